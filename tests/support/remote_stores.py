"""A store at a small server of this process, with a proxy for faults before it."""

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, fault_proxy
from object_server import ObjectServer, StoredObject, object_server

from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.remote.retrying import Timing

__all__ = [
    "DATA",
    "FAST",
    "Remote",
    "keeps_conditions",
    "remote_store",
    "set_endpoint",
    "set_google",
]

DATA = bytes(range(256)) * 40
FAST = Timing(
    give_up_s=20.0,
    warn_after_s=1.0,
    warn_every_s=1.0,
    first_wait_s=0.001,
    longest_wait_s=0.01,
    connect_s=1.0,
    read_s=3.0,
    request_s=10.0,
)
"""Nothing is waited for; a machine that is busy has time to answer."""
_buckets = itertools.count()


class Remote:
    """An S3 bucket that is empty, as a client sees it and as it is; `prefix` is its bucket and
    folder, as the server names objects."""

    def __init__(
        self, store: ObjectStore, server: ObjectServer, proxy: FaultProxy, prefix: str
    ) -> None:
        self.store, self.server, self.proxy, self.prefix = store, server, proxy, prefix

    def content(self, name: str) -> bytes:
        return self.server.objects[f"{self.prefix}/{name}"].data

    def put(self, name: str, data: bytes) -> None:
        self.server.objects[f"{self.prefix}/{name}"] = StoredObject(data)


def set_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """S3 is a server of this machine."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")


def set_google(monkeypatch: pytest.MonkeyPatch, folder: Path, remote: Remote) -> None:
    """Google is the server of a bucket, by an account that a file in `folder` names."""
    account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    said = account | {"gcs_base_url": remote.proxy.url, "disable_oauth": True}
    (folder / "account.json").write_text(json.dumps(said))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(folder / "account.json"))


@contextmanager
def remote_store(monkeypatch: pytest.MonkeyPatch, timing: Timing = FAST) -> Iterator[Remote]:
    """A bucket of its own: a process keeps the client of a store, and with it the server."""
    with object_server() as server, fault_proxy(server.port) as proxy:
        set_endpoint(monkeypatch, proxy.port)
        prefix = f"bucket{next(_buckets)}/data"
        address = ObjectStore.from_url(f"s3://{prefix}").address
        yield Remote(ObjectStore(address, timing), server, proxy, prefix)


def keeps_conditions(store: ObjectStore) -> bool:
    """Whether a store refuses a second `create`, and a `replace` of an object that has changed."""
    name = f".tokenfeed-probe-{secrets.token_hex(8)}"
    try:
        if not store.create(name, b"first") or store.create(name, b"second"):
            return False
        before = store.head(name).etag
        store.write(name, b"third")
        return not store.replace(name, b"fourth", before)
    finally:
        store.delete(name)
