"""An address says where and who, shows no secret, and what is missing for it is named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.object_server import DATA, FAST, Fault, Remote, StoredObject, as_own_process

from tokenfeed.pipeline.errors import ConfigError, RemoteError, RemoteMissingError
from tokenfeed.pipeline.format.store import open_place, open_store
from tokenfeed.pipeline.remote import address
from tokenfeed.pipeline.remote.address import SCHEMES
from tokenfeed.pipeline.remote.hub import HubStore
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.tools.corpus.remote_sources import object_at, objects_below

pytest.importorskip("obstore")


def test_store_with_signed_address_shows_no_signature(remote: Remote) -> None:
    url = f"http://127.0.0.1:{remote.proxy.port}/{remote.prefix}"
    signed = ObjectStore.from_url(f"{url}?X-Amz-Signature=hunter2%2F")
    store = replace(signed, timing=replace(FAST, give_up_s=0.3))
    remote.put("x", DATA)
    assert store.read("x") == DATA
    said = [repr(store), store.name, store.path("x")]
    for fault in (Fault("403"), Fault("503"), Fault("reset")):
        remote.proxy.always = fault
        with pytest.raises(RemoteError) as caught:
            store.read("x")
        said.append(str(caught.value))
    assert all(line.endswith("x?X-Amz-Signature=hunter2%2F") for line in remote.proxy.seen)
    for bad in (
        "http://user:hunter2@host/x",
        "https://hunter2@host/x",
        "https://host/x#hunter2",
        "s3://bucket/x?token=hunter2",
        "s3://key:hunter2@bucket/x",
        "ftp://me:hunter2@host/x",
        "hf://datasets/a/b?token=hunter2",
    ):
        with pytest.raises(ConfigError) as refused:
            open_store(bad)
        said.append(str(refused.value))
    assert "hunter2" not in " ".join(said)


def test_a_scheme_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^s3://b/x: .*`pip install 'tokenfeed\[remote\]'`"):
        open_store("s3://b/x")


def test_requests_are_signed_unless_they_are_anonymous(remote: Remote) -> None:
    remote.put("x", DATA)
    anonymous = ObjectStore.from_url(f"{remote.store.name}?anonymous")
    assert remote.store.read("x") == anonymous.read("x") == DATA
    signed, unsigned = remote.proxy.signed
    assert "Credential=someone/" in signed
    assert not unsigned


def test_a_profile_signs_with_its_keys(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    keys = "[work]\naws_access_key_id = of-work\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(keys)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    remote.put("x", DATA)
    first = ObjectStore.from_url(f"s3://{remote.prefix}/of-keys")
    with pytest.raises(RemoteMissingError):
        first.read("x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RemoteMissingError):
        ObjectStore.from_url(f"s3://{remote.prefix}/of-profile").read("x")
    of_keys, of_profile = remote.proxy.signed
    assert "Credential=someone/" in of_keys
    assert "Credential=of-work/" in of_profile
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(ConfigError, match=r"^AWS_PROFILE=none: "):
        ObjectStore.from_url(f"s3://{remote.prefix}/of-none").read("x")


def test_a_profile_without_boto3_names_the_package(
    monkeypatch: pytest.MonkeyPatch, remote: Remote
) -> None:
    from tokenfeed.pipeline.remote import client

    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^AWS_PROFILE=work: .*`pip install boto3`"):
        ObjectStore.from_url("s3://of-a-profile/x").read("x")


@pytest.mark.parametrize("scheme", ["s3://b/x", "hf://datasets/a/b"])
def test_the_time_to_give_up_is_a_number_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    said = "TOKENFEED_REMOTE_TIMEOUT"
    monkeypatch.setenv(said, "30.5")
    assert open_store(scheme).timing.give_up_s == 30.5  # type: ignore[attr-defined]
    for wrong in ("0", "0.9", "-1", "inf", "nan", "a minute"):
        monkeypatch.setenv(said, wrong)
        with pytest.raises(ConfigError, match=f"^{said}={wrong}: expected seconds"):
            open_store(scheme)


def test_keys_of_buckets_are_taken_literally(remote: Remote) -> None:
    for folder in ("a%20b", "a b", "50%", "a#b", "a?b", "ä+&"):
        store = ObjectStore.from_url(f"{remote.store.name}/{folder}")
        store.write("x #?%25", folder.encode())
        assert remote.content(f"{folder}/x #?%25") == store.read("x #?%25") == folder.encode()
        assert [info.name for info in store.list()] == ["x #?%25"]
        url = f"{store.name}/x #?%25"
        assert [str(file) for file, _ in objects_below(store.name)] == [url]
        assert str(object_at(url)) == url


def test_a_name_that_cannot_be_one_is_told(remote: Remote) -> None:
    for name in ("tab\tx", "two//x", "../x"):
        with pytest.raises(RemoteError, match=r"^[^\n]*the name of an object cannot be used here"):
            remote.store.read(name)


@pytest.mark.parametrize("name", ["deep//x", "Timeout/./x", "404/../x", "/x"])
def test_a_name_that_cannot_be_listed_is_told_and_harms_no_other_folder(
    remote: Remote, name: str
) -> None:
    remote.put("deeper/x", DATA)
    remote.put(name, DATA)
    assert [info.name for info in remote.store.list("deeper")] == ["deeper/x"]
    found = re.escape(f'"{remote.prefix.partition("/")[2]}/{name}"')
    said = rf"^s3://{remote.prefix}/: has an object that cannot be listed, .*{found}.* Rename it"
    with pytest.raises(RemoteError, match=said):
        list(remote.store.list())


def test_a_weak_etag_is_none(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers refuse to compare it: `If-Match` wants a strong one."""
    monkeypatch.setattr(StoredObject, "etag", 'W/"1"')
    monkeypatch.setattr("tokenfeed.pipeline.remote.object_store.PIECE_BYTES", 1000)
    remote.put("x", DATA)
    assert remote.store.head("x").etag == ""
    assert remote.store.read("x") == DATA
    assert remote.store.read_range("x", 1, 2).version == '"1"', "to tell versions apart it will do"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://", "ftp://host", "no url"])
def test_an_endpoint_that_is_no_url_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = ObjectStore.from_url("s3://bucket-of-no-service/x")
    with pytest.raises(ConfigError, match=r"^AWS_ENDPOINT_URL: is not a URL, like"):
        store.size("x")


def test_a_repository_that_cannot_be_one_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_own_process(monkeypatch)
    store = replace(HubStore.from_url("hf://datasets/a b/c"), timing=FAST)
    with pytest.raises(RemoteError, match="no such repository: Repo id must"):
        store.read("x")
    with pytest.raises(ConfigError, match=r"hf://\*\*\*@datasets/a/b: expected"):
        HubStore.from_url("hf://someone:hunter2@datasets/a/b")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_opened_and_written_to_unless_it_is_the_webs(scheme: str) -> None:
    url = f"{scheme}://somewhere/out"
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    assert store.address.traits is SCHEMES[scheme]
    if SCHEMES[scheme].is_web:
        with pytest.raises(ConfigError, match=f"^{url}: nothing can be written there"):
            open_place(url)
    else:
        assert open_place(url) == store
