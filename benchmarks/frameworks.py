"""How fast do training frameworks train with the loader of tokenfeed, beside their own way to read?

Each framework trains the same small Qwen2 for an epoch on the same conversations, with the same ids
and labels, on the CPU with one thread. The lengths are lognormal (median 100 tokens, at most
2,048), an assumption. The rows of the own ways are in memory already.

- transformers: `Trainer` over a `datasets.Dataset`, 8 shuffled rows a batch, padded to the longest
- TRL: `SFTTrainer` with `packing`, which packs before the first step, sequences of 2,048 tokens
- Accelerate: a loop over a prepared `DataLoader`, with the batches of transformers
- Lightning: `Trainer.fit` over a `DataLoader`, with the batches of transformers
- Ray Train: one worker with `iter_torch_batches` of Ray Data, with the batches of transformers
- DataLoader: a plain loop, with the batches of transformers

With tokenfeed, a framework has the lines that docs/how/projects.md shows, a loader with one worker
process, and `Packed(2048, 1)` for TRL or `Padded(2048)` for the others.

Measured: targets per second between the starts of forward passes, without the first steps; slots
without a real token; and steps. Repeats are interleaved, every run is a process of its own. Every
run of a framework must have the same number of targets in its epoch, else the benchmark fails.
Refuted by a framework that is slower with tokenfeed by more than the range of the repeats.

    python -m benchmarks.frameworks [--only NAME ...] [--repeats 3] [--rows 240]    # 15 minutes

Needs an environment with transformers, trl, accelerate, lightning and ray.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.processes import run
from tokenfeed import Packed, Padded, ShardLoader

ROWS, LONGEST, WARMUP = 8, 2048, 3
"""Rows of a padded batch; tokens of the longest row; steps that are not timed."""
OWN, OURS = "own", "tokenfeed"

Entry = dict[str, Any]


def make_model() -> Any:
    """A small Qwen2, whose `passes` has the start, the targets and the slots of each step."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 910}
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=LONGEST)
    model = transformers.Qwen2ForCausalLM(config)
    model.passes = []

    def note(_: Any, __: Any, inputs: Entry) -> None:
        if (labels := inputs.get("labels")) is not None:  # else a check of the model
            targets = int((labels[:, 1:] != -100).sum())
            model.passes.append((time.perf_counter(), targets, labels.numel()))

    model.register_forward_pre_hook(note, with_kwargs=True)  # TRL replaces `forward`
    return model


def read_rows(shards: Path) -> list[dict[str, list[int]]]:
    """The ids and labels of all rows, in file order."""
    from benchmarks.finetune import alone

    names = ("input_ids", "labels")
    return [{name: batch[name][0].tolist() for name in names} for batch, _ in alone(shards)]


