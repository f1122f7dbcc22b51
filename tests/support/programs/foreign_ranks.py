"""A loop that is not ours on two ranks, of which the second has a loader that sleeps; the first
prints its report, and as JSON.

python foreign_ranks.py SECONDS STEPS FOLDER
"""

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from support.simulated_clocks import SharedClock, two_ranks
from torch.nn.parallel import DistributedDataParallel

from tokenfeed.trainer.stall import StallMeter


def batches(rank: int, seconds: float, steps: int, clock: SharedClock) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        if rank:
            clock.sleep(seconds)
        yield torch.ones(16, 8)


def loop(rank: int, seconds: float, steps: int, clock: SharedClock) -> StallMeter:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    meter = StallMeter("cpu", skipped_steps=2)
    for batch in meter.watch(batches(rank, seconds, steps, clock)):
        with meter.cause("communication"):
            dist.all_reduce(torch.zeros(1))
        model(batch).square().mean().backward()
        meter.step(tokens=len(batch))
    meter.gather()
    return meter


def main(seconds: float, steps: int, folder: str) -> None:
    with two_ranks(folder) as (rank, clock):
        meter = loop(rank, seconds, steps, clock)
    meter.gather()  # alone by now, it keeps what both told
    report = meter.report()
    print(report)
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
