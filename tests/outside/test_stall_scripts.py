"""Odd scripts under `tokenfeed stall` print and end as under python, and nothing is written."""

from pathlib import Path

import pytest
from support import warm

LOOP = """
import os, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(count=1):
    for _ in range(count):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
SCRIPTS = {
    "deletes itself": (
        "threading.Thread(target=sys.exit, args=(5,)).start()\n"
        "os.chdir('/'); os.remove(__file__); print(step(12)); print('said', file=sys.stderr)\n"
        "sys.exit('bye')",
        "12 steps of SGD",
    ),
    "closures": (
        "rows = torch.randn(32, 8)\n"
        "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(rows).square().mean()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "print([float(optimizer.step(closure)) for _ in range(9)])",
        "9 steps of LBFGS",
    ),
    "generators": (
        "def feed():\n"
        "    try:\n"
        "        yield from DataLoader(torch.randn(40, 8), batch_size=2)\n"
        "    finally:\n"
        "        print('closed')\n"
        "rows = feed(); next(rows); rows.close()\n"
        "print([len(each) for each in feed()], step(8))\n"
        "print(1 / 0)",
        "8 steps of SGD",
    ),
    "two trainings": (
        "print(step(7)); model = nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters()); print(step(20))",
        "27 steps, at last of AdamW, number 2 of 2 optimizers",
    ),
    "syntax": ("print(1", "NOT MEASURED"),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_odd_script_ends_as_with_python(kind: str, tmp_path: Path) -> None:
    text, steps = SCRIPTS[kind]
    folder, script = tmp_path / "cwd", tmp_path / "odd.py"
    folder.mkdir()
    found = []
    for words in ([], ["-m", "tokenfeed.tools.stall"]):
        script.write_text(LOOP + text)
        found.append(warm.run([*words, script], cwd=folder))
    plain, watched = found
    assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
    assert steps in watched.stderr
    if kind == "syntax":
        assert watched.stderr.startswith(f'  File "{script}"')  # no frame of another file
    assert not [*folder.iterdir()]
