"""`shards inspect|verify|cat|copy|repair|explain`: show a data set, check it, print its text,
copy it elsewhere, repair it, and show what a step of a training run held."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tyro

from tokenfeed.pipeline.errors import ManifestError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.format.store import Store, open_store
from tokenfeed.tools.cat import Cat, DataSet, longest_row
from tokenfeed.tools.console import parse_words, print_json
from tokenfeed.tools.copying import Copy
from tokenfeed.tools.explain import Explain
from tokenfeed.tools.histogram import histogram_lines
from tokenfeed.tools.repairing.command import Repair
from tokenfeed.tools.verify import find_problems

__all__ = ["Cat", "Copy", "Explain", "Inspect", "Repair", "Verify", "run_subcommand"]

_MANY_ROWS, _LARGE_SHARE = 100, 0.05
"""In a split of so many rows, one that holds such a share of the tokens is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Show what is inside: splits, shards, tokenizer, ledger, lengths of rows."""

    out: DataSet
    """Output folder of `pretokenize`, or an address that a store is registered for."""
    json: bool = False
    """Print the manifest as JSON."""

    def run(self) -> int:
        """Print it."""
        manifest = Manifest.read(self.out)
        if self.json:
            print_json(manifest.content() | {"fingerprint": manifest.fingerprint})
            return 0
        store = open_store(self.out)
        print("\n".join([*_splits_table(manifest), *_facts(manifest), *_lengths(store, manifest)]))
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Check every checksum, every record batch and the ledger; exit code 1 if anything is wrong."""

    out: DataSet
    """Output folder of `pretokenize`, or an address that a store is registered for."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Check it, print every problem."""
        store = open_store(self.out)
        try:
            manifest = Manifest.read(store)
        except ManifestError as error:
            if not self.json:
                raise
            print_json({"ok": False, "problems": [str(error)]})
            return 1
        problems = list(find_problems(store, manifest))
        num_shards = sum(len(split.shards) for split in manifest.splits.values())
        num_batches = sum(split.batches for split in manifest.splits.values())
        if self.json:
            print_json({"ok": not problems, "problems": problems})
        elif problems:
            print("\n".join(problems))
            print(f"{store.name}: damaged, problems found: {len(problems):,}")
        else:
            print(f"{store.name}: good, shards: {num_shards:,}, record batches: {num_batches:,}")
        return 1 if problems else 0


def run_subcommand() -> int:
    """Do what the command line says; its exit code."""
    command: Any = parse_words(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {
                "inspect": Inspect,
                "verify": Verify,
                "cat": Cat,
                "copy": Copy,
                "repair": Repair,
                "explain": Explain,
            },
            prog="shards",
            description="Show, check, copy or repair a data set that `pretokenize` made.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    )
    return int(command.run())


def _splits_table(manifest: Manifest) -> Iterator[str]:
    """A line for each split, in columns as wide as their numbers."""
    rows: list[tuple[str, ...]] = [
        ("split", "shards", "rows", "tokens", "tokens of longest row", "MB on disk")
    ]
    for name, split in manifest.splits.items():
        counts = (len(split.shards), split.rows, split.tokens, split.longest_row)
        megabytes = f"{sum(shard.bytes for shard in split.shards) / 1e6:,.1f}"
        rows.append((name, *map("{:,}".format, counts), megabytes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([f"{first:<{widths[0]}}", *cells])


def _lengths(store: Store, manifest: Manifest) -> Iterator[str]:
    """Histograms of the lengths of rows, and rows that hold much of their split."""
    for name, split in manifest.splits.items():
        if split.rows:
            yield f"rows of {name} by their tokens"
            yield from histogram_lines(split.length_histogram)
        share = split.longest_row / max(split.tokens, 1)
        if split.rows >= _MANY_ROWS and share >= _LARGE_SHARE:
            with contextlib.suppress(TokenfeedError):  # damage is for `verify` to find
                place = longest_row(store, manifest, name)
                yield f"1 row holds {share:.0%} of the tokens of {name}: {place}"


def _facts(manifest: Manifest) -> Iterator[str]:
    tokenizer, ledger = manifest.tokenizer, manifest.ledger
    tokens = max(sum(split.tokens for split in manifest.splits.values()), 1)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    num_bytes = sum(shard.bytes for shard in shards)
    end = "no end token" if tokenizer.end_id is None else f"end id {tokenizer.end_id}"
    labels = ", ".join(manifest.label_names) or "none"
    facts = {
        "task": f"{manifest.task}, columns {', '.join(_column_names(manifest))}",
        "labels": f"{len(manifest.label_names):,}: {labels}" if manifest.label_names else labels,
        "tokenizer": f"{tokenizer.vocabulary_size:,} ids, {end}, pad id {tokenizer.pad_id}",
        "ids": _ids(manifest),
        "documents": f"{ledger.read:,} read = {ledger.written:,} written + "
        f"{ledger.empty:,} empty + {ledger.rejected:,} rejected",
        "input": f"{ledger.files:,} file{'s' * (ledger.files != 1)}, "
        f"{ledger.bytes / 1e6:,.1f} MB of text, {ledger.bytes / tokens:.2f} bytes of text per "
        "token",
        "shards": f"{num_bytes / 1e6:,.1f} MB, compressed to {num_bytes / tokens:.2f} bytes per "
        "token on disk",
        "fingerprint": f"{manifest.fingerprint}, the same for equal data sets",
    }
    for name, text in facts.items():
        yield f"{name:<12}{text}"


def _ids(manifest: Manifest) -> str:
    """How the ids were made, and how far that was checked."""
    tokenizer = manifest.tokenizer
    audit = f", {tokenizer.audited:,} texts compared with `tokenizers`, "
    audit += f"{tokenizer.differences:,} with other ids" if tokenizer.audited else ""
    special = "with" if tokenizer.special_tokens_added else "without"
    return (
        f"by {tokenizer.engine} {tokenizer.engine_version}{audit if tokenizer.audited else ''}; "
        f"{special} the tokenizer's template; special tokens in text: "
        f"{tokenizer.special_tokens_in_text}"
    )


def _column_names(manifest: Manifest) -> list[str]:
    return list(shard_schema(manifest.tokenizer.vocabulary_size, manifest.columns).names)
