"""Data sets of the Hub: converted by `datasets`, or files of a repository as they are.

`hub:OWNER/NAME[@REVISION][:CONFIG]` is loaded by `datasets`, which downloads and converts it once;
from then on its files are read like any other Arrow file. A local folder that `datasets` can load
goes the same way. `hf://datasets/OWNER/NAME[@REVISION][/PATH]` names files of a repository, which
are read by ranges. Both depend on the commit that the revision is at, not on times of local copies.
"""

import os
import re
from collections.abc import Iterator

from tokenfeed.pipeline.errors import CorpusError, RemoteError
from tokenfeed.pipeline.remote.hub import HubStore
from tokenfeed.pipeline.remote.ranged import ObjectInfo
from tokenfeed.tools.corpus.left_out import is_hidden
from tokenfeed.tools.corpus.places import RemoteFile

__all__ = ["HUB_PREFIX", "REPOSITORY_PREFIX", "hub_files", "repository_files"]

HUB_PREFIX, REPOSITORY_PREFIX = "hub:", "hf://"
_COMMIT = re.compile("[0-9a-f]{40}")


def repository_files(url: str) -> list[RemoteFile]:
    """List files of a repository at the commit that its revision is at now.

    Raises:
        ConfigError: The address cannot be one, or a package is missing.
        CorpusError: There is no such repository or folder, or the Hub cannot be reached.
    """
    place = HubStore.from_url(url)
    try:
        commit, files = place.list()
    except RemoteError as error:
        raise CorpusError(str(error)) from None
    store, kind = place.files_at(commit), f"{place.kind}s"
    return [
        RemoteFile(
            store,
            ObjectInfo(path, size, etag="", version=""),
            pinned=f"hf://{kind}/{place.repository}@{commit}/{path}",
        )
        for path, size in sorted(files.items(), key=lambda each: each[0].split("/"))
        if not any(map(is_hidden, path.split("/")))
    ]


def hub_files(name: str) -> Iterator[tuple[str, str, str | None]]:
    """The Arrow files of a data set, each with its split, and the commit that it was made of, if
    the Hub has it.

    Args:
        name: `hub:` and an id, perhaps with `@` and a revision, and with `:` and a configuration.

    Raises:
        CorpusError: It cannot be loaded.
    """
    import datasets  # seconds that only its users should pay

    identity, _, configuration = name.removeprefix(HUB_PREFIX).partition(":")
    revision = ""
    if not os.path.exists(identity):
        identity, _, revision = identity.partition("@")
    try:
        splits = datasets.load_dataset(identity, configuration or None, revision=revision or None)
    except Exception as error:  # whatever a script, a server or a parser of theirs may raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CorpusError(f"{name}: cannot be loaded by `datasets`: {reason}") from error
    for split, data in splits.items():
        if not data.cache_files:
            raise CorpusError(f"{name}: `datasets` keeps it in memory; save it by `save_to_disk`.")
        for file in data.cache_files:
            path = file["filename"]
            commit = _COMMIT.fullmatch(os.path.basename(os.path.dirname(path)))
            yield path, str(split), commit[0] if commit else None
