"""How much faster do ranks train on rows of unequal length, if their micro-batches are alike?

A small Qwen2 trains on rows with lognormal lengths, on 2 or 4 processes of gloo with one thread
each. After its backward pass, every rank waits for the slowest one, to sum the gradients. All
samplers get the same rows and about the same number of real tokens a step:

- random: `DistributedSampler`, batches padded to their longest row
- sorted: the same, but each rank sorts its own rows by length and shuffles the batches
- by length: `LengthGroupedSampler` of `transformers` (`group_by_length`), one batch a rank in turn
- tokenfeed: `ShardLoader(..., Padded(TOKENS), rank, world_size)`
- control: every rank gets the batches that tokenfeed has for rank 0, so its idle time is noise

Measured: real tokens a second of all ranks by the clock, one epoch, rounds interleaved; padding;
and idle, the share of time that ranks wait for the slowest rank: 1 - mean / max over the ranks of
the work of each step, summed over steps. The work is measured in three ways:

- clock: seconds of forward and backward pass. They contain waits for a core, because the ranks
  share cores with each other and with everything else. Median of the rounds
- processor: processor time of the same work. It contains no waits, but the noise of shared caches
  and clock rates. All rounds have the same batches, so the least time of the rounds counts
- operations: floating-point operations by the shape of the batch. They contain no noise: what
  batches alone cost on ranks with equal hardware

The epoch of 800 rows that trains has 16 steps on 4 ranks, and its last step alone, the rest of the
rows, has half of the idle time. Real epochs have many steps. So the idle share by operations, which
needs no training, is also computed for `--planned` rows.

Rows of the peers are in memory already. Refuted if tokenfeed is less than twice as fast as
`random`, idle for more than 2 % by operations with 2,400 rows, or idle for 2 percentage points more
than the control by processor time.

    python -m benchmarks.ranks [--ranks 2 4] [--rows 800] [--rounds 3]    # 6 minutes on 2 cores
    python -m benchmarks.ranks --rounds 0    # no training: idle by operations
"""

import argparse
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DistributedSampler

from benchmarks.protocol import RESULTS, summary, write_result
from tokenfeed import Fixed, Padded, ShardLoader, pretokenize

MEDIAN, SIGMA, LONGEST, VOCABULARY = 50, 1.0, 512, 500
ROWS_OF_BATCH = 16
OURS = "tokenfeed"
SAMPLERS = ("random", "sorted", "by length", OURS, "control")

READING: dict[str, Any] = {"num_workers": 0, "epochs": 1, "seed": 0}

WORK = ("clock", "processor", "operations")
"""How the work of a step is measured."""

Row = torch.Tensor
Run = dict[str, Any]


def main() -> None:
    """Measure, print and write results/ranks.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--planned", type=int, nargs="+", default=[800, 2400])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for rows in options.planned:
        with tempfile.TemporaryDirectory() as folder:
            shards = write_rows(Path(folder), rows)
            for ranks in options.ranks:
                steps, share = planned_idle(shards, ranks)
                print(f"{ranks} ranks, {rows:,} rows, {steps} steps: idle {share:.2%}")
                results.append({"ranks": ranks, "rows": rows, "steps": steps, "planned": share})
    if not options.rounds:
        return
    print(f"| ranks | sampler | real tokens/s | of random | padding | {' | '.join(WORK)} |")
    print(f"| {' | '.join(['---'] * (5 + len(WORK)))} |")
    with tempfile.TemporaryDirectory() as folder:
        shards = write_rows(Path(folder), options.rows)
        for ranks in options.ranks:
            found = train(shards, options.rounds, ranks, Path(folder))
            base = median(run["tokens_s"] for run in found["random"])
            for name, runs in found.items():
                tokens_s = summary([run["tokens_s"] for run in runs], 0)
                result = {
                    "ranks": ranks,
                    "sampler": name,
                    "tokens_s": tokens_s,
                    "of_random": round(tokens_s["median"] / base, 2),
                    "padding": round(runs[0]["padding"], 4),
                    "idle": idle([run["work"] for run in runs]),
                }
                results.append(result)
                print(
                    f"| {ranks} | {name} | {tokens_s['median']:,.0f} | {result['of_random']} "
                    f"| {result['padding']:.1%} | "
                    f"{' | '.join(f'{share:.1%}' for share in result['idle'].values())} |"
                )
    print(f"written to {write_result('ranks', results, options.results)}")


def idle(rounds: list[torch.Tensor]) -> dict[str, float]:
    """Return the idle share by each measure of `WORK`, from the work of each round, shape (ranks,
    steps, measures)."""

    def share(work: torch.Tensor) -> float:
        return 1 - float(work.mean(0).sum() / work.max(0).values.sum())

    least = torch.stack(rounds).min(0).values
    clock = median(share(work[..., 0]) for work in rounds)
    shares = (clock, share(least[..., 1]), share(least[..., 2]))
    return {name: round(each, 4) for name, each in zip(WORK, shares, strict=True)}


def planned_idle(shards: Path, ranks: int) -> tuple[int, float]:
    """Return the steps of an epoch, and the idle share of tokenfeed by operations, from the shapes
    of the batches."""
    rows, model = _rows(str(shards)), _model()
    work = [
        [
            _operations(model, *ids.shape)
            for ids, _ in _batches(str(shards), OURS, rows, rank, ranks)
        ]
        for rank in range(ranks)
    ]
    found = torch.tensor(work, dtype=torch.float64)
    share = 1 - float(found.mean(0).sum() / found.max(0).values.sum())
    return found.shape[1], round(share, 4)


def write_rows(folder: Path, rows: int) -> Path:
    """Write a data set of random ids with lognormal lengths."""
    from tokenizers import Tokenizer, models

    draw = np.random.default_rng(0)
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    (folder / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), SIGMA, rows), 8, LONGEST).astype(int)
    data = [{"input_ids": draw.integers(1, VOCABULARY, n).tolist()} for n in lengths]
    pretokenize(data, folder / "out", task="ids", tokenizer=folder / "tokenizer", validation=0)
    return folder / "out"


def train(shards: Path, rounds: int, ranks: int, folder: Path) -> dict[str, list[Run]]:
    """Train an epoch with each sampler in each round, on `ranks` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (ranks, port, str(shards), rounds, str(folder)), nprocs=ranks)
    found: dict[str, list[Run]] = torch.load(folder / "found.pt")
    return found


