"""Programs that tests start: each does one thing with a store, and prints what came of it."""

import os
import sys
from dataclasses import replace

from support.object_server import FAST

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.pipeline.remote.hub import HubStore


def _started() -> bool:
    return "obstore" in sys.modules


def read(url: str) -> None:
    """As a training process opens a data set."""
    print(open_store(url).read("x").decode(), _started())


def read_and_fork(url: str) -> None:
    """Its forks, as those of a DataLoader, may talk to the store."""
    store = open_store(url)
    store.read("x")
    _in_fork(lambda: print(store.size("x"), _started(), flush=True))


def talk_and_fork(url: str) -> None:
    """Where the client has been started, they may not."""
    own_process()
    store = open_store(url)
    store.read("x")
    _in_fork(lambda: store.read("x"))
    _in_fork(lambda: open_store(url.replace("data", "other")).size("x"))
    print(len(store.read("x")))


def hub(url: str) -> None:
    """Every way to read a file of the Hub; what fails is told."""
    own_process()
    store = open_store(url)
    assert isinstance(store, HubStore)
    store = replace(store, timing=FAST)
    for ask in (
        lambda: store.read("x"),
        lambda: store.size("x"),
        lambda: store.read_range("x", 1, 3).data,
        lambda: store.read_tail("x", 2).data,
        lambda: store.open("x", store.size("x")).read(),
        lambda: store.read("y"),
    ):
        try:
            print(ask())
        except TokenfeedError as error:
            print(f"{type(error).__name__}: {error}")


def _in_fork(work: object) -> None:
    assert callable(work)
    child = os.fork()
    if not child:
        try:
            work()
        except TokenfeedError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    globals()[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    main()