def collate(rows: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows, padded to the longest."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([torch.as_tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad([torch.ones_like(row) for row in ids])
    return {
        "input_ids": pad(ids),
        "labels": pad(labels, padding_value=-100),
        "attention_mask": mask,
    }


def padded_batches(shards: Path) -> Any:
    order = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(
        read_rows(shards),  # type: ignore[arg-type]
        batch_size=ROWS,
        shuffle=True,
        collate_fn=collate,
        generator=order,
    )


def loader_of(shards: Path, **settings: Any) -> ShardLoader:
    settings = {"batching": Padded(LONGEST), "num_workers": 1} | settings
    return ShardLoader(shards, micro_batches_per_step=1, **settings)


def loop(model: Any, batches: Iterable[Any], backward: Callable[[Any], None] | None = None) -> None:
    """A loop as users write it, over batches or steps of one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(**batch).loss
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def dataloader(model: Any, shards: Path, variant: str, folder: Path) -> None:
    from tokenfeed.integrations.dataloader import StatefulShardLoader

    ours = variant == OURS
    loop(model, StatefulShardLoader(loader_of(shards)) if ours else padded_batches(shards))


def accelerate(model: Any, shards: Path, variant: str, folder: Path) -> None:
    from accelerate import Accelerator

    from tokenfeed.integrations.steps import steps

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if variant == OWN:
        batches = padded_batches(shards)
        prepared, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        for batch in batches:
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        return
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for step in steps(loader_of(shards, device=accelerator.device)):
        for batch in step.accumulate(prepared):
            accelerator.backward(prepared(**batch, num_items_in_batch=step.divisor).loss)
        optimizer.step()
        optimizer.zero_grad()


def lightning(model: Any, shards: Path, variant: str, folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from tokenfeed.integrations.lightning import ShardDataModule

    class Module(LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = model, variant == OWN

        def training_step(self, batch: Any, index: int) -> Any:
            if variant == OWN:
                return self.model(**batch).loss
            for each in batch:
                self.manual_backward(self.model(**each, num_items_in_batch=batch.divisor).loss)
            optimizer: Any = self.optimizers()
            optimizer.step()
            return optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    settings = {"batching": Padded(LONGEST), "num_workers": 1, "micro_batches_per_step": 1}
    ours = variant == OURS
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    ).fit(Module(), ShardDataModule(shards, **settings) if ours else padded_batches(shards))


def arguments(kind: Any, folder: Path, **settings: Any) -> Any:
    return kind(
        str(folder),
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
        remove_unused_columns=False,
        **settings,
    )


def endless(shards: Path, batching: Any) -> tuple[ShardLoader, int]:
    """A loader without an end, and the steps of an epoch."""
    once = loader_of(shards, batching=batching, num_workers=0)
    return loader_of(shards, batching=batching, epochs=None), sum(1 for _ in once)


def trainer(model: Any, shards: Path, variant: str, folder: Path) -> None:
    import datasets
    import transformers

    from tokenfeed.integrations.transformers import ShardTrainer

    of = partial(arguments, transformers.TrainingArguments, folder)
    if variant == OWN:
        args = of(num_train_epochs=1, per_device_train_batch_size=ROWS)
        rows = datasets.Dataset.from_list(read_rows(shards))
        transformers.Trainer(model, args, train_dataset=rows, data_collator=collate).train()
        return
    loader, steps = endless(shards, Padded(LONGEST))
    ShardTrainer(model, of(max_steps=steps), train_dataset=loader).train()


def trl(model: Any, shards: Path, variant: str, folder: Path) -> None:
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    from tokenfeed.integrations.trl import ShardSFTTrainer

    of = partial(arguments, SFTConfig, folder, gradient_checkpointing=False)
    file = str(shards / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, eos_token="<|end|>", pad_token="<|end|>"
    )
    if variant == OWN:
        sizes = {"max_length": LONGEST, "per_device_train_batch_size": 1, "num_train_epochs": 1}
        rows = datasets.Dataset.from_list(read_rows(shards))
        SFTTrainer(
            model, of(packing=True, **sizes), train_dataset=rows, processing_class=tokenizer
        ).train()
        return
    loader, steps = endless(shards, Packed(LONGEST, 1))
    ShardSFTTrainer(
        model, of(max_steps=steps), train_dataset=loader, processing_class=tokenizer
    ).train()


def ray_train(model: Any, shards: Path, variant: str, folder: Path) -> None:
    """Train in a worker, which writes its passes to a file."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000)
    data = {} if variant == OURS else {"train": ray.data.from_items(read_rows(shards))}
    TorchTrainer(
        ray_worker,
        train_loop_config={"shards": str(shards), "variant": variant, "folder": str(folder)},
        datasets=data,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=str(folder)),
    ).fit()
    ray.shutdown()
    model.passes = json.loads((folder / "passes.json").read_text())


