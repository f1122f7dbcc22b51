"""Find the input files at an address: an object, all objects below it, or a data set of the Hub.

Objects have the order of files with the same names in a folder. Hidden names are left out. A web
server cannot list files, so each file is given by its own address.

`datasets` loads `hub:OWNER/NAME[@REVISION][:CONFIG]`: it downloads and converts the data set once,
and later runs read the Arrow files. A local folder that `datasets` can load is read the same way.
Files of `hf://datasets/OWNER/NAME[@REVISION][/PATH]` are read by ranges. Both depend on the commit
of the revision, and not on the times of local copies.
"""

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from tokenfeed.pipeline.errors import ConfigError, CorpusError, RemoteError
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
)
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.remote.address import object_address
from tokenfeed.pipeline.remote.hub import HubStore
from tokenfeed.pipeline.remote.object_file import ObjectInfo
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.text import is_address, public
from tokenfeed.tools.corpus.locations import RemoteFile

logger = logging.getLogger(__name__)

_SET, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files in the folder of a saved data set, and in the folder of several splits."""
_OF_SAVED = {_SET, _INFO, _SPLITS}
_SHOWN = 5
"""Names of files that are shown."""


def is_saved(names: Collection[str]) -> bool:
    """Return whether a folder with these names is a saved data set, of one or several splits."""
    return _SPLITS in names or {_SET, _INFO} <= set(names)


def saved_entries(folder: str, names: list[str], split: str | None) -> list[tuple[str, str | None]]:
    """Return the splits or files that a data set of `datasets` lists, each with its split.

    Args:
        folder: A folder for which `is_saved` is true.
        names: The names in the folder.
        split: The split of the folder.

    Raises:
        CorpusError: The list cannot be read, or the folder lacks a listed file.
    """
    index, key = (_SPLITS, "splits") if _SPLITS in names else (_SET, "_data_files")
    try:
        listed = json.loads(Path(folder, index).read_bytes())[key]
        entries = listed if index == _SPLITS else [file["filename"] for file in listed]
        missing = sorted({*entries} - {*names})
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"it lists no files as `{key}`"
        if not isinstance(error, LookupError | TypeError):
            reason = str(error)
        raise CorpusError(
            f"{folder}: is a saved data set by the names in it, but its {index} cannot be read: "
            f"{reason}. Save the data set again. If another program wrote the file: --exclude "
            f"{index}."
        ) from error
    if missing:
        raise CorpusError(
            f"{folder}: the saved data set names {missing[0]!r}, which is not in this folder. Save "
            "the data set again."
        )
    if unused := sorted(
        filter(lambda name: not is_hidden(name), {*names} - {*entries} - _OF_SAVED)
    ):
        shown = ", ".join(unused[:_SHOWN]) + ", ..." * (len(unused) > _SHOWN)
        logger.info("%s: is a saved data set, and does not list %s: left out", folder, shown)
    return [(name, name if index == _SPLITS else split) for name in entries]


NOT_A_CORPUS = (
    "is a data set of pretokenize, not a corpus. Expected CORPUS... OUT: the last path is the "
    "output."
)

LEFT_OUT = "left out, it is a data set of pretokenize"


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, a cache, or what Spark has not committed."""
    return name.startswith(".") or name in ("__pycache__", "_temporary")


def is_data_set(names: Iterable[str]) -> bool:
    """Return whether a folder with these names is an output of `pretokenize`."""
    found = set(names)
    return PARTS_FOLDER in found or {MANIFEST_FILE, TOKENIZER_FILE} <= found


def object_at(url: str) -> RemoteFile | None:
    """Return the object that a URL names; None if it is missing.

    Raises:
        ConfigError: There is no such store.
        CorpusError: Nothing else can be at this URL.
    """
    is_web = _object_store(url).address.traits.is_web
    folder, name = object_address(url)
    if not folder:
        return None  # a whole bucket
    store = _object_store(folder)
    try:
        return RemoteFile(store, store.head(name)).asked_for()
    except FileNotFoundError:
        pass
    if is_web:
        raise CorpusError(
            f"{public(url)}: not found. Give each file by its URL: a web server has no "
            "lists of them."
        )
    return None


