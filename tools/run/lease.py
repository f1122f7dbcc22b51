"""The claim of a run on a place in a store, where there are no locks: an object with a heartbeat.

It says who works there. Whoever finds it waits for its end: for the process named there to be gone,
on the same machine, or for so long without a heartbeat. It is a courtesy that spares work: two runs
of one command write the same bytes. Every write of it
is read back, for some stores take any that should be refused.
"""

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from tokenfeed.pipeline.errors import ConfigError, RemoteError, TokenfeedError
from tokenfeed.pipeline.remote.object_store import ObjectStore

__all__ = ["CLAIM_FILE", "Lease", "clear_away"]

CLAIM_FILE = ".claim.json"
_BEAT_S = 30.0
_DEAD_AFTER_S = 300.0


class _Claim(msgspec.Struct, frozen=True):
    """Who says to be at work, and when it said so."""

    run: str
    host: str
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    alive_at: float
    """By the clock of that machine."""

    @property
    def silent_s(self) -> float:
        """Seconds since then; one that is to come, by a clock that is wrong, counts as far."""
        return abs(time.time() - self.alive_at)


_NOBODY = _Claim("", "", 1, 0.0)
_held: set[str] = set()
"""Runs of this process that have a claim."""


@dataclass(slots=True)
class Lease:
    """The claim of a run of this process; it beats until it is released."""

    store: ObjectStore
    _run: str = field(default_factory=lambda: os.urandom(8).hex())
    _etag: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _is_lost: bool = False

    @classmethod
    def take(cls, store: ObjectStore) -> "Lease":
        """Claim a place that nobody has, or whose owner has ended.

        Raises:
            ConfigError: Another run is at work there.
        """
        lease = cls(store)
        if not lease._is_placed():
            raise ConfigError(lease._other())
        _held.add(lease._run)
        threading.Thread(target=lease._beat, daemon=True).start()
        return lease

    def check(self) -> None:
        """Look whether it still holds.

        Raises:
            TokenfeedError: Another run has taken over.
        """
        if self._is_lost:
            raise TokenfeedError(self._other())

    def release(self) -> None:
        """Leave the place to others; where the store cannot be told, they see that we have gone."""
        self._ended.set()
        _held.discard(self._run)
        with contextlib.suppress(OSError):
            if self._is_mine():
                self.store.delete(CLAIM_FILE)

    def _is_placed(self) -> bool:
        """Put the claim where there is none, or in place of a dead one; whether it is there."""
        content = self._content()
        try:
            etag = self.store.head(CLAIM_FILE).etag
            if not _is_dead(_decoded(self.store.read(CLAIM_FILE))):
                return False
            is_placed = self.store.replace(CLAIM_FILE, content, etag)
        except FileNotFoundError:
            is_placed = self.store.create(CLAIM_FILE, content)
        return is_placed and self._stands(content)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(RemoteError):  # what the run itself asks will tell
                content = self._content()
                is_kept = self._is_mine() and self.store.replace(CLAIM_FILE, content, self._etag)
                self._is_lost = not (is_kept and self._stands(content))
                if self._is_lost:
                    return

    def _stands(self, content: bytes) -> bool:
        """Whether the store gives back what it has taken; notes the ETag of that."""
        self._etag = self.store.head(CLAIM_FILE).etag
        return self.store.read(CLAIM_FILE) == content

    def _is_mine(self) -> bool:
        return _decoded(self.store.read(CLAIM_FILE)).run == self._run

    def _content(self) -> bytes:
        claim = _Claim(self._run, socket.gethostname(), os.getpid(), time.time())
        return msgspec.json.encode(claim)

    def _other(self) -> str:
        """Who has the place, and what to do."""
        try:
            claim = _decoded(self.store.read(CLAIM_FILE))
        except FileNotFoundError:
            return f"{self.store.name}: another run was writing here. Repeat the command."
        return (
            f"{self.store.name}: another run is writing here: process {claim.pid} on {claim.host}, "
            f"last heard of {claim.silent_s:.0f} s ago. Wait for it or end it; the same command "
            f"takes over what was silent for {_DEAD_AFTER_S:.0f} s."
        )


def clear_away(store: ObjectStore) -> None:
    """Delete the claim of a run that was killed when it had just finished."""
    with contextlib.suppress(FileNotFoundError):
        if _is_dead(_decoded(store.read(CLAIM_FILE))):
            store.delete(CLAIM_FILE)


def _is_dead(claim: _Claim) -> bool:
    """Whether its owner has ended, as far as anything says so."""
    if claim.silent_s > _DEAD_AFTER_S:
        return True
    if claim.host != socket.gethostname():
        return False
    if claim.pid == os.getpid():
        return claim.run not in _held
    return not _is_running(claim.pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _decoded(content: bytes) -> _Claim:
    """A claim; what is none is nobody's."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        return msgspec.json.decode(content, type=_Claim)
    return _NOBODY
