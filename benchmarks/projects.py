"""Do other projects train as well and as fast with the loader of tokenfeed as with their own?

Each project trains a tiny model by its own script, on the CPU with one thread: as it ships, and
with the changes that docs/how/projects.md shows, which are read from that page. Both read the same
documents, with the same ids: the standard library in pieces of 20 lines.

- nanoGPT: `train.py`, with `train.bin` in its own loader
- nanochat: `scripts/base_train.py`, with its own tokenizer, and Parquet files in its own loader
- litgpt: `litgpt.pretrain`, with the tokens as chunks of litData in `litgpt.data.LitData`
- torchtitan: its trainer on its debug model, made smaller, with the texts as JSON Lines in its own
  loader, which tokenizes. torchtitan has no CPU trainer: the device's memory statistics are stubs

Measured: targets per second, from the project's own times of its steps after the first ones; the
training loss, the mean of the last quarter of the steps; and the validation loss of the trained
model on documents that no loader had, each alone. A seed sets the weights and the project's own
shuffle; repeats are interleaved. All but litgpt also resume from the checkpoint in the middle
of the run, and the losses of all later steps must equal those of the whole run, bit for bit.

Refuted by a project whose validation loss is higher than with its own loader by more than the
range of the seeds, or which is slower by more than the range of the repeats, or by a loss that
differs after the resume.

    python -m benchmarks.projects FOLDER [--seeds 1 2 3] [--iterations 150]

FOLDER has checkouts of nanoGPT (3adf61e), nanochat (92d63d4), litgpt (2685705) and torchtitan
(b5bcd76). They stay unchanged. Needs an environment with their requirements.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import re
import runpy
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.data import blocks, standard_library
from benchmarks.text_loaders.processes import run
from tokenfeed import Packed, ShardLoader, pretokenize

ROWS, LENGTH, VOCABULARY = 8, 256, 2048
TITAN_ROWS = 2  # torchtitan's attention computes all pairs of a batch on a CPU
WARMUP, EVERY, DOCUMENTS = 10, 50, 200
"""Steps that are not timed; a document of each so many is held out; documents to validate on."""
FULL = Packed(LENGTH, ROWS, last="fill", split=True)
"""The batches of our adapters for nanoGPT, nanochat and torchtitan."""
PAGE = Path(__file__).parents[1] / "docs" / "how" / "projects.md"
OWN, OURS, RESUMED = "own", "tokenfeed", "resumed"

Entry = dict[str, Any]
Logits = Callable[[torch.Tensor], torch.Tensor]


def make_data(folder: Path, checkouts: Path) -> None:
    """Write `gpt/`, shards with nanoGPT's and litgpt's files beside, and `chat/`, the same for
    nanochat."""
    texts = list(blocks(list(standard_library())))
    random.Random(0).shuffle(texts)  # nanochat's own loader reads them in their order
    held, kept = texts[::EVERY], [text for at, text in enumerate(texts) if at % EVERY]
    corpus = {}
    for name, documents in (("train", kept), ("validation", held)):
        corpus[name] = folder / f"{name}.jsonl"
        corpus[name].write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    inputs, split = [*corpus.values()], {"validation": "validation.jsonl"}
    gpt, chat = folder / "gpt", folder / "chat"
    pretokenize(inputs, gpt, vocab_size=VOCABULARY, split=split)
    streams = {name: np.concatenate(rows_of(gpt, name)) for name in corpus}
    for name, ids in streams.items():
        ids.astype(np.uint16).tofile(gpt / f"{name.replace('idation', '')}.bin")
    end = {"eos_token": "<|endoftext|>"}
    (gpt / "tokenizer_config.json").write_text(json.dumps(end))  # for torchtitan
    (gpt / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))
    for name, ids in streams.items():
        write_chunks(ids, gpt / "chunks" / name)
    (chat / "base" / "tokenizer").mkdir(parents=True)
    write_nanochat(chat, checkouts / "nanochat", kept, held)
    options = {"tokenizer": chat / "tokenizer.json", "add_special_tokens": True}
    pretokenize(inputs, chat / "shards", end_token="<|bos|>", split=split, **options)


def rows_of(shards: Path, split: str) -> list[np.ndarray]:
    """The rows of a split, in the order of the files."""
    found = []
    for shard in sorted((shards / split).glob("*.arrow")):
        column = pa.ipc.open_file(shard).read_all()["input_ids"]
        found += [row.values.to_numpy() for row in column]
    return found


def write_chunks(ids: np.ndarray, folder: Path) -> None:
    """Write a stream of ids for litgpt's own loader."""
    from litdata import optimize
    from litdata.streaming import TokensLoader

    optimize(
        fn=torch.from_numpy,
        inputs=np.array_split(ids.astype(np.int64), 4),
        output_dir=str(folder),
        num_workers=1,
        chunk_bytes="50MB",
        item_loader=TokensLoader(block_size=LENGTH + 1),
    )


