"""The files of a repository as the Hugging Face Hub gives them: a commit, an ETag, the bytes, and
what its API says of them."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from support.object_server import Handler, serving

_API = re.compile(r"/api/(?:datasets|models)/[^/]+/[^/]+(?:/(revision|tree|paths-info)/(.*))?")


@dataclass
class HubServer:
    files: dict[str, bytes] = field(default_factory=dict)
    """By the path below `/datasets/OWNER/NAME/resolve/`, with the revision first."""
    failing: int = 0
    """So many of the next requests are answered 503."""
    private: bool = False
    token: str = ""
    """Where it is set, files are sent to those who have it, by a signed address elsewhere."""
    port: int = 0
    seen: list[str] = field(default_factory=list)
    told_token: list[bool] = field(default_factory=list)
    """Whether each request to a signed address had the token, which it does not need."""
    num_ranges: int = 0
    """Requests for a part of a file."""

    def commit(self, revision: str = "main") -> str:
        return _sha1(repr(sorted(self.of_revision(revision).items())).encode())

    def of_revision(self, revision: str) -> dict[str, bytes]:
        """The files of a branch or tag, or of the commit that one is at."""
        names = {name.partition("/")[0] for name in self.files}
        if revision not in names:
            found = (name for name in sorted(names) if self.commit(name) == revision)
            revision = next(found, revision)
        return {
            name.partition("/")[2]: content
            for name, content in self.files.items()
            if name.startswith(f"{revision}/")
        }


class _Hub(Handler):
    state: HubServer

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.state.seen.append(f"{self.command} {self.path}")
        said = self.body().decode()
        if self.state.private:
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        if self.state.failing:
            self.state.failing -= 1
            return self.answer(503, {})
        url = urlsplit(self.path)
        path = unquote(url.path)
        if found := _API.fullmatch(path):
            return self._api(found[1] or "revision", found[2] or "main", said)
        revision, _, name = path.partition("/resolve/")[2].partition("/")
        if path.startswith("/signed/"):
            revision, _, name = path.removeprefix("/signed/").partition("/")
            assert url.query == "Signature=hunter2"
            self.state.told_token.append("Authorization" in self.headers)
        elif self.state.token:
            if self.headers.get("Authorization") != f"Bearer {self.state.token}":
                return self.answer(401, {"X-Error-Code": "GatedRepo"})
            place = f"http://localhost:{self.state.port}/signed/{revision}/{name}"
            return self.answer(302, {"Location": f"{place}?Signature=hunter2"})
        content = self.state.of_revision(revision).get(name)
        if content is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        return self._send(content, revision)

    def _send(self, content: bytes, revision: str) -> None:
        headers = {"X-Repo-Commit": self.state.commit(revision), "ETag": f'"{_sha1(content)}"'}
        headers["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
        status, part = 200, content
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            self.state.num_ranges += 1
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
            status, part = 206, content[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        headers["Content-Length"] = str(len(part))
        self.answer(status, headers, b"" if self.command == "HEAD" else part)

    def _api(self, what: str, place: str, said: str) -> None:
        revision, _, folder = place.partition("/")
        files = self.state.of_revision(revision)
        if not files:
            return self._json(404, {"error": "no such revision"}, "RevisionNotFound")
        if what == "revision":
            names = [{"rfilename": name} for name in files]
            about = {"_id": "1", "id": "owner/name", "sha": self.state.commit(revision)}
            return self._json(200, about | {"siblings": names, "private": False, "tags": []})
        if what == "paths-info":
            asked = re.findall(r"paths=([^&]*)", said) or json.loads(said)["paths"]
            kept = {name: files[name] for name in map(unquote, asked) if name in files}
        else:
            return self._tree(files, f"{folder}/" if folder else "")
        return self._json(200, [_entry(name, content) for name, content in kept.items()])

    def _tree(self, files: dict[str, bytes], below: str) -> None:
        is_recursive = "recursive=true" in urlsplit(self.path).query.lower()
        folders, found = set[str](), []
        for name, content in files.items():
            first, slash, _ = name.removeprefix(below).partition("/")
            if not name.startswith(below):
                continue
            if slash and not is_recursive:
                folders.add(f"{below}{first}")
            else:
                found.append(_entry(name, content))
        if not found and not folders:
            return self._json(404, {"error": "no such folder"}, "EntryNotFound")
        names = [{"type": "directory", "path": name, "oid": "0"} for name in sorted(folders)]
        return self._json(200, found + names)

    def _json(self, status: int, said: Any, code: str = "") -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        self.answer(status, headers, json.dumps(said).encode())


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _sha1(content)}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub with nothing in it."""
    state = HubServer()
    with serving(_Hub, state=state) as state.port:
        yield state
