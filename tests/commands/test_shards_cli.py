"""`shards inspect|verify|cat`: what is inside, whether it is whole, and what it says."""

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.data_sets import files_of
from support.object_server import StoredObject, fault_proxy, object_server

from tokenfeed.pipeline.format.manifest import Manifest


def test_cat_into_a_closed_pipe_is_quiet(documents: Path) -> None:
    command = (
        f"'{sys.executable}' -m tokenfeed.tools.shards cat '{documents}' --rows 90 | head -n 1"
    )
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith("--- train row 0 ")
    assert result.stderr == ""


def test_an_interruption_while_the_command_begins_is_told_in_one_line(documents: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from tokenfeed.tools.shards import main\n"
        "assert not {'numpy', 'pyarrow', 'rich'} & sys.modules.keys()\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "main()"
    )
    command = [sys.executable, "-c", code, "cat", str(documents), "--rows", "99999999"]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (result.stderr, result.returncode) == ("interrupted\n", 130)


def test_two_copies_into_one_folder_leave_one_whole_data_set(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one waits for its server while the second one begins."""
    pytest.importorskip("obstore")
    other, to = tmp_path / "other", tmp_path / "to"
    shutil.copytree(documents, other)
    replace(Manifest.read(documents), label_names=("another",)).write(other)
    with object_server() as server, fault_proxy(server.port) as proxy:
        for name, content in files_of(documents).items():
            server.objects[f"set/{name}"] = StoredObject(content)
        began, go_on = threading.Event(), threading.Event()

        def held(line: str) -> None:
            if ".arrow" in line:
                began.set()
                assert go_on.wait(60)

        monkeypatch.setattr(proxy, "fault_of", held)
        words = [sys.executable, "-m", "tokenfeed.tools.shards", "copy"]
        first = subprocess.Popen([*words, f"{proxy.url}/set", str(to)])
        assert began.wait(60)
        second = subprocess.run([*words, str(other), str(to)], capture_output=True, text=True)
        go_on.set()
        assert second.returncode == 2
        assert second.stderr.startswith(f"error: {to}: another run is writing here")
        assert first.wait(60) == 0
    assert files_of(to) == files_of(documents)
