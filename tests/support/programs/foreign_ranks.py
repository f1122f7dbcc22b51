"""A loop that is not ours on two ranks, of which the second has a loader that sleeps; the first
prints its report, and as JSON.

python foreign_ranks.py SECONDS STEPS FOLDER
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from support.simulated_clocks import SharedClock
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
    torch.set_num_threads(1)  # no threads, which forks would lack
    clock = SharedClock()
    rank = int(os.fork() == 0)
    clock.join(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    meter = loop(rank, seconds, steps, clock)
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    os.wait()
    meter.gather()  # alone by now, it keeps what both told
    report = meter.report()
    print(report)
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
