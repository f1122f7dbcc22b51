"""The mission, train: a test for each row of docs/mission.md, by public commands and API."""

import contextlib
import gzip
import importlib.resources
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file
from support import PROGRAMS, hub_models, training, warm
from support.commands import call
from support.processes import eventually
from support.simulated_gpu import simulated_gpu
from support.training import (
    LONGEST,
    OVERFLOWS,
    SEEN,
    load_state,
    make_head,
    one_layer_model,
    overflowing_model,
    read_metrics,
    write_labelled,
)
from tokenizers import Tokenizer

from tokenfeed import Manifest
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.tools import pretokenize, report, train

SMALL = ("--model", "support.training:one_layer_model", "--device", "cpu", "--log-every", 1)
SIZES = ("--sequence-length", 32, "--micro-batch-tokens", 128, "--step-tokens", 256)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("lm") / "shards", "lm", count=150)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("classes") / "shards", "classify", count=150)


@pytest.fixture(scope="module")
def many_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("many") / "shards", "classify", count=13_000)


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
        scaler.scale(loss / 128).backward()
        scaler.unscale_(optimizer)
        for weight in weights:
            assert weight.grad is not None
            weight.grad *= 128 / targets
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
    sizes = ("--sequence-length", 32, "--micro-batch-tokens", 128, "--step-tokens", 128)
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
def operators_of(*words: object) -> dict[str, int]:
    """How often a run of `train` called each operator of torch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call(train.main, *words)
    return {event.key: event.count for event in seen.key_averages()}


def test_m08_steps_accumulate_clip_unscaled_gradients_and_are_fused(
    lm: Path, tmp_path: Path
) -> None:
    """With a large epsilon, AdamW moves a weight in proportion to its gradient. So the weights of
    the first step show by how much it was clipped."""
    model = ("--model", "support.training:one_layer_model", "--sequence-length", 32)
    model += ("--device", "cpu", "--epsilon", 1.0, "--step-tokens", 512)
    cases: dict[str, tuple[object, ...]] = {
        "whole": ("--micro-batch-tokens", 512),
        "parts": ("--micro-batch-tokens", 128),
        "clipped": ("--micro-batch-tokens", 512, "--clip-norm", 0.01),
        "fp16": ("--micro-batch-tokens", 128, "--precision", "fp16", "--clip-norm", 0.01),
    }
    norms, moved = {}, {}
    for name, own in cases.items():
        folder, like = tmp_path / name, (*model, *own, "--weight-decay", 0.0)
        norms[name] = trained(lm, folder, *like, "--steps", 1)[0]["gradient_norm"]
        torch.manual_seed(0)
        begun, ended = one_layer_model(make_head()).state_dict(), load_state(folder, 1)
        flat = [(ended[f"model.{each}"] - begun[each]).flatten() for each in begun]
        moved[name] = torch.cat(flat)
    assert norms["whole"] == pytest.approx(norms["parts"], rel=1e-4)
    assert norms["whole"] == pytest.approx(norms["fp16"], rel=1e-2)
    assert torch.allclose(moved["whole"], moved["parts"], rtol=1e-3, atol=1e-7)
    share = 0.01 / norms["whole"]
    assert share < 0.1
    assert float(moved["clipped"].norm() / moved["whole"].norm()) == pytest.approx(share, rel=0.1)
    assert float(moved["fp16"].norm() / moved["clipped"].norm()) == pytest.approx(1, rel=1e-2)
    words = ("--shards", lm, *model, "--micro-batch-tokens", 128, "--steps", 3)
    operators = operators_of(*words, "--run-dir", tmp_path / "fused")
    assert operators["aten::_fused_adamw_"] == 3 * 2  # with and without weight decay


# ---------- m09 ----------
def test_m09_recompute_repeats_forward_passes_and_changes_no_loss(lm: Path, tmp_path: Path) -> None:
    hub = hub_models.save_model(tmp_path / "hub", "CausalLM", "Llama", vocab_size=64)
    words = ("--shards", lm, *SIZES, "--steps", 2, "--log-every", 1, "--device", "cpu")
    attention = "aten::scaled_dot_product_attention"
    for model in ("support.training:dropping_model", f"hf:{hub}"):
        for precision in ("fp32", "fp16"):
            runs = {}
            for option in ((), ("--recompute",)):
                folder = tmp_path / f"{model[:2]}-{precision}{len(option)}"
                own = ("--model", model, "--precision", precision, "--run-dir", folder, *option)
                runs[bool(option)] = operators_of(*words, *own)[attention], folder
            layers = 2
            assert runs[True][0] - runs[False][0] == layers * 2 * 2  # steps of two micro-batches
            for key in ("loss", "gradient_norm"):
                assert read_metrics(runs[True][1], key) == read_metrics(runs[False][1], key)


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


def limited(head: Any) -> torch.nn.Module:
    """A model on a device of `LIMIT["bytes"]`, of which each trained slot takes a part. After
    `LIMIT["passes"]` another program takes half of the memory."""
    model = one_layer_model(head)
    model.register_buffer("passes", torch.zeros(()))

    def check(module: torch.nn.Module, given: Any) -> None:
        if not module.training:
            return
        module.get_buffer("passes").add_(1)
        free = LIMIT["bytes"] / (2 if module.get_buffer("passes") > LIMIT["passes"] else 1)
        if given[0].num_slots * _BYTES_PER_SLOT > free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.register_forward_pre_hook(check)
    return model


LIMIT = {"bytes": 80e9, "passes": 1e9}
_BYTES_PER_SLOT = 1.25e9 / LONGEST
LIMITED = ("--model", f"{__name__}:limited", "--device", "cpu")


@pytest.mark.parametrize("task", ["lm", "complete", "classify", "tag"])
def test_m11_micro_batch_is_found_by_trial_for_every_task(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.tools.train_settings._is_on_gpu", lambda command: True)
    monkeypatch.setitem(LIMIT, "bytes", 24e9)
    shards = write_labelled(tmp_path / "shards", task, count=150)
    words = ("--shards", shards, "--run-dir", tmp_path / "run", *LIMITED, "--steps", 2)
    log = call(train.main, *words).stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    micro = config["micro_batch_tokens"]
    assert f"--micro-batch-tokens {micro}: " in log
    assert micro * _BYTES_PER_SLOT <= 24e9 < 2 * micro * _BYTES_PER_SLOT
    if config.get("step_rows"):
        assert config["step_rows"] == 32  # as many as suit the data, in several micro-batches


def test_m11_run_out_of_memory_goes_on_with_smaller_micro_batches(
    lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMIT, "bytes", 256 * _BYTES_PER_SLOT)
    words = ("--shards", lm, *LIMITED, "--sequence-length", 32, "--step-tokens", 512, "--steps", 9)
    words = (*words, "--save-every", 2, "--log-every", 1, "--eval-every", 4, "--eval-tokens", 9999)
    call(train.main, *words, "--micro-batch-tokens", 128, "--run-dir", tmp_path / "small")
    monkeypatch.setitem(LIMIT, "passes", 11)  # in step 6
    begun = (*words, "--micro-batch-tokens", 256, "--run-dir", tmp_path / "run")
    ended = call(train.main, *begun, expect=2).stderr.splitlines()
    assert ended[-1].startswith("error: `--micro-batch-tokens`=256 needs more memory than there is")
    assert not any("Traceback" in line for line in ended)
    advised = ended[-1].split("`train ")[1].split("`")[0].split()
    assert advised == [
        "--resume",
        "--run-dir",
        str(tmp_path / "run"),
        "--micro-batch-tokens",
        "128",
    ]
    log = call(train.main, *advised).stderr
    assert "micro_batch_tokens was 256, is 128 from now on" in log
    for key in ("loss", "validation_loss"):
        found, expected = (read_metrics(tmp_path / name, key) for name in ("run", "small"))
        assert found == pytest.approx(expected, abs=1e-5)
    # Another step is accepted too, at the border of a step.
    longer = ("--resume", "--run-dir", tmp_path / "run", "--step-tokens", 768, "--steps", 12)
    assert "step_tokens was 512, is 768 from now on" in call(train.main, *longer).stderr
    tokens = read_metrics(tmp_path / "run", "tokens")
    assert tokens[11] - tokens[10] > 512 >= tokens[9] - tokens[8]


# ---------- m12 ----------


def printed_config(*words: object) -> tuple[dict[str, Any], str]:
    """The settings that --print-config prints, and what is logged meanwhile."""
    done = call(train.main, *words, "--print-config")
    return yaml.safe_load(done.stdout), done.stderr


def test_m12_learning_rate_follows_the_batch(lm: Path, classes: Path, tmp_path: Path) -> None:
    labelled = ("--shards", classes, "--device", "cpu")
    own = ("--learning-rate", "2e-5", "--scale-learning-rate")
    config, log = printed_config(*labelled, *own, "sqrt", "--reference-step-rows", 8)
    assert "2.0e-5 x sqrt(32/8) = 4.0e-5" in log
    assert config["learning_rate"] == pytest.approx(4e-5)
    packed = ("--shards", lm, *SMALL, *SIZES)
    config, log = printed_config(*packed, *own, "linear", "--reference-step-tokens", 1024)
    assert "2.0e-5 x 256/1024 = 5.0e-6" in log
    assert config["learning_rate"] == pytest.approx(5e-6)
    # A rate of a preset follows too, and what is printed is scaled once.
    file = tmp_path / "printed.yaml"
    scale = ("--scale-learning-rate", "sqrt", "--reference-step-tokens", 524_288)
    config, log = printed_config(*packed, "--preset", "gpt2", *SIZES, "--model", "tiny", *scale)
    assert config["learning_rate"] == pytest.approx(6e-4 * (256 / 524_288) ** 0.5)
    file.write_text(yaml.safe_dump(config))
    assert printed_config("--config", file)[0]["learning_rate"] == config["learning_rate"]
    # Rates that `train` chooses are scaled already, also for rows that are given, and say so.
    for rows in (8, 32, 512):
        config, log = printed_config(*labelled, "--step-rows", rows, *own[2:], "linear", *scale[2:])
        assert config["learning_rate"] == pytest.approx(1e-3 * (rows / 32) ** 0.5, rel=0.005)
        assert f"1.0e-3 x sqrt({rows}/32)" in log
        assert "--scale-learning-rate linear changes nothing" in log


# ---------- m13 ----------

OF_GPU_FILES = {
    *("precision", "micro_batch_tokens", "step_rows", "num_workers", "prefetch"),
    *("compile", "recompute"),
}


def files_of_presets() -> dict[str, dict[str, Any]]:
    """The presets that are in the package, by name."""
    folder = importlib.resources.files("tokenfeed") / "trainer" / "presets"
    files = {Path(each.name).stem: each.read_text() for each in folder.iterdir()}
    return {name: yaml.safe_load(content) for name, content in files.items()}


def test_m13_settings_by_gpu_and_purpose(lm: Path, classes: Path) -> None:
    files = files_of_presets()
    gpus = {"t4", "v100", "rtx4090", "a100", "h100"}
    assert {*gpus, "test", "production", "gpt2"} <= files.keys()
    for name in gpus:
        assert files[name].keys() <= OF_GPU_FILES
    assert (files["test"]["save_every"], files["production"]["save_every"]) == (200, 500)
    assert files["gpt2"]["model"] == "gpt2"
    plain, _ = printed_config("--shards", classes, "--device", "cpu")
    both, _ = printed_config("--shards", classes, "--device", "cpu", "--preset", "t4,production")
    assert (both["save_every"], both["step_rows"]) == (500, 32)  # the later one wins
    assert both["micro_batch_tokens"] == "auto"
    assert both["num_workers"] == files["t4"]["num_workers"]
    assert (both["model"], both["sequence_length"]) == (plain["model"], plain["sequence_length"])
    turned, _ = printed_config("--shards", lm, "--device", "cpu", "--preset", "production,t4")
    assert (turned["save_every"], turned["step_rows"]) == (500, "auto")


GPUS = [
    ("Tesla T4", (7, 5), 15.8e9, "t4"),
    ("Tesla V100-SXM2-16GB", (7, 0), 16.9e9, "v100"),
    ("NVIDIA GeForce RTX 4090", (8, 9), 25.4e9, "rtx4090"),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 42.3e9, "a100"),
    ("NVIDIA H100 80GB HBM3", (9, 0), 85.0e9, "h100"),
    ("NVIDIA A10", (8, 6), 24.0e9, "rtx4090"),
    ("NVIDIA L4", (8, 9), 23.6e9, "rtx4090"),
    ("NVIDIA GeForce RTX 3090", (8, 6), 25.3e9, "rtx4090"),
    ("NVIDIA GeForce RTX 5090", (12, 0), 34.2e9, "rtx4090"),
    ("NVIDIA H200", (9, 0), 150.0e9, "h100"),
    ("NVIDIA RTX A1000", (8, 6), 8.6e9, "rtx4090"),
    ("Quadro RTX 8000", (7, 5), 51.0e9, "t4"),
    ("Tesla P100-PCIE-16GB", (6, 0), 17.1e9, None),
    (None, None, None, None),
]


@pytest.mark.parametrize(("name", "capability", "memory", "preset"), GPUS)
def test_m13_auto_finds_the_preset_of_the_gpu(
    name: str | None,
    capability: Any,
    memory: Any,
    preset: str | None,
    classes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name is not None:
        major, minor = capability
        gpu = SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    words = ("--shards", classes, "--seed", 3)
    found, log = printed_config(*words, "--preset", "auto")
    expected = preset or "the defaults"
    reason = f"{name}, capability" if name else "there is no GPU"
    assert f"--preset auto: {expected} ({reason}" in log
    if preset:
        settings = files_of_presets()[preset]
        assert found.items() >= settings.items()
    else:
        assert found.get("step_rows") == 32


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
def test_m15_one_line_names_the_attention_kernel_and_why_no_better_one(
    every_task: Path,
) -> None:
    mask = " with a mask"
    old = "memory-efficient kernel of torch{} (flash and variable-length attention need compute {}"
    expected = {
        ("lm", (7, 5), "auto"): old.format("", "capability 8.0, this GPU has 7.5)"),
        ("complete", (7, 5), "auto"): old.format(mask, "capability 8.0, this GPU has 7.5)"),
        ("classify", (7, 0), "auto"): old.format(mask, "capability 8.0, this GPU has 7.0)"),
        ("lm", (8, 0), "auto"): "attention: flash attention, over whole rows",
        ("lm", (8, 0), "fp32"): "(flash attention needs --precision bf16 or fp16)",
        ("complete", (8, 0), "auto"): "attention: variable-length flash attention, version 2",
        ("classify", (8, 6), "auto"): "attention: variable-length flash attention, version 2",
        ("lm", (9, 0), "auto"): "attention: flash attention or cuDNN's, as torch prefers",
        ("complete", (9, 0), "auto"): "version 2 (version 3 needs the module flash_attn_interface",
        ("complete", None, "auto"): "the CPU kernel of torch, one call for each document",
        ("classify", None, "auto"): "the CPU kernel of torch with a mask",
    }
    small = ("--model", "shallow", "--dry-run", "--num-workers", 0, "--sequence-length", 32)
    small += ("--micro-batch-tokens", 128, "--step-tokens", 128)
    for (task, capability, precision), words in expected.items():
        given = ("--shards", every_task / task, *small, "--precision", precision)
        with simulated_gpu("a GPU", capability) if capability else contextlib.nullcontext():
            said = call(train.main, *given).stderr
        lines = [line for line in said.splitlines() if line.startswith("attention: ")]
        assert len(lines) == 1
        assert words in lines[0]


# ---------- m16 ----------
def test_m16_profile_writes_a_trace_and_changes_no_loss(every_task: Path, tmp_path: Path) -> None:
    model = ("--model", "support.training:one_layer_model", "--sequence-length", 32)
    words = ("--shards", every_task / "lm", *model, "--micro-batch-tokens", 128)
    words += ("--step-tokens", 256, "--steps", 6, "--log-every", 1)
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    call(train.main, *words, "--run-dir", plain)
    ended = call(train.main, *words, "--run-dir", traced, "--profile", "3:4")
    for name in ("loss", "gradient_norm", "tokens"):
        assert read_metrics(traced, name) == read_metrics(plain, name)

    path = traced / "trace-3-4.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step#") for event in events) == 2
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}  # counted from 0
    assert any("aten::mm" in event["name"] for event in events)
    for printed in (ended.stdout, call(report.main, traced).stdout):
        assert f"{path}, for https://ui.perfetto.dev" in printed
    assert json.loads((traced / "report.json").read_text())["trace"] == path.name
    assert path.name in (traced / "report.html").read_text()
    assert json.loads((plain / "report.json").read_text())["trace"] is None


# ---------- m17 ----------

PHASES = """
shards: {shards}
model: hf:{model}
steps: 4
warmup_steps: 0
sequence_length: 24
micro_batch_tokens: 192
step_rows: 8
log_every: 1
eval_every: 2
save_every: 2
patience: 0
device: cpu
phases:
  - name: adapters
    lora: 2
    learning_rate: 1e-2
  - name: head
    trainable: 'score*'
    schedule: constant
    learning_rate: 5e-3
  - name: all
    from: best
    learning_rate: 1e-4
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rows with classes, and a model of transformers to learn them."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("hub")
    model = hub_models.save_model(folder / "llama", "CausalLM", "Llama")
    return {"shards": hub_models.write_shards(folder / "rows", "classify"), "model": model}


