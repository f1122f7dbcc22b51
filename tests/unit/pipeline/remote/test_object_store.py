"""An object store gives what was put, whatever the network does in between."""

import io
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.object_server import (
    DATA,
    FAST,
    FAULTS,
    Fault,
    Remote,
    set_google,
)
from xxhash import xxh3_64_hexdigest

from tokenfeed.pipeline.errors import RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote import object_store
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore

pytest.importorskip("obstore")


Names = st.sampled_from(["a", "b/c", "b/d e", "b/ü%2F#?+"])
Operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "create", "delete"]),
        Names,
        st.binary(max_size=20),
    ),
    max_size=8,
)
Schedules = st.lists(st.sampled_from([None, *FAULTS]), max_size=6)


def perform(store: ObjectStore, known: dict[str, bytes], operation: tuple[str, str, bytes]) -> None:
    """Do it in the store and in a dictionary; the answers must be the same."""
    kind, name, data = operation
    if kind == "write":
        store.write(name, data)
        known[name] = data
    elif kind == "create":
        expected = known.setdefault(name, data) == data
        assert store.create(name, data) == expected
    else:
        store.delete(name)
        known.pop(name, None)


@given(operations=Operations, schedule=Schedules)
def test_it_is_a_dictionary_whatever_the_network_does(
    remote: Remote, operations: list[tuple[str, str, bytes]], schedule: list[str | None]
) -> None:
    remote.server.objects.clear()
    remote.proxy.schedule.clear()
    remote.proxy.schedule.extend(kind and Fault(kind, seconds=0.01) for kind in schedule)  # type: ignore[arg-type]
    known: dict[str, bytes] = {}
    for operation in operations:
        perform(remote.store, known, operation)
    listed = list(remote.store.list())
    assert {info.name: info.size for info in listed} == {k: len(v) for k, v in known.items()}
    assert [info.name for info in listed] == sorted(known)
    for name, data in known.items():
        assert remote.store.read(name) == data
        assert remote.store.head(name).size == len(data)
    remote.proxy.schedule.clear()


@given(start=st.integers(0, 400), length=st.integers(0, 400))
def test_any_range_and_any_tail_are_slices(remote: Remote, start: int, length: int) -> None:
    data = DATA[:400]
    remote.put("x", data)
    assert remote.store.read_tail("x", length + 1).data == data[-length - 1 :]
    if start + length <= len(data):
        assert remote.store.read_range("x", start, length).data == data[start : start + length]
    else:
        with pytest.raises(RemoteError, match=r"/x: .* Copy it again\.$"):
            remote.store.read_range("x", start, length)


def test_a_large_object_comes_in_pieces_of_one_version(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PIECE_BYTES", 1000)
    remote.put("large", DATA)
    assert remote.store.read("large") == DATA
    assert len(remote.proxy.seen) == 1 + -(-len(DATA) // 1000)
    part = object_store.ObjectStore._part

    def changed(self: ObjectStore, name: str, start: int, *rest: object) -> bytes:
        if start == 2000:
            remote.put("large", DATA[::-1])
        return part(self, name, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(object_store.ObjectStore, "_part", changed)
    with pytest.raises(RemoteError, match=r"large: was changed while it was read \(412 Pre"):
        remote.store.read("large")


def test_a_list_goes_on_where_it_was_cut(remote: Remote) -> None:
    names = [f"train/{number:05}" for number in range(2500)]
    for name in names:
        remote.put(name, b"")
    remote.put("training", b"")
    remote.proxy.schedule.extend([None, Fault("503"), Fault("short", 1000)])
    assert [info.name for info in remote.store.list("train")] == names
    assert len(remote.proxy.seen) == 5


@pytest.mark.slow
@settings(max_examples=20)
@given(reads=st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 1 << 20)), max_size=5))
def test_a_file_that_is_opened_reads_like_one_of_the_disk(
    remote: Remote, reads: list[tuple[int, int]]
) -> None:
    data = DATA * 300
    remote.put("x", data)
    on_disk = io.BytesIO(data)
    with remote.store.open("x", len(data)) as file:
        for start, length in reads:
            file.seek(start)
            on_disk.seek(start)
            assert file.read(length) == on_disk.read(length)
        assert file.read() == on_disk.read()


def test_a_file_read_in_order_takes_few_requests(remote: Remote) -> None:
    data = DATA * 1600
    remote.put("x", data)
    with remote.store.open("x", len(data)) as file:
        assert b"".join(iter(lambda: file.read(100_000), b"")) == data
    assert len(remote.proxy.seen) <= 7
    assert remote.store.open("x", 500).read() == data[:500]


def test_plain_http_is_read_and_says_what_it_cannot(remote: Remote) -> None:
    remote.put("train/0.arrow", DATA)
    url = f"{remote.proxy.url}/{remote.prefix}"
    web = replace(ObjectStore.from_url(f"{url}/"), timing=FAST)
    assert web.read("train/0.arrow") == DATA
    assert web.read_range("train/0.arrow", 3, 4).data == DATA[3:7]
    assert web.read_tail("train/0.arrow", 4).data == DATA[-4:]
    assert web.head("train/0.arrow").size == len(DATA)
    assert web.path("x") == f"{url}/x"
    with pytest.raises(RemoteMissingError):
        web.read("x")
    with pytest.raises(RemoteError):
        list(web.list("train"))


def test_google_goes_by_the_number_of_a_version(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_google(monkeypatch, tmp_path, remote)
    store = replace(ObjectStore.from_url(f"gs://{remote.prefix}/google"), timing=FAST)
    store.write("a/b", DATA)
    assert (store.read("a/b"), store.read_tail("a/b", 5).data) == (DATA, DATA[-5:])
    before = store.head("a/b")
    assert before.metadata[XXH3_KEY] == xxh3_64_hexdigest(DATA)
    assert store.read_range("a/b", 1, 2, before.etag).data == DATA[1:3]
    for fault in (None, Fault("lost"), Fault("503")):
        remote.proxy.schedule.append(fault)
        name = f"created/{fault and fault.kind}"
        assert store.create(name, DATA)
        assert not store.create(name, b"late")
        store.delete(name)
    assert [info.name for info in store.list()] == ["a/b"]
    store.delete("a/b")
    assert list(store.list()) == []


class Quiet(SimpleHTTPRequestHandler):
    """What `python -m http.server` answers with."""

    def log_message(self, *given: object) -> None:
        pass


def test_a_web_server_without_ranges_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = ObjectStore.from_url(f"http://127.0.0.1:{server.server_port}")
        assert store.read("x") == DATA
        with pytest.raises(
            RemoteError, match=r"/x: the server does not support range .* such as nginx"
        ):
            store.read_range("x", 1, 2)
        server.shutdown()