def write_nanochat(folder: Path, checkout: Path, kept: list[str], held: list[str]) -> None:
    """Train nanochat's tokenizer, write its files, and convert it to a `tokenizer.json` that puts
    `<|bos|>` before each document."""
    import base64

    from tokenizers.processors import TemplateProcessing
    from transformers.convert_slow_tokenizer import TikTokenConverter

    sys.path.insert(0, str(checkout))
    from nanochat import tokenizer as module  # pyright: ignore[reportMissingImports]

    base = folder / "base"
    made = module.RustBPETokenizer.train_from_iterator(iter(kept), VOCABULARY)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(made.enc))
    torch.save(torch.ones(VOCABULARY, dtype=torch.int32), base / "tokenizer" / "token_bytes.pt")
    (base / "base_data_climbmix").mkdir()
    for number, texts in enumerate((kept, held)):
        path = base / "base_data_climbmix" / f"shard_{number:05d}.parquet"
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    ranks = made.enc._mergeable_ranks
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "ranks.tiktoken").write_text("".join(lines))
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else tiktoken keeps the content of each path forever
    converted = TikTokenConverter(
        vocab_file=str(folder / "ranks.tiktoken"),
        pattern=module.SPLIT_PATTERN,
        extra_special_tokens=module.SPECIAL_TOKENS,
    ).converted()
    converted.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", made.get_bos_token_id())]
    )
    converted.save(str(folder / "tokenizer.json"))
    for text in held:
        assert converted.encode(text).ids == made.encode(text, prepend="<|bos|>")


def changes(project: str) -> list[str]:
    """The code blocks of a project on the page."""
    section = PAGE.read_text().split(f"\n## {project}\n")[1].split("\n## ")[0]
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)


def copied(options: argparse.Namespace, project: str, file: str, adapt: Any, shown: Any) -> None:
    """Copy a checkout into this folder, adapt a file of it, and print exact losses."""
    if options.variant == RESUMED:
        return  # continues in the folder of the whole run
    shutil.copytree(options.checkouts / project, ".", dirs_exist_ok=True)
    edits = [*(adapt if options.variant == OURS else ()), shown]
    Path(file).write_text(edited(Path(file).read_text(), edits))


def edited(source: str, edits: list[tuple[str, str]]) -> str:
    """Replace every match of each pattern."""
    for old, new in edits:
        parts = re.split(old, source, flags=re.DOTALL)
        assert len(parts) > 1, old
        source = new.join(parts)
    return source