def written_phases(folder: Path, hub: dict[str, Path]) -> Path:
    path = folder / "phases.yaml"
    path.write_text(PHASES.format(**hub))
    return path


def weights_in(phase: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by their names in transformers."""
    state = load_file(phase / f"checkpoints/step-{step:08d}/state-0.safetensors")
    return {
        name.removeprefix("model.model."): weight
        for name, weight in state.items()
        if name.startswith("model.")
    }


def test_m17_phases_of_one_training(hub: dict[str, Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("--config", written_phases(tmp_path, hub), "--run-dir", run_dir)
    early = call(train.main, *words, "--phase", "head", expect=2).stderr.splitlines()[-1]
    assert "phase 2 (head) starts from phase 1 (adapters), which is not finished" in early
    unknown = call(train.main, *words, "--phase", "4", expect=2).stderr.splitlines()[-1]
    assert "expected a number from 1 to 3, or a name: adapters, head, all" in unknown
    call(train.main, *words, "--phase", 1, "--export", tmp_path / "unused")
    assert not (tmp_path / "unused").exists()  # the last phase exports
    printed = call(train.main, *words, "--json", "--export", tmp_path / "model")
    assert "phase 1 (adapters) is finished" in printed.stderr
    folders = [run_dir / name for name in ("phase-1-adapters", "phase-2-head", "phase-3-all")]
    for phase, folder in zip(("adapters", "head", "all"), folders, strict=True):
        assert f"phase: {phase}\n" in (folder / "config.yaml").read_text()
    assert all("lora_" in name or "score" in name for name in weights_in(folders[0], 4))
    head, everything = weights_in(folders[1], 4), weights_in(folders[2], 4)
    earlier = weights_in(folders[1], 2)
    moved = {name for name in head if not torch.equal(head[name], earlier[name])}
    assert moved == {"score.weight"}
    merged = head["model.layers.0.self_attn.q_proj.weight"]
    given = load_file(hub["model"] / "model.safetensors")
    assert not torch.equal(merged, given["model.layers.0.self_attn.q_proj.weight"])
    assert all(not torch.equal(everything[name], head[name]) for name in head)
    begun = [lines_of(folder)[0]["validation_loss"] for folder in folders[1:]]
    adapters = [line.get("validation_loss") for line in lines_of(folders[0])]
    assert begun[0] == pytest.approx(adapters[-1], rel=1e-5)  # merged
    reports = [json.loads((folder / "report.json").read_bytes()) for folder in folders]
    assert begun[1] == reports[1]["metrics"]["validation"]["loss"]  # the best, not the last
    whole = json.loads(printed.stdout)
    assert whole["finished"]
    assert whole["steps"] == 12
    assert whole["seconds"] == pytest.approx(sum(report["total_seconds"] for report in reports))
    page = (run_dir / "report.html").read_text()
    assert all(f'href="{folder.name}/report.html"' in page for folder in folders)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.num_labels == 3
    again = call(train.main, "--resume", "--run-dir", run_dir).stderr
    assert [
        f"phase {n} ({name}) is finished" in again
        for n, name in enumerate(("adapters", "head", "all"), 1)
    ] == [True] * 3
    assert "step 1/4" not in again


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.slow
def test_m17_phases_killed_twelve_times_equal_an_undisturbed_run(
    hub: dict[str, Path], tmp_path: Path
) -> None:
    program = PROGRAMS / "killed_phases.py"
    done = warm.run([program, written_phases(tmp_path, hub), tmp_path])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"kills": 12, "steps": [12, 12]}


# ---------- m18 ----------


def test_m18_part_of_a_model_is_trained(hub: dict[str, Path], tmp_path: Path) -> None:
    words = ("--shards", hub["shards"], "--model", f"hf:{hub['model']}", "--steps", 3)
    words += ("--save-every", 1, "--keep", 9, "--device", "cpu", "--learning-rate", 1e-2)
    for name, options, moves in (
        ("head", ("--trainable", "score*"), {"score.weight"}),
        ("layer", ("--trainable", "model.layers.1.mlp.*, score.*"), None),
    ):
        printed = call(train.main, *words, "--run-dir", tmp_path / name, *options).stderr
        before, after = weights_in(tmp_path / name, 1), weights_in(tmp_path / name, 3)
        moved = {key for key in after if not torch.equal(before[key], after[key])}
        wanted = {k for k in after if k.startswith(("model.layers.1.mlp.", "score."))}
        assert moved == (moves or wanted)
        trained = sum(after[key].numel() for key in moved)
        assert f" {trained:,} trained," in printed
        state = load_file(tmp_path / name / "checkpoints/step-00000003/state-0.safetensors")
        assert not any("embed_tokens" in key for key in state if key.startswith("optimizer."))
    both = ("--lora", 2, "--trainable", "score*,model.norm.*")
    call(train.main, *words, "--run-dir", tmp_path / "both", *both)
    both_at = [weights_in(tmp_path / "both", step) for step in (1, 3)]
    assert any("lora_B" in name for name, w in both_at[1].items() if not w.equal(both_at[0][name]))
    named = {name for name in both_at[1] if "lora_" not in name}
    assert {name.partition(".modules")[0] for name in named} == {"score", "model.norm.weight"}
    all_of_it = call(train.main, *words, "--run-dir", tmp_path / "all").stderr
    assert "all trained" in all_of_it
    wrong = ("--trainable", "socre*", "--run-dir", tmp_path / "wrong")
    line = call(train.main, *words, *wrong, expect=2).stderr.splitlines()[-1]
    assert "no parameter of hf:" in line
    assert "score.weight" in line


# ---------- m19 ----------


def test_m19_a_run_starts_from_the_weights_of_another(
    hub: dict[str, Path], lm: Path, tmp_path: Path
) -> None:
    words = ("--shards", hub["shards"], "--model", f"hf:{hub['model']}", "--device", "cpu")
    words += ("--eval-every", 1, "--warmup-steps", 0)
    lora = ("--lora", 2, "--learning-rate", 1e-2, "--steps", 2, "--export", tmp_path / "model")
    call(train.main, *words, *lora, "--run-dir", tmp_path / "run")
    last = [
        line["validation_loss"] for line in lines_of(tmp_path / "run") if "validation_loss" in line
    ]
    exported = json.loads((tmp_path / "model" / "tokenfeed.json").read_bytes())
    for source, loss in (("run", last[-1]), ("model", exported["metrics"]["loss"])):
        new = ("--run-dir", tmp_path / f"from {source}", "--init-from", tmp_path / source)
        printed = call(train.main, *words, *new, "--steps", 1).stderr
        assert lines_of(tmp_path / f"from {source}")[0]["validation_loss"] == pytest.approx(loss)
        assert "start at random" not in printed
    small = ("--shards", lm, *SIZES, "--device", "cpu", "--steps", 1)
    call(train.main, *small, "--model", "shallow", "--run-dir", tmp_path / "two layers")
    deeper = (*small, "--model", "tiny", "--run-dir", tmp_path / "six layers")
    printed = call(train.main, *deeper, "--init-from", tmp_path / "two layers").stderr
    assert "start at random: blocks.2.attention_in.weight, " in printed
    none = (*small, *SMALL, "--run-dir", tmp_path / "none", "--init-from", tmp_path / "two layers")
    assert "none of its 14 weights" in call(train.main, *none, expect=2).stderr.splitlines()[-1]
    other = ("--run-dir", tmp_path / "other", "--init-from", tmp_path / "two layers")
    line = call(train.main, *words, *other, expect=2).stderr.splitlines()[-1]
    assert "was trained with another tokenizer" in line
    for shards in (lm, hub["shards"]):
        assert Manifest.read(shards).tokenizer.xxh3 in line


# ---------- m20 ----------
def test_m20_prompts_of_several_data_sets_train_by_weight_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {
        "sums": [{"prompt": f"add {n} and 1:", "completion": f"{n + 1}"} for n in range(300)],
        "moods": [{"prompt": f"mood of day {n}:", "completion": "good"} for n in range(300)],
    }
    like: tuple[object, ...] = ()
    for name, rows in tasks.items():
        corpus = tmp_path / f"{name}.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ("--task", "complete", "--validation", 0.2)
        call(pretokenize.main, corpus, tmp_path / name, *own, *like)
        like = ("--tokenizer", tmp_path / name / "tokenizer.json")
    weighted = [f"{tmp_path / 'sums'}=0.7", f"{tmp_path / 'moods'}=0.3"]
    monkeypatch.setattr(training, "OVERFLOWS", set())
    model = ("--model", "support.training:overflowing_model", "--run-dir", tmp_path / "run")
    SEEN.clear()
    found = report_of("--shards", *weighted, "--steps", 40, *SIZES, *model, "--device", "cpu")
    tokens = {"add": 0, "moo": 0}
    tokenizer = Tokenizer.from_file(str(like[1]))
    for batch in SEEN:
        ends = batch.scope.cu_seqlens.tolist()
        for ids in (batch.ids_BT.flatten()[at:end].tolist() for at, end in pairwise(ends)):
            name = tokenizer.decode(ids)[:3]
            tokens[name] = tokens.get(name, 0) + len(ids)
    assert tokens["add"] / (tokens["add"] + tokens["moo"]) == pytest.approx(0.7, abs=0.1)
    metrics = found["metrics"]["validation"]
    losses = [metrics[f"loss/{name}"] for name in ("sums", "moods")]
    assert metrics["loss"] == pytest.approx(0.7 * losses[0] + 0.3 * losses[1])
    assert losses[1] < losses[0]  # the answer is always the same


# ---------- m21 ----------
def test_m21_skipped_steps_are_counted_and_named_and_the_scale_adapts(
    lm: Path, tmp_path: Path
) -> None:
    """The loss of one step is not a number: it is named. Overflows of gradients lower the scale,
    and end a run only when the scale is below 1, where no lower one helps."""
    own = ("--schedule", "constant", "--sequence-length", 32, "--device", "cpu")
    own += ("--micro-batch-tokens", 128, "--step-tokens", 128, "--precision")
    models = ("failing_model", "overflowing_for_25", "overflowing_for_ever")
    failing, for_25, for_ever = (("--model", f"support.training:{name}") for name in models)
    for precision in ("fp32", "fp16"):
        folder = tmp_path / precision
        given = ("--shards", lm, "--run-dir", folder, *failing, *own, precision)
        ended = call(train.main, *given, "--steps", 8, "--log-every", 1)
        assert "8 steps (1 skipped)" in ended.stdout
        named = "step 5 was skipped: its loss or gradients are not finite; its records"
        assert named in ended.stderr
        assert json.loads((folder / "bad-step.jsonl").read_text().splitlines()[0])["record"] >= 0
        assert read_metrics(folder, "skipped_steps") == {5: 1}
    lines = trained(lm, tmp_path / "25", *for_25, *own, "fp16", "--steps", 30)
    assert [line["loss_scale"] for line in lines] == [
        65536 / 2 ** min(step, 25) for step in range(1, 31)
    ]
    given = ("--shards", lm, "--run-dir", tmp_path / "ever", *for_ever, *own, "fp16")
    ended = call(train.main, *given, "--steps", 60, "--log-every", 1, expect=2)
    assert "20 steps in a row, from step 18 on" in ended.stderr
    assert "or take --precision fp32" in ended.stderr


def test_m21_diverging_run_is_named_with_what_to_try(every_task: Path, tmp_path: Path) -> None:
    model = ("--model", "support.training:one_layer_model", "--sequence-length", 32)
    words = ("--shards", every_task / "lm", *model, "--micro-batch-tokens", 128, "--log-every", 1)
    words += ("--step-tokens", 128, "--steps", 30, "--schedule", "constant")
    rates = {"calm": 1e-3, "wild": 5.0}
    for name, rate in rates.items():
        settings = ("--learning-rate", rate, "--warmup-steps", 25, "--run-dir", tmp_path / name)
        ended = call(train.main, *words, *settings)
        losses = [*read_metrics(tmp_path / name, "loss").values()]
        smoothed = [sum(losses[at : at + 3]) / 3 for at in range(len(losses) - 2)]
        is_diverging = smoothed[-1] > 1.2 * min(smoothed)
        assert is_diverging == (name == "wild")
        notes = " ".join(json.loads((tmp_path / name / "report.json").read_text())["notes"])
        for text in (ended.stdout, notes, call(report.main, tmp_path / name).stdout):
            assert ("the run is diverging" in text) == is_diverging
        for option in ("--learning-rate", "--step-tokens", "--clip-norm"):
            assert (option in notes) == is_diverging


# ---------- m36 ----------


@pytest.mark.parametrize(
    ("memory", "rows"), [(12e9, 8), (16e9, 8), (24e9, 16), (40e9, 32), (80e9, 64)]
)
@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_m36_the_step_fills_the_gpu(
    memory: float,
    rows: int,
    unit: str,
    many_classes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LIMIT, "bytes", memory)
    words = ("--shards", many_classes, "--run-dir", tmp_path / "run", "--device", "cpu")
    size = (f"--step-{unit}", "auto", "--model", f"{__name__}:limited")
    log = call(train.main, *words, *size, "--steps", 2).stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    step = config[f"step_{unit}"]
    slots = step if unit == "tokens" else step * LONGEST
    assert slots * _BYTES_PER_SLOT <= memory
    assert rows * LONGEST <= slots < 2 * rows * LONGEST
    assert config["micro_batch_tokens"] == slots  # so accumulation is 1
    bound = 256 * LONGEST if unit == "tokens" else 256
    assert f"--step-{unit} {step}: a micro-batch on each device, at most {bound} in all" in log
    in_step = rows if unit == "rows" else slots / mean_tokens(many_classes)
    assert config["learning_rate"] == pytest.approx(1e-3 * (in_step / 32) ** 0.5, rel=0.03)
    assert files_of_presets()["t4"]["step_rows"] == "auto"


def mean_tokens(shards: Path) -> float:
    train_split = json.loads((shards / "manifest.json").read_text())["splits"]["train"]["shards"]
    return sum(s["tokens"] for s in train_split) / sum(s["rows"] for s in train_split)


# ---------- m37 ----------


@pytest.mark.parametrize("task", ["lm", "classify", "score", "tag"])
def test_m37_evaluation_uses_larger_micro_batches(task: Task, tmp_path: Path) -> None:
    """A larger micro-batch changes no metric."""
    shards = write_labelled(tmp_path / "shards", task, count=150)
    words = ("--shards", shards, *SMALL, "--sequence-length", 32, "--micro-batch-tokens", 64)
    words = (*words, "--model", f"{__name__}:watched", "--step-tokens", 64, "--steps", 2)
    found, passes, most = {}, {}, {}
    for name, size in (("1", 64), ("default", None), ("2", 128), ("4", 256)):
        EVALUATED.clear()
        option = () if size is None else ("--eval-micro-batch-tokens", size)
        run_dir = tmp_path / name
        report = report_of(*words, *option, "--eval-tokens", 10**6, "--run-dir", run_dir)
        found[name] = report["metrics"]
        passes[name], most[name] = len(EVALUATED), max(EVALUATED)
    assert passes["1"] > passes["2"] > passes["4"]
    assert passes["default"] == passes["2"]
    assert most["1"] <= 64 < most["2"] <= 128 < most["4"] <= 256
    for name in ("2", "4", "default"):
        for split, metrics in found["1"].items():
            assert found[name][split] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
    wrong = (*words, "--eval-micro-batch-tokens", 16, "--run-dir", tmp_path / "wrong")
    assert "Try 32." in call(train.main, *wrong, expect=2).stderr.splitlines()[-1]


EVALUATED: list[int] = []
"""Slots of each forward pass of an evaluation."""


def watched(head: Any) -> torch.nn.Module:
    """A model that notes the micro-batches of evaluations."""
    model = one_layer_model(head)

    def note(module: torch.nn.Module, given: Any) -> None:
        if not module.training:
            EVALUATED.append(given[0].num_slots)

    model.register_forward_pre_hook(note)
    return model


# ---------- m38 ----------


@pytest.mark.filterwarnings("ignore:`cache_dir` and `cache_bytes` have no effect")
def test_m38_a_run_is_one_yaml_file_that_the_command_line_overrides(
    hub: dict[str, Path], tmp_path: Path
) -> None:
    begun = ("--shards", hub["shards"], "--model", f"hf:{hub['model']}", "--device", "cpu")
    printed = call(train.main, *begun, "--sequence-length", 32, "--print-config").stdout
    settings = yaml.safe_load(printed)
    assert settings["sequence_length"] == 32
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    settings |= {"epsilon": 1e-6, "patience": 3, "eval_tokens": 100, "cache_dir": str(cache)}
    settings |= {"run_dir": str(run_dir), "eval_every": 2, "save_every": 2, "log_every": 1}
    settings |= {"schedule": "constant", "patience": 1_000, "learning_rate": 3e-3}
    file = tmp_path / "edited.yaml"
    file.write_text(yaml.safe_dump(settings))
    words = ["--config", file, "--steps", 100_000, "--export", tmp_path / "model"]
    with warm.Popen(["-m", "tokenfeed.tools.train", *words], stderr=subprocess.PIPE) as process:
        metrics = run_dir / "metrics.jsonl"
        assert eventually(lambda: metrics.exists() and '"step":20,' in metrics.read_text())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    kept = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert kept["steps"] == 100_000
    assert {k: v for k, v in kept.items() if k != "steps"}.items() <= settings.items()
    assert settings.keys() - kept.keys() <= {"export", "resume", "json", "profile"}
    steps = json.loads((run_dir / "report.json").read_bytes())["steps"]
    assert not (tmp_path / "model").exists()
    end = ("--steps", steps + 4, "--patience", 1, "--export", tmp_path / "model")
    report = report_of("--resume", "--run-dir", run_dir, *end)
    assert report["finished"]
    assert {"loss", "accuracy", "macro_f1"} <= report["metrics"]["validation"].keys()
    losses = {line["step"]: line for line in lines_of(run_dir) if "validation_macro_f1" in line}
    best = report["metrics"]["validation"]
    assert best["macro_f1"] > losses[2]["validation_macro_f1"], "no run that improves"
    assert best["macro_f1"] == max(line["validation_macro_f1"] for n, line in losses.items() if n)
    exported = json.loads((tmp_path / "model/tokenfeed.json").read_bytes())
    assert (exported["step"], exported["metrics"]) == (report["best_step"], best)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    weights = weights_in(run_dir, report["best_step"])
    assert all(torch.equal(weights[name], w) for name, w in theirs.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("w5")["input_ids"] == [5]


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
