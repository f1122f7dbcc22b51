"""End a run: merge the results of the units into sources.jsonl, rejects.jsonl and the manifest.

The manifest is written last, and the caller then removes the records of the run. So a kill at any
moment does not matter: the same command finishes with the same bytes.
"""

import fnmatch
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.format.manifest import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    REJECTS_FILE,
    SOURCES_FILE,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
    RecordCounts,
    SplitInfo,
    TokenizerInfo,
    file_info,
    length_histogram,
)
from tokenfeed.pipeline.format.schema import FORMAT_VERSION
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_file
from tokenfeed.pipeline.format.store import Place
from tokenfeed.tools.corpus.input_files import InputFile
from tokenfeed.tools.corpus.sources import Known, kind_left_out
from tokenfeed.tools.encoding.limit import TRAIN
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.encoding.tasks.chat import ChatEncoder
from tokenfeed.tools.jobs.crew import PROBES
from tokenfeed.tools.jobs.run_records import changed_file
from tokenfeed.tools.pretokenizing.prepare import Prepared

_COUNTS = ("bytes", "written", "empty", "rejected", "left_out")


def commit(run: Prepared, results: list[UnitResult]) -> Manifest:
    """Write everything but the shards, the manifest last.

    Args:
        run: The run, with the engine that made the ids. All its shards are in the output.
        results: The results of all units, in order.
    """
    output, task, template = run.output, run.task, b""
    if isinstance(task, ChatEncoder) and task.chat_template:
        template = task.chat_template.with_variables.encode()
        output.write(CHAT_TEMPLATE_FILE, template)
    ledgers = _source_ledgers(run.corpus.sources, results)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        task=task.name,
        columns=task.columns,
        label_names=task.labels.names,
        tokenizer=_tokenizer_info(run, results),
        splits=_splits(results),
        ledger=RecordCounts.of(ledgers),
        sources=_write_lines(output, SOURCES_FILE, ledgers),
        rejects=_join_rejects(output, results, run.corpus.binary),
        chat_template=file_info(CHAT_TEMPLATE_FILE, template) if template else None,
        fields=task.names if isinstance(task, ChatEncoder) else None,
        counts=_counts(results),
    )
    _clear_away(output, run.splits, results)
    if changed := changed_file(output, manifest):
        raise TokenfeedError(
            f"{output.path(changed)}: was deleted or changed while the run was at work. Repeat the "
            "command to make it again."
        )
    output.write(MANIFEST_FILE, manifest.encoded())
    return manifest


def _counts(results: list[UnitResult]) -> dict[str, int] | None:
    names = {name: None for result in results for name in result.counts}
    return {n: sum(result.counts.get(n, 0) for result in results) for n in names} or None


def _clear_away(output: Place, splits: Iterable[str], results: list[UnitResult]) -> None:
    """Delete files of killed or late workers."""
    named = {info.file for result in results for info in result.files}
    for split in splits:
        found = {f"{split}/{name}" for name in output.names(split) if ".arrow" in name}
        output.delete(*found - named)
    for pattern in (PROBES, f"*{TEMPORARY_SUFFIX}"):
        output.delete(*fnmatch.filter(output.names(), pattern))


def _source_ledgers(
    sources: tuple[InputFile, ...], results: list[UnitResult]
) -> list[dict[str, Any]]:
    counts = np.zeros((len(sources), len(_COUNTS)), np.int64)
    for result in results:
        for source in result.sources:
            counts[source.source] += [getattr(source, name) for name in _COUNTS]
    return [
        {
            "path": source.name,
            "bytes": num_bytes,
            "read": written + empty + rejected + left_out,
            "written": written,
            "empty": empty,
            "rejected": rejected,
        }
        | ({"left_out": left_out} if left_out else {})
        for source, (num_bytes, written, empty, rejected, left_out) in zip(
            sources, counts.tolist(), strict=True
        )
    ]


def _splits(results: list[UnitResult]) -> dict[str, SplitInfo]:
    """Return the splits with rows, and always `train`."""
    found: dict[str, SplitInfo] = {}
    for name in sorted({TRAIN}.union(*(result.shards for result in results))):
        having = [result for result in results if name in result.shards]
        histogram = length_histogram(np.empty(0))
        for result in having:
            histogram += result.histograms[name]
        shards = tuple(result.shards[name] for result in having)
        found[name] = SplitInfo(shards=shards, length_histogram=tuple(histogram.tolist()))
    return found


def _tokenizer_info(run: Prepared, results: list[UnitResult]) -> TokenizerInfo:
    tokenizer, audit, task = run.tokenizer, run.audit, run.task
    splits_special = tokenizer.splits_special  # for a chat template, whatever the user asked for
    if isinstance(task, ChatEncoder):
        splits_special = task.splits_special
    engine = run.encoding.engine
    return TokenizerInfo(
        file=TOKENIZER_FILE,
        bytes=len(tokenizer.json_bytes),
        xxh3=tokenizer.xxh3,
        vocabulary_size=tokenizer.vocabulary_size,
        end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id,
        engine=engine,
        engine_version=importlib.metadata.version(engine),
        audited=audit.audited + sum(result.audited for result in results),
        differences=len(audit.differing) + sum(len(result.differing) for result in results),
        special_tokens_in_text="split" if splits_special else "plain",
        special_tokens_added=task.add_special_tokens,
        routed=sum(result.routed for result in results) if run.is_fast else None,
    )


def _join_rejects(output: Place, results: list[UnitResult], unread: Sequence[Known]) -> FileInfo:
    """Write rejects.jsonl: the files that were left out, and the rejects of the units."""
    digest, num_bytes = xxhash.xxh3_64(), 0
    lines = ({"file": file.name, "reason": kind_left_out(file).reason} for file in unread)
    names = (result.reject_file.file for result in results if result.reject_file)
    contents = chain((json.dumps(line).encode() + b"\n" for line in lines), map(output.read, names))
    with output.room() as folder, atomic_file(folder / REJECTS_FILE, is_shared=True) as file:
        for content in contents:
            file.write(content)
            digest.update(content)
            num_bytes += len(content)
    return FileInfo(file=REJECTS_FILE, bytes=num_bytes, xxh3=digest.hexdigest())


def _write_lines(output: Place, name: str, rows: Iterable[dict[str, Any]]) -> FileInfo:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    output.write(name, content)
    return file_info(name, content)
