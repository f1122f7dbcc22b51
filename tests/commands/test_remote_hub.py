"""hf:// reads whole files of the Hub, each once, and says what the Hub refuses."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server
from places import SUPPORT

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.store import open_store

pytest.importorskip("obstore")
URL = "hf://datasets/owner/name@main/folder"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        hub.files["main/folder/x"] = b"content"
        yield hub


def read(hub: HubServer, home: Path, url: str = URL) -> list[str]:
    hub.seen.clear()
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    result = subprocess.run(
        [sys.executable, SUPPORT / "remote_program.py", "hub", url],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_file_of_the_hub_is_downloaded_once_however_busy_the_hub_is(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.failing = 2
    *answers, missing = read(hub, tmp_path)
    assert answers == [str(a) for a in (b"content", 7, b"ont", b"nt", b"content")]
    assert missing == f"RemoteMissingError: {URL}/y: not found."
    assert sum(line.startswith("GET") and line.endswith("/x") for line in hub.seen) == 1
    hub.files["main/folder/x"] = b"changed"
    assert read(hub, tmp_path)[0] == str(b"changed")


@pytest.mark.slow
def test_a_repository_of_others_is_told_with_the_remedy(hub: HubServer, tmp_path: Path) -> None:
    hub.private = True
    for line in read(hub, tmp_path):
        assert line.startswith(f"RemoteError: {URL}/")
        assert "`hf auth login` or HF_TOKEN" in line


@pytest.mark.parametrize("url", ["hf://owner/name", "hf://datasets/name", "hf://spaces/a/b"])
def test_an_address_of_the_hub_names_kind_owner_and_name(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{url}: expected hf://datasets/OWNER/NAME"):
        open_store(url)
