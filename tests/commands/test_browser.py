"""A run's page in a real browser: it asks nobody for anything, and nothing in it fails."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.training import make_config, run, write_labelled

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=1000"),
)

_OF_BROWSER = "not an origin"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


def opened(page: Path, folder: Path) -> tuple[set[str], list[str]]:
    """Addresses that the page asked the network for, and what the console said."""
    kept = (("user-data-dir", "profile"), ("log-net-log", "net.json"), ("screenshot", "page.png"))
    ended = subprocess.run(
        [str(CHROMIUM), *OPTIONS, *(f"--{name}={folder}/{at}" for name, at in kept), page.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (folder / "page.png").exists(), ended.stderr
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return _addresses(json.loads((folder / "net.json").read_text())), said


def _addresses(log: dict[str, Any]) -> set[str]:
    """Those of the page: a browser asks its maker for this and that, too."""
    params = (event.get("params", {}) for event in log["events"])
    return {each["url"] for each in params if each.get("initiator", _OF_BROWSER) != _OF_BROWSER}


def test_a_page_asks_for_nothing_and_nothing_in_it_fails(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "lm", "lm", count=150)
    run(make_config(shards, tmp_path / "run", steps=8))
    assert opened(tmp_path / "run" / "report.html", tmp_path) == (set(), [])


def test_what_a_page_asks_for_and_what_fails_in_it_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://example.invalid/a.png"><script>throw Error()</script>')
    asked, said = opened(page, tmp_path)
    assert asked == {"http://example.invalid/a.png"}
    assert any("Uncaught Error" in line for line in said)
