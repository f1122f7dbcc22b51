"""Fine-tuning on conversations: packed rows against padded rows, with the same model and loss.

A small Qwen2 trains on conversations with lognormal lengths (median 100 tokens, mean 200, cut at
2,048), on one thread, in fp32. These lengths are an assumption, not those of a data set. `padded 8`
is the batch of `transformers` and TRL: 8 random conversations, padded to the longest; `padded 16`
and `padded 32` have more. `by length` sorts 8 of them as `group_by_length` does. `packed` is
`Packed(2048, 1)` of tokenfeed, with the attention that `train` gives models of `transformers`, and
`packed, sdpa` with their own. `bucketed` is `Padded(2048)`. All have the same ids and labels.
The figures are real tokens per processor second over whole steps: loader, forward, backward, AdamW.
The loss of all rows is compared between the batches.

    python -m benchmarks.finetune [--rows 160] [--rounds 3]
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.protocol import summary, write_result
from tokenfeed import Fixed, Packed, Padded, ShardLoader, pretokenize
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.trainer.data.attention import Reach, separation
from tokenfeed.trainer.data.micro_batch import Shaper
from tokenfeed.trainer.models.hf_attention import ATTENTION_NAME

MEDIAN, SIGMA, LONGEST = 100, 1.2, 2048
WORDS = np.array([f"w{number}" for number in range(900)])
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_conversations(Path(folder), options.rows)
        found: dict[str, list[float]] = {name: [] for name in LOADERS}
        for _, name in itertools.product(range(options.rounds), LOADERS):
            found[name].append(tokens_per_second(shards, name))
        losses = {name: total_loss(shards, name) for name in LOADERS}
        padding = {name: padding_of(shards, name) for name in LOADERS}
    base = losses["one by one"]
    results: list[dict[str, Any]] = [
        {
            "case": name,
            "tokens_s": summary(found[name], 0),
            "of_padded": round(median(found[name]) / median(found["padded 8"]), 2),
            "padding": round(padding[name], 3),
            "loss": losses[name],
            "loss_difference": abs(losses[name] / base - 1),
        }
        for name in LOADERS
    ]
    for result in results:
        print(result)
    write_result("finetune", results)


def write_conversations(folder: Path, rows: int) -> Path:
    """Write a data set of conversations, whose tokens are words."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), SIGMA, rows), 8, LONGEST - 8).astype(int)
    own = folder / "tokenizer"
    own.mkdir()
    vocabulary = {word: number for number, word in enumerate([*WORDS, "user:", "assistant:", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(own / "tokenizer.json"))
    (folder / "chat.jinja").write_text(TEMPLATE)
    data = [{"messages": messages(draw, length)} for length in lengths]
    pretokenize(
        data,
        folder / "out",
        task="chat",
        tokenizer=own,
        chat_template=folder / "chat.jinja",
        validation=0,
    )
    return folder / "out"


def messages(draw: np.random.Generator, length: int) -> list[dict[str, str]]:
    """Return a question and an answer, each with half of the words."""
    texts = [" ".join(draw.choice(WORDS, max(1, length // 2 - 2))) for _ in range(2)]
    roles = ("user", "assistant")
    return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


def packed_by_mask(shards: Path) -> Iterator[tuple[Any, int]]:
    """Yield packed batches of one epoch."""
    yield from batches_of(shards, Packed(LONGEST, 1))


def packed(shards: Path) -> Iterator[tuple[Any, int]]:
    """Yield packed batches of one epoch, with the scope of attention."""
    shape = Shaper(
        causal=True,
        apart=True,
        separation=separation(torch.device("cpu"), torch.float32, compiled=False),
    )
    with ShardLoader(shards, batching=Packed(LONGEST, 1), num_workers=0, epochs=1) as loader:
        for batch in loader:
            names = ("input_ids", "labels", "position_ids")
            scopes = {Reach(causal=True, window=None): shape(batch).scope}
            yield {name: batch[name] for name in names} | {"scopes": scopes}, batch.num_tokens


def bucketed(shards: Path) -> Iterator[tuple[Any, int]]:
    """Yield batches of rows with similar lengths."""
    yield from batches_of(shards, Padded(LONGEST))


def alone(shards: Path) -> Iterator[tuple[Any, int]]:
    """Yield rows one by one."""
    yield from batches_of(shards, Fixed(1))


def batches_of(shards: Path, batching: Batching) -> Iterator[tuple[Any, int]]:
    """Yield the batches of one epoch, each with its number of real tokens."""
    with ShardLoader(shards, batching=batching, num_workers=0, epochs=1) as loader:
        for batch in loader:
            yield {name: batch[name] for name in batch}, batch.num_tokens


def padded(
    shards: Path, num_rows: int = 8, *, by_length: bool = False
) -> Iterator[tuple[Any, int]]:
    """Yield batches of random rows, padded to the longest, like the collators of peers."""
    rows = [(b["input_ids"][0], b["labels"][0]) for b, _ in alone(shards)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    if by_length:  # groups of 50 batches are sorted by length
        groups = [order[at : at + 400] for at in range(0, len(order), 400)]
        order = [row for group in groups for row in sorted(group, key=lambda r: -len(rows[r][0]))]
    pad = torch.nn.utils.rnn.pad_sequence
    for at in range(0, len(order), num_rows):
        chosen = [rows[row] for row in order[at : at + num_rows]]
        ids, labels = [row[0] for row in chosen], [row[1] for row in chosen]
        lengths = torch.tensor([len(row) for row in ids])
        batch = {
            "input_ids": pad(ids, batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        }
        yield batch, int(lengths.sum())


LOADERS = {
    "padded 8": padded,
    "padded 16": lambda shards: padded(shards, 16),
    "padded 32": lambda shards: padded(shards, 32),
    "by length": lambda shards: padded(shards, by_length=True),
    "one by one": alone,
    "packed": packed,
    "packed, sdpa": packed_by_mask,
    "bucketed": bucketed,
}


def make_model(name: str) -> Any:
    """Return a Qwen2 of about 5 M parameters, always with the same weights."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=910,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        attn_implementation=ATTENTION_NAME if name == "packed" else "sdpa",
    )
    return transformers.Qwen2ForCausalLM(config)


def tokens_per_second(shards: Path, name: str) -> float:
    """Return real tokens per processor second over one epoch, without the first step."""
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, start = 0, 0.0
    for step, (batch, num_tokens) in enumerate(LOADERS[name](shards)):
        if step == 1:
            tokens, start = 0, time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += num_tokens
    return tokens / (time.process_time() - start)


@torch.no_grad()
def total_loss(shards: Path, name: str) -> float:
    """Return the summed loss of all rows under the first weights."""
    model = make_model(name).eval()
    return sum(
        float(model(**batch, num_items_in_batch=1).loss) for batch, _ in LOADERS[name](shards)
    )


def padding_of(shards: Path, name: str) -> float:
    """Return the share of slots without a token."""
    slots = tokens = 0
    for batch, num_tokens in LOADERS[name](shards):
        slots += batch["input_ids"].numel()
        tokens += num_tokens
    return 1 - tokens / slots


if __name__ == "__main__":
    main()
