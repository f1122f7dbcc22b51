"""The manifest survives a round trip and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import sealed_manifest

from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.manifest import Manifest, length_histogram


@pytest.fixture
def folder(make_dataset) -> Path:  # noqa: ANN001
    return make_dataset([3, 5, 700])


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1))
def test_histogram_counts_by_power_of_two(lengths: list[int]) -> None:
    counts = length_histogram(np.array(lengths))
    expected = [0] * 32
    for length in lengths:
        expected[length.bit_length() - 1] += 1
    assert counts.tolist() == expected


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, with the checksum that fits."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(sealed_manifest(content))


def set_column(content: dict[str, Any], **changes: str) -> None:
    content["columns"] = [{"name": "label", "dtype": "int32", "per": "row"} | changes]


def set_file(content: dict[str, Any], name: str) -> None:
    content["splits"]["train"]["shards"][0]["file"] = name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(("dtype", dtype, "Invalid enum value") for dtype in ("int33", "object", "U5", "")),
        *(("name", name, "Expected `str` matching") for name in ("", "\ud800", "a-b")),
    ],
)
def test_a_column_of_unknown_type_or_name_is_refused(
    folder: Path, key: str, value: str, message: str
) -> None:
    forge(folder, lambda content: set_column(content, **{key: value}))
    with pytest.raises(ManifestError, match=rf"manifest\.json: {message}"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    "name", ["", "a\0b", "/etc/passwd", "../other/0.arrow", "train/../../0.arrow", "..", "\ud800"]
)
def test_a_file_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    forge(folder, lambda content: set_file(content, name))
    with pytest.raises(ManifestError, match=r"manifest\.json: .* is not a file below"):
        Manifest.read(folder)


def test_a_file_name_with_dots_is_read(folder: Path) -> None:
    forge(folder, lambda content: set_file(content, "train/..a/b..arrow"))
    assert Manifest.read(folder).split("train").shards[0].file == "train/..a/b..arrow"


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "./Manifest.json", ".//manifest.json"),
        *(".made_by.json", ".parts/job.json"),
    ],
)
def test_manifest_with_reserved_file_name_is_refused(folder: Path, name: str) -> None:
    forge(folder, lambda content: content["rejects"].update(file=name))
    with pytest.raises(ManifestError, match=r"manifest\.json: lists '.*', a name that tokenfeed"):
        Manifest.read(folder)
