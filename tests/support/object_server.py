"""A small object store of this process: what of S3 the client asks for, and plain HTTP.

It keeps objects in a dictionary, knows ranges, ETags and conditional writes, and checks no
signature. Told so, it takes conditional requests as if they had none, as some stores do.
"""

import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_METADATA = re.compile(r"x-(?:amz|goog)-meta-(.*)")

__all__ = ["ObjectServer", "StoredObject", "object_server", "serving"]


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
            if not self.server_state.lies and not self._met(there):
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
        wanted = self.headers.get("If-Match")
        return wanted is None or (there is not None and there.etag == wanted)

    def _give(self, *, head: bool) -> None:
        there = self.server_state.objects.get(self._name)
        signature = self.server_state.signature
        if signature and (head or signature not in urlsplit(self.path).query):
            return self.answer(403, {})
        if there is None:
            return self.answer(404, {})
        wanted = self.headers.get("If-Match")
        if wanted and wanted != there.etag and not self.server_state.lies:
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
    lies: bool = False
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
