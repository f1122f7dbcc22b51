"""One epoch is every token once, in one order, whatever the workers; errors are one line."""

import copy
import json
import os
import pickle
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import warm
from support.delivery import (
    POLICIES,
    MakeDataset,
    Span,
    check_elastic_run,
    open_loader,
    pool_of,
    realistic_lengths,
    row_tokens,
    spans,
    times_delivered,
    tokens_of,
)
from support.processes import eventually, run_script, workers_of

from tokenfeed import Mixture, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError, ShardFormatError
from tokenfeed.pipeline.feeding import placement
from tokenfeed.pipeline.planning.policies import Batching

LENGTHS = realistic_lengths()


pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_an_epoch_is_every_token_exactly_once_with_any_workers(
    folder: Path, batching: Batching
) -> None:
    rows = row_tokens(folder)
    assert [len(row) for row in rows] == LENGTHS.tolist()
    orders = []
    for num_workers in (0, 2):  # other numbers: see resizing
        with open_loader(folder, batching, num_workers=num_workers) as loader:
            kept = [(spans(batch), tokens_of(batch)) for batch in loader]
        for pieces, tokens in kept:  # after the loop: a buffer that is filled again would show
            expected = [rows[row][start : start + length] for row, start, length in pieces]
            assert np.array_equal(tokens, np.concatenate(expected))
        orders.append([pieces for pieces, _ in kept])
    assert orders[0] == orders[1], "order depends on workers"
    assert times_delivered((span for batch in orders[0] for span in batch), LENGTHS) == {1}


@pytest.mark.parametrize("num_workers", [0, 1])
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


def test_resizing_while_running_changes_nothing_in_the_order(folder: Path) -> None:
    whole = [spans(batch) for batch in open_loader(folder, epochs=3)]
    with open_loader(folder, num_workers=1, epochs=3) as loader:
        delivered = []
        for number in (3, 1, 1, 0, 2, 2, 1):
            delivered += [spans(batch) for batch in islice(loader, 17)]
            loader.num_workers = number
            assert loader.num_workers == number
        with pytest.raises(ConfigError, match="`num_workers`=-3"):
            loader.num_workers = -3
        delivered += [spans(batch) for batch in loader]
    assert delivered == whole
    assert len(whole) > 7 * 17


@pytest.mark.parametrize(("ranks", "workers"), [(1, 4), (4, 3), (64, 1)])
def test_workers_auto_are_the_share_of_the_cores_and_at_most_four(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int
) -> None:
    """The machine has 12 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setattr(placement, "MEMBERSHIP", Path("/no/such/file"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with open_loader(folder, num_workers="auto") as loader:
        assert loader.num_workers == workers
        loader.num_workers = 1
        loader.num_workers = "auto"
        assert loader.num_workers == workers
        next(iter(loader))
        assert len(workers_of()) == workers


def test_workers_auto_are_none_where_there_can_be_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    assert open_loader(folder, num_workers="auto").num_workers == 0


@pytest.mark.parametrize("num_workers", [0, 1])
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
            if loader.position.epoch == 1 and loader.position.window == 1:
                break
        stats = loader.stats()
        windows = loader.state_dict()["plan"]["windows"]
    assert sums == {name: getattr(stats, name) for name in sums}
    assert stats.fillers > 0
    assert stats.padding == pytest.approx(1 - sums["tokens"] / sums["slots"])
    assert stats.windows == windows + 1
    assert stats.num_workers == num_workers
    assert sum(stats.epoch_tokens.values()) < LENGTHS.sum() / 2, "only the second epoch counts"
    assert stats.wait_total_s > 0
    assert 0 < stats.wait_s.p50 <= stats.wait_s.p95 <= stats.wait_s.p99 <= stats.wait_s.max
    assert stats.decode_s.p50 > 0
    assert (stats.queue_depth.max > 0) == (num_workers > 0)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_workers_that_prefetch_are_not_in_the_state(folder: Path) -> None:
    legs = [(2, 13, 2), (1, 0, 0), (3, 11, 1), (1, 0, 2)]
    check_elastic_run(
        folder, LENGTHS, legs, batching=POLICIES[0], micro_batches_per_step=3, epochs=2
    )


def test_loading_a_state_in_the_middle_of_the_loop_goes_there(folder: Path) -> None:
    with open_loader(folder, num_workers=1) as loader:
        feed = iter(loader)
        first = [spans(next(feed)) for _ in range(9)]
        state = loader.state_dict()
        second = [spans(next(feed)) for _ in range(9)]
        loader.load_state_dict(state)
        assert [spans(next(feed)) for _ in range(9)] == second != first


def windows_ready(loader: ShardLoader) -> int:
    pool = pool_of(loader)
    pool._drain(0)
    return sum(pending.answer is not None for pending in pool._pending)


def test_a_slow_loop_finds_windows_ready_and_does_not_wait(folder: Path) -> None:
    with open_loader(folder, num_workers=2, epochs=None) as loader:
        for _ in islice(loader, 60):
            assert eventually(lambda: windows_ready(loader) >= 2)
        stats = loader.stats()
    assert stats.queue_depth.max >= 2
    assert stats.wait_s.p50 < 1.0


@pytest.mark.parametrize("num_workers", [0, 1])
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


def test_loader_that_outlives_its_modules_ends_quietly(folder: Path) -> None:
    """A program that freezes the collector, as nanochat does, closes it after all else is gone."""
    run_script(
        """
