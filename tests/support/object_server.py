"""A small object store of this process: what of S3 the client asks for, and plain HTTP.

It keeps objects in a dictionary, knows ranges, ETags and conditional writes, and checks no
signature. Told so, it takes conditional requests as if they had none, as some stores do.
"""

import hashlib
import http.client
import itertools
import json
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from support.data_sets import files_of
from tokenfeed.pipeline.remote import client
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.remote.retrying import Timing

_METADATA = re.compile(r"x-(?:amz|goog)-meta-(.*)")


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    metadata: dict[str, str] = field(default_factory=dict)
    generation: int = field(default_factory=itertools.count(1).__next__, compare=False)
    """Google's name of a version."""
    modified: str = field(default_factory=partial(formatdate, usegmt=True), compare=False)

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    """Answers in one packet, so that nothing waits for an acknowledgement."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.wfile.write(self.head_of(status, {"Content-Length": str(len(body))} | headers) + body)

    def head_of(self, status: int, headers: dict[str, str]) -> bytes:
        lines = [f"{self.protocol_version} {status} {self.responses[status][0]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Who finds it full is let wait a second by the kernel."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **attributes: Any) -> Iterator[int]:
    """The port where `handler` answers, in threads of this process."""
    made = type(handler.__name__, (handler,), attributes)
    with _Server(("127.0.0.1", 0), made) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Objects(Handler):
    server_state: "ObjectServer"

    def do_HEAD(self) -> None:
        self._give(head=True)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list({name: values[0] for name, values in query.items()})
        else:
            self._give(head=False)

    def do_PUT(self) -> None:
        data, objects = self.body(), self.server_state.objects
        metadata = {
            found[1]: value
            for name, value in self.headers.items()
            if (found := _METADATA.fullmatch(name.lower()))
        }
        with self.server_state.lock:
            there = objects.get(self._name)
            if not self._met(there):
                return self.answer(412, {})
            objects[self._name] = made = StoredObject(data, metadata)
        return self.answer(200, {"ETag": made.etag, "x-goog-generation": str(made.generation)})

    def do_DELETE(self) -> None:
        self.server_state.objects.pop(self._name, None)
        self.answer(204, {})

    def do_POST(self) -> None:
        bucket = self._name.partition("/")[0]
        names = re.findall(r"<Key>(.*?)</Key>", self.body().decode())
        for name in names:
            self.server_state.objects.pop(f"{bucket}/{name}", None)
        gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._xml(f"<DeleteResult>{gone}</DeleteResult>")

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def _met(self, there: StoredObject | None) -> bool:
        """Whether the conditions of a write hold."""
        if self.headers.get("If-None-Match") == "*" and there:
            return False
        generation = self.headers.get("x-goog-if-generation-match")
        if generation is not None:
            return generation == str(there.generation if there else 0)
        return True

    def _give(self, *, head: bool) -> None:
        there = self.server_state.objects.get(self._name)
        signature = self.server_state.signature
        if signature and (head or signature not in urlsplit(self.path).query):
            return self.answer(403, {})
        if there is None:
            return self.answer(404, {})
        wanted = self.headers.get("If-Match")
        if wanted and wanted != there.etag:
            return self.answer(412, {})
        headers = {
            f"x-{company}-meta-{name}": value
            for name, value in there.metadata.items()
            for company in ("amz", "goog")
        }
        headers["x-goog-generation"] = str(there.generation)
        headers |= {"Last-Modified": there.modified} | self.server_state.etag_of(there)
        status, data = 200, there.data
        if "Range" in self.headers:
            begin, end = _range(self.headers["Range"], len(data))
            if begin >= len(data):
                return self.answer(416, {})
            status, data = 206, data[begin:end]
            headers["Content-Range"] = f"bytes {begin}-{begin + len(data) - 1}/{len(there.data)}"
        headers["Content-Length"] = str(len(data))
        return self.answer(status, headers, b"" if head else data)

    def _list(self, query: dict[str, str]) -> None:
        bucket, prefix = self._name, query.get("prefix", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        found = sorted(
            (name.removeprefix(f"{bucket}/"), each)
            for name, each in self.server_state.objects.items()
            if name.startswith(f"{bucket}/{prefix}")
        )
        found = [pair for pair in found if pair[0] > after]
        most = int(query.get("max-keys", 1000))
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(each.data)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{escape(each.etag)}"
            "</ETag></Contents>"
            for name, each in found[:most]
        )
        if len(found) > most:
            last = escape(found[most - 1][0])
            items += f"<NextContinuationToken>{last}</NextContinuationToken>"
        self._xml(f"<ListBucketResult>{items}</ListBucketResult>")

    def _xml(self, text: str) -> None:
        self.answer(200, {"Content-Type": "application/xml"}, text.encode())


def _range(header: str, size: int) -> tuple[int, int]:
    """Begin and end of `bytes=5-9`, `bytes=5-` and `bytes=-5`."""
    begin, _, end = header.removeprefix("bytes=").partition("-")
    if not begin:
        return max(size - int(end), 0), size
    return int(begin), int(end) + 1 if end else size


@dataclass
class ObjectServer:
    """Its objects, by bucket and name, and where it is."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    signature: str = ""
    """What the query must hold, if anything; then GET alone is answered, as for a signed URL."""
    etags: Iterator[str] | None = None
    """What each answer calls the version of its object: None for its own ETag, or nothing."""
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def etag_of(self, there: StoredObject) -> dict[str, str]:
        """The header that tells it."""
        with self.lock:
            etag = there.etag if self.etags is None else next(self.etags)
        return {"ETag": etag} if etag else {}


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """One that is empty."""
    state = ObjectServer()
    with serving(_Objects, server_state=state) as state.port:
        yield state


