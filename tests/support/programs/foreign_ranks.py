"""A loop that is not ours on two ranks, of which the second has a loader that sleeps; the first
prints its report, and as JSON, with how long the other has slept.

python foreign_ranks.py SECONDS STEPS FOLDER
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tokenfeed.trainer.stall import StallMeter

_slept: list[float] = []


def batches(rank: int, seconds: float, steps: int) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        began = time.perf_counter()
        time.sleep(seconds * rank)
        _slept.append(time.perf_counter() - began)
        yield torch.ones(16, 8)


def loop(rank: int, seconds: float, steps: int) -> tuple[StallMeter, float]:
    """The meter, and how long the second rank has slept a step."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    meter = StallMeter("cpu", skipped_steps=2)
    for batch in meter.watch(batches(rank, seconds, steps)):
        with meter.cause("communication"):
            dist.all_reduce(torch.zeros(1))
        model(batch).square().mean().backward()
        meter.step(tokens=len(batch))
    meter.gather()
    slept = [0.0]
    if rank:
        slept = [sum(_slept[2:]) / (steps - 2)]
    dist.broadcast_object_list(slept, 1)
    return meter, slept[0]


def main(seconds: float, steps: int, folder: str) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    meter, slept = loop(rank, seconds, steps)
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    os.wait()
    meter.gather()  # alone by now, it keeps what both told
    report = meter.report()
    print(report)
    print(json.dumps({"slept": slept, "stall": dataclasses.asdict(report)}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