def objects_below(url: str) -> Iterator[tuple[RemoteFile, tuple[str, ...]]]:
    """Yield the objects below a URL, each with its folders as paths from the URL.

    Raises:
        CorpusError: A folder was written by `save_to_disk`, or the URL is an output of
            `pretokenize`.
    """
    store = _object_store(url)
    found = {tuple(info.name.split("/")): info for info in store.list()}
    within = _names_within(found)
    for folder, names in within.items():
        if is_saved(names):
            raise CorpusError(
                f"{'/'.join((store.name, *folder))}: looks like a saved data set, which is read "
                "from a folder. Copy it to this machine."
            )
    files = found.keys() - within.keys()  # what stands for a folder is no file
    for parts in _read_of(store.name, files, within):
        paths = ("/".join((store.name, *parts[:depth])) for depth in range(1, len(parts)))
        yield RemoteFile(store, found[parts]), tuple(paths)


_Parts = tuple[str, ...]
"""The folders and the name of a file."""


def _names_within(files: Iterable[_Parts]) -> dict[_Parts, set[str]]:
    """Return the names in each folder."""
    within: dict[_Parts, set[str]] = defaultdict(set)
    for parts in files:
        for depth in range(len(parts)):
            within[parts[:depth]].add(parts[depth])
    return within


def _read_of(root: str, files: Iterable[_Parts], within: dict[_Parts, set[str]]) -> list[_Parts]:
    """Return the files to read in order, without hidden ones and those of data sets.

    Raises:
        CorpusError: All of them are a data set of `pretokenize`.
    """
    skipped = {folder for folder, names in within.items() if is_data_set(names)}
    if () in skipped:
        raise CorpusError(f"{root}: {NOT_A_CORPUS}")
    for folder in sorted(skipped):
        logger.info("%s: %s", "/".join((root, *folder)), LEFT_OUT)
    return [
        parts
        for parts in sorted(files)
        if not any(map(is_hidden, parts))
        and skipped.isdisjoint(parts[:depth] for depth in range(len(parts)))
    ]


def _object_store(url: str) -> ObjectStore:
    store = open_store(url)
    if isinstance(store, ObjectStore):
        return store
    raise ConfigError(
        f"{public(url)}: no corpus is read from there. Give the address of a bucket, of a file on "
        "the web, or hf://datasets/OWNER/NAME."
    )


HUB_PREFIX, REPOSITORY_PREFIX = "hub:", "hf://"
_COMMIT = re.compile("[0-9a-f]{40}")


def repository_files(url: str) -> list[RemoteFile]:
    """List files of a repository at the present commit of its revision.

    Raises:
        ConfigError: The address is invalid, or a package is missing.
        CorpusError: The repository or folder is missing, or the Hub cannot be reached.
    """
    place = HubStore.from_url(url)
    try:
        commit, files = place.list()
    except RemoteError as error:
        raise CorpusError(str(error)) from None
    store, kind = place.files_at(commit), f"{place.kind}s"
    root, paths = f"hf://{kind}/{place.repository}@{commit}", [tuple(p.split("/")) for p in files]
    return [
        RemoteFile(
            store,
            ObjectInfo("/".join(parts), files["/".join(parts)], etag="", version=""),
            pinned="/".join((root, *parts)),
        )
        for parts in _read_of(root, paths, _names_within(paths))
    ]


def hub_files(name: str) -> Iterator[tuple[str, str, str | None]]:
    """Return the Arrow files of a data set, each with its split, and the commit if it is known.

    Args:
        name: `hub:` and an id, which may end with `@` and a revision, and `:` and a configuration.

    Raises:
        CorpusError: The data set cannot be loaded.
    """
    if name == HUB_PREFIX or is_address(name.removeprefix(HUB_PREFIX)):
        raise CorpusError(f"{public(name)}: expected hub:OWNER/NAME[@REVISION][:CONFIG].")
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
