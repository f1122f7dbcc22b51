"""A table in a store gives what it gives as a file, and only what is needed of it is asked for."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.object_server import FAST, FAULTS, Fault, Remote, as_own_process, remote_store

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.remote.retrying import Timing, Traffic
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.locations import RemoteFile
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units, read_records, read_texts

pytest.importorskip("obstore")

FIELDS: Fields = {"text": FieldKind.TEXT, "labels": FieldKind.LABELS}
MIB = 1 << 20


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    as_own_process(monkeypatch)
    monkeypatch.setattr(Timing, "from_environment", lambda: FAST)
    with remote_store(monkeypatch) as remote:
        yield remote


def parts_of(place: str, shard_bytes: int) -> list[FilePart]:
    sources = find_corpus((place,), out=None, field="text").sources
    return [part for unit in cut_units(sources, shard_bytes) for part in unit.parts]


def read_all(place: str, shard_bytes: int, fields: Fields = FIELDS) -> list[object]:
    """What there is of each part: records with their fields, and rejects."""
    found: list[object] = []
    for part in parts_of(place, shard_bytes):
        found.append((part.start, part.stop, part.first_record, part.weight_bytes))
        for records in read_records(part, fields):
            rows = zip(records.numbers.tolist(), *records.fields.values(), strict=True)
            found += [*rows, *records.rejects]
    return found


def traffic_of(part: FilePart) -> Traffic:
    assert isinstance(part.source.path, RemoteFile)
    return part.source.path.store.traffic


@pytest.fixture(scope="module")
def table() -> bytes:
    """A file of twenty row groups with 20 MiB of texts; as much again stands beside these."""
    draw = np.random.default_rng(0)
    texts = pa.array([draw.bytes(MIB // 500).hex() for _ in range(5000)])
    sink, options = pa.BufferOutputStream(), {"use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"a": texts, "text": texts}), sink, row_group_size=250, **options)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def halves(remote: Remote, table: bytes) -> list[FilePart]:
    """Its two parts, in a store."""
    remote.put("rows.parquet", table)
    sources = find_corpus((f"s3://{remote.prefix}",), out=None, field="text").sources
    units = cut_units(sources, sources[0].text_bytes // 2)
    return [part for unit in units for part in unit.parts]


@settings(max_examples=15)
@given(
    num_rows=st.integers(0, 60),
    group=st.integers(1, 30),
    length=st.sampled_from([0, 3, 6_000]),
    names=st.permutations(["text", "labels", "other", "texts.x"]),
    shard_bytes=st.sampled_from([1, 5_000, 10**9]),
    damaged=st.none() | st.integers(0, 10**9),
    faults=st.lists(st.sampled_from([None, *FAULTS[:6]]), max_size=3),
)
def test_rows_rejects_and_cuts_are_those_of_a_file(
    tmp_path: Path,
    remote: Remote,
    num_rows: int,
    group: int,
    length: int,
    names: list[str],
    shard_bytes: int,
    damaged: int | None,
    faults: list[str],
) -> None:
    draw = np.random.default_rng(num_rows)
    columns = {
        "text": [draw.bytes(length).hex() for _ in range(num_rows)],
        "labels": [[str(n), "x"] for n in range(num_rows)],
        "other": list(range(num_rows)),
        "texts.x": ["y" * length] * num_rows,
    }
    path = tmp_path / "rows.parquet"
    table = pa.table({name: columns[name] for name in names})
    pq.write_table(table, path, row_group_size=group, write_page_checksum=True)
    if damaged is not None:
        data = bytearray(path.read_bytes())
        data[damaged % len(data)] ^= 16
        path.write_bytes(data)
    remote.put("rows.parquet", path.read_bytes())
    remote.proxy.schedule.extend(fault and Fault(fault, after=3) for fault in faults)  # type: ignore[arg-type]
    there = read_all(f"s3://{remote.prefix}/rows.parquet", shard_bytes)
    remote.proxy.schedule.clear()
    assert there == read_all(str(path), shard_bytes)


TEXTS: Fields = {"text": FieldKind.TEXT}
FOOTER = 1 << 16


def test_only_what_is_needed_of_a_table_is_asked_for(halves: list[FilePart]) -> None:
    assert [part.first_record for part in halves] == [0, 2500]
    cut = traffic_of(halves[0])
    assert cut.bytes <= FOOTER
    next(read_texts(halves[0], TEXTS))
    begun = traffic_of(halves[1])
    assert begun.bytes - cut.bytes <= FOOTER + 7 * MIB  # less than a part
    assert sum(len(records) for records in read_records(halves[1], TEXTS)) == 2500
    asked = traffic_of(halves[1])
    assert asked.bytes - begun.bytes <= FOOTER + 1.01 * 10 * MIB
    assert asked.requests - begun.requests <= 1 + 10


def test_many_tables_are_cut_at_the_same_time_and_in_their_order(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(32):
        path = tmp_path / f"{number:02}.parquet"
        pq.write_table(pa.table({"text": ["some text"] * (number + 1)}), path, row_group_size=9)
        remote.put(path.name, path.read_bytes())
    sources = find_corpus((f"s3://{remote.prefix}",), out=None, field="text").sources
    together, asked = threading.Barrier(4), itertools.count()

    def held(line: str) -> None:
        """Answer the first four requests when all four have come."""
        if next(asked) < 4:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(60)

    monkeypatch.setattr(remote.proxy, "fault_of", held)
    there = cut_units(sources, 1000)
    assert not together.broken
    here = cut_units(find_corpus((str(tmp_path),), out=None, field="text").sources, 1000)
    assert [[(p.start, p.stop, p.source.index) for p in unit.parts] for unit in there] == [
        [(p.start, p.stop, p.source.index) for p in unit.parts] for unit in here
    ]


def test_a_store_that_fails_between_row_groups_is_no_damage(
    halves: list[FilePart], remote: Remote
) -> None:
    records = read_records(halves[1], TEXTS)
    assert not next(records).rejects
    remote.proxy.always = Fault("403")
    with pytest.raises(CorpusError, match=r"rows\.parquet: the store refuses access"):
        list(records)


def test_ctrl_c_is_heard_while_a_store_fails(
    halves: list[FilePart], remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = read_records(halves[1], TEXTS)
    next(records)
    remote.proxy.always, main = Fault("503"), threading.get_ident()
    fault_of = remote.proxy.fault_of

    def interrupting(line: str) -> Fault | None:
        """Send Ctrl-C with the fifth request."""
        if len(remote.proxy.seen) == 4:
            signal.pthread_kill(main, signal.SIGINT)
        return fault_of(line)

    monkeypatch.setattr(remote.proxy, "fault_of", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        for read in (lambda: list(records), lambda: cut_units([halves[0].source], 1)):
            remote.proxy.seen.clear()
            with pytest.raises(KeyboardInterrupt):
                read()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_table_that_changes_between_row_groups_is_an_error(
    halves: list[FilePart], remote: Remote
) -> None:
    records = read_records(halves[1], TEXTS)
    next(records)
    remote.put("rows.parquet", remote.content("rows.parquet") + b"more")
    with pytest.raises(CorpusError, match=r"rows\.parquet: changed while the corpus was read"):
        list(records)
