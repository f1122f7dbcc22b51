"""The command `tokenfeed` runs every other command, and prints what a bug report needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, warm
from support.commands import call

from tokenfeed.tools import doctor


def tokenfeed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "tokenfeed", *words], cwd=cwd)


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
    assert {"open files", "locked memory", "memory of the container"} <= facts["limits"].keys()
    assert {"cores", "disk, here", "shared memory"} <= facts["machine"].keys()
    assert facts["loader"]["out"]["M tokens/s"] > 0
    assert facts["versions"]["tokenfeed"] == tokenfeed("--version", cwd=tmp_path).stdout.split()[1]
    for name in ("train", "report"):
        assert f"usage: {name}" in tokenfeed(name, "--help", cwd=tmp_path).stdout


def test_tokenfeed_names_its_commands(tmp_path: Path) -> None:
    listed = tokenfeed("--help", cwd=tmp_path).stdout
    wrong, near = tokenfeed("xyz", cwd=tmp_path), tokenfeed("tokenize", cwd=tmp_path)
    for name in ("pretokenize", "train", "report", "shards", "stall", "doctor"):
        assert name in listed
        assert name in wrong.stderr
    assert "Did you mean pretokenize?" in near.stderr
    for failed in (wrong, near):
        assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("data_set", "reason"),
    [
        ("nothing", "nothing/manifest.json: not found"),
        ("http://127.0.0.1:9/x?sig=pass", "127.0.0.1:9"),
    ],
)
def test_doctor_fails_if_data_set_cannot_be_read(
    data_set: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENFEED_REMOTE_TIMEOUT", "1")
    found = call(doctor.main, "--data-set", data_set, "--json", expect=1)
    ((_, value),) = json.loads(found.stdout)["loader"].items()
    assert reason in value["error"]
    assert "pass" not in found.stdout


def test_cat_into_a_closed_pipe_is_quiet(documents: Path) -> None:
    command = (
        f"'{sys.executable}' -m tokenfeed.tools.shards cat '{documents}' --rows 90 | head -n 1"
    )
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith("--- train row 0 ")
    assert result.stderr == ""
