"""What a run of `pretokenize` has to say at its end, for people and for scripts."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import ENDED_TASKS
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.histogram import histogram_lines
from tokenfeed.tools.pretokenizing.commit import REJECTS_FILE

__all__ = ["Summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a finished data set and of the run that finished it."""

    out: str
    files: int
    skipped_binary: int
    """Binary files found in folders and left out."""
    documents: int
    """Rows written, to all splits."""
    splits: dict[str, int]
    """Rows by split."""
    empty: int
    """Documents without a token, not written."""
    rejected: int
    tokens: int
    text_bytes: int
    """Text read, as UTF-8."""
    shard_bytes: int
    """All shards on disk."""
    text_bytes_per_token: float
    shard_bytes_per_token: float
    vocabulary_size: int
    vocabulary_wanted: int | None
    """Ids asked for when the tokenizer was trained; a small corpus gives fewer."""
    end_token: str | None
    task: str
    labels: list[str]
    """Classes or tags in the order of their numbers."""
    engine: str
    audited: int
    """Texts whose ids the fast engine and the reference both made."""
    differences: int
    """Of those, how many differed; with any, the reference made all ids."""
    routed: int
    """Texts that the fast engine left to the reference."""
    verified: bool
    """Whether the reference encoded every text too, and gave the same ids."""
    length_histogram: list[int]
    """Rows by powers of two of their tokens, all splits together."""
    already_finished: bool
    """Whether there was nothing left to do."""
    units: int
    resumed_units: int
    """Units that an earlier, interrupted run had finished."""
    seconds: float
    tokenizer_seconds: float
    """Of `seconds`, those for loading or training the tokenizer."""
    mb_per_s: float
    """Text of this run, without what was resumed, in 10^6 bytes, over the rest of `seconds`."""

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest,
        *,
        out: str,
        skipped_binary: int,
        tokenizer: TextTokenizer,
        vocabulary_wanted: int | None,
        units: int,
        resumed_units: int,
        new_bytes: int,
        already_finished: bool,
        seconds: float,
        tokenizer_seconds: float,
    ) -> "Summary":
        """Add up the figures of a data set."""
        ledger, splits, info = manifest.ledger, manifest.splits, manifest.tokenizer
        tokens = sum(split.tokens for split in splits.values())
        shard_bytes = sum(shard.bytes for split in splits.values() for shard in split.shards)
        return cls(
            out=out,
            files=ledger.files,
            skipped_binary=skipped_binary,
            documents=ledger.written,
            splits={name: split.rows for name, split in splits.items()},
            empty=ledger.empty,
            rejected=ledger.rejected,
            tokens=tokens,
            text_bytes=ledger.bytes,
            shard_bytes=shard_bytes,
            text_bytes_per_token=round(ledger.bytes / tokens, 3),
            shard_bytes_per_token=round(shard_bytes / tokens, 3),
            vocabulary_size=tokenizer.vocabulary_size,
            vocabulary_wanted=vocabulary_wanted,
            end_token=tokenizer.end_token,
            task=manifest.task,
            labels=list(manifest.label_names),
            engine=f"{info.engine} {info.engine_version}",
            audited=info.audited,
            differences=info.differences,
            routed=info.routed or 0,
            verified=bool(info.verified),
            length_histogram=[
                sum(counts)
                for counts in zip(*(s.length_histogram for s in splits.values()), strict=True)
            ],
            already_finished=already_finished,
            units=units,
            resumed_units=resumed_units,
            seconds=round(seconds, 2),
            tokenizer_seconds=round(tokenizer_seconds, 2),
            mb_per_s=round(new_bytes / 1e6 / (seconds - tokenizer_seconds), 2),
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON object of all fields."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{name:<12}{text}" for name, text in self._lines()]
        return "\n".join([*lines, "rows by their tokens", *histogram_lines(self.length_histogram)])

    def _lines(self) -> list[tuple[str, str]]:
        binary = f", {self.skipped_binary:,} binary skipped" if self.skipped_binary else ""
        rejects = f" (why: {self.out}/{REJECTS_FILE})" if self.rejected else ""
        resumed = f", {self.resumed_units:,} of them by earlier runs" if self.resumed_units else ""
        splits = ", ".join(f"{rows:,} {name}" for name, rows in self.splits.items())
        text_mb, shard_mb = self.text_bytes / 1e6, self.shard_bytes / 1e6
        lines = {
            "input": f"{_count(self.files, 'file')}, {text_mb:,.1f} MB of text{binary}",
            "rows": f"{self.documents:,}: {splits}",
            "not written": f"{self.empty:,} empty, {self.rejected:,} rejected{rejects}",
            "tokens": f"{self.tokens:,}, {self.text_bytes_per_token:.2f} bytes of text each",
            "shards": f"{shard_mb:,.1f} MB, compressed to {self.shard_bytes_per_token:.2f} bytes "
            "per token on disk",
            "tokenizer": f"{self.vocabulary_size:,} ids{self._training()}",
            "engine": self._engine(),
            "labels": f"{len(self.labels):,}: {', '.join(self.labels)}",
            "end token": self.end_token
            or "none: the tokenizer has no such token (see --end-token)",
            "speed": f"{self.mb_per_s:,.1f} MB/s, {_count(self.units, 'unit')} of work{resumed}",
            "time": f"{self.seconds:,.1f} s",
            "output": self.out,
        }
        if not self.labels:
            del lines["labels"]
        if self.task not in ENDED_TASKS:
            del lines["end token"]
        return list(lines.items())

    def _engine(self) -> str:
        if not self.audited:
            return self.engine
        routed = f", {self.routed:,} left to `tokenizers`" if self.routed else ""
        compared = "every text" if self.verified else f"{self.audited:,} texts"
        return (
            f"{self.engine}{routed}, {compared} compared with `tokenizers`, "
            f"{self.differences:,} with other ids"
        )

    def _training(self) -> str:
        if self.vocabulary_wanted is None:
            return ""
        if self.vocabulary_wanted == self.vocabulary_size:
            return f", trained in {self.tokenizer_seconds:,.1f} s"
        return f", trained; the corpus gave no more of the {self.vocabulary_wanted:,} wanted"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
