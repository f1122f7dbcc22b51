"""A proxy before a real store that does to each request what a test says, and notes it.

Requests go on as they came, with the same Host, so that signatures stay valid.
"""

import http.client
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from object_server import Handler, serving

__all__ = ["FAULTS", "Fault", "FaultProxy", "Kind", "fault_proxy"]

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
        upstream = http.client.HTTPConnection("127.0.0.1", self.state.upstream)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body or None)
        reply = upstream.getresponse()
        content = reply.read()
        headers = {k: v for k, v in reply.getheaders() if k.lower() != "transfer-encoding"}
        upstream.close()
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
