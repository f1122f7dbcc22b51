"""`shards inspect|verify|cat|copy|repair|explain`: show a data set, check it, print its text,
copy it elsewhere, repair it, and show what a step of a training run held."""

from dataclasses import dataclass
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.cat import Cat, DataSet
from tokenfeed.tools.console import parse_words, print_json
from tokenfeed.tools.copying import Copy
from tokenfeed.tools.explain import Explain
from tokenfeed.tools.histogram import histogram_lines
from tokenfeed.tools.repairing.command import Repair
from tokenfeed.tools.verify import find_problems

__all__ = ["Cat", "Copy", "Explain", "Inspect", "Repair", "Verify", "run_subcommand"]


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
        console, table = Console(), _splits_table(manifest)
        needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        if needed > console.width:
            console = Console(
                width=needed
            )  # the terminal wraps lines, where rich would cut numbers
        console.print(table)
        for name, split in manifest.splits.items():
            _print_histogram(console, name, split)
        _print_facts(console, manifest)
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


def _splits_table(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "split",
        "shards",
        "record batches",
        "rows",
        "tokens",
        "longest",
        "MB",
        "bytes/token",
    ):
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
        "fingerprint": f"{manifest.fingerprint}, the same for equal data sets",
    }
    for name, text in facts.items():
        console.print(f"{name:<12}{text}", highlight=False, soft_wrap=True)


def _ids(manifest: Manifest) -> str:
    """How the ids were made, and how far that was checked."""
    tokenizer = manifest.tokenizer
    audit = f", {tokenizer.audited:,} texts compared with the reference, "
    audit += f"{tokenizer.differences:,} with other ids" if tokenizer.audited else ""
    special = "with" if tokenizer.special_tokens_added else "without"
    return (
        f"by {tokenizer.engine} {tokenizer.engine_version}{audit if tokenizer.audited else ''}; "
        f"{special} the tokenizer's template; special tokens in text: "
        f"{tokenizer.special_tokens_in_text}"
    )


def _column_names(manifest: Manifest) -> list[str]:
    return list(shard_schema(manifest.tokenizer.vocabulary_size, manifest.columns).names)
