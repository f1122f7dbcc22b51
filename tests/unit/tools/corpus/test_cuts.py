"""A file of lines is cut where one look from its beginning to its end would cut it."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.object_server import Remote, as_own_process, remote_store

from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.corpus.formats.json_records import cut_lines
from tokenfeed.tools.corpus.sources import find_corpus

Lines = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\0", b"x")), max_size=30)


def cuts_by_one_look(data: bytes, shard_bytes: int) -> list[tuple[int, int | None, int]]:
    """Begin, end and first record of each part."""
    if len(data) <= shard_bytes:
        return [(0, None, 0)]
    goal = len(data) / math.ceil(len(data) / shard_bytes)
    found, start = [], 0
    while start < len(data):
        newline = data.find(b"\n", math.ceil(start + goal) - 1)
        stop = newline + 1 if newline >= 0 else len(data)
        found.append((start, stop, data.count(b"\n", 0, start)))
        start = stop
    return found


def cuts_of(place: str, shard_bytes: int) -> list[tuple[int, int | None, int]]:
    (source,) = find_corpus((place,), out=None, field="text").sources
    return [(p.start, p.stop, p.first_record) for p in cut_lines(source, shard_bytes)]


def test_a_line_longer_than_a_block_is_not_cut(tmp_path: Path) -> None:
    data = b"a\n" * 50 + b"b" * 1_000_000 + b"\n" + b"c\n" * 50
    (tmp_path / "x.jsonl").write_bytes(data)
    assert cuts_of(str(tmp_path / "x.jsonl"), 60) == cuts_by_one_look(data, 60)


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    pytest.importorskip("obstore")
    with pytest.MonkeyPatch.context() as monkeypatch, remote_store(monkeypatch) as remote:
        as_own_process(monkeypatch)
        yield remote


@settings(max_examples=10)
@given(lines=Lines, shard_bytes=st.integers(20, 400))
def test_parts_of_an_object_are_those_of_a_file(
    lines: list[bytes], shard_bytes: int, remote: Remote
) -> None:
    data = b"\n".join(lines)
    remote.put("x.jsonl", data)
    found = cuts_of(f"s3://{remote.prefix}/x.jsonl", shard_bytes)
    assert found == cuts_by_one_look(data, shard_bytes)


def test_after_an_error_no_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    ended, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def end(threads: ThreadPoolExecutor, **options: bool) -> None:
        shutdown(threads, wait=False, **options)
        ended.set()
        shutdown(threads)

    def do(number: int) -> int:
        begun.append(number)
        if number == 5:
            raise ValueError
        assert number < 5 or ended.wait(60)
        return -number

    assert list(results_of(lambda number: -number, range(3_000), 4)) == list(range(0, -3_000, -1))
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(ValueError):
        list(results_of(do, range(3_000), 2))
    assert 5 in begun
    assert len(begun) <= 8, "the other thread does one more thing, and both have begun another"
