"""A folder by HTTP, each answer late by some milliseconds: what benchmarks/remote/ reads from.

One process without threads, so that its own work is little beside the client's. It knows GET, HEAD
and ranges: enough for clients of S3 that read, to whom its folders are buckets. It prints its port;
GET /__count tells how many requests came, and how many bytes went.

usage: server.py FOLDER DELAY_MS
"""

import asyncio
import json
import re
import sys
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote

RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)", re.IGNORECASE)


class Server(asyncio.Protocol):
    """One connection; requests come one after the other."""

    folder: Path
    delay_s: float
    requests = sent = 0
    buffer = b""
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Have each whole request answered later."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, self.buffer = self.buffer[:end], self.buffer[end + 4 :]
            method, path, _ = head.split(b" ", 2)
            if path == b"/__count":
                told = json.dumps({"requests": Server.requests, "bytes": Server.sent}).encode()
                self.answer(200, [], told)
            else:
                Server.requests += 1
                loop = asyncio.get_running_loop()
                loop.call_later(self.delay_s, self.give, method, path, head)

    def give(self, method: bytes, path: bytes, head: bytes) -> None:
        """Answer a request."""
        file = self.folder / unquote(path.decode()).lstrip("/").partition("?")[0]
        if not file.is_file():
            self.answer(404, [], b"")
            return
        size = file.stat().st_size
        tags = [f'ETag: "{size}"', f"Last-Modified: {formatdate(0, usegmt=True)}"]
        start, stop, status = 0, size, 200
        if found := RANGE.search(head):
            first, last = found.groups()
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= stop:
                self.answer(416, [f"Content-Range: bytes */{size}"], b"")
                return
            tags.append(f"Content-Range: bytes {start}-{stop - 1}/{size}")
            status = 206
        with open(file, "rb") as opened:
            opened.seek(start)
            body = opened.read(stop - start) if method == b"GET" else b""
        Server.sent += len(body)
        self.answer(status, tags, body, stop - start)

    def answer(self, status: int, tags: list[str], body: bytes, length: int | None = None) -> None:
        """Send it."""
        length = len(body) if length is None else length
        lines = [f"HTTP/1.1 {status} -", f"Content-Length: {length}", "Accept-Ranges: bytes", *tags]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)


async def main() -> None:
    Server.folder, Server.delay_s = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
