"""Files that are whole or absent."""

import errno
import os
from pathlib import Path

import pytest

from tokenfeed.pipeline.format.storage import atomic_write


def test_failed_fsync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / 'file'}'"):
        atomic_write(tmp_path / "file", b"content")
    assert not list(tmp_path.iterdir())
