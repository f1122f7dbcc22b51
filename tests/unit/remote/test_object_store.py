"""An object store gives what was put, whatever the network does in between."""

import errno
import io
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fault_proxy import FAULTS, Fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import StoredObject
from remote_stores import FAST, Remote, remote_store

from tokenfeed.pipeline.errors import ConfigError, RemoteError, RemoteMissingError
from tokenfeed.pipeline.format.store import Store, open_store
from tokenfeed.pipeline.remote import address, object_store, process
from tokenfeed.pipeline.remote.conditions import keeps_conditions
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 40
examples = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def talks(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are a program of ours."""
    monkeypatch.setattr(process, "_ours", True)


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    with pytest.MonkeyPatch.context() as monkeypatch, remote_store(monkeypatch) as remote:
        yield remote


@pytest.fixture(autouse=True)
def no_faults(remote: Remote) -> None:
    remote.server.objects.clear()
    remote.server.lies = False
    remote.proxy.schedule.clear()
    remote.proxy.seen.clear()
    remote.proxy.signed.clear()
    remote.proxy.always, remote.proxy.match = None, ""


def test_it_is_a_store(remote: Remote) -> None:
    assert isinstance(remote.store, Store)
    assert open_store(remote.store) is remote.store
    assert remote.store.path("train/0.arrow") == f"s3://{remote.prefix}/train/0.arrow"


Names = st.sampled_from(["a", "b/c", "b/d e", "b/ü%2F#?+"])
Operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "create", "replace", "stale", "delete"]),
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
    elif kind == "delete":
        store.delete(name)
        known.pop(name, None)
    elif kind == "stale" or name not in known:
        assert store.replace(name, data, '"0"') == (known.get(name) == data)
    else:
        assert store.replace(name, data, store.head(name).etag)
        known[name] = data


@examples
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


@examples
@given(start=st.integers(0, 400), length=st.integers(0, 400))
def test_any_range_and_any_tail_are_slices(remote: Remote, start: int, length: int) -> None:
    data = DATA[:400]
    remote.put("x", data)
    assert remote.store.read_tail("x", length + 1) == data[-length - 1 :]
    if start + length <= len(data):
        assert remote.store.read_range("x", start, length) == data[start : start + length]
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


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_a_request_and_no_more(remote: Remote, kind: str) -> None:
    remote.put("x", DATA)
    before = remote.store.traffic
    for times in (1, 2):
        remote.proxy.seen.clear()
        remote.proxy.schedule.extend([Fault(kind, 500)] * times)  # type: ignore[arg-type]
        assert remote.store.read_range("x", 5, 2000) == DATA[5:2005]
        assert len(remote.proxy.seen) == 1 + times
    after = remote.store.traffic
    assert (after.requests - before.requests, after.retries - before.retries) == (5, 3)
    assert after.bytes - before.bytes == 4000
    assert 0 < after.outage_s - before.outage_s < 5


def test_mistakes_that_are_the_networks_pass(remote: Remote) -> None:
    error = "<Error><Code>{}</Code><Message>Said at\nlength.</Message></Error>"
    for code in ("RequestTimeout", "XAmzContentSHA256Mismatch"):
        remote.proxy.schedule.append(Fault("400", says=error.format(code)))
        remote.store.write("x", DATA)
        assert remote.content("x") == DATA
    remote.proxy.schedule.append(Fault("400", says=error.format("InvalidName")))
    with pytest.raises(RemoteError, match=r"mistake \(400 Bad Request, InvalidName, Said at\)\.$"):
        remote.store.write("x", DATA)


def test_a_bit_that_flips_on_the_way_is_for_checksums_to_find(remote: Remote) -> None:
    remote.put("x", DATA)
    remote.proxy.schedule.append(Fault("flip"))
    assert sum(a != b for a, b in zip(remote.store.read("x"), DATA, strict=True)) == 1


FINAL: dict[str, tuple[Callable[[ObjectStore], object], str, int]] = {
    "missing": (lambda store: store.read("none"), "not found", errno.ENOENT),
    "missing head": (lambda store: store.size("none"), "not found", errno.ENOENT),
    "range": (lambda store: store.read_range("x", 10**6, 5), "is shorter", errno.EINVAL),
}


@pytest.mark.parametrize("case", FINAL)
def test_what_repetition_cannot_mend_ends_after_one_request(remote: Remote, case: str) -> None:
    ask, said, number = FINAL[case]
    remote.put("x", DATA)
    with pytest.raises(RemoteError, match=f"^s3://{remote.prefix}/[a-z]+: {said}") as caught:
        ask(remote.store)
    assert caught.value.errno == number
    assert "\n" not in str(caught.value)
    assert len(remote.proxy.seen) == 1
    assert isinstance(caught.value, FileNotFoundError) == (number == errno.ENOENT)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("method", ["read", "size", "delete", "list", "write"])
def test_who_may_not_learns_it_at_once(remote: Remote, method: str) -> None:
    remote.proxy.always = Fault("403")
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: list(remote.store.list("x")),
        "write": lambda: remote.store.write("x", b""),
    }
    refused = r"/x: the store refuses access \(403 Forbidden\)\. Check the credentials"
    with pytest.raises(RemoteError, match=refused) as caught:
        calls.get(method, lambda: getattr(remote.store, method)("x"))()
    assert caught.value.errno == errno.EACCES
    assert len(remote.proxy.seen) == 1


def test_an_outage_is_told_of_and_survived(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.put("x", DATA)
    store = replace(remote.store, timing=replace(FAST, warn_after_s=0.05, warn_every_s=0.1))
    remote.proxy.always = Fault("503")

    def end() -> None:
        remote.proxy.always = None

    threading.Timer(0.4, end).start()
    with caplog.at_level(logging.WARNING, "tokenfeed"):
        assert store.read("x") == DATA
    assert 2 <= len(caplog.messages) <= 5
    pattern = r"s3://{}/x: fails for \d+ s now \(503 Service Unavailable\); given up after 3 s"
    for message in caplog.messages:
        assert re.fullmatch(pattern.format(remote.prefix), message)
    assert 0.3 < store.traffic.outage_s < 2


def test_an_outage_of_many_requests_counts_once(remote: Remote) -> None:
    remote.put("x", DATA)
    store = replace(remote.store, timing=replace(FAST, give_up_s=2.9))
    remote.proxy.always = Fault("reset")

    def end() -> None:
        remote.proxy.always = None

    threading.Timer(0.3, end).start()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.read, ["x"] * 8)) == [DATA] * 8
    assert 0.2 < store.traffic.outage_s < 1


def test_an_outage_without_end_is_given_up_in_one_line(remote: Remote) -> None:
    store = replace(remote.store, timing=replace(FAST, give_up_s=0.5))
    remote.proxy.always = Fault("503")
    with pytest.raises(RemoteError) as caught:
        store.read("x")
    assert caught.value.errno == errno.ETIMEDOUT
    assert str(caught.value).startswith(f"s3://{remote.prefix}/x: failed for 0 s, ")
    assert "503" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_acknowledgement_that_is_lost_is_found_again(remote: Remote) -> None:
    remote.proxy.schedule.append(Fault("lost"))
    assert remote.store.create("a", b"ours")
    assert remote.content("a") == b"ours"
    remote.proxy.schedule.append(Fault("lost"))
    assert not remote.store.create("a", b"another's")
    etag = remote.store.head("a").etag
    remote.proxy.schedule.append(Fault("lost"))
    assert remote.store.replace("a", b"newer", etag)
    assert not remote.store.replace("a", b"newest", etag)
    assert remote.content("a") == b"newer"


def test_of_many_that_create_one_wins(remote: Remote) -> None:
    with ThreadPoolExecutor(8) as threads:
        for round in range(5):
            names = [f"claim{round}"] * 8
            won = list(threads.map(remote.store.create, names, [b"%d" % n for n in range(8)]))
            assert sum(won) == 1
            assert remote.content(names[0]) == b"%d" % won.index(True)


def test_a_store_that_lies_about_conditions_is_noticed(remote: Remote) -> None:
    assert keeps_conditions(remote.store)
    remote.server.lies = True
    assert not keeps_conditions(remote.store)
    assert not remote.server.objects


def test_metadata_comes_back_with_head(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    etag = remote.store.write("x", tmp_path / "file", {XXH3_KEY: "0123"})
    info = remote.store.head("x")
    assert (info.size, info.etag) == (len(DATA), etag)
    assert info.metadata[XXH3_KEY] == "0123"


def test_a_list_goes_on_where_it_was_cut(remote: Remote) -> None:
    names = [f"train/{number:05}" for number in range(2500)]
    for name in names:
        remote.put(name, b"")
    remote.put("training", b"")
    remote.proxy.schedule.extend([None, Fault("503"), Fault("short", 1000)])
    assert [info.name for info in remote.store.list("train")] == names
    assert len(remote.proxy.seen) == 5


@settings(examples, max_examples=20)
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
    assert web.read_range("train/0.arrow", 3, 4) == DATA[3:7]
    assert web.read_tail("train/0.arrow", 4) == DATA[-4:]
    assert web.head("train/0.arrow").size == len(DATA)
    assert web.path("x") == f"{url}/x"
    with pytest.raises(RemoteMissingError):
        web.read("x")
    with pytest.raises(RemoteError):
        list(web.list("train"))


def test_a_password_in_an_address_is_shown_nowhere(remote: Remote) -> None:
    url = f"http://user:hunter2@127.0.0.1:{remote.proxy.port}/{remote.prefix}"
    store = replace(ObjectStore.from_url(url), timing=replace(FAST, give_up_s=0.3))
    remote.put("x", DATA)
    assert store.read("x") == DATA
    said = [repr(store), store.name, store.path("x")]
    for fault in (Fault("403"), Fault("503"), Fault("reset")):
        remote.proxy.always = fault
        with pytest.raises(RemoteError) as caught:
            store.read("x")
        said.append(str(caught.value))
    for bad in (f"{url}?token=hunter2", "s3://key:hunter2@bucket/x", "ftp://me:hunter2@host/x"):
        with pytest.raises(ConfigError) as refused:
            open_store(bad)
        said.append(str(refused.value))
    assert "hunter2" not in " ".join(said)
    assert all("user:***@" in text for text in said[1:6])


def test_it_is_pickled_small_and_without_its_client(remote: Remote) -> None:
    remote.put("x", DATA)
    assert remote.store.read("x") == DATA
    pickled = pickle.dumps(remote.store)
    assert len(pickled) < 500
    assert pickle.loads(pickled) == remote.store
    assert pickle.loads(pickled).read("x") == DATA


def test_a_scheme_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^s3://b/x: .*`pip install 'tokenfeed\[remote\]'`"):
        open_store("s3://b/x")


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "https:///x", "s3://b/x?y", "s3://b/x#y"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$"):
        open_store(url)


def test_requests_are_signed_unless_they_are_anonymous(remote: Remote) -> None:
    remote.put("x", DATA)
    anonymous = ObjectStore.from_url(f"{remote.store.name}?anonymous")
    assert remote.store.read("x") == anonymous.read("x") == DATA
    signed, unsigned = remote.proxy.signed
    assert "Credential=someone/" in signed
    assert not unsigned


def test_a_profile_signs_with_its_keys(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    keys = "[work]\naws_access_key_id = of-work\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(keys)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    remote.put("x", DATA)
    first = ObjectStore.from_url(f"s3://{remote.prefix}/of-keys")
    with pytest.raises(RemoteMissingError):
        first.read("x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RemoteMissingError):
        ObjectStore.from_url(f"s3://{remote.prefix}/of-profile").read("x")
    of_keys, of_profile = remote.proxy.signed
    assert "Credential=someone/" in of_keys
    assert "Credential=of-work/" in of_profile
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(ConfigError, match=r"^AWS_PROFILE=none: "):
        ObjectStore.from_url(f"s3://{remote.prefix}/of-none").read("x")


def test_a_profile_without_boto3_names_the_package(
    monkeypatch: pytest.MonkeyPatch, remote: Remote
) -> None:
    from tokenfeed.pipeline.remote import client

    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^AWS_PROFILE=work: .*`pip install boto3`"):
        ObjectStore.from_url("s3://of-a-profile/x").read("x")


def test_objects_of_the_server_are_what_was_written(remote: Remote) -> None:
    remote.store.write("x", b"1", {"a": "b"})
    assert remote.server.objects[f"{remote.prefix}/x"] == StoredObject(b"1", {"a": "b"})
