"""`shards cat OUT`: print rows as text, each with its file and record."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.manifest import Manifest, read_checked
from tokenfeed.pipeline.format.schema import (
    ENDED_TASKS,
    KINDS,
    ORIGIN_FILE,
    ORIGIN_RECORD,
    PROMPT_LENGTH,
    Column,
    Rows,
    is_target,
    role_of,
)
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import Store, open_store
from tokenfeed.pipeline.text import printable
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.shell.command_line import WholeNumber, text
from tokenfeed.tools.shell.console import print_json

DataSet = Annotated[str, text("OUT")]
"""A data set, as it was typed: `Path` would remove a slash from `s3://bucket/data`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cat:
    """Print rows as text, decoded by the stored tokenizer, each with its input file and record."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    split: Annotated[str, text("NAME")] = "train"
    """Split to read."""
    start: WholeNumber = 0
    """First row, counted from 0 within the split."""
    rows: WholeNumber = 5
    """Rows to print."""
    targets: Annotated[str, text("assistant|last|all|KINDS")] | None = None
    """Mark the tokens of conversations that the loss counts, as `train --targets` does: in colour
    in a terminal, else in [[ ]]."""
    json: bool = False
    """Print a JSON object per row."""

    def run(self) -> int:
        """Print the rows."""
        store = open_store(self.out)
        manifest = Manifest.read(store)
        num_rows = manifest.split(self.split).rows
        if not num_rows:
            raise ConfigError(f"{store.name}: split `{self.split}` has no rows.")
        if not 0 <= self.start < num_rows or self.rows < 1:
            raise ConfigError(
                f"`--start` {self.start} and `--rows` {self.rows}: split `{self.split}` has rows 0 "
                f"to {num_rows - 1:,}, and at least one must be asked for."
            )
        if self.targets is not None:
            TargetRule.from_setting(self.targets, manifest.columns)  # raises before anything else
        for row in _decoded_rows(store, manifest, self):
            if self.json:
                print_json(row)
            else:
                print(_shown(_heading(row, _targets(manifest, "row"))))
                print(_marked_text(row["parts"]) if "parts" in row else _shown(row["text"]))
                for name in _targets(manifest, "token"):
                    tagged = zip(row["pieces"], row[name], strict=True)
                    print(" ".join(f"{piece}/{tag}" for piece, tag in tagged if tag is not None))
        return 0


def _targets(manifest: Manifest, per: str) -> list[str]:
    """Return the names of the columns with targets, one per row or one per token."""
    return [c.name for c in manifest.columns if c.per == per and role_of(c.name) == "target"]


def _heading(row: dict[str, Any], targets: list[str]) -> str:
    """Describe a row: its file and record, its length, and its labels."""
    facts = [
        f"--- {row['split']} row {row['row']}",
        f"{row['file']} record {row['record']}",
        f"{row['tokens']:,} tokens",
    ]
    facts += [f"{name} {row[name]}" for name in targets]
    if PROMPT_LENGTH in row:
        facts.append(f"{row[PROMPT_LENGTH]:,} of them prompt")
    return " | ".join(facts)


def _decoded_rows(store: Store, manifest: Manifest, wanted: Cat) -> Iterator[dict[str, Any]]:
    tokenizer = _stored_tokenizer(store, manifest)
    sources = read_checked(store, manifest.sources).splitlines()
    end_id, ends = manifest.tokenizer.end_id, manifest.task in ENDED_TASKS
    for row, rows in _wanted_rows(store, manifest, wanted):
        ids = rows.ids.tolist()
        text_ids = ids[:-1] if ends and ids[-1] == end_id else ids
        decode = partial(tokenizer.tokenizer.decode, skip_special_tokens=False)
        marked: dict[str, Any] = {}
        if wanted.targets is not None:
            rule = TargetRule.from_setting(wanted.targets, manifest.columns)
            kinds = rows.per_token[KINDS]
            mask = np.ones(len(ids), bool) if rule is None else rule.mask(kinds, rows.lengths)
            mask[0] = False  # it has no context
            marked = {"targets": mask.tolist()}
            if not wanted.json:
                marked["parts"] = _parts(ids, mask, decode)
        source = int(rows.per_row[ORIGIN_FILE][0])
        yield {
            "split": wanted.split,
            "row": row,
            "file": json.loads(sources[source])["path"],
            "source": source,
            "record": int(rows.per_row[ORIGIN_RECORD][0]),
            "tokens": len(ids),
            **_values(rows, manifest, tokenizer),
            **marked,
            "text": decode(text_ids),
        }


def _parts(
    ids: list[int], mask: np.ndarray, decode: Callable[[list[int]], str]
) -> list[tuple[bool, str]]:
    """Return the texts of a row's runs of targets and of other tokens."""
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [(bool(mask[start]), decode(ids[start:stop])) for start, stop in pairwise(cuts)]


def _marked_text(parts: list[tuple[bool, str]]) -> str:
    """Return the text of a row with its targets marked."""
    begin, end = ("\x1b[1;32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    shown = ((is_target, _shown(part)) for is_target, part in parts)
    return "".join(f"{begin}{part}{end}" if is_target else part for is_target, part in shown)


def _shown(text: str) -> str:
    """Return a text that a terminal may print. In pipes, it is unchanged."""
    return printable(text) if sys.stdout.isatty() else text


def _values(rows: Rows, manifest: Manifest, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the task's values of a row. Targets of tokens come with the tokens' texts."""
    values: dict[str, Any] = {}
    for column in manifest.columns:
        if column.per == "row":
            (values[column.name],) = _said(rows.per_row[column.name], column, manifest)
        else:
            values[column.name] = _said(rows.per_token[column.name], column, manifest)
    if _targets(manifest, "token"):
        values["pieces"] = [tokenizer.tokenizer.id_to_token(i) for i in rows.ids.tolist()]
    return values


def _said(values: np.ndarray, column: Column, manifest: Manifest) -> list[Any]:
    """Return values for printing: targets by name if they have names, None for a missing target,
    and floats with as many digits as distinguish them."""
    said: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        said = list(map(float, map(str, values)))
    if role_of(column.name) != "target":
        return said
    names, due = manifest.label_names, is_target(values).tolist()
    return [
        (names[value] if names else value) if is_due else None
        for value, is_due in zip(said, due, strict=True)
    ]


def _stored_tokenizer(store: Store, manifest: Manifest) -> TextTokenizer:
    json_bytes = read_checked(store, manifest.tokenizer)
    return TextTokenizer.load(json_bytes, origin=store.path(manifest.tokenizer.file))


def _wanted_rows(store: Store, manifest: Manifest, wanted: Cat) -> Iterator[tuple[int, Rows]]:
    """Yield rows from `wanted.start` on, each with its number in the split."""
    begin, end, first = wanted.start, wanted.start + wanted.rows, 0
    for shard in manifest.split(wanted.split).shards:
        if first < end and begin < first + shard.rows:
            reader = ShardReader.open(store, manifest, shard)
            for index in range(shard.batches):
                batch, before = reader.read(index)
                place = first + before  # of the first row of the batch in the split
                if place >= end:
                    return
                for row in range(max(begin - place, 0), min(end - place, len(batch))):
                    yield place + row, batch.slice(row, row + 1)
        first += shard.rows
