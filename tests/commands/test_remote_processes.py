"""Which process talks to a store: a training process never does, so its forks do not hang."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_proxy import Fault
from places import SUPPORT
from remote_stores import FAST, Remote, remote_store

import tokenfeed
from tokenfeed.pipeline.errors import RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote import process
from tokenfeed.pipeline.remote.child import read_in_child

pytest.importorskip("obstore")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setattr(process, "_ours", False)
    monkeypatch.setattr(process, "_started", False)
    with remote_store(monkeypatch) as remote:
        remote.put("x", b"content")
        yield remote


def program(*arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, SUPPORT / "remote_program.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_training_process_reads_without_the_client(remote: Remote) -> None:
    assert program("read", remote.store.name) == ["content False"]
    assert program("read_and_fork", remote.store.name) == ["7 True"]


def test_a_fork_of_who_has_talked_is_refused_and_does_not_hang(remote: Remote) -> None:
    first, second, last = program("talk_and_fork", remote.store.name)
    assert first.startswith("ConfigError: this process was forked")
    assert (second, last) == (first, "7")


def test_a_child_hands_over_content_errors_and_warnings(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    content, traffic = read_in_child(remote.store, "x")
    assert (content, traffic.requests, traffic.bytes) == (b"content", 1, 7)
    assert remote.store.read("x") == b"content"
    assert remote.store.traffic == traffic
    with pytest.raises(RemoteMissingError, match=r"/y: not found\.$"):
        remote.store.read("y")
    remote.proxy.always = Fault("503")
    hasty = replace(remote.store, timing=replace(FAST, give_up_s=0.6, warn_after_s=0.1))
    with caplog.at_level(logging.WARNING, "tokenfeed"), pytest.raises(RemoteError, match="503"):
        hasty.read("x")
    assert [message.split(":")[1][:12] for message in caplog.messages] == ["//bucket0/da"] * 1 or (
        "fails for" in caplog.messages[0]
    )


def test_a_child_ends_with_its_parent(remote: Remote) -> None:
    remote.proxy.always = Fault("503")
    command = [sys.executable, SUPPORT / "remote_program.py", "read", remote.store.name]
    with subprocess.Popen(command) as parent:
        while not remote.proxy.seen:
            time.sleep(0.01)
        (child,) = _children(parent.pid)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] == "Z":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}").exists()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_importing_tokenfeed_imports_no_client() -> None:
    names = ", ".join(f"tokenfeed.{name}" for name in tokenfeed.__all__)
    code = f"import sys, tokenfeed; {names}; sys.exit('obstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