def _rank(rank: int, ranks: int, port: int, shards: str, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    rows = _rows(shards)
    found: dict[str, list[Run]] = {name: [] for name in SAMPLERS}
    for _ in range(rounds):
        for name in SAMPLERS:
            found[name].append(_epoch(_batches(shards, name, rows, rank, ranks), ranks))
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _rows(shards: str) -> list[Row]:
    """Return all rows, which every rank knows."""
    with ShardLoader(shards, batching=Fixed(1), rank=0, world_size=1, **READING) as loader:
        return [batch["input_ids"][0] for batch in loader]


def _epoch(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], ranks: int) -> Run:
    """Train on some batches; return real tokens a second and padding, over all ranks, and the work
    of each rank and step, (ranks, steps, measures)."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    busy, counts, started = [], torch.zeros(2), 0.0  # counts: real tokens, slots
    for step, (ids, mask) in enumerate(batches):
        if step == 2:  # both warm-up steps are not counted
            dist.barrier()
            busy, counts, started = [], torch.zeros(2), time.perf_counter()
        begun = time.perf_counter(), time.process_time()
        labels = ids.masked_fill(mask == 0, -100)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        clock, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
        busy.append((clock, processor, _operations(model, *ids.shape)))
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
        counts += torch.tensor([float(mask.sum()), float(mask.numel())])
    seconds = time.perf_counter() - started
    dist.all_reduce(counts)
    of_ranks = [torch.zeros(len(busy), len(WORK), dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(of_ranks, torch.tensor(busy, dtype=torch.float64))
    tokens, slots = counts.tolist()
    work = torch.stack(of_ranks)
    return {"tokens_s": tokens / seconds, "padding": 1 - tokens / slots, "work": work}


def _operations(model: Any, rows: int, length: int) -> float:
    """Return the floating-point operations of forward and backward pass: 6 for each weight of a
    matrix and token, and 12 for each layer, channel and pair of tokens of a row."""
    embedding = model.get_input_embeddings().weight.numel()
    weights = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1) - embedding
    pairs = model.config.num_hidden_layers * model.config.hidden_size * length
    return float(rows * length * (6 * weights + 12 * pairs))


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY + 1,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    return transformers.Qwen2ForCausalLM(config)


def _batches(
    shards: str, name: str, rows: list[Row], rank: int, ranks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and mask of every micro-batch of this rank in one epoch."""
    if name in (OURS, "control"):
        rank = 0 if name == "control" else rank
        tokens = ROWS_OF_BATCH * sum(map(len, rows)) // len(rows)
        batching = Padded(max(tokens, LONGEST))
        with ShardLoader(
            shards, batching=batching, rank=rank, world_size=ranks, **READING
        ) as loader:
            for batch in loader:
                ids = batch["input_ids"]
                mask = batch.get("attention_mask")
                yield ids, torch.ones_like(ids) if mask is None else mask.long()
        return
    for numbers in _peer_batches(name, rows, rank, ranks):
        chosen = [rows[number] for number in numbers]
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        lengths = torch.tensor([len(row) for row in chosen])
        yield ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def _peer_batches(name: str, rows: list[Row], rank: int, ranks: int) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each micro-batch of this rank."""
    lengths = [len(row) for row in rows]
    if name == "by length":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        draw = torch.Generator().manual_seed(1)
        order = list(LengthGroupedSampler(ROWS_OF_BATCH, lengths=lengths, generator=draw))
        whole = len(order) // (ROWS_OF_BATCH * ranks) * ROWS_OF_BATCH * ranks
        order = order[:whole]  # so that all ranks have equally many
        batches = [order[at : at + ROWS_OF_BATCH] for at in range(0, whole, ROWS_OF_BATCH)]
        yield from batches[rank::ranks]
        return
    sampler = DistributedSampler(rows, ranks, rank, seed=1)  # type: ignore[arg-type, var-annotated]
    order = list(sampler)
    if name == "sorted":
        order.sort(key=lengths.__getitem__)
    batches = [order[at : at + ROWS_OF_BATCH] for at in range(0, len(order), ROWS_OF_BATCH)]
    if name == "sorted":
        shuffled = torch.randperm(len(batches), generator=torch.Generator().manual_seed(2 + rank))
        batches = [batches[number] for number in shuffled.tolist()]
    yield from batches


if __name__ == "__main__":
    main()
