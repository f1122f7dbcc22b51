"""What a run says where it is broken off: how much of it is kept."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.run.crew import WorkerDied
from tokenfeed.tools.run.journal import Journal

__all__ = ["saying_what_is_kept"]


@contextlib.contextmanager
def saying_what_is_kept(num_units: int, journal: Journal[Any]) -> Iterator[None]:
    """Have an interruption, and the death of a worker, say what of `num_units` the journal has."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(num_units, journal)) from None
    except WorkerDied:
        raise TokenfeedError(
            "a worker process was killed, perhaps for want of memory (then use fewer `--workers`); "
            + _kept(num_units, journal)
        ) from None


def _kept(num_units: int, journal: Journal[Any]) -> str:
    return (
        f"{len(journal.results):,} of {num_units:,} units are finished and kept; the same command "
        "continues with the others."
    )
