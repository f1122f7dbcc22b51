"""How fast do other trainers train GPT-2 on the same GPU? Measured beside a step of this package.

Each step trains GPT-2 124M, or its nearest relative, on 64 rows of 1,024 tokens in bf16 on one GPU,
with its own model and optimizer:

- tokenfeed: `train --compile`, packed documents that the loader streams, AdamW
- nanoGPT: `model.py`, compiled as a whole, fused AdamW, clipping
- nanochat: `gpt.py` with 12 layers and full attention, compiled as a whole, Muon with AdamW. It has
  value embeddings and two tables of tokens, and uses torch's attention where FlashAttention 3 is
  not installed
- llm.c: `train_gpt2cu` built with cuDNN, as its scripts run it. It reads the shards of tokenfeed,
  which are exported to its format
- transformers.Trainer: GPT2LMHeadModel with sdpa, 4 micro-batches a step since its logits fill a
  GPU; as it is and with `torch_compile`

All but tokenfeed and llm.c read random ids. Only the figure of tokenfeed has a loader that packs
documents, a log and a stall meter in it. Runs are processes, one after the other, repeated in
turns.

usage: python -m benchmarks.gpu.beside CHECKOUTS DATA [--repeats 2] [--name NAME]

CHECKOUTS has nanoGPT (3adf61e), nanochat (92d63d4), and llm.c (f1e2ace) with `train_gpt2cu`. DATA
is the folder of `python -m benchmarks.gpu --data DATA`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import RESULTS, write_result

__all__ = ["TRAINERS"]

Entry = dict[str, Any]

ROWS, LENGTH, VOCABULARY = 64, 1024, 50_304
TOKENS = ROWS * LENGTH
WARMUP, STEPS = 10, 25


def timed(step: Callable[[], object]) -> Entry:
    """Run steps of a loop, and return their speed and the work of their kernels."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    rate = STEPS * TOKENS / (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.device_time_total]
    return {
        "tokens_per_s": round(rate),
        "peak_memory_bytes": peak,
        "kernels": sum(event.count for event in kernels),
        "kernel_milliseconds": round(
            sum(event.self_device_time_total for event in kernels) / 1e3, 1
        ),
        "longest_kernels": {
            event.key: [event.count, round(event.self_device_time_total / 1e3, 2)]
            for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:25]
        },
    }


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and targets."""
    ids = torch.randint(50_257, (rows, LENGTH + 1), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def nanogpt(checkouts: Path, data: Path) -> Entry:
    """Train steps of nanoGPT."""
    sys.path.insert(0, str(checkouts / "nanoGPT"))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.backends.cuda.matmul.allow_tf32 = True
    model = GPT(GPTConfig(vocab_size=VOCABULARY, dropout=0.0, bias=False)).to("cuda")
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    compiled: Any = torch.compile(model)
    ids, targets = batch()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step)


def nanochat(checkouts: Path, data: Path) -> Entry:
    """Train steps of nanochat."""
    sys.path.insert(0, str(checkouts / "nanochat"))
    from nanochat.flash_attention import HAS_FA3  # type: ignore[import-not-found]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.set_float32_matmul_precision("high")
    config = GPTConfig(sequence_len=LENGTH, vocab_size=VOCABULARY, window_pattern="L")
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cuda")
    model.init_weights()
    optimizer = model.setup_optimizer()
    compiled: Any = torch.compile(model, dynamic=False)
    ids, targets = batch()

    def step() -> None:
        compiled(ids, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return {
        "flash_attention_3": HAS_FA3,
        "parameters": sum(map(torch.numel, model.parameters())),
    } | timed(step)


def transformers_trainer(checkouts: Path, data: Path, *, compiled: bool = False) -> Entry:
    """Train steps of `transformers.Trainer`."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**dropouts, attn_implementation="sdpa", use_cache=False))
    rows = np.random.default_rng(0).integers(0, 50_257, (ROWS * (WARMUP + STEPS), LENGTH))
    times: list[float] = []

    class Times(TrainerCallback):  # type: ignore[misc]
        """When each step ends on the GPU."""

        def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
            if len(times) in (WARMUP - 1, WARMUP + STEPS - 1):
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            bf16=True,
            per_device_train_batch_size=ROWS // 4,
            gradient_accumulation_steps=4,
            max_steps=WARMUP + STEPS,
            optim="adamw_torch_fused",
            torch_compile=compiled,
            dataloader_num_workers=2,
            dataloader_pin_memory=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        records = [
            {"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows
        ]
        Trainer(model, arguments, train_dataset=records, callbacks=[Times()]).train()  # type: ignore[arg-type]
    seconds = times[WARMUP + STEPS - 1] - times[WARMUP - 1]
    return {
        "tokens_per_s": round(STEPS * TOKENS / seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }


def llm_c(checkouts: Path, data: Path) -> Entry:
    """Train steps of llm.c, without evaluations and samples."""
    steps = WARMUP + STEPS
    with tempfile.TemporaryDirectory() as folder:
        export = ["shards", "export", str(data / "lm"), f"{folder}/ids", "--to", "llm.c"]
        subprocess.run([sys.executable, "-m", "tokenfeed.tools.main", *export], check=True)
        files = f"-i {folder}/ids/train_*.bin -j {folder}/ids/train_*.bin -e d12".split()
        # It evaluates one batch, before the first step and after the last one.
        size = f"-b {ROWS} -t {LENGTH} -d {TOKENS} -x {steps} -v 1000 -m 1 -s 0 -r 0 -ge 1".split()
        ended = subprocess.run(
            [str(checkouts / "llm.c" / "train_gpt2cu"), *files, *size],
            capture_output=True,
            text=True,
            check=False,
        )
    times = [float(found) for found in re.findall(r"\| ([\d.]+) ms \|", ended.stdout)]
    if ended.returncode or len(times) != steps:
        sys.exit(ended.stdout[-2000:] + ended.stderr)
    return {"tokens_per_s": round(1e3 * STEPS * TOKENS / sum(times[WARMUP:]))}


def tokenfeed(checkouts: Path, data: Path) -> Entry:
    """Train as `make gpu` does."""
    command = [sys.executable, "-m", "benchmarks.gpu.case", "speed", str(data)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    found: Entry = json.loads(ended.stdout.splitlines()[-1])
    return found


TRAINERS: dict[str, Callable[[Path, Path], Entry]] = {
    "tokenfeed": tokenfeed,
    "nanoGPT": nanogpt,
    "nanochat": nanochat,
    "llm.c": llm_c,
    "transformers.Trainer": transformers_trainer,
    "transformers.Trainer, compiled": lambda *folders: transformers_trainer(
        *folders, compiled=True
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--name", help="of the result; by default the GPU's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--one", action="store_true", help="run one trainer in this process")
    options = parser.parse_args()
    folders = options.checkouts.resolve(), options.data.resolve()
    if options.one:
        print(json.dumps(TRAINERS[options.trainers[0]](*folders)))
        return
    results = []
    for repeat in range(options.repeats):
        for name in options.trainers:
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu.beside",
                *map(str, folders),
                "--one",
                "--trainers",
                name,
            ]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                print(ended.stderr[-3000:], file=sys.stderr)
                found: Entry = {"outcome": f"failed: {(ended.stderr.splitlines() or [''])[-1]}"}
            else:
                found = json.loads(ended.stdout.splitlines()[-1])
            results.append({"trainer": name, "repeat": repeat} | found)
            print(json.dumps(results[-1]), flush=True)
    gpu = torch.cuda.get_device_properties(0)
    slug = options.name or re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    about = {"device": gpu.name, "cuda": torch.version.cuda}
    print(write_result(f"gpu-beside-{slug}", results, options.results, **about))


if __name__ == "__main__":
    main()
