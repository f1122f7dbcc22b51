"""Two ranks under DDP, of which the second has a data set whose items take real seconds. The first
prints its report, and as JSON. The ranks meet in the backward pass alone.

python ddp_ranks.py SECONDS STEPS FOLDER
"""

import dataclasses
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tokenfeed.trainer.stall import StallMeter


class Items(Dataset[torch.Tensor]):
    """Items that take some seconds each."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(8)


def main(seconds: float, steps: int, folder: str) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StallMeter("cpu", skipped_steps=2)
    for batch in meter.watch(DataLoader(Items(steps, seconds * rank), batch_size=1)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(tokens=len(batch))
    meter.gather()
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    os.wait()
    report = meter.report()
    print(report)
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
