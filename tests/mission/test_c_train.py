"""The mission, train: a test for each row of docs/mission.md, by public commands and API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import call
from support.training import write_labelled

from tokenfeed.tools import train

SMALL = ("--model", "support.training:one_layer_model", "--device", "cpu", "--log-every", 1)
SIZES = ("--sequence-length", 32, "--micro-batch-tokens", 128, "--step-tokens", 256)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("lm") / "shards", "lm", count=150)


def report_of(*words: object) -> dict[str, Any]:
    """The report of a run of `train`, as --json prints it."""
    report: dict[str, Any] = json.loads(call(train.main, *words, "--json").stdout)
    return report


# ---------- m07 ----------

# ---------- m08 ----------

# ---------- m09 ----------

# ---------- m10 ----------


def test_m10_compile_takes_the_modes_of_torch(
    lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler itself takes minutes here; what it is called with decides."""
    modes: list[str | None] = []

    def compile_module(module: torch.nn.Module, *, dynamic: bool, mode: str | None) -> None:
        modes.append(mode)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    passes: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: passes.append(1))
    words = ("--shards", lm, *SMALL, *SIZES, "--steps", 3)
    plain = report_of(*words, "--run-dir", tmp_path / "plain")
    assert not modes
    for mode in (None, "reduce-overhead", "max-autotune"):
        option = ("--compile", mode) if mode else ("--compile",)
        report = report_of(*words, "--run-dir", tmp_path / str(mode), *option)
        assert modes
        assert set(modes) == {mode}
        assert bool(passes) == (mode is not None)  # a new replay of CUDA graphs
        assert report["loss_last"] == pytest.approx(plain["loss_last"], abs=1e-5)
        modes.clear()
        passes.clear()
    wrong = call(train.main, *words, "--compile", "fast", expect=2).stderr.splitlines()[-1]
    assert "reduce-overhead, max-autotune, got fast" in wrong


# ---------- m11 ----------

# ---------- m12 ----------

# ---------- m13 ----------

# ---------- m14 ----------

_FIRST_IMPORT = """
import os, sys
class Spy:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
            os._exit(0 if sys.stdout.flush() is None else 1)
sys.meta_path.insert(0, Spy())
from tokenfeed.tools.train import main
main()
"""


def test_m14_memory_of_a_gpu_is_not_fragmented(lm: Path, tmp_path: Path) -> None:
    words = ("--shards", lm, *SMALL, *SIZES, "--steps", 3, "--run-dir", tmp_path / "run")
    printed = call(train.main, *words, "--dry-run").stderr
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in printed
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", _FIRST_IMPORT, *map(str, words)]
    for user, seen in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ):
        done = subprocess.run(command, env=plain | user, capture_output=True, text=True)
        assert (done.stdout.strip(), done.returncode) == (seen, 0), done.stderr


# ---------- m15 ----------

# ---------- m16 ----------

# ---------- m17 ----------

# ---------- m18 ----------

# ---------- m19 ----------

# ---------- m20 ----------

# ---------- m21 ----------

# ---------- m36 ----------

# ---------- m37 ----------

# ---------- m38 ----------

# ---------- m39 ----------


def driver_with(name: str, capability: tuple[int, int], cuda: int) -> Any:
    """The module pynvml of a machine with one card."""
    return SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda handle: name,
        nvmlDeviceGetCudaComputeCapability=lambda handle: capability,
        nvmlSystemGetCudaDriverVersion=lambda: cuda,
    )


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "wheel"),
    [
        ("Tesla T4", (7, 5), 12020, "cu126"),
        ("NVIDIA H100", (9, 0), 13000, "cu130"),
        ("Tesla V100-SXM2-16GB", (7, 0), 13000, "cu126"),
        ("Tesla P100-PCIE-16GB", (6, 0), 12040, "cu126"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 12080, "cu128"),
        ("Tesla K80", (3, 7), 11040, None),
    ],
)
def test_m39_a_gpu_that_torch_cannot_use_is_named(
    name: str,
    capability: tuple[int, int],
    cuda: int,
    wheel: str | None,
    lm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver_with(name, capability, cuda))
    monkeypatch.setattr(torch.version, "cuda", None)
    words = ("--shards", lm, *SMALL, *SIZES, "--steps", 2, "--run-dir", tmp_path / "run")
    printed = call(train.main, *words, "--device", "auto").stderr.splitlines()
    line = next(line for line in printed if name in line)
    assert "is built without CUDA" in line
    assert (f"https://download.pytorch.org/whl/{wheel}`" in line) == (wheel is not None)
    assert any("on cpu" in line for line in printed)  # and the run has gone on
    assert (tmp_path / "run" / "report.json").exists()
    refused = call(train.main, *words, "--device", "cuda", expect=2).stderr.splitlines()[-1]
    assert refused.startswith("error: `--device`=cuda: there is a ")


def test_m39_a_gpu_without_kernels_in_the_wheel_is_named(
    lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver_with("Tesla V100", (7, 0), 13000))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    built_for = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    words = ("--shards", lm, *SMALL, *SIZES, "--steps", 2, "--run-dir", tmp_path / "run")
    printed = call(train.main, *words, "--device", "auto").stderr.splitlines()
    line = next(line for line in printed if "Tesla V100" in line)
    assert "has no kernels for its capability 7.0" in line
    assert "https://download.pytorch.org/whl/cu126`" in line
    assert (tmp_path / "run" / "report.json").exists()
