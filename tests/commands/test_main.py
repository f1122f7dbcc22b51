"""The command `tokenfeed` runs every other command, and prints what a bug report needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import ROOT, warm
from support.commands import call

from tokenfeed.pipeline.feeding import cores
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
    found = tokenfeed("doctor", "--data-set", "out", "--url", "out", "--json", cwd=tmp_path)
    facts = json.loads(found.stdout)
    assert facts["address"]["out"]["manifest.json"].endswith(" bytes")
    assert {"open files", "locked memory", "memory of the container"} <= facts["limits"].keys()
    assert {"cores", "disk, here", "shared memory"} <= facts["machine"].keys()
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


@pytest.mark.parametrize(
    ("words", "test", "reason"),
    [
        (("--data-set", "nothing"), "loader", "nothing/manifest.json: not found"),
        (("--url", "s3://user:pass@x/y?sig=1"), "address", "contains a user"),
        (("--url", "http://127.0.0.1:9/x"), "address", "127.0.0.1:9"),
    ],
)
def test_doctor_fails_if_address_or_data_set_cannot_be_read(
    words: tuple[str, str], test: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENFEED_REMOTE_TIMEOUT", "1")
    found = call(doctor.main, *words, "--json", expect=1)
    ((_, value),) = json.loads(found.stdout)[test].items()
    assert reason in value["error"]
    assert "pass" not in found.stdout


def test_doctor_finds_limits_of_nested_control_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text("0::/user/job\n")
    for group, limit in (("", "max"), ("user", "8589934592"), ("user/job", "max")):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "memory.max").write_text(limit)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    limits = doctor._limits()
    assert limits["memory of the container"] == "8589934592"
    assert limits["CPU time of the container"] == "unlimited"


def test_issue_templates_ask_for_output_of_doctor() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug.yml", "question.yml"):
        form = yaml.safe_load((folder / name).read_text())
        asked = {field["id"]: field for field in form["body"] if "id" in field}
        assert "tokenfeed doctor --json" in asked["doctor"]["attributes"]["description"]
        assert asked["doctor"]["validations"]["required"] == (name == "bug.yml")


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
