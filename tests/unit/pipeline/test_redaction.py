"""Addresses as they are shown and stored."""

import pickle
from pathlib import Path

import pytest

from tokenfeed.pipeline.errors import ConfigError, RemoteError
from tokenfeed.pipeline.format.store import local_path, open_store
from tokenfeed.pipeline.text import public, without_secrets


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://me:pw@host/a?token=x#y", "https://***@host/a"),
        ("HTTPS://host/a?x", "HTTPS://host/a"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://[::1]:8080/a", "https://[::1]:8080/a"),
        ("s3://key:a/b c@bucket/x", "s3://***@bucket/x"),
        ("s3://bucket/a?b#c", "s3://bucket/a?b#c"),
        ("s3://bucket/a?b=c", "s3://bucket/a"),
        ("s3:/key:pw@bucket/x", "s3:/***@bucket/x"),
        ("abfss://box@account/x", "abfss://box@account/x"),
        ("abfss://box:pw@account/x", "abfss://***@account/x"),
        ("train=https://host/a?b", "train=https://host/a"),
        ("C:/folder/a@b?c=d", "C:/folder/a@b?c=d"),
        ("folder/a?b=c@d", "folder/a?b=c@d"),
    ],
)
def test_public_removes_secrets_and_nothing_else(given: str, shown: str) -> None:
    assert public(given) == public(shown) == shown
    assert without_secrets(f"error at {given}") == f"error at {shown}"


def test_without_secrets_keeps_text_after_an_address() -> None:
    text = "https://host: failed. Ask me@host, or read https://a/b."
    assert without_secrets(text) == text
    assert without_secrets('"https://a:b@c/d", "s3://e?f=g"') == '"https://***@c/d", "s3://e"'


def test_errors_never_show_secrets() -> None:
    for error in (ConfigError("s3://a:pw@b: no"), RemoteError(5, "no", "https://b/c?pw")):
        assert "pw" not in f"{error}" + str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize("path", ["s3:/bucket/x", Path("s3://bucket/x"), Path("hf://models/a/b")])
def test_address_with_one_slash_is_not_a_folder(path: str | Path) -> None:
    for opened in (open_store, lambda each: local_path(str(each))):
        with pytest.raises(ConfigError, match=r"^\S+: is not a path on this machine\. Write"):
            opened(path)
    assert local_path("./s3:/bucket") == Path("s3:/bucket")
