"""The command `tokenfeed` runs every other command, and prints what a bug report needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT


def tokenfeed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenfeed", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_tokenfeed_runs_every_command(tmp_path: Path) -> None:
    made = tokenfeed(
        "pretokenize", str(ROOT / "docs/how"), "out", "--vocab-size", "300", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    shown = tokenfeed("shards", "inspect", "out", "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["splits"]["train"]["shards"]
    found = tokenfeed("doctor", "--data-set", "out", "--json", cwd=tmp_path)
    facts = json.loads(found.stdout)
    assert facts["loader"]["out"]["M tokens/s"] > 0
    assert facts["versions"]["tokenfeed"] == tokenfeed("--version", cwd=tmp_path).stdout.split()[1]
    for name in ("train", "report"):
        assert f"usage: {name}" in tokenfeed(name, "--help", cwd=tmp_path).stdout


def test_tokenfeed_names_its_commands(tmp_path: Path) -> None:
    listed = tokenfeed("--help", cwd=tmp_path).stdout
    wrong = tokenfeed("tokenize", cwd=tmp_path)
    for name in ("pretokenize", "train", "report", "shards", "doctor"):
        assert name in listed
        assert name in wrong.stderr
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_doctor_fails_if_the_data_set_cannot_be_read(tmp_path: Path) -> None:
    found = tokenfeed("doctor", "--data-set", "nothing", "--json", cwd=tmp_path)
    assert found.returncode == 1
    assert (
        "nothing/manifest.json: not found" in json.loads(found.stdout)["loader"]["nothing"]["error"]
    )


def test_an_interruption_of_the_imports_of_a_command_is_one_line() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'psutil':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "sys.argv = ['tokenfeed', 'doctor']\n"
        "from tokenfeed.tools.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")
