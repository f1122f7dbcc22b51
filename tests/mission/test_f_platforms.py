"""The mission, platforms: a test for each row of docs/mission.md, by public commands and API."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm
from support.commands import SMALL, run
from support.data_sets import WriteDataset
from support.other_systems import EVERY_MODULE, FORGET, LIKE_WINDOWS, RUN
from support.training import write_counting

from tokenfeed import Manifest

ROOT = Path(__file__).parents[2]

# ---------- m31 ----------


def losses_of(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_m31_several_ranks(tmp_path: Path, write_dataset: WriteDataset) -> None:
    # 31 rows of 4 to 39 tokens, which two ranks cannot share evenly.
    shards = write_counting(write_dataset, tmp_path / "shards", rows=31, validation_rows=9)
    words: list[object] = [
        *("--shards", shards, "--model", "support.training:double_model", "--device", "cpu"),
        *("--epochs", 2, "--batching", "padded", "--sequence-length", 40, "--log-every", 1),
        *("--micro-batch-tokens", 80, "--step-tokens", 160, "--json"),
    ]
    ranks: list[object] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    reports: dict[str, dict[str, Any]] = {}
    with warm.serve_commands(tmp_path / "bin"):
        own = [*ranks, "--no-python", tmp_path / "bin" / "train", *words]
        for name, command in {
            "alone": ["-m", "tokenfeed.tools.train", *words],
            "replicas": own,
            "shards of the model": [*own, "--shard-model"],
        }.items():
            ended = warm.run([*command, "--run-dir", tmp_path / name])
            assert ended.returncode == 0, ended.stderr
            (printed,) = ended.stdout.splitlines()  # by rank 0 alone
            reports[name] = json.loads(printed)
            steps = re.findall(r"^step +(\d+)/\d+ \| loss", ended.stderr, re.MULTILINE)
            assert [int(step) for step in steps] == list(range(1, reports[name]["steps"] + 1))

    def files(name: str) -> set[str]:
        return {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.*")}

    last = f"checkpoints/step-{reports['alone']['steps']:08d}"
    assert files("replicas") == files("alone")
    assert files("shards of the model") == files("alone") | {f"{last}/state-1.safetensors"}
    for name in ("replicas", "shards of the model"):  # every row once an epoch, and no more steps
        assert (tmp_path / name / last).is_dir()
        assert reports[name]["tokens"] == reports["alone"]["tokens"]
        assert reports[name]["stall"]["world_size"] == 2
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)


# ---------- m32 ----------

ON_WINDOWS = (
    FORGET
    + LIKE_WINDOWS
    + EVERY_MODULE
    + RUN
    + """
from tokenfeed import Padded, ShardLoader
from tokenfeed.tools.pretokenizing import runner
runner.is_small = lambda units: False  # so that workers start for few texts
corpus, out, folder, plain = sys.argv[1:]
run("pretokenize", corpus, out, "--tokenizer", plain, "--workers", "2", "--shard-size", "20KB")
with ShardLoader(out, batching=Padded(512), epochs=1, num_workers=0) as loader:
    print("tokens", sum(batch.num_tokens for batch in loader))
try:
    ShardLoader(out, batching=Padded(512), num_workers=2)
except ValueError as error:
    print(error)
words = "--model words --sequence-length 32 --micro-batch-tokens 128 --step-tokens 256 --steps 4"
run("train", "--shards", out, "--run-dir", folder, *words.split(), "--save-every", "2")
"""
)


@pytest.mark.slow
def test_m32_same_script_without_a_gpu_and_on_windows(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """What Windows lacks is hidden: locks and limits of POSIX, fork, shared memory, signals."""
    done = warm.run(["-c", ON_WINDOWS, corpus, tmp_path / "out", tmp_path / "run", tokenizer])
    assert done.returncode == 0, done.stderr
    assert "`num_workers`=2: loader workers cannot run on Windows" in done.stdout
    assert "trained  4 steps" in done.stdout
    run(corpus, tmp_path / "linux", "--tokenizer", tokenizer, "--shard-size", "20KB")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "linux")
    tokens = Manifest.read(tmp_path / "out").splits["train"].tokens
    assert f"tokens {tokens}" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert "windows-latest" in workflow["jobs"]["platforms"]["strategy"]["matrix"]["os"]
    limits = " ".join((ROOT / "docs/limits.md").read_text().split())
    assert "No test has run on Windows" in limits


def shards_of(out: Path) -> list[tuple[str, str, str]]:
    """The shards of a data set with their checksums."""
    splits = Manifest.read(out).splits
    return [(name, shard.file, shard.xxh3) for name in splits for shard in splits[name].shards]


NOTEBOOK = """
import json, os, sys
from types import ModuleType

display = sys.modules["IPython.display"] = ModuleType("IPython.display")
display.HTML = lambda page: print("shown:", len(page), "<svg" in page or "&lt;svg" in page)
notebook, sys.executable, drive = sys.argv[1:]

synced, opened = os.fsync, os.open
def fsync(descriptor):  # a mounted drive has no locks, no links, and syncs no folders
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        raise OSError(22, "Invalid argument")
def link(*paths):
    raise OSError(95, "Operation not supported")
os.fsync, os.link = fsync, link

names = {"__name__": "__main__"}
for cell in json.load(open(notebook))["cells"]:
    if cell["cell_type"] == "code":
        source = "".join(cell["source"]).replace('Path("quickstart")', f"Path({drive!r})")
        exec(compile(source, cell["id"], "exec"), names)
"""
PYTHON = """#!/bin/sh
[ "$1 $2 $3" = "-u -m tokenfeed" ] || exec {python} "$@"
shift 3
echo "train begins"
for wait in $(seq 200); do [ -e {seen} ] || sleep 0.05; done
[ -e {seen} ] || exit 3
exec {commands}/tokenfeed "$@"
"""


def test_m33_notebook_in_colab_and_kaggle(tmp_path: Path) -> None:
    """`train` goes on when its first line was seen: lines appear while it runs."""
    commands, python, seen = tmp_path / "bin", tmp_path / "python", tmp_path / "seen"
    python.write_text(PYTHON.format(python=sys.executable, seen=seen, commands=commands))
    python.chmod(0o755)
    words = ["-c", NOTEBOOK, ROOT / "examples/quickstart.ipynb", python, tmp_path / "drive"]
    pipe, printed = subprocess.PIPE, ""
    with (
        warm.serve_commands(commands, SMALL),
        warm.Popen(words, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            printed += line
            if line == "train begins\n":
                seen.touch()
    assert process.returncode == 0, printed
    assert "No GPU: the notebook goes on on the CPU. To get one, change the runtime" in printed
    assert "trained  20 steps" in printed
    assert re.search(r"^shown: [0-9]{5,} True$", printed, re.MULTILINE)
    assert (tmp_path / "drive/runs/first/report.json").exists()


@pytest.mark.parametrize(
    ("version", "present", "expected"),
    [
        ("2.8.1+cu126", True, "torch 2.8.1+cu126 is too old: tokenfeed needs 2.9 or later"),
        ("2.10.0+cu128", False, "torch==2.10.0+cu128"),
        ("2.9.0", True, ""),
    ],
)
def test_m33_first_cell_installs_into_the_torch_that_is_there(
    version: str, present: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    specs = {"torch": True, "tokenfeed": present}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs[name])
    monkeypatch.setattr(subprocess, "run", lambda words, check: installed.append(words))
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    try:
        exec(source, {})
    except RuntimeError as error:
        installed.append([str(error)])
    assert expected in str(installed)
    assert bool(expected) == bool(installed)
