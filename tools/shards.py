"""`shards inspect|verify|cat OUT`: look into a data set, prove it whole, read it back as text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import xxhash
from rich import box
from rich.console import Console
from rich.table import Table

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import FileInfo, Manifest, SplitInfo
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import (
    ENDED_TASKS,
    IGNORED,
    LABEL,
    LABELS,
    ORIGIN_FILE,
    ORIGIN_RECORD,
    PROMPT_LENGTH,
    shard_schema,
)
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.tools.console import print_json, run_command
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.histogram import histogram_lines
from tokenfeed.tools.verify import find_problems

__all__ = ["Cat", "Inspect", "Verify", "main"]


_Out = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Show what is inside: splits, shards, tokenizer, ledger, lengths of rows."""

    out: _Out
    """Output folder of `pretokenize`."""
    json: bool = False
    """Print the manifest as JSON."""

    def run(self) -> int:
        """Print it."""
        manifest = Manifest.read(self.out)
        if self.json:
            print_json(manifest.content() | {"fingerprint": manifest.fingerprint})
            return 0
        console = Console()
        console.print(_splits_table(manifest))
        for name, split in manifest.splits.items():
            _print_histogram(console, name, split)
        _print_facts(console, manifest)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Check every checksum, every record batch and the ledger; exit code 1 if anything is wrong."""

    out: _Out
    """Output folder of `pretokenize`."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Check it, print every problem."""
        try:
            manifest = Manifest.read(self.out)
        except ManifestError as error:
            if not self.json:
                raise
            print_json({"ok": False, "problems": [str(error)]})
            return 1
        problems = list(find_problems(self.out, manifest))
        num_shards = sum(len(split.shards) for split in manifest.splits.values())
        num_batches = sum(split.batches for split in manifest.splits.values())
        if self.json:
            print_json({"ok": not problems, "problems": problems})
        elif problems:
            print("\n".join(problems))
            print(f"{self.out}: damaged, problems found: {len(problems):,}")
        else:
            print(f"{self.out}: good, shards: {num_shards:,}, record batches: {num_batches:,}")
        return 1 if problems else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cat:
    """Print rows as text, decoded by the stored tokenizer, each with where it came from."""

    out: _Out
    """Output folder of `pretokenize`."""
    split: str = "train"
    """Split to read."""
    start: int = 0
    """First row, counted from 0 within the split."""
    rows: int = 5
    """Rows to print."""
    json: bool = False
    """Print a JSON object per row."""

    def run(self) -> int:
        """Print the rows."""
        manifest = Manifest.read(self.out)
        num_rows = manifest.split(self.split).rows
        if not 0 <= self.start < num_rows or self.rows < 1:
            raise ConfigError(
                f"`--start` {self.start} and `--rows` {self.rows}: split `{self.split}` has rows 0 "
                f"to {num_rows - 1:,}, and at least one must be asked for."
            )
        for row in _decoded_rows(self.out, manifest, self):
            if self.json:
                print_json(row)
            else:
                print(_heading(row))
                print(row["text"])
                if LABELS in row:
                    tagged = zip(row["pieces"], row[LABELS], strict=True)
                    print(" ".join(f"{piece}/{tag}" for piece, tag in tagged if tag is not None))
        return 0


def main() -> None:
    """The command `shards`."""
    run_command(_command)


