"""One epoch is every token once, in one order, whatever the workers; errors are one line."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from support.delivery import (
    MakeDataset,
    Span,
    delivered,
    open_loader,
    shuffled,
    spans,
)
from torch.utils.data import DataLoader

from tokenfeed import (
    Fixed,
    Mixture,
    Packed,
    Padded,
    ShardDataset,
    ShardLoader,
    Stage,
    pretokenize,
)
from tokenfeed.integrations.dataloader import StatefulShardLoader
from tokenfeed.pipeline.errors import ConfigError, LoaderError, ManifestError
from tokenfeed.pipeline.planning.plan import Position, RowOrder
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice


def test_without_shuffle_epochs_are_equal_and_windows_in_the_order_of_the_files(
    folder: Path,
) -> None:
    loader = open_loader(folder, shuffle=False)
    batches, windows = [], []
    for batch in loader:
        batches.append(spans(batch))
        windows.append(loader.position.window)
    assert batches == [spans(batch) for batch in loader]
    last = max(row for pieces in batches[: windows.index(1)] for row, _, _ in pieces)
    assert last < 600 / 2, "the first window is no beginning of the data"


@pytest.mark.parametrize(
    "batching",
    [
        Packed(64, 4, long_rows="truncate"),
        Padded(256, long_rows="truncate"),
        Packed(64, 4, long_rows="crop"),
    ],
    ids=str,
)
def test_loader_truncating_rows_ends_its_epochs(folder: Path, batching: Batching) -> None:
    loader = open_loader(folder, batching, epochs=2)
    pieces = [span for batch in loader for span in spans(batch)]
    assert {start for _, start, _ in pieces} == {0}
    assert len(pieces) == 2 * len({row for row, _, _ in pieces}) == 2 * 600


@pytest.mark.parametrize(
    "batching",
    [
        Packed(64, 12, last="fill"),
        Packed(64, 12, split=True, last="fill"),
        Padded(4096, 512, last="fill"),
        Padded(256, 64, last="fill"),
    ],
    ids=lambda policy: f"{policy} fill",
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_filled_batches_have_the_promised_shapes_and_rows(
    folder: Path, batching: Batching, world_size: int
) -> None:
    ranks = {"rank": world_size - 1, "world_size": world_size, "micro_batches_per_step": 2}
    plain = replace(batching, last="short")  # type: ignore[type-var]
    loader, unfilled = (open_loader(folder, each, **ranks) for each in (batching, plain))
    found, before = set(), set()
    for batch, expected in zip(loader, unfilled, strict=True):
        found.add(tuple(batch["input_ids"].shape))
        before.add(tuple(expected["input_ids"].shape))
        assert spans(batch) == spans(expected)
        assert batch.num_targets == int((batch.targets != -100).sum()) == expected.num_targets
        assert tuple(batch["labels"].shape) == (len(batch.lengths), batch["input_ids"].shape[1])
    assert found <= {*loader.shapes}
    assert before > found or not before <= {*loader.shapes}, "nothing was filled"
    state = unfilled.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_shapes_of_batches_that_are_not_filled_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="have any number of rows"):
        open_loader(folder).shapes  # noqa: B018


@pytest.mark.parametrize("order", ["shuffled", "file"])
@pytest.mark.parametrize("batching", [Fixed(16, last="drop"), Packed(2600, 2, last="drop")])
def test_windows_without_a_full_step_are_left_out_and_counted(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, batching: Batching, order: RowOrder
) -> None:
    """The first and last windows of an epoch may be among them."""
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 3_000)
    folder = make_dataset([10] * 2000 + [2500] * 20)

    def open_rank(rank: int, world_size: int, **settings: Any) -> ShardLoader:
        given = {"window_tokens": 6000, "epochs": 2, "micro_batches_per_step": 2, "order": order}
        given |= {"rank": rank, "world_size": world_size}
        return open_loader(folder, batching, **given | settings)

    alone, states, batches = open_rank(0, 1), [], []
    for batch in alone:
        batches.append(spans(batch))
        states.append(json.loads(json.dumps(alone.state_dict())))
    stats = alone.stats()
    assert stats.tokens + stats.left_out_tokens == 2 * 70_000
    assert 0 < stats.batches == len(batches)
    for state, done in zip(states[::5], range(1, len(batches), 5), strict=False):
        resumed = open_rank(0, 1)
        resumed.load_state_dict(state)
        assert [spans(batch) for batch in resumed] == batches[done:]
    ranks = [[*open_rank(rank, 2)] for rank in range(2)]
    together = [spans(batch) for both in zip(*ranks, strict=True) for batch in both]
    assert together == batches
    dataset = ShardDataset(
        *(folder, batching), window_tokens=6000, epochs=2, micro_batches_per_step=2, order=order
    )
    assert delivered(DataLoader(dataset, batch_size=None)) == batches
    for data in (folder, [Stage({folder: 1.0})]):
        huge = ShardLoader(data, batching=Fixed(10**6, last="drop"), num_workers=0)
        with pytest.raises(ConfigError, match=r"leaves out all rows of .* Use `last`='short'"):
            next(iter(huge))


def test_settings_without_effect_or_beyond_memory_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"`sequence_length`=1000 .* `max_tokens`=64"):
        Padded(64, sequence_length=1000)
    with pytest.raises(ConfigError, match=r"10,000,000,000 tokens, .* Lower `batch_size`"):
        Packed(10**6, 10**4, last="fill")
    for place in ("feeding.batch.pad_on_host", "windows.maker.digests"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tokenfeed.pipeline.{place}", Mock(side_effect=MemoryError("80 GiB")))
            with pytest.raises(LoaderError, match=r"memory for a .* \(80 GiB\)\. Use smaller"):
                next(iter(open_loader(folder)))
    with pytest.warns(UserWarning, match="`cache_dir` and `cache_bytes` have no effect"):
        open_loader(folder, cache_dir=folder)


def test_cropped_sequences_are_full_and_begin_documents(folder: Path) -> None:
    batching = Packed(64, 4, long_rows="crop")
    loader = open_loader(folder, batching, epochs=2)
    begun = [spans(batch) for batch in islice(loader, 9)]
    state = loader.state_dict()
    again = open_loader(folder, batching, epochs=2)
    again.load_state_dict(state)
    rest = list(loader)
    assert [spans(batch) for batch in again] == [spans(batch) for batch in rest]
    padded = sum(int((batch.lengths < 64).sum()) for batch in rest)
    windows = loader.stats().windows
    assert padded <= windows
    rows = [row for spans_ in [*begun, *map(spans, rest)] for row, start, _ in spans_]
    assert sorted(rows) == sorted([*range(600)] * 2)
    assert all(start == 0 for batch in rest for start in batch.starts)


def test_cpu_with_an_index_is_the_cpu(folder: Path) -> None:
    """Accelerate calls the CPU so if there are several ranks."""
    ids = [
        next(iter(open_loader(folder, device=device)))["input_ids"].tolist()
        for device in ("cpu", "cpu:0")
    ]
    assert ids[0] == ids[1]


def test_the_length_of_a_mixture_is_exact_or_refused(make_dataset: MakeDataset) -> None:
    """Which part of a source an epoch leaves out differs, and so may its number of batches."""
    even = make_dataset([100] * 400)
    uneven = make_dataset([3000] * 10 + [3] * 10 + [100] * 300, num_shards=30)
    mixture = Mixture({even: 1.0, uneven: 1.0}, exhausted="stop")
    loader = ShardLoader(mixture, batching=Fixed(4), num_workers=0, seed=3, epochs=5)
    try:
        promised = len(loader)
    except TypeError:
        return
    assert promised == sum(1 for _ in loader)


def test_several_windows_have_no_length_but_make_a_list(folder: Path) -> None:
    loader = open_loader(folder)
    with pytest.raises(TypeError, match="estimated_batches"):
        len(loader)
    assert loader, "`if loader:` must not ask for the length"
    assert StatefulShardLoader(loader)
    assert len(list(loader)) > 10
    with pytest.raises(TypeError):
        len(open_loader(folder, epochs=None, window_tokens=None))


def test_endless_epochs_have_no_estimate(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`epochs`=None: a pass has no end"):
        _ = open_loader(folder, epochs=None).estimated_batches


def test_stats_of_a_loader_that_delivered_nothing_are_zeros(folder: Path) -> None:
    stats = open_loader(folder).stats()
    assert (stats.tokens, stats.padding, stats.wait_s.max) == (0, 0.0, 0.0)


def test_splits_that_are_missing_or_empty_are_named(
    folder: Path, make_dataset: MakeDataset
) -> None:
    with pytest.raises(ManifestError, match="no split `validation`"):
        open_loader(folder, split="validation")
    with pytest.raises(ConfigError, match=r"holds no rows\. Run `pretokenize` on"):
        open_loader(make_dataset([]))


def test_equal_texts_in_one_split_are_named(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"text": "word 12"}] * 30
    pretokenize(rows, tmp_path / "out", tokenizer=tokenizer, validation=0.999)
    with pytest.raises(ConfigError, match=r"All are in `validation`: give `pretokenize --valid"):
        open_loader(tmp_path / "out")


def rows_of(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch.rows.tolist() for batch in islice(batches, count)]


def open_split(folder: Path, split: str, **options: Any) -> ShardLoader:
    return open_loader(folder, Fixed(8), split=split, window_tokens=1000, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_validation_loop_begins_anew_each_time(both_splits: Path, shuffle: bool) -> None:
    loader = open_split(both_splits, "validation", shuffle=shuffle)
    first = rows_of(loader, 3)
    assert rows_of(loader, 3) == first
    whole = rows_of(loader)
    assert len(whole) == 52
    assert whole[:3] == first
    assert rows_of(loader) == whole


def test_validation_iterator_goes_on_where_it_stopped(both_splits: Path) -> None:
    loader = open_split(both_splits, "validation")
    whole = rows_of(loader)
    batches = iter(loader)
    assert rows_of(batches, 3) + rows_of(batches) == whole


def test_validation_loop_after_loading_goes_on_once(both_splits: Path) -> None:
    loader = open_split(both_splits, "validation")
    whole = rows_of(loader)
    assert rows_of(loader, 20) == whole[:20]
    again = open_split(both_splits, "validation")
    again.load_state_dict(loader.state_dict())
    assert rows_of(again) == whole[20:]
    assert rows_of(again) == whole


def test_train_loop_goes_on_and_rewind_begins_anew(both_splits: Path) -> None:
    loader = open_split(both_splits, "train")
    whole = rows_of(open_split(both_splits, "train", epochs=2))
    assert rows_of(loader, 3) + rows_of(loader) + rows_of(loader, 5) == whole[:57]
    loader.rewind()
    assert loader.position == Position(0, 0, 0)
    assert rows_of(loader) == whole[:52]
    assert loader.state_dict() == advanced(both_splits, 52).state_dict()


def advanced(folder: Path, batches: int) -> ShardLoader:
    loader = open_split(folder, "train")
    rows_of(loader, batches)
    return loader


def test_dataloader_over_a_loader_names_the_right_class(make_dataset: MakeDataset) -> None:
    with pytest.raises(ConfigError, match=r"StatefulShardLoader\(loader\)"):
        next(iter(DataLoader(open_loader(make_dataset([5, 3])))))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"StatefulShardLoader\(loader\)`; .*\.ShardTrainer`"):
        next(iter(DataLoader(open_loader(make_dataset([5, 3]), epochs=None))))  # type: ignore[arg-type]


def test_repr_of_a_loader_names_data_policy_and_position(both_splits: Path) -> None:
    loader = advanced(both_splits, 3)
    assert repr(loader) == (
        f"ShardLoader({both_splits}, split='train', {Fixed(8)}, device=cpu, rank 0 of 1, "
        "at epoch 0, window 0, micro-batch 3)"
    )


OPTIONS: dict[str, Any] = {"batching": Padded(2048), "window_tokens": 5_000, "epochs": 2}


TRACED = ("feeding/delivery.py", "feeding/loader.py", "planning/state.py")


def whole(small_folder: Path) -> list[list[Span]]:
    return [spans(batch) for batch in open_loader(small_folder, **OPTIONS)]


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
    small_folder: Path,
) -> None:
    options = OPTIONS | {"batching": Padded(4096)}
    loader = open_loader(small_folder, **options)
    given_out = [json.dumps(loader.state_dict())]
    given_out += [json.dumps(loader.state_dict()) for _ in loader]
    assert loader.position == (2, 0, 0)
    assert len(given_out) > 12

    handled = open_loader(small_folder, **options)
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
def test_whatever_line_an_interrupt_breaks_into_no_batch_is_lost_or_repeated(
    small_folder: Path,
) -> None:
    loader = open_loader(small_folder, **OPTIONS)
    positions, expected = [loader.position], []
    for batch in loader:
        expected.append(spans(batch))
        positions.append(loader.position)
    few = islice(open_loader(small_folder, **OPTIONS), 2)
    lines = at_every_step(lambda: list(few), lambda: None, opcodes=False)
    assert lines > 40
    for line in range(lines):
        interrupted = open_loader(small_folder, **OPTIONS)
        got = until_interrupted(interrupted, line)
        reached = positions.index(interrupted.position)
        assert len(got) <= reached <= len(got) + 1
        assert got == expected[: len(got)]
        assert [spans(batch) for batch in islice(interrupted, 4)] == expected[reached : reached + 4]


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
def held(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ShardLoader, Any]]:
    """A loader that another thread is in, and that thread's batch once it has it."""
    hold = Held(monkeypatch)
    loader = open_loader(small_folder, **OPTIONS)
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


