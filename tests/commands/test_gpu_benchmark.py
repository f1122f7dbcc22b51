"""benchmarks/gpu/, as far as it goes without a GPU: what was not measured is not claimed."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT, warm
from support.training import write_labelled

from benchmarks.gpu import __main__ as gpu_benchmark
from benchmarks.gpu.data import TASKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu` is for this machine")


def run_gpu(*options: object) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "benchmarks.gpu", *options], cwd=ROOT, timeout=600)


def test_without_a_gpu_one_line_says_that_nothing_was_measured() -> None:
    ended = run_gpu()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("no CUDA device")
    assert ended.stderr.count("\n") == 1


def test_what_the_sanitizer_watches_runs(tmp_path: Path) -> None:
    write_labelled(tmp_path / "lm", "lm")
    command = ["-m", "benchmarks.gpu.case", "races", tmp_path, "--device", "cpu", "--small"]
    ended = warm.run(command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["batches"] > 0


def outcomes(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "gpu-cpu.json").read_text())
    assert found["environment"]["device"] == "cpu"
    assert {"commit", "date", "torch", "cpu"} <= set(found["environment"])
    for entry in found["results"]:
        assert ("tokens_per_s" in entry) == (entry["outcome"] == "passed")
    return {entry["part"]: entry["outcome"] for entry in found["results"]}


@pytest.mark.long
@pytest.mark.slow
def test_parts_that_need_no_gpu_are_measured_and_the_others_skipped(tmp_path: Path) -> None:
    ended = run_gpu("--device", "cpu", "--small", "--results", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = outcomes(tmp_path)
    measured = {part for part, outcome in found.items() if outcome == "passed"}
    skipped = {part for part, outcome in found.items() if outcome == "skipped: no CUDA"}
    assert skipped | measured == set(found)
    assert {"tests", "races", *(f"waits {task}" for task in TASKS)} <= skipped
    assert {"loader", "speed", *(f"train {task}" for task in TASKS)} <= measured


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_others_are_kept(tmp_path: Path) -> None:
    for task in TASKS:  # damaged, so it is not made
        (tmp_path / task).mkdir()
        (tmp_path / task / "manifest.json").write_text("{}")
    options = ("--device", "cpu", "--small", "--results", tmp_path, "--data", tmp_path)
    ended = run_gpu(*options, "--only", "train tag", "races")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "failed: train tag"
    found = outcomes(tmp_path)
    assert found["races"] == "skipped: no CUDA"
    assert re.fullmatch(r"failed: .*tag/manifest\.json.*", found["train tag"])


LOOP = {
    "loop": [8192, 2048],
    "tokens_per_s": 50_000,
    "stall": 0.201,
    "interval": [0.19, 0.22],
    "unmeasured": None,
    "main_cause": "data",
    "expected_cause": "data",
    "predicted_gain": 1.25,
    "trace_idle": 0.31,
    "trace_idle_at_usual_speed": 0.205,
}


def test_only_stall_runs_checks_and_loops_and_writes_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: dict[str, dict[str, str]] = {}

    def run(
        command: list[str], environment: dict[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        ran[f"{command[3]} {environment}"] = environment
        if command[3] == "query":
            return subprocess.CompletedProcess(command, 1, "", "RuntimeError: no GPU")
        found: dict[str, object] = {"slower": 0.01}
        if command[2] == "benchmarks.stall.case":
            found = LOOP | ({"tokens_per_s": 62_000} if command[3] == "none" else {})
            if command[3] == "collector":
                found |= {"interval": None, "unmeasured": "the tracer failed: CUPTI is taken"}
        return subprocess.CompletedProcess(command, 0, json.dumps(found) + "\n", "")

    properties = SimpleNamespace(name="Some GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(gpu_benchmark, "run", run)
    monkeypatch.setattr("sys.argv", ["gpu", "--only", "stall", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed: stall query"):
        gpu_benchmark.main()
    written = json.loads((tmp_path / "gpu-some-gpu.json").read_text())
    assert written["environment"]["device"] == "Some GPU"
    assert {"commit", "torch", "cuda", "date"} <= written["environment"].keys()
    parts = {entry["part"]: entry for entry in written["results"]}
    assert len(parts) == 5 + 2 + 11 + 4
    assert parts["stall query"]["outcome"] == "failed: RuntimeError: no GPU"
    assert parts["stall slow loader"]["measured_gain"] == pytest.approx(1.24)
    teardown = [each["TEARDOWN_CUPTI"] for each in ran.values() if each]
    assert sorted(teardown) == ["0", "1"]
    printed = capsys.readouterr().out
    assert "fetched late" in printed
    assert "19.0% to 22.0%" in printed
    assert "the tracer failed: CUPTI is taken" in printed
