"""What comes in between: handlers inside `next`, numbers that are set, copies of what runs."""

import inspect
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.delivery import open_loader, spans

from tokenfeed import Padded, ShardLoader
from tokenfeed.pipeline.errors import LoaderError

OPTIONS: dict[str, Any] = {"batching": Padded(2048), "window_tokens": 5_000, "epochs": None}


ROUNDS = 4
"""Batches of a loop, from two windows."""


def calling_at(event: int, run: Callable[[], object], do: Callable[[], object]) -> bool:
    """Run something, and do something else once when the feeding code calls or returns for the
    so-manieth time; whether it came to that."""
    seen = 0

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal seen
        code = frame.f_code
        if not code.co_filename.endswith("feeding/delivery.py"):
            return None
        if code.co_flags & inspect.CO_GENERATOR:  # traced where no signal handler runs: in a yield
            return None
        if kind in ("call", "return"):
            seen += 1
            if seen == event:
                do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen >= event


def iterate(loader: ShardLoader, given: list[Any]) -> None:
    """Deliver some batches. Continue after errors about signal handlers."""
    batches = iter(loader)
    while len(given) < ROUNDS:
        try:
            given.append(spans(next(batches)))
        except LoaderError as error:
            assert "a signal handler" in str(error)


HANDLERS: dict[str, Callable[[ShardLoader, list[Any]], object]] = {
    "close": lambda loader, _: loader.close(),
    "resize": lambda loader, _: setattr(loader, "num_workers", 0),
    "load": lambda loader, _: loader.load_state_dict(loader.state_dict()),
    "iterate": lambda loader, given: given.append(spans(next(iter(loader)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_a_handler_inside_next_loses_and_repeats_nothing(small_folder: Path, handler: Any) -> None:
    reference = open_loader(small_folder, **OPTIONS)
    whole, states = [], []
    for batch in islice(reference, ROUNDS + 1):
        whole.append(spans(batch))
        states.append(reference.state_dict())
    event, came = 0, True
    while came:
        event += 1
        loader, given = open_loader(small_folder, **OPTIONS), list[Any]()

        def run(loader: ShardLoader = loader, given: list[Any] = given) -> None:
            iterate(loader, given)

        def do(loader: ShardLoader = loader, given: list[Any] = given) -> None:
            handler(loader, given)

        came = calling_at(event, run, do)
        assert sorted(given) == sorted(whole[: len(given)])
        assert loader.state_dict() == states[len(given) - 1]
    assert event > 3 * ROUNDS