def test_a_second_thread_is_refused_and_disturbs_nothing(small_folder: Path, held: Any) -> None:
    loader, (batches, finish) = held
    state = loader.state_dict()
    for use in (
        lambda: next(iter(loader)),
        lambda: next(batches),
        loader.close,
        lambda: loader.load_state_dict(state),
        lambda: setattr(loader, "num_workers", 2),
    ):
        with pytest.raises(LoaderError, match="another thread is using this loader"):
            use()
    assert loader.state_dict() == state
    assert loader.position == (0, 0, 0)
    assert loader.stats().batches == 0
    assert loader.num_workers == 0
    got = finish()
    assert got + [spans(batch) for batch in loader] == whole(small_folder)


def test_threads_may_take_turns(small_folder: Path) -> None:
    loader = open_loader(small_folder, **OPTIONS)
    got: list[list[Span]] = []
    batches = iter(loader)
    for _ in range(3):
        thread = threading.Thread(target=lambda: got.append(spans(next(batches))))
        thread.start()
        thread.join(60)
    loader.close()
    assert got + [spans(batch) for batch in loader] == whole(small_folder)


def test_a_pass_that_has_ended_stays_ended(small_folder: Path) -> None:
    loader = open_loader(small_folder, **OPTIONS)
    batches = iter(loader)
    assert iter(batches) is batches
    assert len(list(batches)) == len(whole(small_folder))
    assert next(batches, None) is None
    assert len(list(loader)) > 0


def test_iterators_of_one_pass_end_together(small_folder: Path) -> None:
    loader = open_loader(small_folder, **OPTIONS)
    first, second = iter(loader), iter(loader)
    shared = [next(first), next(second), *first]
    assert [spans(batch) for batch in shared] == whole(small_folder)
    assert next(second, None) is None


def test_an_iteration_keeps_the_epoch_it_began_with(small_folder: Path) -> None:
    dataset = ShardDataset(small_folder, Padded(2048), window_tokens=5_000)
    shares = iter(dataset)
    dataset.epoch = 1
    assert delivered(shares) == shuffled(small_folder, 0)
