"""A loop whose loader is too slow: compare the stall meter with a stopwatch around the loader.

python recipes/slow_loader.py --items 4000
"""

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tokenfeed import StallMeter

WARMUP = 5
"""Steps that the meter and the stopwatch leave out."""


class SlowRows(Dataset[Tensor]):
    """Rows that take a millisecond each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.001)
        return torch.randn(256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=4000)
    items = parser.parse_args().items
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(SlowRows(items), batch_size=8)
    meter = StallMeter("cpu", skipped_steps=WARMUP)
    waits: list[float] = []
    steps: list[float] = [time.perf_counter()]

    def timed(batches: Iterator[Tensor]) -> Iterator[Tensor]:
        started = time.perf_counter()
        for batch in batches:
            waits.append(time.perf_counter() - started)
            yield batch
            started = time.perf_counter()

    for batch in timed(iter(meter.watch(loader))):
        model(batch.repeat(16, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(tokens=batch.numel())
        steps.append(time.perf_counter())
    print(meter.report())
    share = sum(waits[WARMUP:]) / (steps[-1] - steps[WARMUP])
    print(f"stopwatch {share:.2%} of the time in the loader")


if __name__ == "__main__":
    main()
