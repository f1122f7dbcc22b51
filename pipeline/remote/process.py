"""Which process talks to stores: one that is ours, or one that asks for more than small files.

The client (`obstore`) runs threads of its own, and a fork of a process in which they run hangs on
any request, without an error. A training process is forked by others: by the user's own DataLoader,
for one. So it shall not start the client, and need not: opening a data set reads whole small files,
which a short-lived program fetches (`child`), and shards are read by workers. The rule:

- A program of ours (a command, a loader worker, the child) calls `own_process` and talks itself.
- Elsewhere, `read` goes through a child, until something else has started the client there: ranges,
  sizes, lists and writes do. A loader asks for none of them outside its workers.
- In a fork of a process that had started it, every use is a ConfigError.
"""

import os
import sys

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["check_process", "own_process", "talks_here"]

_ours = False
_started = False
_orphaned = False


def own_process() -> None:
    """Say that this process is a program of ours: it talks to stores itself."""
    global _ours
    _ours = True


def talks_here() -> bool:
    """Whether a small file is fetched by this process itself: one that has no Python to start
    another with does, too."""
    alone = getattr(sys, "frozen", False) or not sys.executable
    return _ours or _started or _orphaned or alone


def check_process() -> None:
    """Note that the client is used in this process.

    Raises:
        ConfigError: It would hang, since this is a fork of a process that has used it.
    """
    global _started
    if _orphaned:
        raise ConfigError(
            "this process was forked from one that had already talked to a remote store, and would "
            "hang on any request. Start it by `spawn` or `forkserver`, or let the parent leave "
            "remote stores alone (a loader with workers does)."
        )
    _started = True


def _forked() -> None:
    global _started, _orphaned
    _orphaned, _started = _orphaned or _started, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