def ray_worker(config: Entry) -> None:
    import ray.train.torch

    from benchmarks.frameworks import collate, loader_of, loop, make_model

    torch.set_num_threads(1)
    model = make_model()
    prepared = ray.train.torch.prepare_model(model)
    if config["variant"] == OURS:
        loop(prepared, loader_of(config["shards"], device=ray.train.torch.get_device()))
    else:
        columns = ray.train.get_dataset_shard("train").iter_torch_batches(
            batch_size=ROWS,
            local_shuffle_buffer_size=20 * ROWS,
            collate_fn=lambda batch: collate(
                [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
            ),
        )
        loop(prepared, columns)
    Path(config["folder"], "passes.json").write_text(json.dumps(model.passes))


FRAMEWORKS: dict[str, Callable[[Any, Path, str, Path], None]] = {
    "transformers": trainer,
    "TRL": trl,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Ray Train": ray_train,
    "DataLoader": dataloader,
}


def case(options: argparse.Namespace) -> None:
    """Train once, and print one line of JSON."""
    torch.set_num_threads(1)
    name, variant = options.case
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        FRAMEWORKS[name](model, options.data / "out", variant, Path(folder))
    starts, targets, slots = zip(*model.passes, strict=True)
    found = {
        "targets_s": sum(targets[WARMUP:-1]) / (starts[-1] - starts[WARMUP]),
        "targets": sum(targets),
        "padding": 1 - options.tokens / sum(slots),
        "steps": len(starts),
    }
    print("\n" + json.dumps(found), flush=True)


def compare(options: argparse.Namespace) -> Iterator[Entry]:
    """Run all frameworks, repeats interleaved; yield medians."""
    runs: dict[tuple[str, str], list[Entry]] = {}
    for repeat in range(options.repeats):
        for name in options.only:
            for variant in (OWN, OURS):
                print(f"repeat {repeat + 1}: {name}, {variant}", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "benchmarks.frameworks", "--data", options.data]
                command += ["--tokens", options.tokens, "--case", name, variant]
                with tempfile.TemporaryDirectory() as home:
                    found, _ = run(command, Path(home), OMP_NUM_THREADS="1")
                runs.setdefault((name, variant), []).append(found)
    for name in options.only:
        own, ours = runs[name, OWN], runs[name, OURS]
        assert len({each["targets"] for each in own + ours}) == 1, (own, ours)
        for variant, found in ((OWN, own), (OURS, ours)):
            speeds = [each["targets_s"] for each in found]
            base = [each["targets_s"] for each in own]
            yield {
                "framework": name,
                "loader": variant,
                "targets_s": summary(speeds, 0),
                "of_own": summary([a / b for a, b in zip(speeds, base, strict=True)], 3),
                "padding": round(found[0]["padding"], 4),
                "steps": found[0]["steps"],
                "targets": found[0]["targets"],
            }


def table(results: list[Entry]) -> list[list[str]]:
    """The rows of the table in docs/how/projects.md."""
    return [
        ["framework", "batches", "targets/s", "of its own", "padding", "steps"],
        *(
            [
                each["framework"],
                each["loader"],
                "{median:,.0f} [{min:,.0f}, {max:,.0f}]".format(**each["targets_s"]),
                "{median:.2f} [{min:.2f}, {max:.2f}]".format(**each["of_own"]),
                f"{each['padding']:.0%}",
                str(each["steps"]),
            ]
            for each in results
        ),
    ]


def main() -> None:
    """Measure, print the table and write results/frameworks.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=240)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options)
        return
    from benchmarks.finetune import alone, write_conversations

    with tempfile.TemporaryDirectory() as name:
        options.data = Path(name)
        shards = write_conversations(options.data, options.rows)
        options.tokens = sum(tokens for _, tokens in alone(shards))
        results = list(compare(options))
    for row in table(results):
        print(" | ".join(row))
    names = ("transformers", "trl", "accelerate", "lightning", "ray")
    peers = {name: version(name) for name in names}
    print(f"written to {write_result('frameworks', results, options.results, peers=peers)}")


if __name__ == "__main__":
    main()
