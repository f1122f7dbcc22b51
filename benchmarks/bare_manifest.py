"""A manifest for shards that a benchmark has written itself, with side files that say nothing."""

from pathlib import Path

from tokenfeed.pipeline.format.manifest import (
    FileInfo,
    Manifest,
    RecordCounts,
    SplitInfo,
    TokenizerInfo,
)
from tokenfeed.pipeline.format.schema import FORMAT_VERSION, Task, task_columns
from tokenfeed.pipeline.format.storage import file_xxh3

__all__ = ["write_manifest"]


def write_manifest(folder: Path, split: SplitInfo, *, vocabulary: int, task: Task = "lm") -> None:
    """Freeze one split of shards as the data set in `folder`."""
    empty = folder / "empty"
    empty.touch()
    nothing = FileInfo(file=empty.name, bytes=0, xxh3=file_xxh3(empty))
    Manifest(
        format_version=FORMAT_VERSION,
        task=task,
        columns=task_columns(task),
        label_names=("short", "long") if task == "classify" else (),
        tokenizer=TokenizerInfo(
            file=nothing.file,
            bytes=0,
            xxh3=nothing.xxh3,
            vocabulary_size=vocabulary,
            end_id=None,
            pad_id=0,
            engine="none",
            engine_version="0",
            audited=0,
            differences=0,
            special_tokens_in_text="plain",
            special_tokens_added=False,
        ),
        splits={"train": split},
        ledger=RecordCounts(
            files=1, bytes=0, read=split.rows, written=split.rows, empty=0, rejected=0
        ),
        sources=nothing,
        rejects=nothing,
    ).write(folder)
