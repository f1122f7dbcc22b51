"""A fault costs a request and no byte; what cannot be mended is told at once."""

import errno
import math
import pickle
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.object_server import DATA, FAST, FAULTS, Fault, Remote

from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.remote.retrying import without_patience

pytest.importorskip("obstore")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_a_request_and_no_more(remote: Remote, kind: str) -> None:
    remote.put("x", DATA)
    is_silent = kind in ("stall", "slow")
    store = replace(remote.store, timing=replace(FAST, read_s=0.5)) if is_silent else remote.store
    before, began, numbers = store.traffic, time.monotonic(), random.getstate()
    for times in (1, 2):
        remote.proxy.seen.clear()
        remote.proxy.schedule.extend([Fault(kind, 500, seconds=1.0)] * times)  # type: ignore[arg-type]
        assert store.read_range("x", 5, 2000).data == DATA[5:2005]
        most = math.inf if is_silent else 1 + times  # on a busy machine no answer is a fault, too
        assert 1 + times <= len(remote.proxy.seen) <= most
    traffic = store.traffic.since(before)
    assert traffic.requests - traffic.retries == 2
    assert traffic.retries == 3 or (is_silent and traffic.retries > 3)
    assert traffic.bytes == 4000
    assert 0 < traffic.outage_s < time.monotonic() - began
    assert random.getstate() == numbers, "the program's own numbers stay as they are"


def test_mistakes_that_are_the_networks_pass(remote: Remote) -> None:
    error = "<Error><Code>{}</Code><Message>Said at\nlength.</Message></Error>"
    for code in ("RequestTimeout", "XAmzContentSHA256Mismatch"):
        remote.proxy.schedule.append(Fault("400", says=error.format(code)))
        remote.store.write("x", DATA)
        assert remote.content("x") == DATA
    remote.proxy.schedule.append(Fault("400", says=error.format("InvalidName")))
    with pytest.raises(RemoteError, match=r"invalid \(400 Bad Request, InvalidName, Said at\)\.$"):
        remote.store.write("x", DATA)


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


def end_outage_after(warnings: int, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Mend the store when so many warnings have been logged; return the list of all."""
    said: list[str] = []

    def warn(message: str, *values: object) -> None:
        said.append(message % values)
        if len(said) == warnings:
            remote.proxy.always = None

    monkeypatch.setattr("tokenfeed.pipeline.remote.retrying._log.warning", warn)
    return said


def test_an_outage_is_told_of_and_survived(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.put("x", DATA)
    store = replace(remote.store, timing=replace(FAST, warn_after_s=0.05, warn_every_s=0.1))
    remote.proxy.always, began = Fault("503"), time.monotonic()
    said = end_outage_after(3, remote, monkeypatch)
    assert store.read("x") == DATA
    assert len(said) == 3
    pattern = r"s3://{}/x: fails for \d+ s now \(503 Service Unavailable\); given up after 20 s"
    assert all(re.fullmatch(pattern.format(remote.prefix), message) for message in said)
    assert 0.2 < store.traffic.outage_s < time.monotonic() - began


def test_an_outage_of_many_requests_counts_once_and_is_told_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("x", DATA)
    store = replace(remote.store, timing=replace(FAST, warn_after_s=0.2, warn_every_s=1000.0))
    remote.proxy.always, began = Fault("reset"), time.monotonic()
    said = end_outage_after(1, remote, monkeypatch)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.read, ["x"] * 8)) == [DATA] * 8
    # Not the sum over eight requests. Of a slow first answer, it counts nothing.
    assert 0 < store.traffic.outage_s < time.monotonic() - began
    assert len(said) == 1


def test_an_outage_without_end_is_given_up_in_one_line(remote: Remote) -> None:
    store = replace(remote.store, timing=replace(FAST, give_up_s=0.5))
    remote.proxy.always = Fault("503")
    with pytest.raises(RemoteError) as caught:
        store.read("x")
    assert caught.value.errno == errno.ETIMEDOUT
    assert re.match(rf"s3://{remote.prefix}/x: failed for \d+ s, ", str(caught.value))
    assert "503" in str(caught.value)


def test_an_acknowledgement_that_is_lost_is_found_again(remote: Remote) -> None:
    remote.proxy.schedule.append(Fault("lost"))
    assert remote.store.create("a", b"ours")
    assert remote.content("a") == b"ours"
    remote.proxy.schedule.append(Fault("lost"))
    assert not remote.store.create("a", b"another's")
    assert remote.content("a") == b"ours"


def test_without_patience_nothing_is_repeated(remote: Remote) -> None:
    store = replace(remote.store, timing=replace(FAST, give_up_s=1000, longest_wait_s=500))
    remote.proxy.always = Fault("503")
    started = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(store.read, "x") for _ in range(4)]
        while len(remote.proxy.seen) < 20:
            time.sleep(0.01)
        with without_patience():
            for each in asked:
                with pytest.raises(RemoteError, match=r"/x: was cancelled while it failed \(503"):
                    each.result()
    assert time.monotonic() - started < 100
    remote.proxy.always = None
    remote.put("x", DATA)
    remote.proxy.schedule.append(Fault("503"))
    assert remote.store.read("x") == DATA, "patient again"


def test_what_is_large_may_take_long_to_send(remote: Remote) -> None:
    """No byte comes back while it is sent."""
    store = replace(remote.store, timing=replace(FAST, read_s=0.3))
    for size, is_patient in ((1000, False), (3 << 20, True)):
        remote.proxy.seen.clear()
        remote.proxy.schedule.append(Fault("slow", seconds=1.0))
        store.write("x", bytes(size))
        assert len(remote.content("x")) == size
        assert (len(remote.proxy.seen) == 1) == is_patient


def test_a_bucket_that_is_not_there_is_told_at_once(remote: Remote) -> None:
    """To list it is the first that `pretokenize` asks; a missing object has an error of its own."""
    said = "<Error><Code>NoSuchBucket</Code></Error>"
    remote.proxy.schedule.append(Fault("404", says=said))
    with pytest.raises(
        RemoteError, match=r"no such bucket \(404 Not Found, NoSuchBucket\)\. Create it"
    ):
        list(remote.store.list())
    assert len(remote.proxy.seen) == 1
