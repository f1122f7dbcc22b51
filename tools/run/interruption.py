"""What a run says where it is broken off: how much of it is kept."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.run.crew import WorkerDied
from tokenfeed.tools.run.records import Records

__all__ = ["saying_what_is_kept"]


@contextlib.contextmanager
def saying_what_is_kept(num_units: int, records: Records[Any]) -> Iterator[None]:
    """Have an interruption, and the death of a worker, say what of `num_units` is recorded."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(num_units, records)) from None
    except WorkerDied as died:
        raise TokenfeedError(f"{died}; {_kept(num_units, records)}") from None


def _kept(num_units: int, records: Records[Any]) -> str:
    return (
        f"{len(records.results):,} of {num_units:,} units are finished and kept; the same command "
        "continues with the others."
    )
