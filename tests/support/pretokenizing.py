"""What stands in for other machines, within this process."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import pytest

from tokenfeed.tools.jobs.executors import CLUSTERS, Cluster
from tokenfeed.tools.pretokenizing import prepare, runner
from tokenfeed.tools.pretokenizing.make import make_dataset, make_part
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.summary import PartSummary, Summary
from tokenfeed.trainer.config.values import setting_of

_SIZE = get_type_hints(Options, include_extras=True)["shard_size"]


def make(corpus: Path | str, out: Path | str, tokenizer: Path | None, **options: Any) -> Summary:
    """Make the data set of a corpus, by this process; None trains a tokenizer."""
    return make_dataset(_options(corpus, out, tokenizer, **options))


def part(
    which: str, corpus: Path | str, out: Path | str, tokenizer: Path | None, **options: Any
) -> PartSummary:
    """One part of it."""
    return make_part(_options(corpus, out, tokenizer, part=which, **options))


def _options(
    corpus: Path | str, out: Path | str, tokenizer: Path | None, **options: Any
) -> Options:
    options["shard_size"] = setting_of(_SIZE, options.get("shard_size", "30KB"), "")
    named = str(tokenizer) if tokenizer else None
    return Options(paths=(str(corpus), str(out)), tokenizer=named, **options)


def interrupt(corpus: Path | str, out: Path | str, tokenizer: Path | None, **options: Any) -> None:
    """Run `make`, and interrupt it when all units are finished."""
    with (
        patch("tokenfeed.tools.pretokenizing.make.commit", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        make(corpus, out, tokenizer, **options)


def with_fast_engine(monkeypatch: pytest.MonkeyPatch, *, crew: bool = False) -> None:
    """Have a small corpus encoded as a large one would be: by the fast engine, and by a cluster
    where there is one."""
    monkeypatch.setattr(prepare, "is_small", lambda units: False)
    monkeypatch.setattr(runner, "is_small", lambda units: not crew)


class CarelessExecutor(Executor):
    """Does what it is given in any order, some of it twice, and the second time much later."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._again: list[Callable[[], Any]] = []
        self.done = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        for _ in range(self._draw.randrange(3)):
            if self._again:
                self._again.pop(self._draw.randrange(len(self._again)))()
        future: Future[Any] = Future()
        future.set_result(fn(*args, **named))
        self.done += 1
        if self._draw.random() < 0.5:
            self._again.append(lambda: fn(*args, **named))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for again in self._again:
            again()


def on_cluster(monkeypatch: pytest.MonkeyPatch, executor: Executor, num_workers: int = 2) -> None:
    """Have `--runner dask` mean an executor."""

    @contextmanager
    def opened() -> Iterator[Cluster]:
        yield Cluster(executor, lambda: num_workers)

    monkeypatch.setitem(CLUSTERS, "dask", opened)
    monkeypatch.setattr(
        "tokenfeed.tools.pretokenizing.options.check_installed", lambda runner: None
    )
