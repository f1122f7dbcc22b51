"""The clients of a process: one per store, made at the first use.

They take their credentials from the same places as the store's own tools.
"""

import os
import re
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.remote.address import Address
from tokenfeed.pipeline.remote.failures import first_line
from tokenfeed.pipeline.remote.own_process import check_process
from tokenfeed.pipeline.remote.retrying import Meter, Timing

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

__all__ = ["Connection", "connection"]

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
    """Return the connection of this process to a store. A fork has its own."""
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
            raise ConfigError(f"{name}={said}: expected a URL, like http://127.0.0.1:9000.")


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
