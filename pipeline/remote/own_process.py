"""Decide which process sends requests to stores: this process, or a short-lived child.

The client (`obstore`) runs its own threads. A fork of a process with such threads hangs at any
request, without an error. Other code forks the training process, such as the user's own DataLoader.
So the training process should not start the client. It does not need to: opening a data set reads
whole small files, which a short-lived program fetches (`read_in_child`), and workers read shards.
The rules:

- A program of tokenfeed (a command, a loader worker, the child) calls `own_process` and sends its
  requests itself.
- In other processes, `read` uses a child until something else has started the client: ranges,
  sizes, lists and writes do. A loader uses these only in its workers.
- In a fork of a process that has started the client, every use is a ConfigError.
"""

import marshal
import os
import pickle
import subprocess
import sys
import threading
import time
from errno import EIO
from typing import Any, NoReturn

from tokenfeed.pipeline.errors import ConfigError, RemoteError, TokenfeedError
from tokenfeed.pipeline.remote.retrying import Traffic

_ours = False
_started = False
_orphaned = False


def own_process() -> None:
    """Mark this process as a program of tokenfeed, which sends its requests itself."""
    global _ours
    _ours = True


def talks_here() -> bool:
    """Return whether this process reads small files itself: a program of tokenfeed, or a process
    that cannot start another Python."""
    alone = getattr(sys, "frozen", False) or not sys.executable
    return _ours or _started or _orphaned or alone


def check_process() -> None:
    """Record that this process uses the client.

    Raises:
        ConfigError: The client would hang: the process is a fork of one that has used it.
    """
    global _started
    if _orphaned:
        raise ConfigError(
            "this process was forked from one that had already used a remote store, and would "
            "hang at any request. Start it by `spawn` or `forkserver`, or use no remote store in "
            "the parent (a loader with workers uses none)."
        )
    _started = True


def _forked() -> None:
    global _started, _orphaned
    _orphaned, _started = _orphaned or _started, False


os.register_at_fork(after_in_child=_forked)


_CODE = (
    "import sys, marshal; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from tokenfeed.pipeline.remote.own_process import main; main()"
)
_PARENT_CHECK_S = 1.0


def read_in_child(store: Any, name: str) -> tuple[bytes, Traffic]:
    """Return the whole of an object and the child's traffic. The child logs warnings to stderr.

    Raises:
        TokenfeedError: What `read` raises in the child.
    """
    paths = [entry for entry in sys.path if isinstance(entry, str)]
    orders = marshal.dumps(paths) + pickle.dumps((os.getpid(), store, name))
    child = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=orders,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C should reach only this process, which then kills the child
    )
    try:
        answer: tuple[bytes, Traffic] | TokenfeedError = pickle.loads(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        reason = "the program that fetches it died; see above"
        raise RemoteError(EIO, reason, store.path(name)) from None
    if isinstance(answer, TokenfeedError):
        raise answer
    return answer


def main() -> NoReturn:
    """Read the file that the parent names, send its bytes, and end. End with the parent, too."""
    own_process()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the answer
    parent, store, name = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    answer: tuple[bytes, Traffic] | TokenfeedError
    try:
        answer = store.read(name), store.traffic
    except TokenfeedError as error:
        answer = error
    pickle.dump(answer, pipe)
    pipe.flush()
    os._exit(os.EX_OK)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(os.EX_OK)
