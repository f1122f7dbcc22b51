"""The copy stream and the computing one share memory in order, whatever the device does when."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.delivery import POLICIES, MakeDataset, open_loader, realistic_lengths, small_batches
from support.simulated_cuda import FakeSource, SimulatedCuda
from support.stream_races import Event, Stream, Traced, trace

from tokenfeed import Batch
from tokenfeed.pipeline.feeding import transfer
from tokenfeed.pipeline.feeding.batch import BatchForm
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.policies import Batching, Packed

DEVICE = torch.device("cuda:0")
TASKS: list[tuple[Task, Batching]] = [
    *(("lm", batching) for batching in POLICIES),
    *((task, POLICIES[0]) for task in ("classify", "tag", "complete")),
    ("complete", Packed(sequence_length=256, batch_size=4)),
]


def use(batch: Batch) -> None:
    """What a step does: reads all that there is, and writes into some of it."""
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.sum()
    batch["labels"].add_(1)


def train(folder: Path, batching: Batching, steps: int = 16) -> None:
    for batch in islice(open_loader(folder, batching, device=DEVICE, epochs=None), steps):
        use(batch)


def never() -> bool:
    return False


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    with trace(monkeypatch, never) as traced:
        yield traced


@pytest.mark.slow
@pytest.mark.parametrize(("task", "batching"), TASKS, ids=str)
def test_no_kernel_uses_a_batch_before_it_is_built_nor_after_its_memory_is_reused(
    make_dataset: MakeDataset,
    monkeypatch: pytest.MonkeyPatch,
    traced: Traced,
    task: Task,
    batching: Batching,
) -> None:
    small_batches(monkeypatch)
    lengths = realistic_lengths(300).clip(max=1000)
    train(make_dataset(lengths, task=task), batching)
    assert traced.races == []
    assert traced.handler.seq_num > 160, "nothing was watched"


class UncheckedSource(FakeSource):
    """Leaves the order of events to the sanitizer."""

    def _release(self, number: int) -> None:
        self.released.append(number)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    ready=st.integers(1, 12),
    passing=st.randoms(use_true_random=False),
)
def test_there_is_no_race_whenever_windows_are_ready_and_events_pass(
    sizes: list[int], ready: int, passing: Any
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        trace(patch, lambda: passing.random() < 0.5) as traced,
    ):
        source = UncheckedSource(SimulatedCuda(), sizes, ready)
        feed = transfer.copy_ahead(source, transfer.copy_stream(DEVICE), BatchForm(0), Counters())
        for batch, _ in islice(feed, sum(sizes)):
            use(batch)
        assert traced.races == []


def early_event(stream: Stream) -> Event:
    """As if it were recorded before the copy is queued."""
    return Event(stream.traced, Stream(stream.traced, 99))


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "not waited for": (Stream, "wait_event", lambda *_: None, "reading from what stream 1"),
    "recorded too early": (Stream, "record_event", early_event, "reading from what stream 1"),
    "memory not recorded": (torch.Tensor, "record_stream", lambda *_: None, "stream 1 is writing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_handover_without_its_event_or_record_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, traced: Traced, fault: str
) -> None:
    owner, name, planted, finding = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    train(folder, POLICIES[0])
    assert traced.races
    assert all(finding in race for race in traced.races)
