"""One epoch is every token once, in one order, whatever the workers; errors are one line."""

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delivery import (
    POLICIES,
    MakeDataset,
    Span,
    flip_bit,
    open_loader,
    realistic_lengths,
    row_tokens,
    small_batches,
    spans,
    times_delivered,
    tokens_of,
)

from tokenfeed import Fixed, Mixture, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError, LoaderError, ManifestError, ShardFormatError
from tokenfeed.pipeline.planning.policy import Batching

LENGTHS = realistic_lengths()


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(LENGTHS, num_shards=3)


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_an_epoch_is_every_token_exactly_once_with_any_workers(
    folder: Path, batching: Batching
) -> None:
    alone = [spans(batch) for batch in open_loader(folder, batching)]
    assert times_delivered((span for batch in alone for span in batch), LENGTHS) == {1}
    for num_workers in (1, 4):  # the others: see resizing
        with open_loader(folder, batching, num_workers=num_workers) as loader:
            assert [spans(batch) for batch in loader] == alone, "order depends on workers"


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_tokens_are_those_of_the_shards(folder: Path, batching: Batching, num_workers: int) -> None:
    rows = row_tokens(folder)
    assert [len(row) for row in rows] == LENGTHS.tolist()
    with open_loader(folder, batching, num_workers=num_workers) as loader:
        kept = [(spans(batch), tokens_of(batch)) for batch in loader]
    for pieces, tokens in kept:  # after the loop: a buffer that is filled again would show
        expected = [rows[row][start : start + length] for row, start, length in pieces]
        assert np.array_equal(tokens, np.concatenate(expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_follow_each_other_in_the_order_of_the_epochs(
    folder: Path, num_workers: int
) -> None:
    with open_loader(folder, num_workers=num_workers) as loader:
        first, second = ([spans(batch) for batch in loader] for _ in range(2))
    assert first != second
    assert times_delivered((span for batch in second for span in batch), LENGTHS) == {1}
    with open_loader(folder, num_workers=num_workers, epochs=2) as loader:
        assert [spans(batch) for batch in loader] == first + second
    with open_loader(folder, num_workers=num_workers, epochs=None) as loader:
        endless = [spans(batch) for batch in islice(loader, len(first) + 3)]
        assert endless == first + second[:3]
        assert loader.position.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_the_loop_and_entering_again_loses_nothing(folder: Path, num_workers: int) -> None:
    whole = [spans(batch) for batch in open_loader(folder, POLICIES[1])]
    with open_loader(folder, POLICIES[1], num_workers=num_workers) as loader:
        parts = []
        for taken in (7, 1, 0, 20):
            parts += [spans(batch) for batch in islice(loader, taken)]
        assert loader.position.micro_batch > 0, "the test should leave within a window"
        loader.close()
        assert parts + [spans(batch) for batch in loader] == whole


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
    assert last < 900 / 3, "the first window is no beginning of the data"


def test_resizing_while_running_changes_nothing_in_the_order(folder: Path) -> None:
    whole = [spans(batch) for batch in open_loader(folder, epochs=3)]
    with open_loader(folder, num_workers=1, epochs=3) as loader:
        delivered = []
        for number in (3, 1, 1, 0, 2, 2, 4, 1):
            delivered += [spans(batch) for batch in islice(loader, 17)]
            loader.num_workers = number
            assert loader.num_workers == number
        delivered += [spans(batch) for batch in loader]
    assert delivered == whole
    assert len(whole) > 8 * 17


def test_auto_settles_on_some_workers_and_keeps_the_order(folder: Path) -> None:
    whole = [spans(batch) for batch in open_loader(folder, epochs=4)]
    with open_loader(folder, num_workers="auto", epochs=4) as loader:
        assert [spans(batch) for batch in loader] == whole
        assert loader.num_workers >= 1


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_the_length_is_exact_where_one_window_is_an_epoch(folder: Path, batching: Batching) -> None:
    for world_size in (1, 3):
        loader = open_loader(
            folder, batching, window_tokens=None, epochs=2, rank=0, world_size=world_size
        )
        assert len(loader) == sum(1 for _ in loader)


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
    assert len(list(loader)) > 10
    with pytest.raises(TypeError):
        len(open_loader(folder, epochs=None, window_tokens=None))


@pytest.mark.parametrize("batching", [Padded(8192), *POLICIES[1:]], ids=str)
@pytest.mark.parametrize(
    ("world_size", "micro_batches_per_step"), [(1, None), (4, None), (2, 4), (8, 4)]
)
def test_the_estimated_number_of_batches_is_within_a_tenth(
    make_dataset: MakeDataset,
    batching: Batching,
    world_size: int,
    micro_batches_per_step: int | None,
) -> None:
    loader = open_loader(
        make_dataset(realistic_lengths(20_000)),
        batching,
        window_tokens=None,
        epochs=2,
        micro_batches_per_step=micro_batches_per_step,
        rank=0,
        world_size=world_size,
    )
    assert loader.estimated_batches == pytest.approx(sum(1 for _ in loader), rel=0.1)


def test_endless_epochs_have_no_estimate(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`epochs`=None has no end"):
        _ = open_loader(folder, epochs=None).estimated_batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stats_are_the_sums_of_what_was_delivered(folder: Path, num_workers: int) -> None:
    sums: Counter[str] = Counter()
    with open_loader(
        folder,
        Padded(700),
        num_workers=num_workers,
        rank=1,
        world_size=3,
        micro_batches_per_step=4,
        epochs=None,
    ) as loader:
        for batch in loader:
            sums["batches"] += 1
            sums["fillers"] += batch.is_filler
            sums["tokens"] += 0 if batch.is_filler else int(batch.piece_lengths.sum())
            sums["slots"] += batch["input_ids"].numel()
            sums["cut_pieces"] += int((batch.starts > 0).sum())
            if loader.position.epoch == 1 and loader.position.window == 1:
                break
        stats = loader.stats()
        windows = loader._plan.order.num_windows
    assert sums == {name: getattr(stats, name) for name in sums}
    assert stats.fillers > 0
    assert stats.cut_pieces > 0
    assert stats.padding == pytest.approx(1 - sums["tokens"] / sums["slots"])
    assert stats.windows == windows + 1
    assert stats.num_workers == num_workers
    assert sum(stats.epoch_tokens.values()) < LENGTHS.sum() / 2, "only the second epoch counts"
    assert stats.wait_total_s > 0
    assert 0 < stats.wait_s.p50 <= stats.wait_s.p95 <= stats.wait_s.p99 <= stats.wait_s.max
    assert stats.decode_s.p50 > 0
    assert (stats.queue_depth.max > 0) == (num_workers > 0)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_stats_of_a_loader_that_delivered_nothing_are_zeros(folder: Path) -> None:
    stats = open_loader(folder).stats()
    assert (stats.tokens, stats.padding, stats.wait_s.max) == (0, 0.0, 0.0)


def test_a_slow_loop_finds_windows_ready_and_does_not_wait(folder: Path) -> None:
    with open_loader(folder, num_workers=2, epochs=None) as loader:
        for _ in islice(loader, 60):
            time.sleep(0.02)
        stats = loader.stats()
    assert stats.queue_depth.max >= 2
    assert stats.wait_s.p50 < 0.01


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_is_named_in_one_line_from_any_process(folder: Path, num_workers: int) -> None:
    path = folder / "train/00001.arrow"
    flip_bit(path, path.stat().st_size // 2)
    with (
        open_loader(folder, num_workers=num_workers) as loader,
        pytest.raises(ShardFormatError, match=r"00001\.arrow: record batch \d+") as caught,
    ):
        list(loader)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_was_put_back_is_read_from_where_the_error_came(
    folder: Path, num_workers: int
) -> None:
    whole = [spans(batch) for batch in open_loader(folder)]
    path = folder / "train/00001.arrow"
    good = path.read_bytes()
    path.unlink()
    delivered: list[list[Span]] = []
    with open_loader(folder, num_workers=num_workers) as loader:
        with pytest.raises(ShardFormatError, match=r"00001\.arrow"):
            delivered.extend(spans(batch) for batch in loader)
        path.write_bytes(good)
        delivered += [spans(batch) for batch in loader]
    assert delivered == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": "many"}, "`num_workers`='many'"),
        ({"batching": "padded"}, "`batching`='padded': expected Padded, Packed or Fixed"),
        ({"num_workers": -1}, "`num_workers`=-1"),
        ({"num_workers": 100_000}, "`num_workers`=100000: expected .* from 0 to"),
        ({"epochs": 0}, "`epochs`=0"),
        ({"micro_batches_per_step": 0}, "`micro_batches_per_step`=0"),
        ({"device": "gpu"}, "`device`='gpu' is no device"),
        ({"device": "meta"}, "`device`='meta' is not supported"),
        ({"rank": 2, "world_size": 2}, "`rank`=2"),
        ({"batching": Padded(2048, long_rows="refuse")}, "the longest row has 2,[0-9]{3} tokens"),
        ({"batching": Packed(64, 4, long_rows="refuse")}, "takes 64"),
    ],
)
def test_settings_out_of_range_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_loader(folder, **options)
    assert "\n" not in str(caught.value)


def test_a_timeout_that_no_worker_can_keep_is_refused(folder: Path) -> None:
    for timeout in (0.0, -1.0):
        with pytest.raises(ConfigError, match="timeout"):
            open_loader(folder, timeout=timeout)


def test_workers_out_of_range_are_refused_while_running(folder: Path) -> None:
    with open_loader(folder, num_workers=1) as loader:
        before = [spans(batch) for batch in islice(loader, 3)]
        with pytest.raises(ConfigError, match="`num_workers`=-3"):
            loader.num_workers = -3
        after = [spans(batch) for batch in loader]
    assert before + after == [spans(batch) for batch in open_loader(folder)]


def test_splits_that_are_missing_or_empty_are_named(
    folder: Path, make_dataset: MakeDataset
) -> None:
    with pytest.raises(ManifestError, match="no split `validation`"):
        open_loader(folder, split="validation")
    with pytest.raises(ConfigError, match="the split `train` holds no rows"):
        open_loader(make_dataset([]))


def test_a_window_that_takes_too_long_is_named(folder: Path) -> None:
    with (
        open_loader(folder, num_workers=1, timeout=0.001) as loader,
        pytest.raises(LoaderError, match=r"worker 0 .* window 0 of epoch 0, did not answer"),
    ):
        list(loader)
