"""Scripts under `tokenfeed stall` print and end as under python, and nothing is written.

On a CUDA device in name only, whose work is done as soon as it is queued, shares are those of a
stopwatch that only the test reads.
"""

from pathlib import Path

import pytest
from support import named_cuda, warm

from benchmarks.stall_tools.any_script import check, is_good

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


FETCH = "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch"
NEXT = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
ON_DEVICE = """
import queue, threading, time, torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model, other = (torch.nn.Linear(16, 4).to(device) for _ in range(2))
optimizer, second = (torch.optim.AdamW(each.parameters()) for each in (model, other))

def rows(count):
    return DataLoader(TensorDataset(torch.randn(count, 16), torch.zeros(count).long()), 4)

def loss(x, y, net=model):
    return cross_entropy(net(x.to(device)), y.to(device))

"""
DEVICE_SCRIPTS: dict[str, tuple[str, str, list[list[object]], tuple[str, ...]]] = {
    "evaluation": (
        "held_out = rows(16)\n"
        "def score(found):\n"
        "    return found\n"
        "def evaluate():\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        score(sum(loss(x, y).item() for x, y in held_out))\n"
        "    model.train()\n"
        "for number, (x, y) in enumerate(rows(160), 1):\n"
        "    loss(x, y).backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    if number % 10 == 0: evaluate()\n",
        "evaluation",
        [["__main__.score", 0.5, False], ["__main__.evaluate", 0.0, True]],
        ("evaluate less often than every 10 steps (train.py:", "40 steps of AdamW"),
    ),
    "accumulation": (
        "for number, (x, y) in enumerate(rows(240), 1):\n"
        "    with torch.autocast(device, dtype=torch.bfloat16):\n"
        "        (loss(x, y) / 3).backward()\n"
        "    if number % 3 == 0:\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        optimizer.step(); optimizer.zero_grad()\n",
        "data",
        [[FETCH, 0.05, False], [NEXT, 0.0, True]],
        ("batches come late", "20 steps of AdamW"),
    ),
    "two optimizers": (
        "for x, y in rows(160):\n"
        "    second.zero_grad(); loss(x, y, other).backward(); second.step()\n"
        "    optimizer.zero_grad(); (loss(x, y) - loss(x, y, other)).backward()\n"
        "    optimizer.step()\n",
        "data",
        [[FETCH, 0.1, False], [NEXT, 0.0, True]],
        ("batches come late", "number 1 of 2 optimizers"),
    ),
    "own thread": (  # no hook sees its waits: they are inside the work, and the line names them
        "ready = queue.Queue(2)\n"
        "def fill():\n"
        "    for _ in range(40):\n"
        "        time.sleep(0.2); ready.put((torch.randn(4, 16), torch.zeros(4).long()))\n"
        "threading.Thread(target=fill, daemon=True).start()\n"
        "for _ in range(40):\n"
        "    x, y = ready.get()\n"
        "    loss(x, y).backward(); optimizer.step(); optimizer.zero_grad()\n",
        "data",
        [],
        ("outside of the work", "inside   not measured", "in get()"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEVICE_SCRIPTS)
def test_share_on_a_device_in_name_only_is_that_of_a_stopwatch(
    kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if lack := named_cuda.why_not():
        pytest.skip(lack)
    text, cause, faults, words = DEVICE_SCRIPTS[kind]
    script = tmp_path / "train.py"
    script.write_text(f"{ON_DEVICE}{text}print('done on', device)\n")
    library = named_cuda.build(tmp_path_factory.getbasetemp().parent)
    found = check([str(script)], cause, faults, named_cuda=library)
    assert is_good(found), found
    assert "done on cuda" in found["stdout"]
    assert (found["truth"] > 0.1) == bool(faults)
    shown = "\n".join(found["lines"])
    assert [word for word in words if word not in shown] == [], shown
