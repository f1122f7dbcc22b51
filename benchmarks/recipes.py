"""How long do training recipes of other projects wait, and does the advice of the meter help?

Each recipe trains as its project ships it: its way to read batches and its defaults, with a small
Llama, on the CPU with one thread, so that one of two cores stands for the device. All read the
standard library, in pieces of 20 lines:

- nanoGPT: `get_batch` over a memory map, evaluation of both splits at regular steps
- run_clm: `transformers.Trainer` over a tokenized `datasets.Dataset`, grouped into blocks
- TRL: `SFTTrainer`, which tokenizes first and pads each batch to its longest row
- Lightning: a `DataLoader` that tokenizes in `collate_fn`
- torchtitan: its Grain loader of JSON Lines, which tokenizes in threads; the loop is ours, because
  torchtitan's trainer needs a GPU

Three runs of each, every one in its own process, repeats interleaved: as shipped; with the first
advice of the meter's report; and with the loader of tokenfeed. The predicted gain is that of the
advice, the measured gain a ratio of real tokens per second. Refuted if the advice gains less than
half of what it predicts, or the loader of tokenfeed is slower than a recipe as shipped.

    python -m benchmarks.recipes [--only NAME] [--repeats 3] [--steps 60] [--data FOLDER]

Needs an environment with transformers, trl, lightning and torchtitan (commit b5bcd76).
"""

import argparse
import json
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
EVAL_EVERY, EVAL_BATCHES = 50, 4
"""As many evaluated batches a step as with 250 and 20, nanoGPT's settings for a CPU."""
SHIPPED, ADVISED, OURS = "as shipped", "advice", "tokenfeed"
VARIANTS = (SHIPPED, ADVISED, OURS)

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


def nanogpt(folder: Path, variant: str, steps: int) -> Any:
    def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:  # opens the map for every batch, against a leak of memory
            ids = np.memmap(folder / "train.bin", np.uint16, "r")
            starts = torch.randint(len(ids) - LENGTH, (ROWS,)).tolist()
            rows = [torch.from_numpy(ids[at : at + LENGTH + 1].astype(np.int64)) for at in starts]
            both = torch.stack(rows)
            yield both[:, :-1].contiguous(), both[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate(model: Any) -> None:
        for _, (ids, targets) in zip(range(2 * EVAL_BATCHES), drawn(), strict=False):
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
    args = arguments_of(SFTConfig, folder, steps, int(variant == ADVISED), max_length=512)
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

    stall = StallCallback(tokens=lambda b: int(b["attention_mask"].sum()), skipped_steps=WARMUP)
    batches: Any
    if variant == OURS:
        batches = loader_of(folder, Padded(ROWS * 256, sequence_length=512))
    else:
        workers = int(variant == ADVISED)
        batches = DataLoader(
            texts_of(folder),  # type: ignore[arg-type]  # a list is a data set
            batch_size=ROWS,
            shuffle=True,
            collate_fn=partial(tokenized, tokenizer_of(folder)),
            num_workers=workers,
            persistent_workers=workers > 0,
        )
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


def tokenized(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """A batch of texts, padded to the longest."""
    made = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    ids, mask = made["input_ids"], made["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


RECIPES: dict[str, Callable[[Path, str, int], Any]] = {
    "nanoGPT": nanogpt,
    "run_clm": run_clm,
    "TRL SFT": trl,
    "Lightning": lightning,
    "torchtitan": torchtitan,
}


def case(options: argparse.Namespace) -> None:
    """Run a recipe once, and print one line of JSON."""
    torch.set_num_threads(1)
    recipe, variant = options.case
    report = RECIPES[recipe](options.data, variant, options.steps)
    about_recipe = (piece for piece in report.advice if piece.cause != "cores")  # of the machine
    advice = next(about_recipe, SimpleNamespace(text=None, gain=0.0))
    found = {
        "tokens_s": report.real_tokens_per_s,
        "stall": report.stall,
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
                if variant == ADVISED and runs[recipe, SHIPPED][-1]["advice"] is None:
                    continue
                with tempfile.TemporaryDirectory() as home:
                    found, _ = run(command, Path(home))
                runs.setdefault((recipe, variant), []).append(found)
    results = []
    for recipe in options.only:
        shipped, advised, ours = (runs.get((recipe, variant), []) for variant in VARIANTS)
        is_advised = len(advised) == len(shipped)
        middle = sorted(shipped, key=lambda found: found["stall"])[len(shipped) // 2]
        causes = {name: share for name, share in middle["causes"].items() if share >= 0.005}
        results.append(
            {
                "case": recipe,
                "tokens_s": summary([found["tokens_s"] for found in shipped], 0),
                "stall": summary([found["stall"] for found in shipped], 4),
                "causes": {name: round(share, 4) for name, share in causes.items()},
                "advice": middle["advice"],
                "predicted": statistics.median(found["gain"] for found in shipped),
                "measured": gains(advised, shipped) if is_advised else None,
                "tokenfeed": gains(ours, shipped),
                "tokenfeed_stall": summary([found["stall"] for found in ours], 4),
            }
        )
    return results


def gains(runs: list[Entry], base: list[Entry]) -> dict[str, float]:
    """Summarize the gain in real tokens per second, repeat by repeat."""
    return summary([a["tokens_s"] / b["tokens_s"] - 1 for a, b in zip(runs, base, strict=True)], 3)


def table(results: list[Entry]) -> list[list[str]]:
    """The rows of the table in docs/benchmarks.md."""
    header = ["recipe", "stall", "by cause", "first advice", "predicted gain", "measured gain"]
    header += ["gain with the loader"]
    body = []
    for each in results:
        causes = sorted(each["causes"].items(), key=lambda cause: -cause[1])
        advice = ["none"] * 3
        if measured := each["measured"]:
            advice = [each["advice"], f"{each['predicted']:.0%}", f"{measured['median']:.0%}"]
        body.append(
            [
                each["case"],
                f"{each['stall']['median']:.1%}",
                ", ".join(f"{name} {share:.1%}" for name, share in causes) or "none",
                *advice,
                f"{each['tokenfeed']['median']:.0%}",
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
