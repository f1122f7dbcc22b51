"""`tokenfeed stall`: scripts run unchanged, and their time is measured.

The scripts hold stopwatches of their own and print nothing of them, except to the test.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import warm

pytestmark = pytest.mark.clock

HEAD = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
slept, marks = 0.0, []
def nap(seconds):
    global slept
    began = time.perf_counter()
    time.sleep(seconds)
    slept += time.perf_counter() - began
def step(x=None, work=0.004):
    time.sleep(work) if model.training else None
    loss = model(torch.ones(8, 64) if x is None else x).sum()
    time.sleep(0.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    marks.append((time.perf_counter(), slept))
"""
"""What scripts share: a step of about 5 ms, and a stopwatch."""
WARMUP = 5
LOOP = HEAD + "for _ in range(12):\n    step()\nprint('trained', flush=True)\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def stall(
    *words: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "tokenfeed.tools.stall", *words], cwd=cwd, env=os.environ | (env or {}))


def true_share(path: Path) -> float:
    """Return the share that the script slept, after the warm-up, up to its last step."""
    marks = json.loads(path.read_text())
    (began, slept_before), (ended, slept) = marks[WARMUP - 1], marks[-1]
    return float((slept - slept_before) / (ended - began))


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["stall"]
    return found


ENDS = {
    "end": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "message": ("sys.exit('bad')", 1),
    "error": ("raise ValueError('wrong shape')", 1),
    "_exit": ("sys.stdout.flush(); os._exit(5)", 5),
    "abrupt success": ("sys.stdout.flush(); os._exit(0)", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_stdout_and_exit_code_are_those_of_the_script(script: Path, end: str) -> None:
    text, code = ENDS[end]
    script.write_text(LOOP + "print('é', *sys.argv[1:])\n" + text)
    plain = warm.run([script, "--lr", "1e-3", "--out", "x"])
    watched = stall(script, "--lr", "1e-3", "--out", "x")
    assert plain.stdout.startswith("trained")
    assert (watched.stdout, watched.returncode) == (plain.stdout, code)
    assert plain.returncode == code
    assert "12 steps of SGD" in watched.stderr
    assert watched.stderr.count("verdict") == 1
    if end == "error":
        assert "ValueError: wrong shape" in watched.stderr
        assert "launch.py" not in watched.stderr


MAIN = """
import atexit, json, os, pickle, sys
class Config: pass
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __spec__ is None, __package__,
    __doc__, sorted(k for k in globals() if k.startswith("__"))]))
print(pickle.loads(pickle.dumps(Config())).__class__ is Config, sys.modules["__main__"].Config)
atexit.register(lambda: print(len(pickle.dumps(Config()))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "module"])
def test_script_sees_the_main_module_of_python(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "main.py").write_text(f'"""Doc."""\n{MAIN}')
    words = ["package/main.py"] if kind == "file" else ["-m", "package.main"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    plain = subprocess.run([sys.executable, *words, "--x", "-m"], **run)  # type: ignore[call-overload]
    watched = subprocess.run(  # type: ignore[call-overload]
        [sys.executable, "-m", "tokenfeed", "stall", *words, "--x", "-m"], **run
    )
    assert plain.stdout
    assert (watched.stdout, watched.returncode) == (plain.stdout, 0)
    assert "the script did not import torch" in watched.stderr


def test_missing_module_ends_as_with_python(tmp_path: Path) -> None:
    ended = stall("-m", "nothing.here")
    assert ended.returncode == 1
    assert "No module named" in ended.stderr or "ModuleNotFoundError" in ended.stderr


def started(script: Path, *words: object) -> warm.Popen:
    pipe = subprocess.PIPE
    process = warm.Popen(["-m", "tokenfeed.tools.stall", *words, script], stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    return process


HANDLER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nslept, marks"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (LOOP + "time.sleep(600)", -signal.SIGTERM),
        # A handler in Python would wait for the C function. Plain Python ends at once.
        (LOOP + "signal.sigwait([signal.SIGUSR1])", -signal.SIGTERM),
        (LOOP.replace("slept, marks", HANDLER) + "time.sleep(600)", 9),
    ],
    ids=["asleep", "stuck in C", "with a handler"],
)
def test_sigterm_reports_and_ends_as_with_python(script: Path, text: str, code: int) -> None:
    script.write_text(text)
    with started(script) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == code
    assert "12 steps of SGD" in errors
    assert ("end      SIGTERM" in errors) == (code < 0)
    assert errors.count("verdict") == 1


SIGNALLED = """
child = os.fork()
if not child:
    signal.sigwait([signal.SIGUSR1])
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
time.sleep(1.5)
"""
TRAINING = """
child = os.fork()
if not child:
    [step() for _ in range(3)]
    os._exit(15)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("child", [SIGNALLED, TRAINING])
def test_a_child_neither_ends_the_script_nor_counts_its_steps(script: Path, child: str) -> None:
    script.write_text(LOOP + child + "step()\nprint('end')")
    ended = stall(script)
    assert (ended.returncode, ended.stdout) == (0, "trained\n15\nend\n")
    assert "13 steps of SGD" in ended.stderr
    assert ended.stderr.count("verdict") == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_caught", [False, pytest.param(True, marks=pytest.mark.long)])
def test_interruption_ends_as_with_python(script: Path, is_caught: bool) -> None:
    ending = "print('caught')" if is_caught else "raise"
    wait = "try:\n    print('trained', flush=True)\n    time.sleep(600)\n"
    wait += f"except KeyboardInterrupt:\n    {ending}\n"
    script.write_text(LOOP.replace("print('trained', flush=True)", wait))
    command = [sys.executable, "-m", "tokenfeed", "stall", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == (0 if is_caught else -signal.SIGINT)
    assert output == ("caught\n" if is_caught else "")
    assert "12 steps of SGD" in errors
    assert ("end      KeyboardInterrupt" in errors) is not is_caught
    frames = re.findall(r'File "(.*)", line', errors)
    assert frames == ([] if is_caught else [str(script)] * len(frames))


def test_killed_script_leaves_a_snapshot(script: Path, tmp_path: Path) -> None:
    often = "from tokenfeed.trainer.watch import watch\n"
    often += "watch._SNAPSHOT_S, watch._LOOK_STEPS = 0.01, 1\n"
    script.write_text(often + LOOP + "time.sleep(600)")
    with started(script, "--out", tmp_path / "out") as process:
        process.kill()
        process.communicate(timeout=300)
    report = report_of(tmp_path / "out")
    assert report["run"]["finished"] is False
    assert report["steps"] >= 1


def test_fail_above_exits_with_3(script: Path) -> None:
    script.write_text(HEAD + "for _ in range(20):\n    step()\n    torch.save([], '/dev/null')\n")
    above = stall("--fail-above", "0%", script)
    below = stall("--fail-above", "100%", script)
    assert (above.returncode, below.returncode) == (3, 0)
    script.write_text(script.read_text() + "sys.exit(7)")
    assert stall("--fail-above", "0%", script).returncode == 7
    script.write_text(script.read_text() + "\n")
    script.write_text(script.read_text().replace("sys.exit(7)", "os._exit(0)"))
    assert stall("--fail-above", "0", script).returncode == 3


LOADER = """
class Items(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        nap({nap})
        return torch.ones(64)
loader = torch.utils.data.DataLoader(Items(), batch_size=4)
"""
DUMP = "json.dump(marks, open(sys.argv[1], 'w'))\n"


def test_slow_items_of_a_script_are_data(script: Path, tmp_path: Path) -> None:
    loop = "for _, x in zip(range(25), loader):\n    step(x, 0.06)\n"
    script.write_text(HEAD + LOADER.format(nap=0.03) + loop + DUMP)
    ended = stall("--out", tmp_path / "out", script, tmp_path / "marks.json")
    report = report_of(tmp_path / "out")
    truth = true_share(tmp_path / "marks.json")
    assert report["causes"]["data"]["fraction"] == pytest.approx(
        truth,
        abs=0.02 + 0.1 * (report["core_wait"] or 0),  # more on a busy machine
    )
    line = (HEAD + LOADER).splitlines().index(LOADER.splitlines()[-1]) + 1
    assert f"DataLoader (train.py:{line})" in ended.stderr or "SHORT OF CORES" in ended.stderr
    assert ended.stderr.endswith(f"page     {tmp_path / 'out' / 'report.html'}\n")


def test_own_generator_is_other_with_its_line(script: Path, tmp_path: Path) -> None:
    script.write_text(
        HEAD
        + "def batches():\n    while True:\n        nap(0.004)\n        yield torch.ones(8, 64)\n"
        + "for _, x in zip(range(150), batches()):\n    step(x)\n"
        + DUMP
    )
    ended = stall("--out", tmp_path / "out", script, tmp_path / "marks.json")
    truth = true_share(tmp_path / "marks.json")
    found = report_of(tmp_path / "out")["causes"]["other"]["fraction"]
    # The step sleeps before its forward pass too, which is also time between steps.
    assert found > truth
    line = script.read_text().splitlines().index("for _, x in zip(range(150), batches()):") + 1
    assert f"train.py:{line}, calls batches()" in ended.stderr


def test_ideal_loader_ends_the_script_and_saves_nothing(script: Path, tmp_path: Path) -> None:
    loop = "for x in loader:\n    step(x)\n    torch.save([], 'checkpoint.pt')\nprint('end')"
    script.write_text(HEAD + LOADER.format(nap=0.04) + loop)
    ended = stall("--ideal-loader", 8, script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert not (tmp_path / "checkpoint.pt").exists()
    first, *_ = ended.stderr.splitlines()
    assert first.startswith("This run is thrown away")
    (ideal,) = [line for line in ended.stderr.splitlines() if line.startswith("ideal")]
    with_loader, ready = map(float, re.findall(r"([\d.]+) ms", ideal))
    assert 130 <= with_loader - ready <= 240  # four items of 40 ms


def test_worker_processes_run_no_hook(script: Path, tmp_path: Path) -> None:
    made = LOADER.format(nap=0.001).replace(
        "batch_size=4", "batch_size=4, num_workers=2, multiprocessing_context='fork'"
    )
    loop = "for _, x in zip(range(40), loader):\n    step(x)\n"
    script.write_text(HEAD + made + loop)
    ended = stall("--out", tmp_path / "out", script)
    assert ended.returncode == 0, ended.stderr
    assert report_of(tmp_path / "out")["queued_steps"] == 40
    assert ended.stderr.count("verdict") == 1


RANKS = """
import torch.distributed as dist
kept = []
def train(rank, size=2):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    kept.append(replica)  # gloo may hang when it goes
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    for _, x in zip(range(40), loader):
        if rank == 1:
            nap(0)
        replica(x).sum().backward()
        optimizer.step()
    dist.barrier()
"""


def test_children_of_spawn_are_measured(script: Path, tmp_path: Path) -> None:
    store = f"'file://{tmp_path / 'store'}', "
    ranks = RANKS.replace('"gloo", ', f'"gloo", {store}')
    start = "torch.multiprocessing.start_processes(train, nprocs=2, start_method='fork')\n"
    script.write_text(HEAD + LOADER.format(nap=0.001) + ranks + start + "print('joined')")
    ended = stall("--out", tmp_path / "out", script)
    assert (ended.returncode, ended.stdout) == (0, "joined\n"), ended.stderr
    assert "2 processes of mp.spawn were measured" in ended.stderr
    assert report_of(tmp_path / "out")["queued_steps"] == 40
    assert [each["rank"] for each in report_of(tmp_path / "out")["ranks"]] == [0, 1]
    assert (tmp_path / "out" / "rank1" / "report.json").exists()


LATE = RANKS.replace("rank, size=2", "rank=None").replace(", rank=rank, world_size=size", "") + (
    """
rank = int(os.environ["RANK"])
if rank == 1:
    Items.__getitem__ = lambda self, index: (nap(0.005), torch.ones(64))[1]
"""
)


def torchrun(script: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks under `tokenfeed stall`, which start warm."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python")
    with warm.serve_commands(commands):
        return warm.run([*launcher, commands / "tokenfeed", "stall", script], cwd=script.parent)


@pytest.mark.slow
def test_late_rank_under_torchrun_is_named(
    script: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = HEAD + LOADER.format(nap=0.0) + LATE + "train(rank)\nos.write(1, b'rank %d\\n' % rank)\n"
    script.write_text(text)
    began = time.monotonic()
    ended = torchrun(script, tmp_path_factory.mktemp("late") / "bin")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert ended.stderr.count("verdict") == 1
    assert "rank 1 keeps the others waiting: data" in ended.stderr
    assert time.monotonic() - began < 120
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # nothing is written


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        pytest.param("raise ValueError('lost')", marks=pytest.mark.long),
        "os.kill(os.getpid(), 9)",
    ],
)
def test_rank_that_dies_leaves_the_report_of_rank_0(script: Path, tmp_path: Path, end: str) -> None:
    ending = f"train(rank)\nif rank == 1:\n    {end}\ntime.sleep(600)\n"
    script.write_text(HEAD + LOADER.format(nap=0.0) + LATE + ending)
    ended = torchrun(script, tmp_path / "bin")
    assert ended.returncode == 1
    assert ended.stderr.count("verdict") == 1
    assert "end      SIGTERM" in ended.stderr
