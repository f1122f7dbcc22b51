"""Options of `tokenfeed stall`: every error is one line on stderr, and exits with 2."""

from pathlib import Path

import pytest
from support.commands import call

from tokenfeed.tools import stall

LAUNCHERS = {
    "torchrun --nproc-per-node 2 train.py --lr 1": (
        "torchrun --nproc-per-node 2 -m tokenfeed stall train.py --lr 1"
    ),
    "/usr/bin/torchrun --standalone -m package.train --lr 1": (
        "torchrun --standalone -m tokenfeed stall -m package.train --lr 1"
    ),
    "-m torch.distributed.run --standalone train.py": (
        "torchrun --standalone -m tokenfeed stall train.py"
    ),
    "accelerate launch --num_processes 2 train.py --lr 1": (
        "accelerate launch --num_processes 2 -m tokenfeed stall train.py --lr 1"
    ),
    "-m accelerate.commands.launch train.py": "accelerate launch -m tokenfeed stall train.py",
    "deepspeed --num_gpus 2 train.py": "deepspeed --num_gpus 2 --module tokenfeed stall train.py",
    "python train.py --lr 1": "tokenfeed stall train.py --lr 1",
    "python3.12 -m package.train": "tokenfeed stall -m package.train",
    "srun -n 2 python train.py": "srun -n 2 python -m tokenfeed stall train.py",
    "mpirun -np 2 python3 train.py": "mpirun -np 2 python3 -m tokenfeed stall train.py",
}


@pytest.mark.parametrize("words", LAUNCHERS)
def test_launcher_is_refused_with_the_right_command(words: str) -> None:
    (line,) = call(stall.main, *words.split(), expect=2).stderr.splitlines()
    assert line.endswith(f"`{LAUNCHERS[words]}`.")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "`SCRIPT` is missing"),
        ("--steps 1:5", "`SCRIPT` is missing"),
        ("-m", "`-m`: expected the name of a module"),
        ("nothing.py", "nothing.py: no such file"),
        ("folder", "folder: is a folder. Expected a Python script"),
        ("book.ipynb", "book.ipynb: is a notebook. Measure a cell by `with tokenfeed.watch():`"),
        ("--out x.py x.py", "`--out x.py`: is not a folder"),
        ("--out x.py/a/b x.py", "`--out x.py/a/b`: cannot be written"),
        ("--out /proc/nothing x.py", "`--out /proc/nothing`: cannot be written"),
        ("--steps 5 x.py", "`--steps 5`: expected A:B"),
        ("--steps 5:5 x.py", "with A < B"),
        ("--steps a:b x.py", "expected A:B"),
        ("--fail-above ten x.py", "`--fail-above ten`: expected a share such as 10%"),
        ("--fail-above 150% x.py", "expected a share"),
        ("--fail-above nan x.py", "expected a share"),
        ("--ideal-loader x x.py", "--ideal-loader"),
        ("--ideal-loader -1 x.py", "--ideal-loader"),
        ("--ideal-loader 5 --steps 1:5 x.py", "leave out `--steps`"),
        ("--outt d x.py", "Unknown option `--outt`"),
        ("--out", "--out"),
    ],
)
def test_wrong_option_is_refused_in_one_line(
    words: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("x.py", "book.ipynb"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    (line,) = call(stall.main, *words.split(), expect=2).stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_help_names_every_option() -> None:
    found = call(stall.main, "--help").stdout
    for option in ("--steps A:B", "--out DIR", "--fail-above SHARE", "--ideal-loader N"):
        assert option in found
    assert "SCRIPT" in found
