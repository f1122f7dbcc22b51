"""Loops as people write them, with torch and `transformers` alone.

The loop is the same text each time; its batches, and when it saves, are what differs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.scenarios.data import Data, Record
from benchmarks.scenarios.disk import written_at
from benchmarks.scenarios.watch import Watch

__all__ = ["BLOCK", "IGNORED", "Encoder", "Inputs", "Loop", "new_model", "train"]

Inputs = dict[str, Any]

BLOCK = 64
"""Tokens of a sequence of documents."""
IGNORED = -100
WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a loop is asked for."""

    batches: Callable[[Data, int], Iterable[Inputs]]
    """Of one epoch, of so many rows each."""
    rows: int
    """Of a step."""
    rate: float
    save_every: int | None = None
    """Steps."""
    disk: float | None = None
    """Bytes a second that it writes; None: as fast as this machine's."""


class Encoder:
    """Makes rows of records."""

    def __init__(self, data: Data) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(data.model)
        names = sorted({record["label"] for record in data.train if "label" in record})
        self._numbers = {name: number for number, name in enumerate(names)}

    def labelled(self, record: Record, **options: Any) -> Inputs:
        """A text and the number of its class."""
        inputs = self.tokenizer(record["text"], truncation=True, **options)
        return {**inputs, "labels": self._numbers[record["label"]]}

    def completion(self, record: Record) -> Inputs:
        """A prompt and its completion, of which alone is learnt."""
        prompt = self.tokenizer(record["prompt"])["input_ids"]
        answer = self.tokenizer(record["completion"])["input_ids"]
        answer.append(self.tokenizer.eos_token_id)
        return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}

    def sequences(self, records: list[Record]) -> list[Inputs]:
        """Documents end to end, cut into sequences: `group_texts` of the examples."""
        texts = self.tokenizer([record["text"] for record in records])["input_ids"]
        ids = list(itertools.chain.from_iterable([*t, self.tokenizer.eos_token_id] for t in texts))
        cut = [ids[at : at + BLOCK] for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        return [{"input_ids": ids, "labels": ids} for ids in cut]

    def encode(self, records: list[Record]) -> list[Inputs]:
        """As suits the task."""
        if "text" in records[0] and "label" not in records[0]:
            return self.sequences(records)
        one = self.labelled if "label" in records[0] else self.completion
        return [one(record) for record in records]

    def pad(self, rows: list[Inputs]) -> dict[str, Tensor]:
        """A batch, padded to its longest row."""
        if isinstance(rows[0]["labels"], int):
            return transformers.DataCollatorWithPadding(self.tokenizer)(rows)
        return transformers.DataCollatorForSeq2Seq(self.tokenizer)(rows)


def new_model(data: Data) -> Any:
    """A model with fresh weights."""
    config = transformers.AutoConfig.from_pretrained(data.model)
    if data.task == "classify":
        return transformers.AutoModelForSequenceClassification.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def train(data: Data, loop: Loop, steps: int, watch: Watch, folder: Path) -> Any:
    """The loop; gives the model."""
    model = new_model(data)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.rate)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    epoch = loop.batches(data, loop.rows)
    bar = tqdm(total=steps)
    for step, batch in enumerate(watch.meter.watch(again(epoch, steps)), 1):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with watch.meter.cause("log"):
            bar.set_postfix(loss=loss.item())
            bar.update()
        if loop.save_every and step % loop.save_every == 0:
            with watch.meter.cause("checkpoint"):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                path = folder / "checkpoint.pt"
                with written_at(loop.disk, path):
                    torch.save({**state, "step": step}, path)
        watch.step(int(batch["attention_mask"].sum()), batch["input_ids"].numel())
    bar.close()
    return model


def again(epoch: Iterable[Inputs], steps: int) -> Iterator[Inputs]:
    """Batches of one epoch after the other."""
    for _ in itertools.count():
        for batch in epoch:
            yield batch
            steps -= 1
            if not steps:
                return


class RowByRow:
    """(a) Each text is tokenized where it is needed, and is a batch."""

    def __init__(self, data: Data, rows: int) -> None:
        self._records, self._encoder = data.train, Encoder(data)

    def __iter__(self) -> Iterator[Inputs]:
        for number in torch.randperm(len(self._records)).tolist():
            yield self._encoder.pad([self._encoder.labelled(self._records[number])])


def padded_when_needed(data: Data, rows: int) -> Iterable[Inputs]:
    """(b) Each text is tokenized and padded to 192 where it is needed."""
    encoder = Encoder(data)

    def collate(records: list[Record]) -> Any:
        padded = [encoder.labelled(each, padding="max_length", max_length=192) for each in records]
        return transformers.default_data_collator(padded)

    return DataLoader(data.train, rows, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def few_by_workers(data: Data, rows: int) -> Iterable[Inputs]:
    """(c) A few examples, by two workers, which begin anew each epoch."""
    encoder = Encoder(data)
    examples = encoder.encode(data.train)
    return DataLoader(examples, rows, shuffle=True, num_workers=WORKERS, collate_fn=encoder.pad)  # type: ignore[arg-type]


def padded_beforehand(data: Data, rows: int) -> Iterable[Inputs]:
    """(d) Texts that were tokenized and padded to 128, as `datasets.map` in the tutorials does."""
    encoder = Encoder(data)
    padded = [encoder.labelled(each, padding="max_length", max_length=128) for each in data.train]
    collate = transformers.default_data_collator
    return DataLoader(padded, rows, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def sequences(data: Data, rows: int) -> Iterable[Inputs]:
    """(e) Sequences of documents, tokenized beforehand."""
    encoder = Encoder(data)
    return DataLoader(encoder.encode(data.train), rows, shuffle=True, collate_fn=encoder.pad)  # type: ignore[arg-type]
