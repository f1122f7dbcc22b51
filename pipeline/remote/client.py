"""The clients of a process: which process may have them, one per store, and their errors.

The client (`obstore`) runs its own threads. A fork of a process with such threads hangs at any
request, without an error. Other code forks the training process, such as the user's own DataLoader.
So the training process should not start the client. It does not need to: opening a data set reads
whole small files, which a short-lived program fetches (`read_in_child`), and workers read shards.
The rules:

- A program of tokenfeed (a command, a loader worker, the short-lived one) calls `own_process` and
  sends its requests itself. The program that forks the workers of `pretokenize` does not.
- In other processes, `read` uses a child until something else has started the client: ranges,
  sizes, lists and writes do. A loader uses these only in its workers.
- In a fork of a process that has started the client, every use is a ConfigError.

Clients take their credentials from the same places as the store's own tools. A missing object or
missing permission is an error at once. Everything else may be temporary, so the request is
repeated: no connection, a busy or broken server, a truncated body.
"""

import errno
import os
import re
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from errno import EIO
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tokenfeed.pipeline.errors import ConfigError, RemoteError, RemoteMissingError, TokenfeedError
from tokenfeed.pipeline.processes import Child, Ended, Failure, undisturbed
from tokenfeed.pipeline.remote.address import Address
from tokenfeed.pipeline.remote.retrying import Meter, Timing, Traffic
from tokenfeed.pipeline.text import without_secrets

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client


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


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


def read_in_child(store: Any, name: str) -> tuple[bytes, Traffic]:
    """Return the whole of an object and the child's traffic. The child logs warnings to stderr.

    Raises:
        TokenfeedError: What `read` raises in the child.
    """
    child = undisturbed(lambda: Child("reads a store"))
    try:
        child.call(partial(_read, store, name))
        answer: tuple[bytes, Traffic] | Failure = child.answer()
    except Ended:
        reason = "the program that fetches it died; see above"
        raise RemoteError(EIO, reason, store.path(name)) from None
    finally:
        child.kill()
        child.wait()
        child.close()
    if isinstance(answer, Failure):
        raise answer.error
    return answer


def _read(store: Any, name: str) -> tuple[bytes, Traffic]:
    own_process()
    return store.read(name), store.traffic


_STATUS = re.compile(r"status code: ((\d{3})[\w ]*)")
_SAID_BY_SERVER = re.compile(r"<(?:Code|Message)>([^<]+)<")
_PASSING = re.compile(r"RequestTimeout|IncompleteBody|BadDigest|ContentSHA256Mismatch")
"""S3 reports these as errors of the client too, but the data arrived late, truncated or damaged."""
_IN_QUERY = re.compile(r"(?<=[?&])[\w.%-]+=[^\s,]+")
"""Parameters of an address that a server quotes without its host."""
_SAID_BY_SYSTEM = re.compile(r'(?:message|error): "([^"]+)"')
_BAD_NAME = "Could not parse path"
"""The client's error for an invalid name, raised before any request."""
_RIGHTS = "the store refuses access ({cause}). Check the credentials and their permissions"
_CHANGED = "was changed while it was read ({cause}). Start again"
_UNABLE = "the store does not support this request ({cause})"
_NAME = "the name of an object cannot be used here ({cause}). Rename it"
_LISTED = (
    "has an object that cannot be listed, nor can its neighbours ({cause}). Rename it, or pass "
    "folders without it"
)
_BEFORE_LISTED = "Encountered object with invalid path: "
_FINAL: dict[str, tuple[int, str]] = {
    "400": (errno.EINVAL, "the store rejects the request as invalid ({cause})"),
    "401": (errno.EACCES, _RIGHTS),
    "403": (errno.EACCES, _RIGHTS),
    "404": (errno.ENOENT, "no such bucket ({cause}). Create it, or correct the address"),
    "405": (errno.EOPNOTSUPP, _UNABLE),
    "412": (errno.ESTALE, _CHANGED),
    "416": (errno.EINVAL, "is shorter than it should be ({cause}). Copy it again"),
    "501": (errno.EOPNOTSUPP, _UNABLE),
    "UnauthenticatedError": (errno.EACCES, _RIGHTS),
    "PermissionDeniedError": (errno.EACCES, _RIGHTS),
    "PreconditionError": (errno.ESTALE, _CHANGED),
    "NotSupportedError": (errno.EOPNOTSUPP, _UNABLE),
}
"""Final errors by HTTP status, or by the class of the client's error."""
_NO_CREDENTIALS = (
    "no credentials were found. Set them in the environment, or add `?anonymous` to the address of "
    "public data: docs/how/remote.md"
)
_METADATA_SERVICE = "169.254.169.254"
"""Address from which a machine in a cloud reads its credentials."""
_NO_RANGES = (
    "the server does not support range requests. Use one that does, such as nginx; "
    "`python -m http.server` does not"
)
_SAYING: dict[str, tuple[int, str]] = {
    _METADATA_SERVICE: (errno.EACCES, _NO_CREDENTIALS),
    "MissingAccessKeyId": (errno.EACCES, _NO_CREDENTIALS),
    "NotPartial": (errno.EOPNOTSUPP, _NO_RANGES),
    "Range request not supported": (errno.EOPNOTSUPP, _NO_RANGES),
    "redirect without LOCATION": (
        errno.EREMOTE,
        "the bucket is in another region. Set AWS_REGION to the region of the bucket",
    ),
}
"""Final errors by words in the client's message."""


