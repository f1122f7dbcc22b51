"""A plain `transformers.Trainer` on two ranks, of which the second has a data set that sleeps; the
first prints the report of its StallCallback as JSON.

python trainer_ranks.py FOLDER SECONDS
"""

import dataclasses
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from support.programs.ranked_training import free_port
from torch.utils.data import Dataset

from tokenfeed.integrations.transformers import StallCallback


class Sleeping(Dataset[dict[str, torch.Tensor]]):
    """Items that take their time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._seconds)
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}


class Tiny(torch.nn.Module):
    """A model that takes the number of targets, so that the Trainer sums it over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"loss": (self.weight * input_ids).square().mean()}


def main(folder: str, seconds: float) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    rank = int(os.fork() == 0)
    os.environ.update(launcher, RANK=str(rank), LOCAL_RANK=str(rank))
    stall = StallCallback(skipped_steps=2)
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=12,
        per_device_train_batch_size=1,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=Tiny(), args=arguments, train_dataset=Sleeping(seconds * rank), callbacks=[stall]
    ).train()
    torch.distributed.destroy_process_group()
    if rank:
        os._exit(0)
    os.wait()
    assert stall.report is not None
    print(json.dumps(dataclasses.asdict(stall.report)))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
