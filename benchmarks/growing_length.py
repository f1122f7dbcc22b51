"""Does a run with growing sequences reach the loss of a run with long ones in less time?

A Llama of 1.6 M parameters learns the source code of Python's standard library on the CPU. All runs
have 4,096 tokens a step, a constant rate after the warm-up, and the same number of tokens, as many
as fit into the time. Runs with one seed begin with the same weights.

- constant: sequences of 2,048 tokens
- window: the same batches, but attention is cut at multiples of 256 tokens, then of 512, then of
  1,024 (SkyLadder, arXiv 2503.15450). Kernels take the cuts as `cu_seqlens`. On a CPU they are a
  view of the batch.
- decomposed: stages with sequences of 256, 512, 1,024, then 2,048 tokens (after arXiv 2405.13226)

Each length lasts for a quarter of the tokens. The validation loss is that of sequences of 2,048
tokens. Seconds are those of training steps, with the loader and without evaluations. `of_constant`
is the time in which a run reaches the final loss of `constant`, as a share of the time of
`constant` with the same seed; none if it never does. The case `speed` compares steps with a window
of 512 tokens with steps that have sequences of 512. The case `rows` counts tokens of each row over
the changes of the length. Refuted if `of_constant` is above 0.75, the speeds differ by more than
5 %, or a token is lost or repeated.

    python -m benchmarks.growing_length [--minutes 15]
"""

import argparse
import itertools
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.protocol import RESULTS, write_result
from tokenfeed import Batch, Packed, ShardLoader, Stage, pretokenize

LENGTHS = (256, 512, 1024, 2048)
LONGEST, STEP_TOKENS, VOCABULARY = 2048, 4096, 4096
RATE, WARMUP_STEPS = 2e-3, 20
EVALUATIONS, HELD_OUT = 12, 4
"""Evaluations of a run, evenly in its tokens, and batches of each."""
SPEEDS = {"constant": (2048, 2048), "window of 512": (2048, 512), "sequences of 512": (512, 512)}
"""Lengths of sequences and windows whose speed is measured."""
SPEED_STEPS = 12
LEAST_TOKENS = 400_000
"""Every stage needs a record batch, which has 64 k tokens and sometimes more."""


def main() -> None:
    """Measure and write results/growing_length.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15, help="for all runs, about")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--corpus", default=sysconfig.get_path("stdlib"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {"constant": [], "window": [], "decomposed": []}
    with tempfile.TemporaryDirectory() as name:
        shards = Path(name, "shards")
        settings: dict[str, Any] = {"vocab_size": VOCABULARY, "validation": 0.02}
        pretokenize(options.corpus, shards, exclude=("site-packages", "test"), **settings)
        speeds = {name: tokens_per_second(shards, *each) for name, each in SPEEDS.items()}
        fitting = int(options.minutes * 60 * speeds["constant"] / len(runs) / options.seeds)
        tokens = max(LEAST_TOKENS, fitting // STEP_TOKENS * STEP_TOKENS)
        print(f"{speeds} tokens per second; {tokens:,} tokens a run", flush=True)
        for seed, case in itertools.product(range(options.seeds), runs):
            runs[case].append(train(shards, case, tokens, seed))
            print(f"{case}, seed {seed}: {runs[case][-1]}", flush=True)
        rows = count_rows(shards, tokens)
    results: list[dict[str, Any]] = [
        {
            "case": case,
            "seconds": [run.seconds[-1] for run in of_case],
            "loss": [run.losses[-1] for run in of_case],
            "of_constant": [
                run.of(base) for run, base in zip(of_case, runs["constant"], strict=True)
            ],
            "curves": [[run.seconds, run.losses] for run in of_case],
        }
        for case, of_case in runs.items()
    ]
    results += [{"case": "speed", "tokens_s": speeds}, {"case": "rows", **rows}]
    for result in results:
        print({name: value for name, value in result.items() if name != "curves"})
    path = write_result("growing_length", results, options.results, tokens=tokens)
    print(f"written to {path}")


@dataclass
class Run:
    """Seconds of training and validation loss at each evaluation."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.seconds[-1]:.0f} s, validation loss {self.losses[-1]:.3f}"

    def of(self, base: "Run") -> float | None:
        """Return the time to the final loss of another run, as a share of the other run's time."""
        reached = np.flatnonzero(np.array(self.losses) <= base.losses[-1])
        if not len(reached):
            return None
        at = slice(max(0, reached[0] - 1), reached[0] + 1)
        second = np.interp(-base.losses[-1], -np.array(self.losses[at]), self.seconds[at])
        return round(float(second) / base.seconds[-1], 3)


