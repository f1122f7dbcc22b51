"""Whatever breaks into a loader finds a whole state, and what breaks off loses no batch."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from delivery import MakeDataset, Span, open_loader, realistic_lengths, small_batches, spans

from tokenfeed import Padded, ShardDataset, ShardLoader
from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

OPTIONS: dict[str, Any] = {"batching": Padded(2048), "window_tokens": 5_000, "epochs": 2}


TRACED = ("feeding/delivery.py", "feeding/loader.py", "planning/state.py")


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(120, mean=4.5), num_shards=3)


def whole(folder: Path) -> list[list[Span]]:
    return [spans(batch) for batch in open_loader(folder, **OPTIONS)]


def traced(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(TRACED)


def at_every_step(run: Callable[[], object], do: Callable[[], None], *, opcodes: bool) -> int:
    """Run something and do something else between all bytecodes, or lines, of the traced files."""
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        if not traced(frame):
            return None
        frame.f_trace_opcodes = opcodes
        if event == ("opcode" if opcodes else "line"):
            steps += 1
            do()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = opcodes  # Python 3.12 wants one such frame before it begins
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.slow
def test_a_state_taken_between_any_two_bytecodes_is_that_of_a_batch_given_out(
    folder: Path,
) -> None:
    loader = open_loader(folder, **OPTIONS)
    given_out = [json.dumps(loader.state_dict())]
    given_out += [json.dumps(loader.state_dict()) for _ in loader]
    assert loader.position == (2, 0, 0)
    assert len(given_out) > 12

    handled = open_loader(folder, **OPTIONS)
    found: list[str] = []

    def handler() -> None:
        state = handled.state_dict()
        assert tuple(handled.position) == (state["epoch"], state["window"], state["micro_batch"])
        handled.stats()
        if not found or json.dumps(state) != found[-1]:
            found.append(json.dumps(state))

    steps = at_every_step(lambda: list(handled), handler, opcodes=True)
    assert steps > 100 * len(given_out), "hardly anything was interrupted"
    assert found == given_out


@pytest.mark.slow
def test_whatever_line_an_interrupt_breaks_into_no_batch_is_lost_or_repeated(folder: Path) -> None:
    loader = open_loader(folder, **OPTIONS)
    positions, expected = [loader.position], []
    for batch in loader:
        expected.append(spans(batch))
        positions.append(loader.position)
    few = islice(open_loader(folder, **OPTIONS), 2)
    lines = at_every_step(lambda: list(few), lambda: None, opcodes=False)
    assert lines > 40
    for line in range(lines):
        interrupted = open_loader(folder, **OPTIONS)
        got = until_interrupted(interrupted, line)
        reached = positions.index(interrupted.position)
        assert len(got) <= reached <= len(got) + 1
        assert got == expected[: len(got)]
        assert [spans(batch) for batch in interrupted] == expected[reached:]


def until_interrupted(loader: ShardLoader, line: int) -> list[list[Span]]:
    """What a loader delivers before it is interrupted at one of its lines."""
    got: list[list[Span]] = []
    countdown = iter(range(line, -1, -1))

    def break_in() -> None:
        if next(countdown, None) == 0:
            raise KeyboardInterrupt

    def deliver() -> None:
        for batch in loader:
            got.append(spans(batch))  # noqa: PERF401  # what came before the interrupt is kept

    with pytest.raises(KeyboardInterrupt):
        at_every_step(deliver, break_in, opcodes=False)
    return got


def test_an_error_after_a_batch_was_taken_and_before_it_was_given_out_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(folder)
    loader = open_loader(folder, **OPTIONS)
    got = [spans(batch) for batch in islice(loader, 2)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Counters, "add_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert got + [spans(batch) for batch in loader] == expected


class Held:
    """Keeps a thread inside the making of a window until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        read = WindowMaker.make

        def wait(maker: WindowMaker, position: Position) -> RankSlice:
            self.entered.set()
            assert self.let_go.wait(60)
            return read(maker, position)

        monkeypatch.setattr(WindowMaker, "make", wait)


@pytest.fixture
def held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ShardLoader, Any]]:
    """A loader that another thread is in, and that thread's batch once it has it."""
    hold = Held(monkeypatch)
    loader = open_loader(folder, **OPTIONS)
    batches = iter(loader)
    taken: list[list[Span]] = []
    thread = threading.Thread(target=lambda: taken.append(spans(next(batches))))

    def finish() -> list[list[Span]]:
        hold.let_go.set()
        thread.join(60)
        return taken

    thread.start()
    assert hold.entered.wait(60)
    yield loader, (batches, finish)
    finish()


def test_a_second_thread_is_refused_and_disturbs_nothing(folder: Path, held: Any) -> None:
    loader, (batches, finish) = held
    state = loader.state_dict()
    for use in (
        lambda: next(iter(loader)),
        lambda: next(batches),
        loader.close,
        lambda: loader.load_state_dict(state),
        lambda: setattr(loader, "num_workers", 2),
    ):
        with pytest.raises(LoaderError, match="another thread is using this loader") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert loader.state_dict() == state
    assert loader.position == (0, 0, 0)
    assert loader.stats().batches == 0
    assert loader.num_workers == 0
    got = finish()
    assert got + [spans(batch) for batch in loader] == whole(folder)


def test_threads_may_take_turns(folder: Path) -> None:
    loader = open_loader(folder, **OPTIONS)
    got: list[list[Span]] = []
    batches = iter(loader)
    for _ in range(3):
        thread = threading.Thread(target=lambda: got.append(spans(next(batches))))
        thread.start()
        thread.join(60)
    loader.close()
    assert got + [spans(batch) for batch in loader] == whole(folder)


def test_a_pass_that_has_ended_stays_ended(folder: Path) -> None:
    loader = open_loader(folder, **OPTIONS)
    batches = iter(loader)
    assert iter(batches) is batches
    assert len(list(batches)) == len(whole(folder))
    assert next(batches, None) is None
    assert len(list(loader)) > 0


def shuffled(folder: Path, epoch: int) -> list[list[Span]]:
    loader = open_loader(folder, epochs=1, window_tokens=5_000)
    for _ in range(epoch):
        list(loader)
    return [spans(batch) for batch in loader]


def delivered(loader: Any) -> list[list[Span]]:
    return [spans(batch) for share in loader for batch in share]


def test_an_iteration_keeps_the_epoch_it_began_with(folder: Path) -> None:
    dataset = ShardDataset(folder, Padded(2048), window_tokens=5_000)
    shares = iter(dataset)
    dataset.epoch = 1
    assert delivered(shares) == shuffled(folder, 0)
