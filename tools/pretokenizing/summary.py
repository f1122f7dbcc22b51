"""The figures at the end of `pretokenize`, for people and for scripts."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenfeed.pipeline.format.manifest import REJECTS_FILE, Manifest
from tokenfeed.pipeline.format.schema import ENDED_TASKS
from tokenfeed.pipeline.format.store import Place
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.corpus.formats.registry import FALLBACK, ending_of
from tokenfeed.tools.corpus.input_files import InputFile
from tokenfeed.tools.corpus.sources import left_out
from tokenfeed.tools.data_sets.inspection import unread
from tokenfeed.tools.encoding.limit import VALIDATION
from tokenfeed.tools.encoding.tasks.registry import TASK_CLASSES
from tokenfeed.tools.pretokenizing.inputs import Inputs

_MARKUP = (".html", ".htm", ".xhtml", ".xml", ".svg", ".rtf", ".ipynb", ".srt", ".vtt", ".json")
"""Endings of files whose text has much besides words."""
_RECORDS_INSIDE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv)[^a-z].*$")
"""Matches the endings of backups and of partial downloads of files with records."""
_SHOWN_ENDINGS = 5
_BEGINNING_BYTES = 1 << 20
"""Bytes of rejects.jsonl that are searched for kinds of reasons."""
_SHOWN_KINDS = 4
_OF_ONE_RECORD = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|it has: .*|\d[\d,.]*")
"""What differs in reasons of one kind."""
_LACKING = re.compile(r"no (?:field|column) `(\w+)`; it has: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSummary:
    """The figures of a part of a run."""

    out: str
    part: str
    """The value of `--part`."""
    units: int
    """Units of this part."""
    resumed_units: int
    """Units of this part that were finished before."""
    already_finished: bool
    """Whether the data set was already finished."""
    is_complete: bool
    """Whether the data set is finished now: all other parts have ended."""
    seconds: float

    def __str__(self) -> str:
        if self.already_finished:
            return f"part {self.part} of {self.out}: the data set is already finished"
        resumed = f", {self.resumed_units:,} of them before" if self.resumed_units else ""
        last = "the part that ends last makes the data set, or `--finish` without it"
        what = "the data set is finished" if self.is_complete else last
        return (
            f"part {self.part} of {self.out}: {count_of(self.units, 'unit')} finished{resumed}, in "
            f"{self.seconds:,.1f} s; {what}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a finished data set and of the run that finished it."""

    out: str
    files: int
    left_out: list[str]
    """Files of folders that no format reads, by kind: how many, the first, and what to do."""
    read_as_text: str
    """Files with markup whose whole content became text, by ending."""
    documents: int
    """Rows written, to all splits."""
    splits: dict[str, int]
    """Rows by split."""
    validation: str
    """What is wrong with the split validation; empty if it has enough rows or was not wanted."""
    empty: int
    """Documents without a token, not written."""
    rejected: int
    reject_kinds: list[str]
    """The first reject of each kind of reason, and how many there are of it."""
    tokens: int
    text_bytes: int
    """Text read, as UTF-8."""
    shard_bytes: int
    """Size of all shards."""
    text_bytes_per_token: float
    shard_bytes_per_token: float
    vocabulary_size: int
    vocabulary_wanted: int | None
    """`--vocab-size` of a trained tokenizer. A small corpus gives fewer ids."""
    end_token: str | None
    task: str
    labels: list[str]
    """Classes or tags in the order of their numbers."""
    engine: str
    audited: int
    """Texts that both the fast engine and the reference encoded."""
    differences: int
    """Audited texts with different ids. If there are any, the reference made all ids."""
    routed: int
    """Texts that the fast engine left to the reference."""
    length_histogram: list[int]
    """Rows by powers of two of their tokens, all splits together."""
    not_read: str
    """What records have, and the data set does not."""
    already_finished: bool
    """Whether the data set was already finished."""
    units: int
    resumed_units: int
    """Units that an earlier, interrupted run had finished."""
    seconds: float
    tokenizer_seconds: float
    """Seconds for loading or training the tokenizer, included in `seconds`."""
    mb_per_s: float
    """Text that this run encoded, in 10^6 bytes, per second outside `tokenizer_seconds`."""

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        manifest: Manifest,
        *,
        units: int,
        resumed_units: int,
        seconds: float,
        already_finished: bool = False,
        new_bytes: int = 0,
        tokenizer_seconds: float = 0.0,
        unread_fields: Mapping[str, str] = MappingProxyType({}),
    ) -> "Summary":
        """Return the summary of a run.

        Args:
            inputs: The input of the run, with the tokenizer that was given or trained.
            manifest: The data set.
            units: All units of the run.
            resumed_units: Units that an earlier, interrupted run had finished.
            seconds: Time of the whole run.
            already_finished: Whether the data set was already finished.
            new_bytes: Bytes of text that this run encoded.
            tokenizer_seconds: Time for training a tokenizer, included in `seconds`.
            unread_fields: Fields of the records that were not read, each with its share.
        """
        options, corpus, tokenizer = inputs.options, inputs.corpus, inputs.tokenizer
        assert tokenizer
        ledger, splits, info = manifest.ledger, manifest.splits, manifest.tokenizer
        tokens = sum(split.tokens for split in splits.values())
        shard_bytes = sum(shard.bytes for split in splits.values() for shard in split.shards)
        histograms = (split.length_histogram for split in splits.values())
        return cls(
            out=str(inputs.output),
            files=ledger.files,
            left_out=left_out(corpus.binary),
            read_as_text=_markup(corpus.sources),
            documents=ledger.written,
            splits={name: split.rows for name, split in splits.items()},
            validation=_validation(manifest) if options.validation != 0 else "",
            empty=ledger.empty,
            rejected=ledger.rejected,
            reject_kinds=_reject_kinds(inputs.output, manifest) if ledger.rejected else [],
            tokens=tokens,
            text_bytes=ledger.bytes,
            shard_bytes=shard_bytes,
            text_bytes_per_token=round(ledger.bytes / tokens, 3),
            shard_bytes_per_token=round(shard_bytes / tokens, 3),
            vocabulary_size=tokenizer.vocabulary_size,
            vocabulary_wanted=None if options.tokenizer else options.vocab_size,
            end_token=tokenizer.end_token,
            task=manifest.task,
            labels=list(manifest.label_names),
            engine=f"{info.engine} {info.engine_version}",
            audited=info.audited,
            differences=info.differences,
            routed=info.routed or 0,
            length_histogram=[sum(counts) for counts in zip(*histograms, strict=True)],
            not_read=unread(manifest, unread_fields),
            already_finished=already_finished,
            units=units,
            resumed_units=resumed_units,
            seconds=round(seconds, 2),
            tokenizer_seconds=round(tokenizer_seconds, 2),
            mb_per_s=round(new_bytes / 1e6 / (seconds - tokenizer_seconds), 2),
        )

    def facts(self) -> dict[str, str]:
        """Return the facts of the run. `shards inspect` has those of the data set."""
        end = self.end_token or "none: the tokenizer has no such token (see --end-token)"
        resumed = f", {self.resumed_units:,} of them by earlier runs" if self.resumed_units else ""
        rejects = f"{self.out}/{REJECTS_FILE}"
        skipped = [*self.left_out, f"{rejects} lists each" if self.left_out else ""]
        rejected = [*self.reject_kinds, f"{rejects} lists each" if self.rejected else ""]
        return {
            "left out": "\n".join(filter(None, skipped)),
            "read as text": self.read_as_text,
            "not read": self.not_read,
            "validation": self.validation,
            "rejects": "\n".join(filter(None, rejected)),
            "training": self._training(),
            "end token": end if self.task in ENDED_TASKS else "",
            "speed": f"{self.mb_per_s:,.1f} MB/s, {count_of(self.units, 'unit')} of work{resumed}",
            "time": f"{self.seconds:,.1f} s",
            "output": self.out,
        }

    def _training(self) -> str:
        """Return the result of training a tokenizer."""
        if self.vocabulary_wanted is None:
            return ""
        if self.vocabulary_wanted == self.vocabulary_size:
            return f"the tokenizer was trained in {self.tokenizer_seconds:,.1f} s"
        wanted = f"{self.vocabulary_wanted:,}"
        return f"the corpus is too small for a tokenizer with {wanted} ids (--vocab-size)"


