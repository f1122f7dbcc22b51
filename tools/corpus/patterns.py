"""Patterns of file names, as `--exclude` and `--split` have them, and names of splits."""

import fnmatch
import os
import re
from collections.abc import Sequence

from tokenfeed.pipeline.format.manifest import MANIFEST_FILE, TOKENIZER_FILE
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX

__all__ = ["is_split_name", "matching"]

_SPLIT = re.compile(r"\w[\w.-]*")
_NO_SPLITS = (MANIFEST_FILE, TOKENIZER_FILE, "sources.jsonl", "rejects.jsonl")
"""Files beside the folders of splits. Names that end like a temporary file are cleared away."""


def is_split_name(name: str) -> bool:
    """Whether a split may have this name: it becomes a folder of the output."""
    is_ours = name.startswith(_NO_SPLITS) or name.endswith(TEMPORARY_SUFFIX)
    return bool(_SPLIT.fullmatch(name)) and not is_ours


def matching(patterns: Sequence[str], path: str, root: str) -> list[bool]:
    """Which of `patterns` match a file or folder.

    A pattern is compared with the name and with the path below `root`, which was given on the
    command line. A pattern that begins with `./` is compared with that path only. A pattern that
    begins with `/` or is an address is compared with the whole path. The current folder does not
    matter. A `*` matches any number of `/`.
    """
    if not patterns:
        return []
    below = path.removeprefix(root).lstrip("/")
    return [_matches(pattern, path, below) for pattern in patterns]


def _matches(pattern: str, path: str, below: str) -> bool:
    if "://" in pattern:
        return fnmatch.fnmatchcase(path, pattern)
    normal = os.path.normpath(pattern)
    if pattern.startswith("/"):
        return fnmatch.fnmatchcase(os.path.abspath(path), normal)
    if fnmatch.fnmatchcase(below, normal):
        return True
    return not pattern.startswith("./") and fnmatch.fnmatchcase(os.path.basename(path), normal)
