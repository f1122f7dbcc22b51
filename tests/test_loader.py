"""One epoch is every token once; a state continues with exactly the rest; damage is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tokenfeed.pipeline import Batch, Fixed, Packed, Padded, ShardDataset, ShardLoader, plan
from tokenfeed.pipeline.batching import Batching
from tokenfeed.pipeline.errors import (
    ConfigError,
    ManifestError,
    ResumeError,
    ShardFormatError,
)
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.window import SplitReader

POLICIES = [Padded(max_tokens=2048), Packed(sequence_length=256, rows=4), Fixed(rows=16)]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows and record batches out of little data."""
    monkeypatch.setattr(plan, "WINDOW_TOKENS", 20_000)
    monkeypatch.setattr("tokenfeed.pipeline.shard.BATCH_TOKENS", 3_000)


@pytest.fixture
def folder(make_dataset, small_windows) -> Path:  # noqa: ANN001
    rng = np.random.default_rng(0)
    return make_dataset(np.clip(rng.lognormal(4, 1.2, 900), 1, 3000).astype(int), num_shards=3)


Span = tuple[int, int, int]


def spans(batches: Iterable[Batch]) -> list[list[Span]]:
    """(row, first token, tokens) of every piece of every batch."""
    return [
        list(zip(b.rows.tolist(), b.starts.tolist(), b.piece_lengths.tolist(), strict=True))
        for b in batches
    ]


def covers_epoch(pieces: Iterable[Span], folder: Path, epochs: int = 1) -> bool:
    """Whether the pieces are every token of every row, exactly `epochs` times."""
    manifest = Manifest.read(folder)
    batches = np.arange(manifest.split("train").batches)
    rows, numbers = SplitReader(folder, manifest, "train").read(batches)
    expected = Counter(
        {(row, t): epochs for row, n in zip(numbers, rows.lengths, strict=True) for t in range(n)}
    )
    return expected == Counter(
        (row, t) for row, start, length in pieces for t in range(start, start + length)
    )


