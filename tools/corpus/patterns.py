"""Patterns of file names, as `--exclude` and `--split` have them, and names of splits."""

import fnmatch
import os
import re
from collections.abc import Iterable

from tokenfeed.pipeline.format.manifest import MANIFEST_FILE, TOKENIZER_FILE

__all__ = ["is_split_name", "matching"]

_SPLIT = re.compile(r"\w[\w.-]*")
_NO_SPLITS = (MANIFEST_FILE, TOKENIZER_FILE, "sources.jsonl", "rejects.jsonl")
"""Files beside the folders of splits."""


def is_split_name(name: str) -> bool:
    """Whether a split may have this name: it becomes a folder of the output."""
    return bool(_SPLIT.fullmatch(name)) and not name.startswith(_NO_SPLITS)


def matching(patterns: Iterable[str], path: str, root: str) -> list[bool]:
    """Which of `patterns` match a file or folder.

    A pattern may name it alone, or its path: below `root`, which was given on the command line,
    from the current folder, or from the root of the file system. A `*` matches any number of `/`.
    """
    forms = (
        os.path.basename(path),
        os.path.relpath(path, root),
        os.path.relpath(path),
        os.path.abspath(path),
    )
    return [_matches_any(forms, os.path.normpath(pattern)) for pattern in patterns]


def _matches_any(forms: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(form, pattern) for form in forms)
