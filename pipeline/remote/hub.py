"""A data set in a repository of the Hugging Face Hub, read by `huggingface_hub`.

It downloads whole files, each once, because the Hub limits requests, not bytes. The files are kept
in `HF_HOME`, where other programs find them too.
"""

import errno
import fnmatch
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tokenfeed.pipeline.errors import ConfigError, RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote.address import require
from tokenfeed.pipeline.remote.client import check_process, read_in_child, talks_here
from tokenfeed.pipeline.remote.object_file import VersionedBytes, cut_short
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.remote.retrying import Meter, Timing, Traffic, persist
from tokenfeed.pipeline.text import public, without_secrets

if TYPE_CHECKING:
    import pyarrow as pa


_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets|models)/(?P<owner>[^/@?#]+/[^/@?#]+)(@(?P<revision>[^/?#]+))?(?P<folder>/[^?#]*)?"
)
_meter = Meter()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubStore:
    """The files below a folder of a repository, at a revision."""

    name: str
    """The address as the user gave it."""
    kind: str
    """dataset or model."""
    repository: str
    revision: str
    folder: str
    timing: Timing

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store at an address like `hf://datasets/OWNER/NAME@REVISION/folder`.

        Raises:
            ConfigError: The address is invalid, or `huggingface_hub` is not installed.
        """
        require("huggingface_hub", url)
        match = _ADDRESS.fullmatch(url.rstrip("/"))
        if match is None:
            raise ConfigError(
                f"{public(url)}: expected hf://datasets/OWNER/NAME[@REVISION][/FOLDER], or "
                "hf://models/..."
            )
        kind, revision = match["kind"].removesuffix("s"), match["revision"] or "main"
        folder = (match["folder"] or "").strip("/")
        timing = Timing.from_environment()
        return cls(url.rstrip("/"), kind, match["owner"], revision, folder, timing)

    @property
    def traffic(self) -> Traffic:
        """Counts of this process's requests to the Hub."""
        return _meter.read()

    def path(self, name: str) -> str:
        """Return a file as messages show it."""
        return f"{self.name}/{name}"

    def size(self, name: str) -> int:
        """Return the bytes of a file. Download it first if it is not here."""
        return os.stat(self._kept(name)).st_size

    def open(self, name: str, size: int) -> "pa.NativeFile":
        """Open a file. Download it first if it is not here."""
        import pyarrow as pa

        return pa.OSFile(os.fsencode(self._kept(name)))

    def read(self, name: str) -> bytes:
        """Return the whole of a file, in its current version at the revision."""
        if not talks_here():
            content, traffic = read_in_child(self, name)
            _meter.add(traffic)
            return content
        with open(self._download(name), "rb") as file:
            return file.read()

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        """Return some bytes of a file; see `Ranges`. Download it first if it is not here."""
        with open(self._kept(name), "rb") as file:
            file.seek(start)
            data = file.read(length)
            if len(data) < length:
                raise cut_short(self.path(name), start + length, os.stat(file.fileno()).st_size)
        return VersionedBytes(data, "")

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        """Return the last bytes of a file, or all of a shorter file."""
        size = self.size(name)
        length = min(length, size)
        return self.read_range(name, size - length, length)

    def fetch(self, name: str) -> None:
        """Download a file unless it is here."""
        self._kept(name)

    def list(self) -> tuple[str, dict[str, int]]:
        """Return the commit of the revision, and the bytes of each file by its path.

        The folder may also be one file, or a pattern, in which `*` matches `/` too. The data set
        card `README.md` is left out of whole folders.
        """
        return self._persist(self._listed, self.name)

    def files_at(self, commit: str) -> ObjectStore:
        """Return the repository at a commit as files of a web server, which are read by ranges."""
        from huggingface_hub import constants

        path = f"{self.kind}s/{self.repository}" if self.kind != "model" else self.repository
        store = ObjectStore.from_url(f"{constants.ENDPOINT}/{path}/resolve/{commit}")
        return replace(store, address=replace(store.address, is_hub=True))

    def _listed(self) -> tuple[str, dict[str, int]]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        info = HfApi().repo_info(self.repository, revision=self.revision, repo_type=self.kind)
        at: Any = {"revision": info.sha, "repo_type": self.kind}
        fixed = re.split(r"(?:^|/)[^/]*[*?\[]", self.folder, maxsplit=1)[0]
        found: Any = []
        if fixed and fixed == self.folder:
            found = HfApi().get_paths_info(self.repository, fixed, **at)
        files = {each.path: each.size for each in found if isinstance(each, RepoFile)}
        if not files:
            tree = HfApi().list_repo_tree(self.repository, fixed or None, recursive=True, **at)
            files = {
                each.path: each.size
                for each in tree
                if isinstance(each, RepoFile) and self._is_meant(each.path, fixed)
            }
        return str(info.sha), files

    def _is_meant(self, path: str, fixed: str) -> bool:
        if fixed == self.folder:
            return path != "README.md"
        return fnmatch.fnmatchcase(path, self.folder)

    def _kept(self, name: str) -> str:
        """Return the path of a downloaded file, of the commit that was read last."""
        from huggingface_hub import try_to_load_from_cache

        kept = try_to_load_from_cache(
            self.repository, self._inner(name), revision=self.revision, repo_type=self.kind
        )
        return kept if isinstance(kept, str) else self._download(name)

    def _download(self, name: str) -> str:
        check_process()

        def attempt() -> str:
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(
                self.repository, self._inner(name), revision=self.revision, repo_type=self.kind
            )
            _meter.add(Traffic(bytes=os.stat(path).st_size))
            return path

        return self._persist(attempt, self.path(name))

    def _persist(self, attempt: Callable[[], T], place: str) -> T:
        return persist(attempt, lambda error: _cause_of(error, place), place, self.timing, _meter)

    def _inner(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def _cause_of(error: Exception, place: str) -> str:
    """Return the cause of a temporary failure of a download.

    Raises:
        RemoteError: The failure is not temporary.
    """
    from huggingface_hub import errors

    said = without_secrets(" ".join(str(error).split())) or type(error).__name__
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(
        error, errors.LocalEntryNotFoundError
    ):
        raise RemoteMissingError(errno.ENOENT, "not found", place) from None
    if isinstance(error, errors.HFValidationError):
        raise RemoteError(errno.EINVAL, f"no such repository: {said.rstrip('.')}", place) from None
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        raise RemoteError(
            errno.EACCES,
            "no such repository or revision, or you may not read it. Log in by `hf auth login`, "
            "or set HF_TOKEN",
            place,
        ) from None
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status not in (408, 429):
        raise RemoteError(
            errno.EACCES, f"the Hub refuses the request ({status}): {said}", place
        ) from None
    return said