Kind = Literal[
    "500",
    "503",
    "429",
    "403",
    "404",
    "400",
    "reset",
    "reset body",
    "short",
    "flip",
    "stall",
    "slow",
    "lost",
]
FAULTS: tuple[Kind, ...] = (
    *("500", "503", "429", "reset", "reset body", "short", "stall", "slow", "lost"),
)
"""Those that pass: a client that asks again gets an answer, and the right one."""


class Fault(NamedTuple):
    kind: Kind
    after: int = 10
    """Bytes of the body that arrive, or the one that is flipped."""
    seconds: float = 0.5
    """How long it stalls, or is slow."""
    says: str = ""
    """The body of an error."""


@dataclass
class FaultProxy:
    upstream: int
    port: int = 0
    schedule: deque[Fault | None] = field(default_factory=deque)
    """What happens to the next requests; those after the last pass."""
    always: Fault | None = None
    """What happens to all others."""
    match: str = ""
    """Only what has this in its method and path is met by faults."""
    server: str = ""
    """What stands behind, for tests that must know."""
    seen: list[str] = field(default_factory=list)
    """`GET /bucket/name` of each request."""

    signed: list[str] = field(default_factory=list)
    """The signature of each, or nothing."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault_of(self, line: str) -> Fault | None:
        self.seen.append(line)
        if self.match not in line:
            return None
        return self.schedule.popleft() if self.schedule else self.always


class _Proxy(Handler):
    state: FaultProxy

    def _serve(self) -> None:
        body = self.body()
        self.state.signed.append(self.headers.get("Authorization", ""))
        fault = self.state.fault_of(f"{self.command} {self.path}")
        kind = fault.kind if fault else ""
        if kind == "reset":
            return self._reset()
        if fault and kind.isdigit():
            return self.answer(int(kind), {"Content-Type": "text/plain"}, fault.says.encode())
        if fault and kind == "slow":
            time.sleep(fault.seconds)
        status, headers, content = self._ask(body)
        if kind == "lost":
            return self._reset()
        head = self.head_of(status, headers)
        if fault and content and kind in ("reset body", "short", "stall"):
            self.wfile.write(head + content[: min(fault.after, len(content) - 1)])
            if kind == "stall":
                time.sleep(fault.seconds)
            self.close_connection = True
            return self._reset() if kind == "reset body" else None
        if fault and content and kind == "flip":
            place = fault.after % len(content)
            content = content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]
        self.wfile.write(head + content)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.state.upstream)
        with closing(connection) as upstream:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            reply = upstream.getresponse()
            content = reply.read()
        headers = {k: v for k, v in reply.getheaders() if k.lower() != "transfer-encoding"}
        if "Content-Length" not in reply.headers:
            headers["Content-Length"] = str(len(content))
        return reply.status, headers, content

    def _reset(self) -> None:
        """End the connection as a crash does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


@contextmanager
def fault_proxy(upstream: int) -> Iterator[FaultProxy]:
    """A proxy before the server at a port of this machine."""
    state = FaultProxy(upstream)
    with serving(_Proxy, state=state) as state.port:
        yield state


DATA = bytes(range(256)) * 40
FAST = Timing(
    give_up_s=20.0,
    warn_after_s=1.0,
    warn_every_s=1.0,
    first_wait_s=0.001,
    longest_wait_s=0.01,
    connect_s=20.0,
    read_s=20.0,
    request_s=60.0,
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

    def put_folder(self, folder: Path) -> None:
        for name, data in files_of(folder).items():
            self.put(name, data)


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


def as_own_process(monkeypatch: pytest.MonkeyPatch, *, is_own: bool = True) -> None:
    """Make the test's process a program of ours, which talks to stores itself, or a user's, which
    has not talked to one yet."""
    monkeypatch.setattr(client, "_ours", is_own)
    monkeypatch.setattr(client, "_started", is_own)


@contextmanager
def remote_store(monkeypatch: pytest.MonkeyPatch, timing: Timing = FAST) -> Iterator[Remote]:
    """A bucket of its own: a process keeps the client of a store, and with it the server."""
    with object_server() as server, fault_proxy(server.port) as proxy:
        set_endpoint(monkeypatch, proxy.port)
        prefix = f"bucket{next(_buckets)}/data"
        address = ObjectStore.from_url(f"s3://{prefix}").address
        yield Remote(ObjectStore(address, timing), server, proxy, prefix)