def trained(call: Callable[[], Any], pattern: str) -> tuple[dict[int, tuple[float, float]], Any]:
    """Run a project's script. Return loss and milliseconds of each step, and its variables."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        names = call()
    found = re.findall(pattern, written.getvalue())
    return {int(step): (float(loss), float(ms)) for step, loss, ms in found}, names


def nanogpt(options: argparse.Namespace) -> Entry:
    shards = options.data / "gpt"
    get_batch, saved, loaded = changes("nanoGPT")
    adapt = [
        (r"get_batch\('train'\)", "get_batch('feed')"),
        (r"def get_batch\(split\):.*?return x, y\n", get_batch),
        (r"(?<='config': config,\n)", saved),
        (r"(?<=best_val_loss = checkpoint\['best_val_loss'\]\n)", loaded),
    ]
    copied(options, "nanoGPT", "train.py", adapt, (r"\{lossf:.4f\}", "{lossf!r}"))
    settings = {"device": "cpu", "dtype": "float32", "compile": False, "dataset": shards}
    settings |= {"batch_size": ROWS, "block_size": LENGTH, "gradient_accumulation_steps": 1}
    settings |= {"n_layer": 2, "n_head": 2, "n_embd": 64, "learning_rate": 3e-3, "min_lr": 3e-4}
    settings |= {"eval_interval": options.iterations // 2, "eval_iters": 1, "warmup_iters": 20}
    settings |= {"max_iters": options.iterations - 1, "lr_decay_iters": options.iterations}
    settings["init_from"] = "resume" if options.variant == RESUMED else "scratch"
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in settings.items())]
    script = partial(runpy.run_path, "train.py", run_name="__main__")
    steps, names = trained(script, r"iter (\d+): loss ([\d.]+), time ([\d.]+)ms")
    return entry(options, steps, shards, lambda ids: names["raw_model"](ids, ids)[0], FULL)


def nanochat(options: argparse.Namespace) -> Entry:
    shards = options.data / "chat" / "shards"
    (block,) = changes("nanochat")
    block = block.replace('"out/"', repr(str(shards)))
    adapt = [(r"train_loader = tokenizing.*?build_val_loader[^\n]*\n", block)]
    shown = (r"\{debiased_smooth_loss:.6f\}", "{train_loss_f!r}")
    copied(options, "nanochat", "scripts/base_train.py", adapt, shown)
    middle = options.iterations // 2
    if not Path("base").exists():
        shutil.copytree(options.data / "chat" / "base", "base")
    os.environ["NANOCHAT_BASE_DIR"] = str(Path("base").resolve())
    settings = {"device-type": "cpu", "depth": 2, "aspect-ratio": 32, "head-dim": 32}
    settings |= {"max-seq-len": LENGTH, "device-batch-size": ROWS, "window-pattern": "L"}
    settings |= {"total-batch-size": ROWS * LENGTH, "num-iterations": options.iterations}
    settings |= {"eval-every": -1, "core-metric-every": -1, "sample-every": -1}
    settings |= {"save-every": middle}
    if options.variant == RESUMED:
        settings["resume-from-step"] = middle
    sys.argv = ["base_train", *(f"--{name}={value}" for name, value in settings.items())]
    script = partial(runpy.run_module, "scripts.base_train", run_name="__main__", alter_sys=True)
    pattern = r"step (\d+)/\d+ .*?loss: ([\d.]+) .*?dt: ([\d.]+)ms"
    steps, names = trained(script, pattern)
    return entry(options, steps, shards, names["orig_model"], FULL)


def litgpt(options: argparse.Namespace) -> Entry:
    import lightning
    from litgpt import GPT, Config, pretrain  # pyright: ignore[reportMissingImports]
    from litgpt.args import EvalArgs, TrainArgs  # pyright: ignore[reportMissingImports]
    from litgpt.data.lit_data import LitData  # pyright: ignore[reportMissingImports]

    from tokenfeed.integrations.litgpt import ShardData

    shards, logged = options.data / "gpt", []
    lightning.Fabric.log_dict = lambda _, metrics, **__: logged.append(metrics)  # type: ignore
    pretrain.save_hyperparameters = lambda *_, **__: None  # of a command
    chunks = {"data_path": shards / "chunks", "split_names": ("train", "validation")}
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "padded_vocab_size": VOCABULARY}
    config = Config(name="tiny", block_size=LENGTH, **sizes)
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain.setup(
            "tiny",
            config,
            Path("run"),
            precision="32-true",
            data=ShardData(str(shards))
            if options.variant == OURS
            else LitData(**chunks, num_workers=1),
            train=TrainArgs(
                global_batch_size=ROWS,
                micro_batch_size=ROWS,
                max_tokens=options.iterations * ROWS * LENGTH,
                max_norm=1.0,
                lr_warmup_steps=20,
                log_interval=1,
                save_interval=None,
            ),
            eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
            devices=1,
            logger_name="csv",
            seed=options.seed,
        )
    model = GPT(config)
    model.load_state_dict(torch.load("run/final/lit_model.pth", weights_only=False)["model"])
    ends = [0.0, *(metrics["time"] for metrics in logged)]
    milliseconds = 1e3 * np.diff(ends)
    losses = (metrics["loss"] for metrics in logged)
    steps = dict(enumerate(zip(losses, milliseconds.tolist(), strict=True)))
    return entry(options, steps, shards, model)


def torchtitan(options: argparse.Namespace) -> Entry:
    shards, block = options.data / "gpt", changes("torchtitan")[0]
    imported, change = block.replace('"out/"', repr(str(shards))).split("\n\n")
    source = f"IndexedJsonlSource.Config(patterns=({str(options.data / 'train.jsonl')!r},))"
    imports = "from torchtitan.components.data import IndexedJsonlSource\n"
    imports += "from torchtitan.hf_datasets.text_datasets import TextProcessor\n\n"
    if options.variant == OURS:
        imports += imported + "\n"
    else:
        change = "        dataloader=GrainDataLoader.Config(dataset=packed),\n"
    texts = f"SingleDatasetConfig(source={source}, processor=TextProcessor.Config()"
    texts += ", post_filters=(lambda sample: sample is not None,))"
    old = r" {8}dataloader=GrainDataLoader.Config\(\n {12}dataset=packed,\n {12}shuffle=False,"
    edits = [
        ("lr=8e-4", "lr=8e-3"),
        (old + r"\n {8}\),\n", change),
        (r'DATASETS\["c4_test"\]', texts),
    ]
    file = "torchtitan/models/llama3/config_registry.py"
    copied(options, "torchtitan", file, [], (r"(?=\n\ndef llama3_debugmodel\()", "\n" + imports))
    if options.variant != RESUMED:
        for path, some in ((file, edits), ("torchtitan/models/llama3/__init__.py", TINY)):
            Path(path).write_text(edited(Path(path).read_text(), some))
    on_cpu()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    steps: dict[int, tuple[float, float]] = {}
    ended = [time.perf_counter()]

    def log(_: Any, step: int, loss: float, *__: Any, **___: Any) -> None:
        ended.append(time.perf_counter())
        steps[step - 1] = loss, 1e3 * (ended[-1] - ended[-2])

    MetricsProcessor.log = log  # type: ignore[method-assign]
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(shards), "run"
    config.debug.seed, config.debug.enable_structured_logging = options.seed, False
    config.validator.enable, config.activation_checkpoint = False, None
    config.checkpoint.enable, config.checkpoint.interval = True, options.iterations // 2
    if options.variant == RESUMED:
        config.checkpoint.load_step = options.iterations // 2
    training = config.training
    training.num_tokens_per_microbatch_per_dp_rank = TITAN_ROWS * LENGTH
    training.max_context_length, training.steps = LENGTH, options.iterations
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = config.build()
        trainer.train()
    model = trainer.model_parts[0]
    model._skip_lm_head = False

    def logits(ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        masks = model.get_attention_masks(positions=positions)
        return model(ids[0], positions=positions, attention_masks=masks)[None]

    return entry(options, steps, shards, logits, FULL, TITAN_ROWS)


TINY = [("dim = 256\n", "dim = 64\n"), ("n_heads = 16\n", "n_heads = 2\n"), ("= 6\n", "= 2\n")]
"""Edits of torchtitan's debug model."""