def _markup(sources: Sequence[InputFile]) -> str:
    """Describe the files with markup or records that were read as text, or an empty text."""
    texts = (source.name.lower() for source in sources if source.format == FALLBACK.name)
    counts = Counter(filter(None, map(_ending_of_markup, texts)))
    if not counts:
        return ""
    found = [f"{count:,} {ending}" for ending, count in counts.most_common(_SHOWN_ENDINGS)]
    found += ["others"] * (len(counts) > _SHOWN_ENDINGS)
    shown = ", ".join(found)
    return f"{shown}, with their markup. Extract the texts, or leave files out by --exclude"


def _ending_of_markup(name: str) -> str:
    """Return the ending of a name if the content is more than text, like .html or .jsonl.bak."""
    ending = ending_of(name)
    if ending in _MARKUP:
        return ending
    inner = _RECORDS_INSIDE.search(os.path.basename(name))
    return inner[0] if inner else ""


def _reject_kinds(output: Place, manifest: Manifest) -> list[str]:
    """Return the first reject of each kind of reason, with the number of rejects of the kind if the
    file is short enough to read all of it. Reasons of a kind differ only in names and numbers."""
    with output.open(REJECTS_FILE, manifest.rejects.bytes) as file:
        lines = file.read(_BEGINNING_BYTES).splitlines(keepends=True)
    rejects = (json.loads(line) for line in lines if line.endswith(b"\n"))
    kinds: dict[str, list[dict[str, Any]]] = {}
    for reject in rejects:
        if "record" in reject:
            kinds.setdefault(_OF_ONE_RECORD.sub("", reject["reason"]), []).append(reject)
    is_whole = manifest.rejects.bytes <= _BEGINNING_BYTES
    shown = []
    for first, *others in sorted(kinds.values(), key=len, reverse=True)[:_SHOWN_KINDS]:
        more = f" (and {len(others):,} like it)" if others and is_whole else ""
        lacking = _LACKING.match(first["reason"])
        is_own = lacking and lacking[1] in TASK_CLASSES[manifest.task].kinds
        remedy = f". Name it: --field {lacking[1]}=NAME" if lacking and is_own else ""
        where = f"{first['file']}, record {first['record']}"
        shown.append(f"{where}: {first['reason']}{remedy}{more}")
    if left := len(kinds) - len(shown):
        shown.append(f"and {count_of(left, 'other kind')} of reasons")
    return shown


def _validation(manifest: Manifest) -> str:
    split = manifest.splits.get(VALIDATION)
    if split is None or not split.rows:
        return (
            f"none, of {count_of(manifest.ledger.written, 'row')}. To evaluate, give a share "
            "(--validation 0.2), or whole files (--split validation=GLOB)"
        )
    if split.is_small:
        return (
            f"only {count_of(split.rows, 'row')}, {split.tokens:,} tokens: small differences of "
            "results are chance. A larger --validation helps"
        )
    return ""
