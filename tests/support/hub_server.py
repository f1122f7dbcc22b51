"""The files of a repository as the Hugging Face Hub gives them: a commit, an ETag, the bytes."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from object_server import Handler, serving

__all__ = ["HubServer", "hub_server"]


@dataclass
class HubServer:
    files: dict[str, bytes] = field(default_factory=dict)
    """By the path below `/datasets/OWNER/NAME/resolve/`, with the revision first."""
    failing: int = 0
    """So many of the next requests are answered 503."""
    private: bool = False
    port: int = 0
    seen: list[str] = field(default_factory=list)


class _Hub(Handler):
    state: HubServer

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.state.seen.append(f"{self.command} {self.path}")
        if self.state.private:
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        if self.state.failing:
            self.state.failing -= 1
            return self.answer(503, {})
        content = self.state.files.get(self.path.partition("/resolve/")[2])
        if content is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        headers = {
            "X-Repo-Commit": _sha1(b"".join(self.state.files.values())),
            "ETag": f'"{_sha1(content)}"',
            "Content-Length": str(len(content)),
        }
        return self.answer(200, headers, b"" if self.command == "HEAD" else content)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub with nothing in it."""
    state = HubServer()
    with serving(_Hub, state=state) as state.port:
        yield state
