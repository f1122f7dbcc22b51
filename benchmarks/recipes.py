"""How long do training recipes of other projects wait, and does the advice of the meter help?

Each recipe trains as its project ships it: its way to read batches and its defaults, with a small
Llama, on the CPU with one thread, so that one of two cores stands for the device. All read the
standard library, in pieces of 20 lines:

- nanoGPT: `get_batch` over a memory map; evaluations of both splits as often, and of as many
  batches, as in its README's command for a CPU, and as in `config/train_shakespeare_char.py`
- run_clm: `transformers.Trainer` over a tokenized `datasets.Dataset`, grouped into blocks
- TRL: `SFTTrainer`, which tokenizes first and pads each batch to its longest row; half of the
  steps, because it also computes entropies and accuracies
- Lightning: a `DataLoader` that tokenizes in `collate_fn`
- torchtitan: its Grain loader of JSON Lines, which tokenizes in threads; the loop is ours, because
  torchtitan's trainer needs a GPU

Three runs of each, every one in its own process, repeats interleaved: as shipped; with the first
advice of the meter's report; and with the loader of tokenfeed. A report without advice predicts
that the largest cause is not worth a change, so the second run removes this cause. The predicted
gain is that of the advice, or of the largest cause. The measured gain is a ratio of real tokens per
second. Refuted if an advice gains less than half of what it predicts, if a change without advice
gains more than 10 %, or if the loader of tokenfeed is slower than a recipe as shipped.

    python -m benchmarks.recipes [--only NAME] [--repeats 3] [--steps 60] [--data FOLDER]

Needs an environment with transformers, trl, lightning and torchtitan (commit b5bcd76).
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.data import blocks, pretokenize, read_back, standard_library
from benchmarks.text_loaders.peers import Rows, open_torchtitan
from benchmarks.text_loaders.processes import run
from tokenfeed import Manifest, Packed, Padded, ShardLoader, StallMeter

ROWS, LENGTH, VOCABULARY = 8, 128, 4096
WARMUP, TEXTS = 10, 20_000
EVAL_EVERY = 25
"""Steps between two evaluations: a tenth of nanoGPT's, which evaluates ten times as much."""
SHIPPED, ADVISED, OURS = "as shipped", "advice", "tokenfeed"
VARIANTS = (SHIPPED, ADVISED, OURS)
CHANGES = {
    "nanoGPT, README": "no evaluation",
    "nanoGPT, shakespeare_char": "no evaluation",
    "run_clm": "a worker",
    "TRL SFT": "batches of similar lengths",
    "Lightning": "batches of similar lengths",
    "torchtitan": "texts tokenized beforehand",
}
"""What the second run of a recipe changes."""

Entry = dict[str, Any]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def make_data(folder: Path) -> None:
    """Write the texts, their shards and tokenizer, and one memory map of all ids."""
    with open(folder / "texts.jsonl", "w") as file:
        for _, text in zip(range(TEXTS), blocks(list(standard_library())), strict=False):
            file.write(json.dumps({"text": text}) + "\n")
    pretokenize(folder / "texts.jsonl", folder / "shards", "--vocab-size", VOCABULARY)
    read_back(folder)
    np.load(folder / "ids.npy").astype(np.uint16).tofile(folder / "train.bin")
    end = {"eos_token": tokenizer_of(folder).eos_token}
    (folder / "shards" / "tokenizer_config.json").write_text(json.dumps(end))  # for torchtitan


def texts_of(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in open(folder / "texts.jsonl")]


