"""Classify failed requests: errors that end a request at once, and causes to try again.

A missing object or missing permission is an error at once. Everything else may be temporary: no
connection, a busy or broken server, a truncated body.
"""

import errno
import re

from tokenfeed.pipeline.errors import RemoteError, RemoteMissingError, TokenfeedError
from tokenfeed.pipeline.remote.address import without_secrets

__all__ = ["cause_of_failure", "first_line"]

_STATUS = re.compile(r"status code: ((\d{3})[\w ]*)")
_SAID_BY_SERVER = re.compile(r"<(?:Code|Message)>([^<]+)<")
_PASSING = re.compile(r"RequestTimeout|IncompleteBody|BadDigest|ContentSHA256Mismatch")
"""S3 reports these as errors of the client too, but the data arrived late, truncated or damaged."""
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
    cause = without_secrets(_cause(str(error)))
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