@pytest.mark.parametrize("batching", POLICIES)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_an_epoch_is_every_token_exactly_once_with_any_workers(
    folder: Path, batching: Batching, num_workers: int
) -> None:
    loader = ShardLoader(folder, batching=batching, num_workers=num_workers)
    delivered = spans(loader)
    assert covers_epoch((span for batch in delivered for span in batch), folder)
    alone = ShardLoader(folder, batching=batching, num_workers=0)
    assert delivered == spans(alone), "the order depends on the number of workers"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=120),
    batching=st.sampled_from([*POLICIES, Padded(max_tokens=100), Packed(50, 3)]),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_ranks_together_deliver_every_token_once_in_equal_steps(
    make_dataset,  # noqa: ANN001
    small_windows: None,
    lengths: list[int],
    batching: Batching,
    world_size: int,
    seed: int,
) -> None:
    folder = make_dataset(lengths)
    ranks = [
        list(
            ShardLoader(
                folder,
                batching=batching,
                num_workers=0,
                seed=seed,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    real = [batch for batches in ranks for batch in batches if not batch.is_filler]
    assert covers_epoch((span for batch in spans(real) for span in batch), folder)
    fillers = [batch for batches in ranks for batch in batches if batch.is_filler]
    assert all(int((batch["labels"] != -100).sum()) == 0 for batch in fillers)
    assert sum(batch.num_tokens for batches in ranks for batch in batches) == sum(lengths)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), batching=st.sampled_from(POLICIES), epochs=st.integers(1, 3))
def test_any_state_continues_with_exactly_the_rest(
    folder: Path, data: st.DataObject, batching: Batching, epochs: int
) -> None:
    def fresh() -> ShardLoader:
        return ShardLoader(folder, batching=batching, num_workers=0, epochs=epochs)

    whole = spans(fresh())
    stop = data.draw(st.integers(0, len(whole) - 1), label="stop")
    again = data.draw(st.integers(0, len(whole) - 1 - stop), label="second stop")
    loader = fresh()
    first = spans(islice(loader, stop))
    second_loader = fresh()
    second_loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    second = spans(islice(second_loader, again))
    third_loader = fresh()
    third_loader.load_state_dict(second_loader.state_dict())
    assert first + second + spans(third_loader) == whole


@pytest.mark.parametrize("resumed_workers", [0, 2])
def test_a_state_taken_while_workers_prefetch_counts_what_was_given_out(
    folder: Path, resumed_workers: int
) -> None:
    batching = POLICIES[0]
    whole = spans(ShardLoader(folder, batching=batching, num_workers=0))
    loader = ShardLoader(folder, batching=batching, num_workers=3)
    iterator = iter(loader)
    first = spans([next(iterator) for _ in range(11)])
    state = loader.state_dict()
    loader.close()
    resumed = ShardLoader(folder, batching=batching, num_workers=resumed_workers)
    resumed.load_state_dict(state)
    assert first + spans(resumed) == whole


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_state_at_the_end_of_a_pass_has_no_rest(folder: Path, epochs: int) -> None:
    loader = ShardLoader(folder, batching=POLICIES[0], num_workers=0, epochs=epochs)
    length = len(list(loader))
    resumed = ShardLoader(folder, batching=POLICIES[0], num_workers=0, epochs=epochs)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert len(list(resumed)) > length // 2, "the pass after it comes when asked for again"


def test_a_gang_that_is_not_there_is_refused(folder: Path) -> None:
    loader = ShardLoader(folder, batching=POLICIES[0], num_workers=0)
    loader.load_state_dict(loader.state_dict() | {"gang": 10**6})
    with pytest.raises(ResumeError, match="no gang 1000000"):
        list(loader)


def test_leaving_the_loop_and_entering_again_loses_nothing(folder: Path) -> None:
    loader = ShardLoader(folder, batching=POLICIES[1], num_workers=2)
    parts = spans(islice(loader, 7)) + spans(loader)
    assert covers_epoch((span for batch in parts for span in batch), folder)


def test_the_next_pass_is_the_next_epoch_in_another_order(folder: Path) -> None:
    loader = ShardLoader(folder, batching=POLICIES[0], num_workers=0)
    first, second = spans(loader), spans(loader)
    assert first != second
    assert covers_epoch((span for batch in second for span in batch), folder)
    both = ShardLoader(folder, batching=POLICIES[0], num_workers=0, epochs=2)
    assert spans(both) == first + second


def test_endless_epochs_run_over_the_seam(folder: Path) -> None:
    one = spans(ShardLoader(folder, batching=POLICIES[0], num_workers=0))
    with ShardLoader(folder, batching=POLICIES[0], num_workers=2, epochs=None) as loader:
        delivered = spans(islice(loader, 2 * len(one) + 3))
    assert delivered[: len(one)] == one
    assert loader.state_dict()["epoch"] >= 1


def test_tokens_are_those_of_the_shards(folder: Path) -> None:
    manifest = Manifest.read(folder)
    batches = np.arange(manifest.split("train").batches)
    rows, numbers = SplitReader(folder, manifest, "train").read(batches)
    assert numbers.tolist() == list(range(len(rows)))
    ends = np.cumsum(rows.lengths)
    for batch in ShardLoader(folder, batching=POLICIES[1], num_workers=0):
        tokens = batch["input_ids"][batch["attention_mask"]].numpy()
        expected = [
            rows.ids[ends[row] - rows.lengths[row] + start :][:length]
            for row, start, length in spans([batch])[0]
        ]
        assert np.array_equal(tokens, np.concatenate(expected))


def test_packing_fills_over_99_percent_of_every_window(folder: Path) -> None:
    shares = DataLoader(ShardDataset(folder, Packed(256, 4)), batch_size=None)
    for share in shares:
        fill = [(batch.num_tokens, batch.num_slots) for batch in share]
        tokens, slots = np.sum(fill, axis=0)
        assert tokens / slots > 0.98  # windows of 20,000 tokens here; 4 million outside of tests


def test_a_plain_dataloader_gives_the_same_batches(folder: Path) -> None:
    shares = DataLoader(ShardDataset(folder, POLICIES[0]), batch_size=None, num_workers=2)
    plain = [spans([batch])[0] for share in shares for batch in share]
    assert plain == spans(ShardLoader(folder, batching=POLICIES[0], num_workers=0))


def test_without_shuffle_every_epoch_is_the_same(folder: Path) -> None:
    loader = ShardLoader(folder, batching=POLICIES[0], num_workers=0, shuffle=False)
    assert spans(loader) == spans(loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed=0, this loader has seed=1"),
        ({"batching": Padded(max_tokens=999)}, r"batching='Padded\(max_tokens=2048"),
        ({"shuffle": False}, "shuffle=True"),
        ({"rank": 0, "world_size": 2}, "world_size=1"),
    ],
)
def test_a_state_of_another_plan_is_refused_with_what_differs(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    state = ShardLoader(folder, batching=POLICIES[0]).state_dict()
    other = ShardLoader(folder, **{"batching": POLICIES[0]} | changes)
    with pytest.raises(ResumeError, match=message):
        other.load_state_dict(state)


def test_a_state_of_other_data_is_refused(folder: Path, make_dataset) -> None:  # noqa: ANN001
    state = ShardLoader(folder, batching=POLICIES[0]).state_dict()
    other = ShardLoader(make_dataset([5] * 900), batching=POLICIES[0])
    with pytest.raises(ResumeError, match="data="):
        other.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 1}, {"version": 1, "plan": {}, "epoch": "x"}])