def train(shards: Path, case: str, tokens: int, seed: int) -> Run:
    """Train a model, and evaluate it during the run and at its end."""
    model, run = make_model(seed), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    seen, seconds = 0, 0.0
    lengths = LENGTHS if case == "decomposed" else (LONGEST,)
    *first, last = stages(shards, tokens, lengths)
    batches = iter(open_loader([*first, replace(last, until_tokens=None)], seed))
    held_out = list(itertools.islice(open_loader(shards, split="validation"), HELD_OUT))
    while seen < tokens:
        started = time.perf_counter()
        batch = next(batches)
        nth = min(seen * len(LENGTHS) // tokens, len(LENGTHS) - 1)
        learn(model, optimizer, batch, LENGTHS[nth] if case == "window" else LONGEST)
        seen += batch.num_tokens
        seconds += time.perf_counter() - started
        if seen * EVALUATIONS >= tokens * (len(run.losses) + 1):
            run.seconds.append(round(seconds, 2))
            run.losses.append(round(validation_loss(model, held_out), 4))
    return run


def stages(shards: Path, tokens: int, lengths: tuple[int, ...]) -> list[Stage]:
    """Return a list of stages with sequences of these lengths, of equal tokens."""
    ends = [nth * tokens // len(lengths) for nth in range(1, len(lengths) + 1)]
    return [
        Stage({shards: 1}, until_tokens=end, batching=Packed(length, STEP_TOKENS // length))
        for length, end in zip(lengths, ends, strict=True)
    ]


def open_loader(data: Path | list[Stage], seed: int = 0, split: str = "train") -> ShardLoader:
    """Return a loader that reads in this process."""
    batching = Packed(LONGEST, STEP_TOKENS // LONGEST)
    return ShardLoader(data, batching=batching, seed=seed, split=split, num_workers=0)


def learn(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, window: int
) -> None:
    """Take a training step. Attention is cut at multiples of `window`."""
    group = optimizer.param_groups[0]
    group["step"] = group.get("step", 0) + 1
    group["lr"] = RATE * min(1.0, group["step"] / WARMUP_STEPS)
    loss_of(model, batch, window).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: LlamaForCausalLM, batch: Batch, window: int) -> torch.Tensor:
    """Return the mean loss of a batch."""
    length = min(window, batch["input_ids"].shape[1])
    logits = model(batch["input_ids"].view(-1, length)).logits
    return cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    """Return the loss per target."""
    losses = [float(loss_of(model, batch, LONGEST)) * batch.num_targets for batch in batches]
    return sum(losses) / sum(batch.num_targets for batch in batches)


def tokens_per_second(shards: Path, length: int, window: int) -> int:
    """Return the median speed of some steps."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for batch in itertools.islice(open_loader(stages(shards, 10**6, (length,))), SPEED_STEPS):
        started = time.perf_counter()
        learn(model, optimizer, batch, window)
        seconds.append((time.perf_counter() - started) / batch.num_tokens)
    return round(1 / median(seconds[2:]))


def count_rows(shards: Path, tokens: int) -> dict[str, int]:
    """Count the tokens of each row in a run whose sequences grow."""
    counts = []
    for data in (shards, stages(shards, tokens, LENGTHS)):
        batches = [(batch.rows, batch.piece_lengths) for batch in open_loader(data)]
        rows, lengths = (np.concatenate(each) for each in zip(*batches, strict=True))
        counts.append(np.bincount(rows, lengths).astype(np.int64))
    whole, found = counts[0], np.pad(counts[1], (0, len(counts[0]) - len(counts[1])))
    part = np.where(found > 0, whole - found, 0)
    return {
        "delivered": int(found.sum()),
        "lost": int(part[part > 0].sum()),
        "repeated": int(-part[part < 0].sum()),
    }


def make_model(seed: int) -> LlamaForCausalLM:
    """Return a Llama of 1.3 M parameters, with the same weights for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
