"""A trainer's loop on two ranks, of which the second computes for longer; the first prints the
report of its stall callback's meter as JSON.

python event_ranks.py DATA FOLDER SECONDS
"""

import dataclasses
import json
import sys

from support.simulated_clocks import two_ranks

from tokenfeed import Padded, ShardLoader
from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.integrations.steps import steps


def main(data: str, folder: str, seconds: float) -> None:
    with two_ranks(folder) as (rank, clock):
        loader = ShardLoader(data, batching=Padded(64), num_workers=0, micro_batches_per_step=2)
        meter = MeterOfEvents(skipped_steps=2)
        meter.begin("cpu")
        for step in steps(loader, meter=meter):
            meter.train()
            if rank:
                clock.sleep(seconds)
            meter.step(sum(batch.num_tokens for batch in step))
        report = meter.end(is_first=rank == 0)
    assert report is not None
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