import gc, json, sys
from tokenfeed import Padded, ShardLoader
def batches():
    with ShardLoader(sys.argv[1], batching=Padded(2048), num_workers=1) as loader:
        yield from loader
kept = batches()
next(kept)
json.kept = [kept]
gc.collect()
gc.freeze()
gc.disable()
""",
        folder,
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_relative_folder_is_found_after_the_working_directory_changed(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    folders = [make_dataset([9] * 20), make_dataset([10] * 18)]
    monkeypatch.chdir(folders[0].parent)
    names = [folder.name for folder in folders]
    with open_loader(Mixture(dict.fromkeys(names, 0.5)), num_workers=num_workers) as loader:  # type: ignore[arg-type]
        monkeypatch.chdir("/")
        assert sum(batch.num_tokens for batch in loader) == 360
        assert list(loader.stats().epoch_tokens) == names


OPTIONS: dict[str, Any] = {"batching": Padded(2048), "window_tokens": 5_000, "epochs": None}


ROUNDS = 12


def copied_by_pickle(anything: Any) -> Any:
    return pickle.loads(pickle.dumps(anything))


@pytest.mark.parametrize(
    ("num_workers", "copied"), [(0, copy.deepcopy), (1, copy.deepcopy), (1, copied_by_pickle)]
)
def test_a_loader_is_copied_while_it_runs(
    small_folder: Path, num_workers: int, copied: Any
) -> None:
    with open_loader(small_folder, num_workers=num_workers, **OPTIONS) as loader:
        next(iter(loader))
        with copied(loader) as other:
            rest = [spans(batch) for batch in islice(other, ROUNDS)]
        assert rest == [spans(batch) for batch in islice(loader, ROUNDS)]


SCRIPT = """
import json, sys
from tokenfeed import Padded, ShardLoader
from tokenfeed.pipeline.errors import LoaderError

def mine(columns, rng):
    return columns

said = []
for function in (mine, lambda columns, rng: columns):
    for workers in (0, 1):
        with_ = ShardLoader(sys.argv[1], batching=Padded(64), num_workers=workers, map=function)
        try:
            said.append(sum(len(batch.rows) for batch in with_))
        except LoaderError as error:
            said.append(str(error))
print(json.dumps(said))
"""


@pytest.fixture
def tiny_folder(make_dataset: MakeDataset) -> Path:
    return make_dataset(np.arange(1, 20))


def test_a_function_that_workers_cannot_import_ends_in_one_line_with_a_remedy(
    tiny_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = warm.run([script, tiny_folder])
    assert (ended.returncode, ended.stderr) == (0, "")
    alone, by_worker, local_alone, local_by_worker = json.loads(ended.stdout)
    assert alone == local_alone == 19
    for line, name in ((by_worker, "mine"), (local_by_worker, "lambda")):
        assert line.startswith("loader workers cannot import the store or function of the loader")
        assert name in line
        assert "\n" not in line
        assert line.endswith("in a separate module, or read in this process (`num_workers`=0).")
