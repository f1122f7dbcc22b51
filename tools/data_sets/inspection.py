"""`shards inspect`: describe a data set. `pretokenize` prints the same lines at its end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.pipeline.format.manifest import Manifest, RecordCounts
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.format.store import LocalStore, Place, open_store
from tokenfeed.pipeline.text import count_of, facts, public
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.encoding.chat_messages import UNREAD_KEY
from tokenfeed.tools.jobs.run_records import progress_of
from tokenfeed.tools.shell.console import print_json

_BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Show splits, shards, tokenizer, row lengths, and the counts of read, written and rejected
    records. Of an unfinished output, show how far it is."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    json: bool = False
    """Print the manifest as JSON."""

    def run(self) -> int:
        """Print the description or the manifest."""
        progress = _progress(self.out)
        if progress and self.json:
            print_json(progress)
            return 0
        if progress:
            print(_described(progress, self.out))
            return 0
        manifest = Manifest.read(self.out)
        if self.json:
            print_json(manifest.content() | {"fingerprint": manifest.fingerprint})
        else:
            print(describe(manifest))
        return 0


def _progress(out: str) -> dict[str, Any] | None:
    """Return the progress of the unfinished run in an output; None for all else."""
    try:
        store = open_store(out)
        is_place = isinstance(store, Place) and (
            not isinstance(store, LocalStore) or store.folder.is_dir()
        )
        return progress_of(store) if is_place else None  # type: ignore[arg-type]
    except RemoteError:
        return None  # reading the manifest says why


def _described(known: dict[str, Any], out: str) -> str:
    """Return how far an unfinished run is, as text."""
    missing, reject = known["units_missing"], known["first_reject"]
    shown = ", ".join(map(str, missing[:_SHOWN_NAMES]))
    shown += ", ..." if len(missing) > _SHOWN_NAMES else ""
    rejects = f"{known['rejected']:,} so far"
    if reject:
        rejects += f"; first {reject['file']}, record {reject['record']}: {reject['reason']}"
    units = "not planned yet"
    if known["units_planned"] is not None:
        units = f"{known['units_done']:,} of {known['units_planned']:,} done"
    failures = (f"part {part}: {error}" for part, error in known["failures"].items())
    return facts(
        {
            "unfinished": f"{public(out)}, of {' '.join(known['corpus'])}",
            "units": units,
            "missing": f"{shown} (--part I/N has the units whose number divided by N leaves I)"
            if missing
            else "",
            "rows": f"{known['rows']:,} with {known['tokens']:,} tokens so far",
            "rejects": rejects,
            "failures": "\n".join(failures),
            "next": "repeat the command of each part that ended early, or run --finish "
            "when all parts have ended. A command without --part continues by itself",
        }
    )


def describe(manifest: Manifest, more: Mapping[str, str] | None = None) -> str:
    """Return a data set as text: a table of its splits, facts, and histograms of row lengths.

    Args:
        manifest: Its manifest.
        more: Further facts, such as those of the run that made the data set.
    """
    table, known = _splits_table(manifest), facts(_facts(manifest) | dict(more or {}))
    return "\n".join([*table, known, *_lengths(manifest)])


def _splits_table(manifest: Manifest) -> Iterator[str]:
    """Return a line for each split, in columns as wide as their numbers."""
    rows: list[tuple[str, ...]] = [
        ("split", "shards", "rows", "tokens", "tokens of longest row", "MB on disk")
    ]
    for name, split in manifest.splits.items():
        counts = (len(split.shards), split.rows, split.tokens, split.longest_row)
        megabytes = f"{sum(shard.bytes for shard in split.shards) / 1e6:,.1f}"
        rows.append((name, *map("{:,}".format, counts), megabytes))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> Iterator[str]:
    """Yield the lines of a table. The first `num_left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, "<" * num_left + ">" * len(row), widths, strict=False)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


def _facts(manifest: Manifest) -> dict[str, str]:
    tokenizer, ledger = manifest.tokenizer, manifest.ledger
    tokens = max(sum(split.tokens for split in manifest.splits.values()), 1)
    num_bytes = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    end = "no end token" if tokenizer.end_id is None else f"end id {tokenizer.end_id}"
    names = manifest.label_names
    labels = ", ".join(names[:_SHOWN_LABELS]) + ", ..." * (len(names) > _SHOWN_LABELS)
    columns = shard_schema(tokenizer.vocabulary_size, manifest.columns).names
    return {
        "task": f"{manifest.task}, columns {', '.join(columns)}",
        "labels": f"{len(names):,}: {labels}" if names else "none",
        **_conversations(manifest.counts or {}),
        "not read": unread(manifest),
        "tokenizer": f"{tokenizer.vocabulary_size:,} ids, {end}, pad id {tokenizer.pad_id}",
        "ids": _ids(manifest),
        "documents": f"{ledger.read:,} read = {ledger.written:,} written + {ledger.empty:,} empty "
        f"+ {ledger.rejected:,} rejected"
        + (f" + {ledger.left_out:,} left out by --limit" if ledger.left_out else "")
        + (f" + {ledger.removed:,} removed" if ledger.removed else ""),
        "input": f"{count_of(ledger.files, 'file')}, {_text(ledger, tokens)}",
        "shards": f"{num_bytes / 1e6:,.1f} MB, compressed to {num_bytes / tokens:.2f} bytes per "
        "token on disk",
        "fingerprint": f"{manifest.fingerprint}, the same for equal data sets",
    }


_NOTES = {
    "fim_rows": "{:,} documents to fill in the middle",
    "removed_thinking": "{:,} messages whose thinking the template removed",
    "removed_text": "{:,} contents or calls that the template removed",
    "no_stop": "{:,} messages of the assistant without a stop token, so a model does not learn to "
    "end there",
    "split_tokens": "{:,} tokens that span two kinds, with the kind of their first character",
    "unmarked": "{:,} contents of the assistant outside {{% generation %}}: not learnt",
    "unread_arguments": "{:,} template arguments that the template does not read",
    "zero_weights": "{:,} messages of weight 0: not learnt",
    "joined_parts": "{:,} contents whose parts were joined, because the template takes texts",
    "text_arguments": "{:,} calls whose arguments are a text, which the template writes as JSON "
    "again: give objects",
    "null_arguments": "{:,} calls with null arguments, which a table may have added",
    "empty_answers": "{:,} messages of the assistant with no text but white space",
    "unproved": "{:,} conversations whose other roles are unknown (kind template)",
}
"""What the counts of a manifest say."""


_UNREAD = {
    "unread_tools": "tools: not in the template ({:,} conversations)",
    "unread_labels": "labels that are not true or false ({:,} records)",
    "unread_systems": "system: beside another system message ({:,} conversations)",
    "weights": "weights other than 0 and 1 ({:,} messages; see --keep)",
}
_SHOWN_LABELS = 100
_SHOWN_NAMES = 12
"""Fields, and keys of messages, that a line shows."""


def unread(manifest: Manifest, fields: Mapping[str, str] | None = None) -> str:
    """Describe what records have, and the data set does not.

    Args:
        manifest: The manifest of the data set.
        fields: Fields of records that were not read, each with its share.
    """
    counts = manifest.counts or {}
    if any(column.name == "weight" for column in manifest.columns):
        counts = {name: number for name, number in counts.items() if name != "weights"}
    keys = {
        n.removeprefix(UNREAD_KEY): f"{counts[n]:,}" for n in counts if n.startswith(UNREAD_KEY)
    }
    parts = [
        f"{what}: {_named(names)}"
        for what, names in (("fields", fields), ("keys of messages", keys))
        if names
    ]
    parts += [said.format(counts[name]) for name, said in _UNREAD.items() if counts.get(name)]
    return "; ".join(parts)


def _named(names: Mapping[str, str]) -> str:
    shown = [f"{name} ({share})" for name, share in names.items()][:_SHOWN_NAMES]
    line = ", ".join(shown) + (" and others" if len(names) > _SHOWN_NAMES else "")
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def _text(ledger: RecordCounts, tokens: int) -> str:
    """Describe the size of the texts."""
    if not ledger.bytes:
        return "texts of unknown size"
    ratio = f"{ledger.bytes / tokens:.2f} bytes of text per token"
    added = "removed records included" if ledger.removed else ratio
    return f"{ledger.bytes / 1e6:,.1f} MB of text, {added}"


def _conversations(counts: dict[str, int]) -> dict[str, str]:
    """Tokens by kind, and what a user may not expect, each with its number."""
    if not counts:
        return {}
    tokens = [(kind.label, counts.get(f"{kind.label}_tokens", 0)) for kind in Kind]
    notes = [said.format(counts[name]) for name, said in _NOTES.items() if counts.get(name)]
    return {
        "kinds": ", ".join(f"{number:,} {name}" for name, number in tokens if number),
        "notes": "; ".join(notes),
    }


def _ids(manifest: Manifest) -> str:
    """Describe how the ids were made and checked."""
    tokenizer = manifest.tokenizer
    audit = ""
    if tokenizer.audited:
        compared = "every text" if tokenizer.verified else f"{tokenizer.audited:,} texts"
        routed = f", {tokenizer.routed:,} left to `tokenizers`" if tokenizer.routed else ""
        audit = (
            f"{routed}; {compared} compared with `tokenizers`, "
            f"{count_of(tokenizer.differences, 'difference')}"
        )
    added = "yes" if tokenizer.special_tokens_added else "no"
    return (
        f"by {tokenizer.engine} {tokenizer.engine_version}{audit}; --add-special-tokens {added}, "
        f"--special-tokens-in-text {tokenizer.special_tokens_in_text}"
    )


def _lengths(manifest: Manifest) -> Iterator[str]:
    """Yield histograms of the lengths of rows."""
    for name, split in manifest.splits.items():
        if split.rows:
            yield f"rows of {name} by their tokens"
            yield from _histogram(split.length_histogram)


def _histogram(counts: Sequence[int]) -> Iterator[str]:
    """Yield a line for each power of two, from the shortest rows to the longest."""
    filled = [exponent for exponent, count in enumerate(counts) if count]
    for exponent in range(filled[0], filled[-1] + 1) if filled else ():
        bar = "█" * ceil_div(counts[exponent] * _BAR_WIDTH, max(counts))
        label = f"{2**exponent:,} to {2 ** (exponent + 1) - 1:,}"
        yield f"{label:>25} {bar:<{_BAR_WIDTH}} {counts[exponent]:,}"
