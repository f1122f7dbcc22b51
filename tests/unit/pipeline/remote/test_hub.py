"""A file that was downloaded from the Hub gives what was asked for, or an error: never less."""

from pathlib import Path

import pytest
from support.object_server import DATA, FAST

from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.format.store import FetchingStore
from tokenfeed.pipeline.remote.hub import HubStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubStore:
    (tmp_path / "x").write_bytes(DATA)
    monkeypatch.setattr(HubStore, "_kept", lambda self, name: str(tmp_path / name))
    return HubStore("hf://datasets/a/b", "dataset", "a/b", "main", "", FAST)


def test_any_part_of_a_file_is_read(store: HubStore) -> None:
    assert isinstance(store, FetchingStore)
    size = len(DATA)
    for start, length in ((0, size), (5, 7), (size - 1, 1), (size, 0), (0, 0)):
        assert store.read_range("x", start, length).data == DATA[start : start + length]
    for length in (0, 3, size, size + 1):
        assert store.read_tail("x", length).data == DATA[max(size - length, 0) :]


@pytest.mark.parametrize(("back", "length"), [(0, 1), (3, 4), (-5, 1)])
def test_bytes_beyond_the_end_are_an_error_and_not_fewer_bytes(
    store: HubStore, back: int, length: int
) -> None:
    start = len(DATA) - back
    said = rf"^hf://datasets/a/b/x: expected bytes up to {start + length:,}, got {len(DATA):,} in"
    with pytest.raises(RemoteError, match=said):
        store.read_range("x", start, length)
