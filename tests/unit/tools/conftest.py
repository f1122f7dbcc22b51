"""A bucket for tests of tools."""

from collections.abc import Iterator

import pytest
from support.object_server import Remote, as_own_process, remote_store


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """An empty bucket. The process of the test is a program of ours."""
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    with remote_store(monkeypatch) as remote:
        yield remote