def _command() -> int:
    command: Any = tyro.extras.subcommand_cli_from_dict(
        {"inspect": Inspect, "verify": Verify, "cat": Cat},
        prog="shards",
        description="Look into a data set that `pretokenize` made.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return int(command.run())


def _splits_table(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("split", "shards", "batches", "rows", "tokens", "longest", "MB", "B/token"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, split in manifest.splits.items():
        num_bytes = sum(shard.bytes for shard in split.shards)
        counts = len(split.shards), split.batches, split.rows, split.tokens, split.longest_row
        table.add_row(
            name,
            *(f"{count:,}" for count in counts),
            f"{num_bytes / 1e6:,.1f}",
            f"{num_bytes / max(split.tokens, 1):.2f}",
        )
    return table


def _print_histogram(console: Console, name: str, split: SplitInfo) -> None:
    if split.rows:
        console.print(f"tokens per row, {name}", style="bold")
    for line in histogram_lines(split.length_histogram):
        console.print(line, highlight=False)


def _print_facts(console: Console, manifest: Manifest) -> None:
    tokenizer, ledger = manifest.tokenizer, manifest.ledger
    end = "no end token" if tokenizer.end_id is None else f"end id {tokenizer.end_id}"
    labels = ", ".join(manifest.label_names) or "none"
    facts = {
        "task": f"{manifest.task}, columns {', '.join(_column_names(manifest))}",
        "labels": f"{len(manifest.label_names):,}: {labels}" if manifest.label_names else labels,
        "tokenizer": f"{tokenizer.vocabulary_size:,} ids, {end}, pad id {tokenizer.pad_id}",
        "ids": _ids(manifest),
        "ledger": f"{ledger.read:,} documents read = {ledger.written:,} written + "
        f"{ledger.empty:,} empty + {ledger.rejected:,} rejected",
        "input": f"{ledger.files:,} files, {ledger.bytes / 1e6:,.1f} MB of text",
        "fingerprint": manifest.fingerprint,
    }
    for name, text in facts.items():
        console.print(f"{name:<12}{text}", highlight=False, soft_wrap=True)


def _heading(row: dict[str, Any]) -> str:
    """Where a row comes from, how long it is, and what it is labelled with."""
    facts = [
        f"--- {row['split']} row {row['row']}",
        f"{row['file']} record {row['record']}",
        f"{row['tokens']:,} tokens",
    ]
    if LABEL in row:
        facts.append(f"label {row[LABEL]}")
    if PROMPT_LENGTH in row:
        facts.append(f"{row[PROMPT_LENGTH]:,} of them prompt")
    return " | ".join(facts)


def _ids(manifest: Manifest) -> str:
    """How the ids were made, and how far that was checked."""
    tokenizer = manifest.tokenizer
    audit = f", {tokenizer.audited:,} texts compared with the reference, "
    audit += f"{tokenizer.differences:,} different" if tokenizer.audited else ""
    special = "with" if tokenizer.special_tokens_added else "without"
    return (
        f"by {tokenizer.engine} {tokenizer.engine_version}{audit if tokenizer.audited else ''}; "
        f"{special} the tokenizer's template; special tokens in text: "
        f"{tokenizer.special_tokens_in_text}"
    )


def _column_names(manifest: Manifest) -> list[str]:
    return list(shard_schema(manifest.tokenizer.vocabulary_size, manifest.columns).names)


def _decoded_rows(folder: Path, manifest: Manifest, wanted: Cat) -> Iterator[dict[str, Any]]:
    tokenizer = _stored_tokenizer(folder, manifest)
    sources = _checked_bytes(folder, manifest.sources).splitlines()
    end_id, ends = manifest.tokenizer.end_id, manifest.task in ENDED_TASKS
    for row, rows in _wanted_rows(folder, manifest, wanted):
        ids = rows.ids.tolist()
        text_ids = ids[:-1] if ends and ids[-1] == end_id else ids
        yield {
            "split": wanted.split,
            "row": row,
            "file": json.loads(sources[int(rows.per_row[ORIGIN_FILE][0])])["path"],
            "record": int(rows.per_row[ORIGIN_RECORD][0]),
            "tokens": len(ids),
            **_labels(rows, manifest, tokenizer),
            "text": tokenizer.tokenizer.decode(text_ids, skip_special_tokens=False),
        }


def _labels(rows: Rows, manifest: Manifest, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The task's values of a single row, labels by name; beside tags the pieces they belong to."""
    names = manifest.label_names
    values: dict[str, Any] = {}
    for column in manifest.columns:
        if column.per == "row":
            value = int(rows.per_row[column.name][0])
            values[column.name] = names[value] if names else value
        elif column.name == LABELS:
            tags = rows.per_token[LABELS].tolist()
            values[LABELS] = [None if tag == IGNORED else names[tag] for tag in tags]
            values["pieces"] = [tokenizer.tokenizer.id_to_token(i) for i in rows.ids.tolist()]
        else:
            values[column.name] = rows.per_token[column.name].tolist()
    return values


def _stored_tokenizer(folder: Path, manifest: Manifest) -> TextTokenizer:
    json_bytes = _checked_bytes(folder, manifest.tokenizer)
    return TextTokenizer.load(json_bytes, origin=folder / manifest.tokenizer.file)


def _checked_bytes(folder: Path, info: FileInfo) -> bytes:
    """The content of a side file, if it is the one the manifest names."""
    path = folder / info.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}. Restore it.") from error
    if xxhash.xxh3_64_hexdigest(content) != info.xxh3:
        raise ManifestError(f"{path}: is not the file that the manifest names. Restore it.")
    return content


def _wanted_rows(folder: Path, manifest: Manifest, wanted: Cat) -> Iterator[tuple[int, Rows]]:
    """Single rows from `wanted.start` on, with their number in the split."""
    start, stop = wanted.start, wanted.start + wanted.rows
    for shard in manifest.split(wanted.split).shards:
        if start < shard.rows and stop > 0:
            reader = ShardReader.open(folder, manifest, shard)
            first = wanted.start - start
            for row, rows in _rows_of_shard(reader, shard.batches, max(start, 0), stop):
                yield first + row, rows
        start, stop = start - shard.rows, stop - shard.rows


def _rows_of_shard(
    reader: ShardReader, num_batches: int, start: int, stop: int
) -> Iterator[tuple[int, Rows]]:
    """Single rows `start` up to `stop` of a shard."""
    for index in range(num_batches):
        batch, first = reader.read(index)
        if first >= stop:
            return
        for row in range(max(start - first, 0), min(stop - first, len(batch))):
            yield first + row, batch.slice(row, row + 1)


if __name__ == "__main__":
    main()
