"""Stores that others wrote hold what is asked of a store, also through a network that fails."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import installed_servers as servers
from support.data_sets import files_of
from support.object_server import (
    FAST,
    FAULTS,
    Fault,
    FaultProxy,
    as_own_process,
    fault_proxy,
    set_endpoint,
)
from support.pretokenizing import make
from xxhash import xxh3_64_hexdigest

from tokenfeed.pipeline.errors import RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore
from tokenfeed.tools.data_sets.copy import copy_data_set

pytest.importorskip("obstore")

DATA = os.urandom(100_000)
PATIENT = replace(FAST, read_s=2.0, request_s=20.0, give_up_s=30.0, warn_after_s=20.0)
"""For servers that take their time."""
STARTS = {
    "seaweed": servers.seaweed,
    "azurite": servers.azurite,
}
_folders = itertools.count()


@pytest.fixture(scope="module", params=STARTS)
def proxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultProxy]:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        STARTS[request.param](tmp_path_factory.mktemp("server")) as port,
        fault_proxy(port) as proxy,
    ):
        as_own_process(monkeypatch)
        set_endpoint(monkeypatch, proxy.port)
        for name, value in servers.AZURE.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/devstoreaccount1")
        proxy.server = request.param
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy) -> ObjectStore:
    """An empty folder of a bucket."""
    scheme = "az" if proxy.server == "azurite" else "s3"
    url = f"{scheme}://{servers.BUCKET}/{proxy.server}{next(_folders)}"
    return replace(ObjectStore.from_url(url), timing=PATIENT)


def test_what_is_put_can_be_had_whole_and_in_part(store: ObjectStore) -> None:
    names = ["a", "b/c", "b/d e", "b/ü%2F#?+"]
    for name in names:
        store.write(name, DATA)
        assert store.read(name) == DATA
        assert store.read_range(name, 5, 1000).data == DATA[5:1005]
        assert store.read_tail(name, 70).data == DATA[-70:]
        info = store.head(name)
        assert (info.size, info.metadata[XXH3_KEY]) == (len(DATA), xxh3_64_hexdigest(DATA))
    assert sorted(info.name for info in store.list()) == sorted(names)
    assert [info.size for info in store.list("b")] == [len(DATA)] * 3
    for name in names:
        store.delete(name)
        with pytest.raises(RemoteMissingError):
            store.read(name)
    assert list(store.list()) == []


def test_conditions_of_writes_hold(store: ObjectStore, proxy: FaultProxy) -> None:
    assert store.create("once", b"first")
    assert not store.create("once", b"second")
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(store.create, ["claim"] * 8, [b"%d" % n for n in range(8)]))
    assert sum(won) == 1
    proxy.schedule.append(Fault("lost"))
    assert store.create("other", b"ours")


def test_a_wrong_key_is_told_at_once(
    store: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not this one")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IHRoaXMgb25l")
    other = replace(ObjectStore.from_url(f"{store.name}other"), timing=PATIENT)
    with pytest.raises(RemoteError, match=r"^\w+://\S+: the store refuses access \(403 [^\n]*$"):
        other.read("x")


def test_a_data_set_survives_a_bad_network(
    store: ObjectStore, proxy: FaultProxy, documents: Path, tmp_path: Path
) -> None:
    faults = [Fault(kind, 999) for kind in FAULTS if kind not in ("stall", "slow")]
    proxy.schedule.extend(itertools.chain.from_iterable((fault, None) for fault in faults))
    copy_data_set(str(documents), store.name)
    proxy.schedule.extend(itertools.chain.from_iterable((None, fault) for fault in faults))
    copy_data_set(store.name, str(tmp_path / "back"))
    assert not proxy.schedule
    assert files_of(tmp_path / "back") == files_of(documents)


def test_a_data_set_is_made_in_a_store(
    store: ObjectStore, proxy: FaultProxy, corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    make(corpus, tmp_path / "out", tokenizer)
    made = files_of(tmp_path / "out")
    proxy.schedule.extend([None, Fault("lost")] * 10)
    make(corpus, store.name, tokenizer)
    assert {info.name: store.read(info.name) for info in store.list()} == made
    assert make(corpus, store.name, tokenizer).already_finished


@pytest.mark.long
def test_a_large_object_goes_in_parts(
    store: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(DATA * 700)
    proxy.schedule.extend([None, Fault("503"), None, Fault("reset")])
    store.write("large", large)
    assert sum("partNumber" in line or "blockid" in line for line in proxy.seen) >= 5
    assert store.read("large") == large.read_bytes()
    assert store.head("large").metadata[XXH3_KEY] == xxh3_64_hexdigest(DATA * 700)
