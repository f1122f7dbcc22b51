"""A loop beside a simulated device that takes 50 ms a step: what does the device wait for?

The device is a clock beside the host. A step that is queued starts when the device is free, and
takes 50 ms. Copies from pageable memory take 30 ms, in which host and device wait for each other.
Tokenizing and loading are real work on this machine's cores. So idle shares are those of a GPU of
this speed beside these cores, and they are not measured on a GPU.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.scenarios.data import Data
from tokenfeed import Padded, ShardLoader

__all__ = ["Device", "loop", "measure_idle", "measure_workers"]

Entry = dict[str, Any]

STEP_S, PAGEABLE_COPY_S = 0.050, 0.030
AHEAD = 4
"""Steps that a host may queue before it waits for the device."""
ROWS, LENGTH = 32, 512
SKIPPED = 5
"""Steps before the first that counts: workers start, and queues fill."""


class Device:
    """A device that runs steps one after the other, beside the host.

    `idle` counts the seconds without work between the first and the last step.
    """

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self._ends: list[float] = []
        self.idle = 0.0

    def step(self) -> None:
        """Queue a step. Wait if the queue is full."""
        if len(self._ends) >= AHEAD:
            _sleep_until(self._ends[-AHEAD])
        now = time.perf_counter()
        free = self._ends[-1] if self._ends else now
        self.idle += max(0.0, now - free)
        self._ends.append(max(now, free) + self._step_s)

    def wait(self) -> None:
        """Wait until all queued steps are done, as `.item()` does."""
        if self._ends:
            _sleep_until(self._ends[-1])

    def copy_from_pageable_memory(self) -> None:
        """Wait for the device, then copy a batch. The device is idle meanwhile."""
        self.wait()
        time.sleep(PAGEABLE_COPY_S)


def loop(batches: Iterator[Any], steps: int, *, tuned: bool) -> Entry:
    """Run a loop over batches, and return the time of a step and the device's idle share.

    Args:
        batches: At least `SKIPPED + steps` batches.
        steps: Steps that count.
        tuned: False copies from pageable memory, and reads the loss in every step. True copies
            from page-locked memory while the device computes, and reads the loss every 10 steps.
    """
    device = Device()
    with contextlib.closing(batches):  # type: ignore[type-var]
        for number in range(SKIPPED + steps):
            if number == SKIPPED:
                device.wait()
                began, idle = time.perf_counter(), device.idle
            next(batches)
            if not tuned:
                device.copy_from_pageable_memory()
            device.step()
            if not tuned or number % 10 == 9:
                device.wait()
        device.wait()
        seconds = time.perf_counter() - began
    return {
        "ms_a_batch": round(1e3 * seconds / steps, 1),
        "steps_s": round(steps / seconds, 2),
        "idle": round((device.idle - idle) / seconds, 4),
    }


def tokenizing(data: Data, workers: int, prefetch: int | None = None) -> Iterator[Any]:
    """Yield batches of texts that a DataLoader tokenizes where they are needed, for ever."""
    import transformers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, as DataLoader workers have
    tokenizer = transformers.AutoTokenizer.from_pretrained(data.model)

    def collate(records: list[Any]) -> Any:
        texts = [record["text"] for record in records]
        return tokenizer(
            texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt"
        )

    options: Entry = {"persistent_workers": True} if workers else {}
    loader: DataLoader[Any] = DataLoader(
        data.train,  # type: ignore[arg-type]
        ROWS,
        shuffle=True,
        collate_fn=collate,
        drop_last=True,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        **options,
    )
    while True:
        yield from loader


def from_shards(data: Data, workers: int, prefetch: int | None = None) -> Iterator[Any]:
    """Yield batches of the same texts from shards, for ever: 32 rows of at most 512 tokens."""
    policy = Padded(max_tokens=ROWS * LENGTH, sequence_length=LENGTH)
    options: Entry = {} if prefetch is None else {"prefetch": prefetch}
    with ShardLoader(
        data.shards, batching=policy, num_workers=workers, epochs=None, **options
    ) as loader:
        yield from loader


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


Loader = Callable[[Data, int, int | None], Iterator[Any]]
LOADERS: dict[str, Loader] = {"DataLoader that tokenizes": tokenizing, "ShardLoader": from_shards}


def measure_idle(data: Data, steps: int) -> Iterator[Entry]:
    """Yield the loop as people write it, and the loop with shards and copies beside the device."""
    yield {"side": "before", **loop(tokenizing(data, 0), steps, tuned=False)}
    yield {"side": "after", **loop(from_shards(data, 2), steps, tuned=True)}


def measure_workers(data: Data, steps: int) -> Iterator[Entry]:
    """Yield each loader with 0, 1, 2 and 4 workers and several numbers of batches ready.

    `prefetch` is a number of batches for each worker of a DataLoader, and in all of a ShardLoader.
    """
    for name, workers in itertools.product(LOADERS, (0, 1, 2, 4)):
        for prefetch in (1, 2, 4) if workers else (None,):
            found = loop(LOADERS[name](data, workers, prefetch), steps, tuned=True)
            yield {"loader": name, "workers": workers, "prefetch": prefetch, **found}
