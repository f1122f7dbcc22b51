"""The mission, keep: a test for each row of docs/mission.md, by public commands and API."""

import functools
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load_file
from support import installed_servers, warm
from support.commands import call
from support.object_server import as_own_process, set_endpoint
from support.processes import eventually

from tokenfeed.pipeline.format.store import open_place
from tokenfeed.tools import train
from tokenfeed.trainer.loop import parts
from tokenfeed.trainer.loop.model_export import load_exported

SETTINGS: dict[str, Any] = {
    "model": "support.training:small_model",
    "steps": 4,
    "save_every": 2,
    "eval_every": 2,
    "log_every": 1,
    "sequence_length": 32,
    "micro_batch_tokens": 128,
    "step_tokens": 128,
    "warmup_steps": 1,
    "schedule": "constant",  # so that rates do not depend on --steps
    "device": "cpu",
}


def words_of(shards: Path, run_dir: Path, settings: dict[str, Any]) -> list[str]:
    """Return the command line of a small run."""
    words = ["--shards", str(shards), "--run-dir", str(run_dir)]
    for name, value in (SETTINGS | settings).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return words


def train_run(
    shards: Path, run_dir: Path, *, expect: int = 0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    return call(train.main, *words_of(shards, run_dir, settings), expect=expect)


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def losses_of(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


# ---------- m28 ----------


def test_m28_checkpoints_with_metadata_and_figures(few_rows: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train_run(few_rows, run_dir, steps=6)
    assert {path.name for path in checkpoint(run_dir, 6).iterdir()} == {
        "checkpoint.json",
        "state-0.safetensors",
    }
    meta = json.loads((checkpoint(run_dir, 6) / "checkpoint.json").read_bytes())["meta"]
    assert (meta["step"], meta["config"]["save_every"]) == (6, 2)
    report, figures = json.loads((run_dir / "report.json").read_bytes()), meta["figures"]
    assert figures["versions"] == report["versions"]
    assert 0 < figures["seconds"] < report["seconds"]
    assert figures["real_tokens_per_s"] > 0
    assert figures["peak_memory_bytes"] > 50_000_000  # more than torch alone
    assert 0 < figures["stall"] < 1
    assert figures["stall"] == pytest.approx(sum(figures["stall_causes"].values()))
    assert "checkpoint" in figures["stall_causes"]

    call(train.main, "--run-dir", run_dir, "--resume", "--steps", 8)
    later = json.loads((checkpoint(run_dir, 8) / "checkpoint.json").read_bytes())["meta"]["figures"]
    assert later["seconds"] > figures["seconds"]  # of both sessions

    damaged = checkpoint(run_dir, 8) / "state-0.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    refused = call(train.main, "--run-dir", run_dir, "--resume", "--steps", 9, expect=1)
    error = refused.stderr.splitlines()[-1]
    assert error.startswith(f"error: {checkpoint(run_dir, 8)}: the checkpoint is damaged")


def test_m28_checkpoint_is_due_after_minutes_without_one(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 60, "save_every": 100, "eval_every": 100, "keep": 100}
    minutes = itertools.count(step=60.0)  # so long a step takes
    monkeypatch.setattr(parts, "monotonic", lambda: next(minutes))
    train_run(few_rows, tmp_path, **settings)
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert 10 <= steps[0] <= 15
    assert all(later - step >= 10 for step, later in itertools.pairwise(steps[:-1]))


# ---------- m29 ----------


def test_m29_compressed_checkpoints(every_task: Path, tmp_path: Path) -> None:
    shards = every_task / "lm"
    plain, small, export = tmp_path / "plain", tmp_path / "small", tmp_path / "export"
    train_run(shards, plain, steps=6)
    train_run(shards, small, compress_checkpoints=True)
    assert not list(plain.rglob("*.zst"))  # off by default
    call(train.main, "--run-dir", small, "--resume", "--steps", 6, "--export", export)
    whole = checkpoint(plain, 6) / "state-0.safetensors"
    file = checkpoint(small, 6) / "state-0.safetensors.zst"
    assert file.stat().st_size < 0.97 * whole.stat().st_size
    content = bytearray(file.read_bytes())
    (tmp_path / "again.safetensors").write_bytes(
        zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(content)
    )
    saved, expected = load_file(tmp_path / "again.safetensors"), load_file(whole)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)  # through a resume
    assert {path.name for path in (small / "checkpoints").iterdir()} == {
        path.name for path in (plain / "checkpoints").iterdir()
    }
    assert not list(export.rglob("*.zst"))
    load_exported(export)

    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused = call(train.main, "--run-dir", small, "--resume", "--steps", 7, expect=1)
    error = refused.stderr.splitlines()[-1]
    assert error.startswith(f"error: {file.parent}: the checkpoint is damaged ({file.name} fails")


# ---------- m30 ----------


def files_in(run_dir: Path) -> dict[str, bytes]:
    paths = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


def assert_same_run(one: Path, other: Path, step: int) -> None:
    assert losses_of(one) == losses_of(other)
    weights, expected = (
        load_file(checkpoint(run_dir, step) / "state-0.safetensors") for run_dir in (one, other)
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_m30_copied_elsewhere_while_training_goes_on(few_rows: Path, tmp_path: Path) -> None:
    whole, run_dir, copy = tmp_path / "whole", tmp_path / "run", tmp_path / "drive" / "copy"
    train_run(few_rows, whole, steps=8)
    settings: dict[str, Any] = {"upload": copy, "resume": "auto", "keep": 1}
    train_run(few_rows, run_dir, **settings)
    shutil.rmtree(run_dir)  # another machine
    resumed = train_run(few_rows, run_dir, **settings, steps=8)
    assert f"downloading step 4 from {copy}" in resumed.stderr
    assert f"uploaded to {copy}" in resumed.stderr
    assert_same_run(run_dir, whole, 8)
    assert files_in(copy) == files_in(run_dir)  # keeps what --keep keeps, the best, and the report
    best = json.loads((checkpoint(copy, 8) / "checkpoint.json").read_bytes())["meta"]["best"]
    steps = {8, best["step"]}
    assert {path.name for path in checkpoint(copy, 8).parent.iterdir()} == {
        f"step-{step:08d}" for step in steps
    }

    shutil.rmtree(copy)
    copy.write_text("nothing can be written here")
    warned = train_run(few_rows, run_dir, **settings, steps=10)
    assert f"the upload to {copy} failed (" in warned.stderr
    assert checkpoint(run_dir, 10).is_dir()


def test_m30_phases_go_on_from_their_copies(few_rows: Path, tmp_path: Path) -> None:
    run_dir, whole, copy = tmp_path / "run", tmp_path / "whole", tmp_path / "copy"
    one = {"name": "one", "steps": 4}
    two = {"name": "two", "steps": 2, "trainable": "blocks.*"}
    file = tmp_path / "phases.yaml"
    common = {name: value for name, value in SETTINGS.items() if name != "steps"}
    file.write_text(json.dumps(common | {"shards": str(few_rows), "phases": [one, two]}))

    def train_phases(run_dir: Path, *words: object) -> str:
        return call(train.main, "--config", file, "--run-dir", run_dir, *words).stderr

    train_phases(whole)
    train_phases(run_dir, "--upload", copy, "--phase", "one")
    shutil.rmtree(run_dir)
    resumed = train_phases(run_dir, "--upload", copy)
    assert "phase 1 (one) is finished" in resumed
    assert_same_run(run_dir / "phase-2-two", whole / "phase-2-two", 2)
    copied, kept = files_in(copy), files_in(run_dir)
    assert copied["report.json"] == kept["report.json"]
    assert {name for name in copied if "phase-2-two" in name} == {
        name for name in kept if "phase-2-two" in name
    }


@pytest.mark.slow
def test_m30_copied_to_a_bucket_and_killed(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    whole, run_dir, server = (tmp_path / name for name in ("whole", "run", "server"))
    server.mkdir()
    with installed_servers.seaweed(server) as port:
        set_endpoint(monkeypatch, port)
        address = f"s3://{installed_servers.BUCKET}/runs/1"
        settings: dict[str, Any] = {"upload": address, "resume": "auto"}
        words = words_of(few_rows, run_dir, settings | {"steps": 100_000})
        with warm.Popen(["-m", "tokenfeed.tools.train", *words], stderr=subprocess.DEVNULL) as run:
            names = functools.partial(open_place(address).names, "checkpoints")
            assert eventually(lambda: len(names()) > 1)
            run.kill()
        shutil.rmtree(run_dir)
        last = max(int(name.removeprefix("step-")) for name in names()) + 4
        resumed = train_run(few_rows, run_dir, **settings, steps=last)
        assert f"from {address}" in resumed.stderr
        train_run(few_rows, whole, steps=last)
        assert_same_run(run_dir, whole, last)
