"""What of a folder is no text to learn, whoever keeps the folder."""

from collections.abc import Iterable

from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
)

__all__ = ["NOT_A_CORPUS", "is_data_set", "is_hidden"]

NOT_A_CORPUS = (
    "is a data set of pretokenize, not a corpus. Expected CORPUS... OUT: the last path is the "
    "output."
)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not meant to be looked at."""
    return name.startswith(".") or name == "__pycache__"


def is_data_set(names: Iterable[str]) -> bool:
    """Whether a folder of these names is an output of ours: its files are no text to learn."""
    found = set(names)
    return PARTS_FOLDER in found or {MANIFEST_FILE, TOKENIZER_FILE} <= found