def test_what_is_no_state_is_refused(folder: Path, state: dict[str, object]) -> None:
    with pytest.raises(ResumeError, match="no loader state"):
        ShardLoader(folder, batching=POLICIES[0]).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_is_named_in_one_line_from_any_process(folder: Path, num_workers: int) -> None:
    path = folder / "train/00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    loader = ShardLoader(folder, batching=POLICIES[0], num_workers=num_workers)
    with pytest.raises(ShardFormatError, match=r"00001\.arrow: record batch \d+") as caught:
        list(loader)
    assert "\n" not in str(caught.value)


KILL_A_WORKER = """
import os, signal, sys
from pathlib import Path
from tokenfeed.pipeline import Padded, ShardLoader
from tokenfeed.pipeline.loader import naming_dead_workers

with naming_dead_workers():
    loader = ShardLoader(sys.argv[1], batching=Padded(2048), num_workers=2, epochs=None)
    iterator = iter(loader)
    next(iterator)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    for batch in iterator:
        pass
"""


def test_a_killed_worker_gives_an_error_not_a_hang(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILL_A_WORKER, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "LoaderError: a loader worker died:" in ended.stderr


LEAVE_EARLY = """
import sys
from tokenfeed.pipeline import Padded, ShardLoader

for step, batch in enumerate(ShardLoader(sys.argv[1], batching=Padded(2048), epochs=None)):
    if step == 3:
        break
kept = iter(ShardLoader(sys.argv[1], batching=Padded(2048), epochs=None))
next(kept)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_loaders_that_are_left_in_the_middle_end_quietly(folder: Path, attempt: int) -> None:
    """A race at the exit: one attempt proves little."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVE_EARLY, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


HANDLE_SIGNALS = """
import signal, sys
from tokenfeed.pipeline import Padded, ShardLoader

loader = ShardLoader(sys.argv[1], batching=Padded(2048), num_workers=2, epochs=3)
tokens = 0
for step, batch in enumerate(loader):
    tokens += batch.num_tokens
    if step == 3:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        print("ready", flush=True)
        sys.stdin.readline()
print(tokens)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_survive_a_signal_that_their_parent_handles(folder: Path, number: int) -> None:
    """Terminals and schedulers signal the whole process group."""
    with subprocess.Popen(
        [sys.executable, "-c", HANDLE_SIGNALS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        time.sleep(0.2)
        rest, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    assert int(rest) == 3 * Manifest.read(folder).split("train").tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "`num_workers`=-1"),
        ({"num_workers": 100_000}, "`num_workers`=100000: expected 0 to"),
        ({"epochs": 0}, "`epochs`=0"),
        ({"device": "gpu"}, "`device`='gpu' is no device"),
        ({"rank": 2, "world_size": 2}, "`rank`=2"),
    ],
)
def test_settings_out_of_range_are_refused(
    folder: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardLoader(folder, batching=POLICIES[0], **options)


def test_a_split_without_rows_is_refused(make_dataset) -> None:  # noqa: ANN001
    with pytest.raises(ConfigError, match="the split `train` holds no rows"):
        ShardLoader(make_dataset([]), batching=POLICIES[0])


def test_a_missing_split_is_named(folder: Path) -> None:
    with pytest.raises(ManifestError, match="no split `validation`"):
        ShardLoader(folder, batching=POLICIES[0], split="validation")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_feeding_a_gpu_never_synchronises(folder: Path) -> None:
    host = list(ShardLoader(folder, batching=POLICIES[0], num_workers=0))
    with ShardLoader(folder, batching=POLICIES[0], num_workers=2, device="cuda") as loader:
        feed = iter(loader)
        torch.cuda.set_sync_debug_mode("error")
        try:
            device = [next(feed) for _ in host]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(device, host, strict=True):
        for name in ours:
            assert torch.equal(ours[name].cpu(), theirs[name])
