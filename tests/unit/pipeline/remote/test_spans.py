"""Some spans of an object are read as from a file, and little else is asked for."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.remote.object_file import (
    LARGEST_BYTES,
    Span,
    SpansFile,
    VersionedBytes,
    joined_spans,
)

MIB = 1 << 20
GAP = 1 << 18


@dataclass
class Ranges:
    """An object of which every byte tells its place; notes what is asked for."""

    data: bytes
    asked: list[Span] = field(default_factory=list)

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        assert 0 <= start < start + length <= len(self.data)
        assert length <= LARGEST_BYTES
        self.asked.append((start, start + length))
        return VersionedBytes(self.data[start : start + length], "")

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.asked)


DATA = np.arange(10 * MIB, dtype=np.uint32).tobytes()


def opened(size: int = len(DATA)) -> tuple[SpansFile, Ranges]:
    ranges = Ranges(DATA[:size])
    return SpansFile(ranges, "name", size), ranges


Places = st.integers(-MIB, len(DATA) + MIB)
Spans = st.lists(st.tuples(Places, Places), max_size=6)
Reads = st.lists(st.tuples(st.integers(0, len(DATA) + 9), st.integers(-1, 12 * MIB)), max_size=6)


@given(st.sampled_from([0, 5, GAP, len(DATA)]), Spans, st.integers(0, 3), Reads)
def test_any_read_gives_the_bytes_that_are_there(
    size: int, spans: list[Span], at_once: int, reads: list[tuple[int, int]]
) -> None:
    file, ranges = opened(size)
    file.expect(spans, at_once)
    for at, length in reads:
        file.seek(at)
        end = size if length < 0 else min(at + length, size)
        assert file.read(length) == ranges.data[at:end]


def test_columns_side_by_side_are_read_once_and_what_is_between_is_not() -> None:
    file, ranges = opened()
    columns = [(MIB, 11 * MIB), (14 * MIB, 23 * MIB), (30 * MIB, 30 * MIB + 9)]
    file.expect(columns, at_once=3)
    steps = range(0, 10 * MIB, MIB // 3)
    for step in steps:
        for start, stop in columns:
            file.seek(min(start + step, stop))
            file.read(min(MIB // 3, stop - file.tell()))
    assert ranges.bytes == sum(stop - start for start, stop in columns)
    assert len(ranges.asked) <= 9


def test_small_neighbours_are_one_request_and_a_beginning_is_a_small_one() -> None:
    chunks = [(start, start + 10_000) for start in range(0, 38 * MIB, 100_000)]
    file, ranges = opened()
    file.expect(chunks, at_once=1)
    for start, stop in chunks:
        file.seek(start)
        assert file.read(stop - start) == DATA[start:stop]
    assert ranges.asked[0][1] - ranges.asked[0][0] <= MIB * 5 // 4
    assert len(ranges.asked) <= 9
    assert all(b[0] >= a[1] for a, b in zip(ranges.asked, ranges.asked[1:], strict=False))


@given(st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(1, 9 * MIB)), max_size=9))
def test_spans_are_joined_where_that_is_one_request_and_nothing_is_lost(
    drawn: list[tuple[int, int]],
) -> None:
    spans = [(start, start + length) for start, length in drawn]
    joined = joined_spans(spans)
    assert joined == sorted(joined)
    assert all(any(a <= start and stop <= b for a, b in joined) for start, stop in spans)
    assert all(stop - start <= LARGEST_BYTES or (start, stop) in spans for start, stop in joined)
