"""Two workers of Ray Train, one of which is killed. Each writes the number, rows and loss of every
step to RANK.jsonl.

python ray_ranks.py SHARDS FOLDER
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS, STEPS, SAVED_EVERY, KILLED_AT = 2, 12, 4, 9


def train(config: dict[str, Any]) -> None:
    """The loop of a worker, as docs/how/projects.md shows it."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from torch.nn.functional import cross_entropy

    from tokenfeed import Packed, ShardLoader
    from tokenfeed.integrations.steps import steps

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    loader = ShardLoader(
        config["shards"],
        batching=Packed(32, 2),
        micro_batches_per_step=2,
        epochs=None,
        num_workers=0,
    )
    size = loader.manifest.tokenizer.vocabulary_size
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(size, 4), torch.nn.Linear(4, size))
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            loader.load_state_dict(json.loads(Path(saved, "loader.json").read_text()))
            model.load_state_dict(torch.load(Path(saved, "model.pt")))
            first = int(Path(saved, "step").read_text())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = ray.train.torch.prepare_model(model)
    with loader, open(folder / f"{loader.rank}.jsonl", "a", buffering=1) as log:
        for number, step in zip(range(first, STEPS), steps(loader), strict=False):
            loss = 0.0
            for batch in step.accumulate(wrapped):
                logits = wrapped(batch.input_ids).flatten(0, 1)
                part = (
                    cross_entropy(logits, batch.targets.flatten(), reduction="sum") / step.divisor
                )
                part.backward()
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
            rows = [[] if batch.is_filler else batch.rows.tolist() for batch in step]
            log.write(json.dumps([number, rows, loss]) + "\n")
            if number == KILLED_AT and loader.rank == 1 and first == 0:
                os.kill(os.getpid(), 9)
            with tempfile.TemporaryDirectory() as name:
                checkpoint = None
                if (number + 1) % SAVED_EVERY == 0 and loader.rank == 0:
                    Path(name, "loader.json").write_text(json.dumps(step.state))
                    Path(name, "step").write_text(str(number + 1))
                    torch.save(model.state_dict(), Path(name, "model.pt"))
                    checkpoint = Checkpoint.from_directory(name)
                ray.train.report({"loss": loss}, checkpoint=checkpoint)


def main(shards: str, folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=RANKS, include_dashboard=False, object_store_memory=100_000_000)
    TorchTrainer(
        train,
        train_loop_config={"shards": shards, "folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(
            name="run", storage_path=folder, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
