"""A bucket without faults for each test; these tests are a program of ours."""

from collections.abc import Iterator

import pytest
from support.object_server import Remote, as_own_process, remote_store

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def talks(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are a program of ours."""
    as_own_process(monkeypatch)


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    with pytest.MonkeyPatch.context() as monkeypatch, remote_store(monkeypatch) as remote:
        yield remote


@pytest.fixture(autouse=True)
def no_faults(remote: Remote) -> None:
    remote.server.objects.clear()
    remote.server.etags = None
    remote.proxy.schedule.clear()
    remote.proxy.seen.clear()
    remote.proxy.signed.clear()
    remote.proxy.always, remote.proxy.match = None, ""