def on_cpu() -> None:
    """Let torchtitan take the CPU for its device, which it does not offer."""
    from types import SimpleNamespace

    from torch.nn.attention import flex_attention

    unknown: dict[str, Any] = {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, function in unknown.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.distributed.barrier = lambda **_: None  # it names a GPU; there is one process
    torch.distributed.set_timeout = lambda *_: None  # newer than torch 2.13
    flex_attention._validate_device = lambda *_: None  # its backward pass works on CPUs, uncompiled
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # needs triton
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


PROJECTS = {
    "nanoGPT": nanogpt,
    "nanochat": nanochat,
    "litgpt": litgpt,
    "torchtitan": torchtitan,
}


def entry(
    options: argparse.Namespace,
    steps: dict[int, tuple[float, float]],
    shards: Path,
    logits: Logits,
    batching: Packed | None = None,
    rows: int = ROWS,
) -> Entry:
    """What a case found. With `batching`, only a part of the slots has targets."""
    milliseconds = [
        ms for step, (_, ms) in steps.items() if step >= WARMUP and step != options.iterations // 2
    ]
    share = 1.0
    if batching and options.variant != OWN:
        with ShardLoader(shards, batching=batching, num_workers=0) as loader:
            some = [batch.targets >= 0 for batch in islice(loader, 20)]
        share = float(torch.cat(some).float().mean())
    return {
        "losses": {step: loss for step, (loss, _) in steps.items()},
        "targets_s": share * rows * LENGTH / statistics.fmean(milliseconds) * 1e3,
        "validation": validation_loss(logits, shards),
    }


@torch.no_grad()
def validation_loss(logits: Logits, shards: Path) -> float:
    """The mean loss of all next tokens in some documents, each alone."""
    total, targets = 0.0, 0
    for row in rows_of(shards, "validation")[:DOCUMENTS]:
        ids = torch.from_numpy(row[:LENGTH].astype(np.int64))[None]
        found = logits(ids)[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(found, ids[0, 1:], reduction="sum"))
        targets += ids.shape[1] - 1
    return total / targets


def case(options: argparse.Namespace) -> None:
    """Train once in a folder of its own, and print one line of JSON."""
    torch.set_num_threads(1)
    options.project, options.variant, options.seed = *options.case[:2], int(options.case[2])
    seed, options.seed = torch.manual_seed, options.seed
    torch.manual_seed = lambda _: seed(options.seed)  # type: ignore[assignment]
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(options.folder)
    sys.path.insert(0, str(options.checkouts / "litgpt"))
    sys.path.insert(0, str(options.folder))
    print("\n" + json.dumps(PROJECTS[options.project](options)), flush=True)


def compare(options: argparse.Namespace, folder: Path) -> Iterator[Entry]:
    """Train every project with both loaders, repeats interleaved."""

    def measured(project: str, variant: str, seed: int) -> Entry:
        print(f"{project}, {variant}, seed {seed}", file=sys.stderr, flush=True)
        place = folder / project / f"{OURS if variant == RESUMED else variant}-{seed}"
        command = [sys.executable, "-m", "benchmarks.projects", options.checkouts]
        command += ["--data", options.data, "--iterations", options.iterations]
        command += ["--folder", place, "--case", project, variant, seed]
        threads = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        found, _ = run(command, folder, **threads)
        return found

    for project in options.only:
        runs: dict[str, list[Entry]] = {OWN: [], OURS: []}
        for seed in options.seeds:
            for variant, found in runs.items():
                found.append(measured(project, variant, seed))
        same = None
        if project != "litgpt":  # its test compares weights
            whole = runs[OURS][0]["losses"]
            resumed = measured(project, RESUMED, options.seeds[0])["losses"]
            assert len(resumed) == options.iterations - options.iterations // 2, len(resumed)
            same = all(whole[step] == loss for step, loss in resumed.items())
        own = [each["targets_s"] for each in runs[OWN]]
        for variant, found in runs.items():
            speeds = [each["targets_s"] for each in found]
            ratios = [speed / base for speed, base in zip(speeds, own, strict=True)]
            yield {
                "project": project,
                "loader": variant,
                "targets_s": summary(speeds, 0),
                "of_own": summary(ratios, 3),
                "training_loss": summary([last_quarter(each["losses"]) for each in found], 3),
                "validation_loss": summary([each["validation"] for each in found], 3),
                "curve": curve(found),
                "resumed_equal": same if variant == OURS else None,
            }


def last_quarter(losses: dict[str, float]) -> float:
    values = list(losses.values())
    return statistics.fmean(values[3 * len(values) // 4 :])


def curve(found: list[Entry]) -> list[float]:
    """The mean loss of each tenth of the steps, over all seeds."""
    means = np.mean([list(each["losses"].values()) for each in found], axis=0)
    return [round(float(part.mean()), 3) for part in np.array_split(means, 10)]


def table(results: list[Entry]) -> list[list[str]]:
    """The rows of the table in docs/benchmarks.md."""
    header = ["project", "loader", "targets/s", "of its own loader", "training loss"]
    header += ["validation loss", "losses after a resume"]
    body = []
    for each in results:
        losses = ("training_loss", "validation_loss")
        equal = {True: "equal", False: "differ", None: "–"}  # noqa: RUF001
        body.append(
            [
                each["project"],
                each["loader"],
                "{median:,.0f} [{min:,.0f}, {max:,.0f}]".format(**each["targets_s"]),
                "{median:.2f} [{min:.2f}, {max:.2f}]".format(**each["of_own"]),
                *("{median:.3f} [{min:.3f}, {max:.3f}]".format(**each[name]) for name in losses),
                equal[each["resumed_equal"]],
            ]
        )
    return [header, *body]


def main() -> None:
    """Measure, print the table and write results/projects.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkouts", type=Path, help="folder with nanoGPT, nanochat and litgpt")
    parser.add_argument("--only", nargs="+", default=list(PROJECTS), choices=PROJECTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.checkouts = options.checkouts.resolve()
    if options.case:
        case(options)
        return
    with tempfile.TemporaryDirectory() as name:
        options.data = (options.data or Path(name) / "data").resolve()
        if not (options.data / "chat" / "shards" / "manifest.json").exists():
            options.data.mkdir(parents=True, exist_ok=True)
            make_data(options.data, options.checkouts)
        results = list(compare(options, Path(name)))
    for row in table(results):
        print(" | ".join(row))
    print(f"written to {write_result('projects', results, options.results)}")


if __name__ == "__main__":
    main()
