"""A plain `transformers.Trainer` on two ranks, of which the second has a data set that sleeps; the
first prints the report of its StallCallback as JSON.

python trainer_ranks.py FOLDER SECONDS
"""

import dataclasses
import json
import os
import sys

import transformers
from support.processes import free_ports
from support.simulated_clocks import two_ranks
from support.sleeping import Sleeping, Tiny

from tokenfeed.integrations.transformers import StallCallback


def main(folder: str, seconds: float) -> None:
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0]), "WORLD_SIZE": "2"}
    with two_ranks() as (rank, clock):
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
            model=Tiny(),
            args=arguments,
            train_dataset=Sleeping(100, seconds, clock.sleep if rank else bool),
            callbacks=[stall],
        ).train()
    assert stall.report is not None
    print(json.dumps(dataclasses.asdict(stall.report)))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
