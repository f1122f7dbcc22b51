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
import torch.nn.functional as F
from support.commands import call
from support.simulated_gpu import simulated_gpu
from support.training import (
    OVERFLOWS,
    SEEN,
    load_state,
    make_head,
    overflowing_model,
    write_labelled,
)

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


def trained(shards: Path, run_dir: Path, *words: object) -> list[dict[str, Any]]:
    """Train with a progress line for each step. Return these lines of metrics.jsonl."""
    SEEN.clear()
    own = ("--log-every", 1, "--num-workers", 0, "--warmup-steps", 0, "--seed", 0)
    call(train.main, "--shards", shards, "--run-dir", run_dir, *own, *words)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "learning_rate" in line]


# ---------- m07 ----------

T4 = ("Tesla T4", (7, 5))


def scaled_loop(batches: list[Any]) -> list[tuple[float, float, bool]]:
    """The loss, the scale and whether the step was skipped, for each step of the loop in torch's
    documentation of `GradScaler`."""
    SEEN.clear()
    torch.manual_seed(0)
    model = overflowing_model(make_head())
    weights = [*model.parameters()]
    wide, narrow = ([w for w in weights if (w.dim() >= 2) == is_wide] for is_wide in (True, False))
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    scaler, found = torch.amp.GradScaler("cpu"), []
    for batch in batches:
        targets = int((batch.targets != -100).sum())
        with torch.autocast("cpu", torch.float16):
            logits_BTV = model(batch)
            loss = F.cross_entropy(
                logits_BTV.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
            )
        before, first = scaler.get_scale(), weights[0].detach().clone()
        scaler.scale(loss / 512).backward()
        scaler.unscale_(optimizer)
        for weight in weights:
            assert weight.grad is not None
            weight.grad *= 512 / targets
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = torch.equal(first, weights[0])
        assert skipped == (scaler.get_scale() < before)
        found.append((loss.item() / targets, scaler.get_scale(), skipped))
    return found


def test_m07_fp16_where_bf16_is_not_native(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "lm", count=300)
    chosen = {(6, 1): "fp32", (7, 0): "fp16", (7, 5): "fp16", (8, 0): "bf16", (9, 0): "bf16"}
    small = ("--model", "support.training:one_layer_model", "--dry-run", "--num-workers", 0)
    for capability, name in chosen.items():
        with simulated_gpu("a GPU", capability):
            said = call(train.main, "--shards", shards, *small).stderr
        reason = "compute capability " + ".".join(map(str, capability))
        assert f"precision: {name} ({reason}" in said
        assert ("TF32" in said) == (capability >= (8, 0))
    assert "precision: fp32 (cpu)" in call(train.main, "--shards", shards, *small).stderr

    steps = ("--steps", 200, "--schedule", "constant", "--clip-norm", 0.5, "--learning-rate", 1e-4)
    sizes = ("--sequence-length", 32, "--micro-batch-tokens", 512, "--step-tokens", 512)
    own = ("--model", "support.training:overflowing_model", *steps, *sizes, "--save-every", 200)
    lines = trained(shards, tmp_path / "cpu", *own, "--device", "cpu", "--precision", "fp16")
    batches = [*SEEN]
    with simulated_gpu(*T4):
        on_t4 = trained(shards, tmp_path / "t4", *own)
    expected = scaled_loop(batches)
    assert len(expected) == 200
    for run in (lines, on_t4):
        for line, (loss, scale, skipped) in zip(run, expected, strict=True):
            assert line["loss_scale"] == scale
            assert bool(line.get("skipped_steps")) == skipped == (line["step"] in OVERFLOWS)
            assert skipped or line["loss"] == pytest.approx(loss, rel=1e-5)
    report = json.loads((tmp_path / "t4" / "report.json").read_text())
    assert (report["skipped_steps"], report["loss_scale"]) == (7, 65536 / 2**7)

    own = ("--model", "support.training:overflowing_model", "--schedule", "constant", *sizes)
    own += ("--precision", "fp16", "--device", "cpu")
    whole = trained(shards, tmp_path / "whole", *own, "--steps", 12)
    trained(shards, tmp_path / "parts", *own, "--steps", 8)
    said = call(train.main, "--resume", "--run-dir", tmp_path / "parts", "--steps", 12)
    assert "1 skipped | loss scale 4,096" in said.stderr
    states = [load_state(tmp_path / name, 12) for name in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert {"precision.scale", "precision.growth", "precision.skips"} <= states[0].keys()
    assert whole[-1]["loss_scale"] == 4096


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
