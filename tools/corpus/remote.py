"""Find the input files at an address: one object, or all below it.

What is below comes in the order of a folder with the same names, and what is hidden there is left
out. A web server has no lists: its files are given one by one.
"""

from collections import defaultdict
from collections.abc import Iterator

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.remote.address import object_address, public
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.tools.corpus.left_out import NOT_A_CORPUS, is_data_set, is_hidden
from tokenfeed.tools.corpus.places import RemoteFile
from tokenfeed.tools.corpus.saved import is_saved

__all__ = ["object_at", "objects_below"]


def object_at(url: str) -> RemoteFile | None:
    """The object that a URL names; None where there is none.

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
        return RemoteFile(store, store.head(name))
    except FileNotFoundError:
        pass
    if is_web:
        raise CorpusError(
            f"{public(url)}: not found. Give each file by its URL: a web server has no "
            "lists of them."
        )
    return None


def objects_below(url: str) -> Iterator[tuple[RemoteFile, tuple[str, ...]]]:
    """The objects below a URL, each with the folders that it is in, as paths from the URL.

    Raises:
        CorpusError: A folder was written by `save_to_disk`, or all of it is a data set of ours.
    """
    store = _object_store(url)
    found = {tuple(info.name.split("/")): info for info in store.list()}
    within: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for parts in found:
        for depth in range(len(parts)):
            within[parts[:depth]].add(parts[depth])
    for folder, names in within.items():
        if is_saved(names):
            raise CorpusError(
                f"{'/'.join((store.name, *folder))}: looks like a saved data set, which is read "
                "from a folder. Copy it to this machine."
            )
    skipped = {folder for folder, names in within.items() if is_data_set(names)}
    if () in skipped:
        raise CorpusError(f"{store.name}: {NOT_A_CORPUS}")
    for parts in sorted(found.keys() - within.keys()):  # what stands for a folder is no file
        folders = [parts[:depth] for depth in range(len(parts))]
        if not any(map(is_hidden, parts)) and skipped.isdisjoint(folders):
            paths = ("/".join((store.name, *folder)) for folder in folders[1:])
            yield RemoteFile(store, found[parts]), tuple(paths)


def _object_store(url: str) -> ObjectStore:
    store = open_store(url)
    if isinstance(store, ObjectStore):
        return store
    raise ConfigError(
        f"{public(url)}: no corpus is read from there. Give the address of a bucket, of a file on "
        "the web, or hf://datasets/OWNER/NAME."
    )
