"""A training loop with one fault, and a stopwatch that only this benchmark reads.

usage: script.py FAULT      # STOPWATCH names the file, without its ending, that gets the times
"""

import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1]
STEPS, ROWS, LENGTH, WIDTH = 85, 8, 8, 512
RANK = int(os.environ.get("RANK", "0"))

Batch = tuple[torch.Tensor, torch.Tensor]
timed: list[tuple[float, float]] = []
steps: list[float] = []


class Items(Dataset[tuple[torch.Tensor, int]]):
    """Random rows, slow to read if that is the fault."""

    seconds = {"slow data": 2e-3, "accumulation": 1e-3, "late rank": 2e-3 * RANK}.get(FAULT, 0.0)

    def __len__(self) -> int:
        return ROWS * STEPS * 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((LENGTH, WIDTH), index / len(self)), index % 10


def own_generator() -> Iterator[Batch]:
    """Make batches by hand, slowly."""
    while True:
        time.sleep(8e-3)
        yield torch.randn(ROWS, LENGTH, WIDTH), torch.arange(ROWS) % 10


def own_thread() -> Iterator[Batch]:
    """Make batches in a thread that is slower than the training."""
    ready: queue.Queue[Batch] = queue.Queue(maxsize=2)

    def fill() -> None:
        while True:
            time.sleep(60e-3)
            ready.put((torch.randn(ROWS, LENGTH, WIDTH), torch.arange(ROWS) % 10))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()


def timing(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Time each fetch."""
    iterator = iter(batches)
    while True:
        began = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        if FAULT in ("slow data", "own generator", "own thread", "accumulation", "late rank"):
            timed.append((began, time.perf_counter()))
        yield batch


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(ROWS, LENGTH, WIDTH))
    model.train()


torch.set_num_threads(1)
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Sequential(
    *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12)), torch.nn.Linear(WIDTH, 10)
)
if FAULT == "late rank":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = {"own generator": own_generator, "own thread": own_thread}.get(FAULT)
batches = own() if own else DataLoader(Items(), batch_size=ROWS)
accumulation = 2 if FAULT == "accumulation" else 1

for number, (rows, labels) in enumerate(timing(batches), 1):
    loss = cross_entropy(model(rows).mean(1), labels) / accumulation
    loss.backward()
    if FAULT == "item":
        began = time.perf_counter()
        loss.item()
        timed.append((began, time.perf_counter()))
    if number % accumulation:
        continue
    optimizer.step()
    optimizer.zero_grad()
    steps.append(time.perf_counter())
    began = time.perf_counter()
    if FAULT == "evaluation" and len(steps) % 20 == 0:
        evaluate()
        timed.append((began, time.perf_counter()))
    if FAULT == "save" and len(steps) % 10 == 0:
        with tempfile.TemporaryFile() as file:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
        timed.append((began, time.perf_counter()))
    if len(steps) == STEPS:
        break

print("losses", [round(loss.item(), 6)], "steps", len(steps))
path = os.environ.get("STOPWATCH")
if path:
    Path(f"{path}.{RANK}.json").write_text(json.dumps({"timed": timed, "steps": steps}))
if FAULT == "late rank":
    torch.distributed.destroy_process_group()
