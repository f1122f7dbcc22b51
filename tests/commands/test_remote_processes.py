"""Which process talks to a store: a training process never does, so its forks do not hang."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import PROGRAMS, warm
from support.object_server import FAST, Fault, Remote, as_own_process, remote_store
from support.processes import children_of, eventually, is_alive

from tokenfeed.pipeline.errors import RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote.client import read_in_child
from tokenfeed.tools.data_sets.copy import copy_data_set

pytest.importorskip("obstore")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    as_own_process(monkeypatch, is_own=False)
    with remote_store(monkeypatch) as remote:
        remote.put("x", b"content")
        yield remote


def program(*arguments: str) -> list[str]:
    result = warm.run([PROGRAMS / "remote_program.py", *arguments])
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
    remote: Remote, capfd: pytest.CaptureFixture[str]
) -> None:
    content, traffic = read_in_child(remote.store, "x")
    assert (content, traffic.requests, traffic.bytes) == (b"content", 1, 7)
    assert remote.store.read("x") == b"content"
    assert remote.store.traffic == traffic
    with pytest.raises(RemoteMissingError, match=r"/y: not found\.$"):
        remote.store.read("y")
    remote.proxy.schedule.append(Fault("503"))
    assert replace(remote.store, timing=replace(FAST, warn_after_s=0.0)).read("x") == b"content"
    (warning,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"s3://\S+/x: fails for \d+ s now \(503 Service Un.*", warning)
    remote.proxy.always = Fault("503")
    with pytest.raises(RemoteError, match="503"):
        replace(remote.store, timing=replace(FAST, give_up_s=0.3)).read("x")


def test_a_child_that_dies_is_one_line(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/bin/false", "/bin/echo"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(RemoteError, match=r"/x: the program that fetches it died; see above"):
            remote.store.read("x")


def test_a_child_ends_with_its_parent(remote: Remote) -> None:
    remote.proxy.always = Fault("503")
    with warm.Popen([PROGRAMS / "remote_program.py", "read", remote.store.name]) as parent:
        while not remote.proxy.seen:
            assert parent.poll() is None
            time.sleep(0.01)
        (child,) = children_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not is_alive(child))


def test_a_copy_that_is_interrupted_in_an_outage_ends(
    remote: Remote, documents: Path, tmp_path: Path
) -> None:
    copy_data_set(str(documents), remote.store.name)
    remote.proxy.match, remote.proxy.always = ".arrow", Fault("503")
    remote.proxy.seen.clear()
    words = ["-m", "tokenfeed.tools.shards", "copy", remote.store.name, tmp_path / "out"]
    with warm.Popen(words, stderr=subprocess.PIPE) as copying:
        while sum(".arrow" in line for line in remote.proxy.seen) < 8:
            time.sleep(0.01)
        copying.send_signal(signal.SIGINT)
        _, said = copying.communicate(timeout=300)
    assert copying.returncode == 130
    assert said.endswith("interrupted: copied files are kept; the same command continues\n")
    remote.proxy.always = None
    copy_data_set(remote.store.name, str(tmp_path / "out"))
    assert not list(tmp_path.rglob("*.tmp"))