def tokenizer_of(folder: Path) -> Any:
    import transformers

    file = str(folder / "shards" / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    end = tokenizer.convert_ids_to_tokens(Manifest.read(folder / "shards").tokenizer.end_id)
    tokenizer.eos_token = tokenizer.pad_token = end
    return tokenizer


def make_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def loader_of(folder: Path, batching: Any = None, **settings: Any) -> ShardLoader:
    """The loader of tokenfeed with one worker, for the other core."""
    batching = batching or Packed(LENGTH, ROWS, split=True)
    settings = {"num_workers": 1, "epochs": None} | settings
    return ShardLoader(folder / "shards", batching=batching, **settings)


def train(batches: Batches, steps: int, evaluate: Callable[[Any], None] | None = None) -> Any:
    """A plain loop, measured; return the report."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = StallMeter("cpu", skipped_steps=WARMUP)
    stream = iter(meter.watch(batches))
    for step in range(steps + WARMUP):
        if evaluate is not None and step % EVAL_EVERY == 0:
            with meter.cause("evaluation"):
                evaluate(model)
        ids, targets = next(stream)
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(tokens=ids.numel())
        with meter.cause("log"):
            loss.item()
    return meter.report()


def nanogpt(eval_batches: int, folder: Path, variant: str, steps: int) -> Any:
    def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:  # opens the map for every batch, against a leak of memory
            ids = np.memmap(folder / "train.bin", np.uint16, "r")
            starts = torch.randint(len(ids) - LENGTH, (ROWS,)).tolist()
            rows = [torch.from_numpy(ids[at : at + LENGTH + 1].astype(np.int64)) for at in starts]
            both = torch.stack(rows)
            yield both[:, :-1].contiguous(), both[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate(model: Any) -> None:
        for _, (ids, targets) in zip(range(2 * eval_batches), drawn(), strict=False):
            logits = model(ids).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    if variant == OURS:
        with loader_of(folder) as loader:
            return train(((b.input_ids, b.targets) for b in loader), steps, evaluate)
    return train(drawn(), steps, evaluate if variant == SHIPPED else None)


def torchtitan(folder: Path, variant: str, steps: int) -> Any:
    sizes: Entry = {"max_context_length": LENGTH, "num_tokens_per_batch": ROWS * LENGTH}
    sizes |= {"dp_rank": 0, "dp_world_size": 1}
    loader: Any
    if variant == SHIPPED:
        from torchtitan.components import data, tokenizer
        from torchtitan.hf_datasets.text_datasets import TextProcessor

        texts = data.SingleDatasetConfig(
            source=data.IndexedJsonlSource.Config(patterns=(str(folder / "texts.jsonl"),)),
            processor=TextProcessor.Config(),
            post_filters=(lambda sample: sample is not None,),
        )
        packed = data.ConcatThenSplitPackingConfig(dataset=texts)
        ids_of = tokenizer.HuggingFaceTokenizer(tokenizer_path=str(folder / "shards"))
        loader = data.GrainDataLoader.Config(dataset=packed).build(**sizes, tokenizer=ids_of)
    elif variant == ADVISED:  # as its README shows for tokens in a memory map
        rows = Rows(folder.parent, folder.name, whole=True)
        loader = open_torchtitan(
            [rows], "ConcatThenSplitPackingConfig", sizes | {"tokenizer": None}
        )
    else:
        from tokenfeed.integrations.torchtitan import ShardDataLoader

        config = ShardDataLoader.Config(path=str(folder / "shards"), num_workers=1)
        loader = config.build(**sizes, tokenizer=None)
    batches = (
        (inputs["input"].view(ROWS, LENGTH), labels.view(ROWS, LENGTH)) for inputs, labels in loader
    )
    return train(batches, steps)


def arguments_of(kind: Any, folder: Path, steps: int, workers: int, **more: Any) -> Any:
    return kind(
        str(folder / "run"),
        max_steps=steps + WARMUP,
        per_device_train_batch_size=ROWS,
        dataloader_num_workers=workers,
        include_num_input_tokens_seen="non_padding",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def run_clm(folder: Path, variant: str, steps: int) -> Any:
    import datasets
    import transformers

    from tokenfeed.integrations.transformers import ShardTrainer, StallCallback

    stall = StallCallback(skipped_steps=WARMUP)
    workers = int(variant == ADVISED)
    args = arguments_of(transformers.TrainingArguments, folder, steps, workers)
    if variant == OURS:
        loader = loader_of(folder, micro_batches_per_step=1)
        ShardTrainer(make_model(), args, train_dataset=loader, callbacks=[stall]).train()
        return stall.report
    ids = np.fromfile(folder / "train.bin", np.uint16).astype(np.int64)
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()
    grouped = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = transformers.Trainer(
        make_model(),
        args,
        train_dataset=grouped,
        data_collator=transformers.default_data_collator,
        callbacks=[stall],
    )
    trainer.train()
    return stall.report


def trl(folder: Path, variant: str, steps: int) -> Any:
    import datasets
    from trl import SFTConfig, SFTTrainer

    from tokenfeed.integrations.transformers import StallCallback
    from tokenfeed.integrations.trl import ShardSFTTrainer

    stall = StallCallback(skipped_steps=WARMUP)
    order = "group_by_length" if variant == ADVISED else "random"
    args = arguments_of(SFTConfig, folder, steps, 0, max_length=512, train_sampling_strategy=order)
    settings = {"processing_class": tokenizer_of(folder), "callbacks": [stall]}
    if variant == OURS:
        loader = loader_of(
            folder, Padded(ROWS * 256, sequence_length=512), micro_batches_per_step=1
        )
        ShardSFTTrainer(make_model(), args, train_dataset=loader, **settings).train()
        return stall.report
    rows = datasets.Dataset.from_dict({"text": texts_of(folder)[: (steps + WARMUP) * ROWS]})
    SFTTrainer(make_model(), args, train_dataset=rows, **settings).train()
    return stall.report


def lightning(folder: Path, variant: str, steps: int) -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from tokenfeed.integrations.lightning import StallCallback

    class Model(LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    stall = StallCallback(
        tokens=lambda batch: int(batch["attention_mask"].sum()),
        slots=lambda batch: batch["input_ids"].numel(),
        skipped_steps=WARMUP,
    )
    batches: Any
    if variant == OURS:
        batches = loader_of(folder, Padded(ROWS * 256, sequence_length=512))
    else:
        texts = texts_of(folder)
        order: dict[str, Any] = {"batch_size": ROWS, "shuffle": True}
        if variant == ADVISED:
            order = {"batch_sampler": by_length(texts)}
        collate = partial(tokenized, tokenizer_of(folder))
        batches = DataLoader(texts, collate_fn=collate, **order)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps + WARMUP,
        callbacks=[stall],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "run",
    )
    trainer.fit(Model(), batches)
    return stall.report


def by_length(texts: list[str]) -> list[list[int]]:
    """Batches of texts of similar lengths: random groups of 50 batches, each sorted."""
    places = random.Random(0).sample(range(len(texts)), len(texts))
    batches = []
    for first in range(0, len(places), 50 * ROWS):
        group = sorted(places[first : first + 50 * ROWS], key=lambda place: len(texts[place]))
        batches += [group[at : at + ROWS] for at in range(0, len(group), ROWS)]
    random.Random(1).shuffle(batches)
    return batches


def tokenized(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """A batch of texts, padded to the longest."""
    made = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    ids, mask = made["input_ids"], made["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


RECIPES: dict[str, Callable[[Path, str, int], Any]] = {
    "nanoGPT, README": partial(nanogpt, 2),
    "nanoGPT, shakespeare_char": partial(nanogpt, 20),
    "run_clm": run_clm,
    "TRL SFT": lambda folder, variant, steps: trl(folder, variant, steps // 2),
    "Lightning": lightning,
    "torchtitan": torchtitan,
}


def case(options: argparse.Namespace) -> None:
    """Run a recipe once, and print one line of JSON."""
    torch.set_num_threads(1)
    recipe, variant = options.case
    report = RECIPES[recipe](options.data, variant, options.steps)
    about_recipe = (piece for piece in report.advice if piece.cause != "cores")  # of the machine
    largest = max(cause.fraction for cause in report.causes.values())
    no_advice = SimpleNamespace(text=None, gain=largest / (1 - largest))
    advice = next(about_recipe, no_advice)
    found = {
        "tokens_s": report.real_tokens_per_s,
        "stall": report.stall,
        "padding": report.padding,
        "causes": {name: cause.fraction for name, cause in report.causes.items()},
        "advice": advice.text,
        "gain": advice.gain,
    }
    print("\n" + json.dumps(found), flush=True)


def compare(options: argparse.Namespace) -> list[Entry]:
    """Run all recipes, repeats interleaved; return medians."""
    runs: dict[tuple[str, str], list[Entry]] = {}
    for repeat in range(options.repeats):
        for recipe in options.only:
            for variant in VARIANTS:
                print(f"repeat {repeat + 1}: {recipe}, {variant}", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "benchmarks.recipes", "--data", options.data]
                command += ["--steps", options.steps, "--case", recipe, variant]
                with tempfile.TemporaryDirectory() as home:
                    found, _ = run(command, Path(home))
                runs.setdefault((recipe, variant), []).append(found)
    results = []
    for recipe in options.only:
        shipped, advised, ours = (runs[recipe, variant] for variant in VARIANTS)
        middle = sorted(shipped, key=lambda found: found["stall"])[len(shipped) // 2]
        causes = {name: share for name, share in middle["causes"].items() if share >= 0.005}
        results.append(
            {
                "case": recipe,
                "tokens_s": summary([found["tokens_s"] for found in shipped], 0),
                "stall": summary([found["stall"] for found in shipped], 4),
                "padding": round(middle["padding"], 4),
                "causes": {name: round(share, 4) for name, share in causes.items()},
                "advice": middle["advice"],
                "predicted": round(statistics.median(found["gain"] for found in shipped), 4),
                "change": CHANGES[recipe],
                "measured": gains(advised, shipped),
                "tokenfeed": gains(ours, shipped),
                "tokenfeed_stall": summary([found["stall"] for found in ours], 4),
            }
        )
    return results


def gains(runs: list[Entry], base: list[Entry]) -> dict[str, float]:
    """Summarize the gain in real tokens per second, repeat by repeat."""
    return summary([a["tokens_s"] / b["tokens_s"] - 1 for a, b in zip(runs, base, strict=True)], 3)


def gain_cell(gain: dict[str, float]) -> str:
    """A gain and its range."""
    return f"{gain['median']:.0%} [{gain['min']:.0%}, {gain['max']:.0%}]"


def table(results: list[Entry]) -> list[list[str]]:
    """The rows of the table in docs/benchmarks.md."""
    header = ["recipe", "stall", "by cause", "padding", "first advice", "change of the second run"]
    header += ["predicted gain", "measured gain", "gain with the loader"]
    body = []
    for each in results:
        causes = sorted(each["causes"].items(), key=lambda cause: -cause[1])
        body.append(
            [
                each["case"],
                f"{each['stall']['median']:.1%}",
                ", ".join(f"{name} {share:.1%}" for name, share in causes) or "none",
                f"{each['padding']:.0%}",
                each["advice"] or "none",
                each["change"],
                f"{each['predicted']:.0%}",
                gain_cell(each["measured"]),
                gain_cell(each["tokenfeed"]),
            ]
        )
    return [header, *body]


def main() -> None:
    """Measure, print the table and write results/recipes.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options)
        return
    with tempfile.TemporaryDirectory() as name:
        options.data = (options.data or Path(name)) / "medium"
        if not (options.data / "train.bin").exists():
            options.data.mkdir(parents=True, exist_ok=True)
            make_data(options.data)
        results = compare(options)
    for row in table(results):
        print(" | ".join(row))
    peers = {name: version(name) for name in ("transformers", "trl", "lightning", "torchtitan")}
    print(f"written to {write_result('recipes', results, options.results, peers=peers)}")


if __name__ == "__main__":
    main()