def cause_of_failure(error: Exception, place: str, *, has_talked: bool) -> str:
    """Return the cause of a temporary failure, in a few words.

    Args:
        error: What the client raised.
        place: Name of the object in messages.
        has_talked: Whether the store has answered before. If so, credentials exist, and a missing
            answer of the credential service is temporary.

    Raises:
        RemoteError: The failure is not temporary.
    """
    if isinstance(error, FileNotFoundError):
        raise RemoteMissingError(errno.ENOENT, "not found", place) from None
    if isinstance(error, ValueError) and _BAD_NAME in str(error):
        raise RemoteError(errno.EINVAL, _NAME.format(cause=first_line(error)), place) from None
    if isinstance(error, TokenfeedError) or not type(error).__module__.startswith("obstore"):
        raise error
    if type(error).__name__ == "InvalidPathError":
        raise RemoteError(errno.EINVAL, _LISTED.format(cause=first_line(error)), place) from None
    cause = _IN_QUERY.sub("", without_secrets(_cause(str(error))))
    if (final := _final(error)) and not (has_talked and _METADATA_SERVICE in str(error)):
        raise RemoteError(final[0], final[1].format(cause=cause), place) from None
    return cause


def first_line(error: Exception) -> str:
    """Return the client's message without its debugging lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return without_secrets(lines[0].strip().removeprefix(_BEFORE_LISTED))


def _final(error: Exception) -> tuple[int, str] | None:
    said = str(error)
    for words, final in _SAYING.items():
        if words in said:
            return final
    status = None if _PASSING.search(said) else _STATUS.search(said)
    return _FINAL.get(type(error).__name__) or (_FINAL.get(status[2]) if status else None)


def _cause(said: str) -> str:
    """Return `503 Service Unavailable`, `Connection refused`, or the first line of the message."""
    if status := _STATUS.search(said):
        by_server = _SAID_BY_SERVER.findall(said.partition("\n\nDebug")[0])
        short = [text.partition("\n")[0].strip().rstrip(".") for text in by_server]
        return ", ".join((status[1].strip(), *short))
    if "TimedOut" in said or "Timeout" in said:
        return "no answer in time"
    if by_system := _SAID_BY_SYSTEM.findall(said):
        return str(by_system[-1])
    return first_line(Exception(said)).rpartition(" - ")[2]


_WRITE_TRIES = 4
"""Attempts to send a part of a large object, by the client itself."""
_AWS_KEY, _AWS_PROFILE = "AWS_ACCESS_KEY_ID", "AWS_PROFILE"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_AWS_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)


@dataclass(slots=True)
class Connection:
    """The clients of a store in this process, and their traffic."""

    address: Address
    timing: Timing
    meter: Meter = field(default_factory=Meter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reads: "Client | None" = None
    _writes: "Client | None" = None

    @property
    def reads(self) -> "Client":
        """The client for reads and small writes. `persist` retries its requests.

        Raises:
            ConfigError: This process must not use a client, or the credentials are missing.
        """
        check_process()
        with self._lock:
            if self._reads is None:
                self._reads = self._made(self.timing, max_retries=0)
            return self._reads

    @property
    def writes(self) -> "Client":
        """The client for large writes, with longer limits; errors are those of `reads`."""
        check_process()
        with self._lock:
            if self._writes is None:
                self._writes = self._made(self.timing.uploading, max_retries=_WRITE_TRIES - 1)
            return self._writes

    def _made(self, timing: Timing, max_retries: int) -> "Client":
        from obstore.exceptions import BaseError

        try:
            return _client(self.address, timing, max_retries)
        except (BaseError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.address}: {first_line(error)}. See docs/how/remote.md."
            ) from None  # the client's own error may hold a signature


_connections: dict[tuple[int, Address, Timing], Connection] = {}


def connection(address: Address, timing: Timing) -> Connection:
    """Return the connection of this process to a store. A forked process has its own connection."""
    key = os.getpid(), address, timing
    return _connections.get(key) or _connections.setdefault(key, Connection(address, timing))


def _client(address: Address, timing: Timing, max_retries: int) -> "Client":
    from obstore import store

    options: ClientConfig = {
        "allow_http": True,  # for endpoints that use plain HTTP
        "connect_timeout": timedelta(seconds=timing.connect_s),
        "read_timeout": timedelta(seconds=timing.read_s),
        "timeout": timedelta(seconds=timing.request_s),
    }
    retries: RetryConfig = {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=timing.request_s),
        "backoff": {
            "init_backoff": timedelta(seconds=timing.first_wait_s),
            "max_backoff": timedelta(seconds=timing.longest_wait_s),
        },
    }
    settings: Any = {"client_options": options | _hub_token(address), "retry_config": retries}
    if address.traits.is_web:
        query = f"?{address.query}" if address.query else ""
        return store.HTTPStore.from_url(f"{address.url}{query}", **settings)
    if address.scheme == "s3":
        _check_endpoint()
    if address.anonymous:
        settings["skip_signature"] = True
    elif address.scheme == "s3" and (provider := _aws_profile()):
        settings["credential_provider"] = provider
    scheme, _, rest = address.url.partition("://")
    host, slash, path = rest.partition("/")
    return store.from_url(f"{scheme}://{host}{slash}{quote(path)}", **settings)


def _check_endpoint() -> None:
    """Check that the endpoint is a URL. The client panics otherwise."""
    for name in _ENDPOINTS:
        said = os.environ.get(name)
        if said and not re.match("https?://[^/]", said):
            raise ConfigError(f"{name}: is not a URL, like http://127.0.0.1:9000.")


def _hub_token(address: Address) -> "ClientConfig":
    """Return the header with the user's Hub token. Redirects to other hosts do not get it."""
    if not address.is_hub:
        return {}
    from huggingface_hub import get_token

    token = get_token()
    return {"default_headers": {"authorization": f"Bearer {token}"}} if token else {}


def _aws_profile() -> Any | None:
    """Return the provider of a profile's keys, which also renews them; None without a profile.

    Only `boto3` reads profiles. Keys in the environment take precedence, as in `boto3`.
    """
    profile = os.environ.get(_AWS_PROFILE)
    files = [Path(os.environ.get(name, usual)).expanduser() for name, usual in _AWS_FILES]
    if os.environ.get(_AWS_KEY) or not (profile or any(file.exists() for file in files)):
        return None
    if find_spec("boto3") is None:
        if profile is None:
            return None
        raise ConfigError(
            f"{_AWS_PROFILE}={profile}: profiles need `boto3`, which is not installed. "
            f"`pip install boto3`, or set {_AWS_KEY} and AWS_SECRET_ACCESS_KEY."
        )
    return _provider(profile)


def _provider(profile: str | None) -> Any | None:
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:
        return None
    except Exception as error:
        if not type(error).__module__.startswith("botocore"):
            raise
        raise ConfigError(f"{_AWS_PROFILE}={profile}: {error}") from error
