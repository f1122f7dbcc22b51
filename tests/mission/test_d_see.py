"""The mission, see: a test for each row of docs/mission.md, by public commands and API."""

import importlib.machinery
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support import named_cuda
from support.commands import call
from support.training import PAUSE_SECONDS

from benchmarks.stall.device import Device, TracerFaults
from tokenfeed import Packed, Padded, ShardLoader, StallMeter
from tokenfeed.tools import report, train
from tokenfeed.trainer.stall.watchers import CoreWait

pytestmark = pytest.mark.clock

PAUSING = ("--model", "support.training:pausing_model")
SMALL = (*("--sequence-length", 32, "--micro-batch-tokens", 128, "--step-tokens", 128), *PAUSING)
ROWS = ("--step-rows", 4, "--micro-batch-tokens", 128, *PAUSING)
"""Steps of the pausing model: one micro-batch of documents, or of labelled rows."""


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The progress lines of a run."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "learning_rate" in line]


def report_of(run_dir: Path) -> dict[str, Any]:
    """What `report --json` prints."""
    found: dict[str, Any] = json.loads(call(report.main, run_dir, "--json").stdout)
    return found


class Tracker(types.ModuleType):
    """Stands for the package of a tracker. Each line takes it some seconds."""

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.is_finished, self._seconds = False, seconds
        self.seconds_of: dict[int, float] = {}
        """Seconds of each line, by its step."""

    def init(self, **settings: Any) -> None:
        self.settings = settings

    def log(self, values: dict[str, float], step: int) -> None:
        began = time.perf_counter()
        time.sleep(self._seconds)
        self.lines.append((step, values))
        self.seconds_of[step] = time.perf_counter() - began

    def finish(self) -> None:
        self.is_finished = True


# ---------- m22 ----------
def late_batches(
    shards: Path, batching: Padded | Packed, meter: StallMeter | None, device: Device
) -> None:
    """Train on a simulated device whose batches come late: 8 ms of the host for each, and up to 6
    ms of the device, by slots."""
    with ShardLoader(shards, batching=batching, epochs=None, num_workers=0) as loader:
        batches = iter(loader)
        for step in range(400):
            if step == 5:  # the warm-up of the meter
                device.began = device.free, device.lost  # type: ignore[attr-defined]
            if meter:
                with meter.cause("data"):
                    batch = next(batches)
                    device.host += 8e-3
            else:
                batch = next(batches)
                device.host += 8e-3
            device.kernels(60, 1e-4 * batch.num_slots / 128)
            if meter:
                meter.step(batch.num_tokens, batch.num_slots)


@pytest.mark.parametrize(("task", "batching"), [("lm", Packed(32, 4)), ("classify", Padded(128))])
def test_m22_stall_by_cause_with_error_bar_and_advice(
    task: str, batching: Padded | Packed, every_task: Path, tmp_path: Path
) -> None:
    alone, metered = Device(launch=8e-6), Device(launch=8e-6)
    metered.faults = TracerFaults(usual_seconds=1.0)
    late_batches(every_task / task, batching, None, alone)
    done, idle = alone.began  # type: ignore[attr-defined]
    truth = (alone.lost - idle) / (alone.free - done)
    meter = StallMeter(clock=metered)
    late_batches(every_task / task, batching, meter, metered)
    metered.wait()
    meter.write(tmp_path)

    found = json.loads((tmp_path / "report.json").read_text())["stall"]
    low, high = found["interval"]
    assert 0.1 < truth < 0.5
    assert low <= truth <= high
    assert high - low <= 0.05
    shares = {cause: part["fraction"] for cause, part in found["causes"].items()}
    assert max(shares, key=shares.__getitem__) == "data"
    assert found["advice"][0]["cause"] == "data"
    shown = call(report.main, tmp_path).stdout
    assert re.search(r"stall +\d+\.\d+% \[\d+\.\d+%, \d+\.\d+%\]", shown)
    assert "batches come late" in shown
    assert "What the device waited for" in (tmp_path / "report.html").read_text()


def test_m22_stall_of_a_run_on_labelled_rows_is_what_it_lost(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker("wandb", 0.4)  # long beside what a busy machine adds to a line
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    words = ("--shards", every_task / "classify", "--run-dir", tmp_path, *ROWS, "--steps", 13)
    ended = call(train.main, *words, "--track", "wandb", "--log-every", 1, "--eval-every", 13)
    found = report_of(tmp_path)["stall"]
    lost = [tracker.seconds_of[step] for step in range(5, 13)]  # by each measured step
    truth = sum(lost) / found["seconds"]
    low, high = found["causes"]["log"]["interval"]
    assert low <= found["causes"]["log"]["fraction"] <= high
    assert high - low <= 0.05
    assert truth <= found["causes"]["log"]["fraction"] <= truth + 0.1
    assert re.search(r"stall \d+\.\d+% \(log \d+\.\d+\)", ended.stderr)
    assert "raise `--log-every`" in ended.stdout
    assert "<svg" in (tmp_path / "report.html").read_text().split("Stall by cause")[1]


# ---------- m23 ----------
def test_m23_line_shows_cpu_ram_and_speed_without_a_gpu(every_task: Path, tmp_path: Path) -> None:
    words = ("--shards", every_task / "lm", "--run-dir", tmp_path, *SMALL)
    ended = call(train.main, *words, "--steps", 8, "--log-every", 2)
    shown = re.findall(r"cpu (\d+)% \| ram (\d+)% \| (\d+\.\d+) it/s", ended.stderr)
    measured = [line for line in lines_of(tmp_path) if "steps_per_s" in line]
    assert shown
    assert len(shown) == len(measured)
    for (cpu, ram, speed), line in zip(shown, measured, strict=True):
        assert (int(cpu), int(ram)) == (
            round(100 * line["cpu_busy"]),
            round(100 * line["ram_used"]),
        )
        assert float(speed) == pytest.approx(line["steps_per_s"], abs=0.06)
        assert 0 < line["steps_per_s"] <= 1 / PAUSE_SECONDS
        assert "gpu_bytes" not in line
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page.split("Load of the machine")[1].split("</figure>")[0]


ON_A_GPU = """
import json, logging, sys, time
from pathlib import Path
from types import SimpleNamespace
from support import named_cuda
named_cuda.begin(Path(sys.argv[1]))
class NVMLError(Exception): pass
def by_uuid(uuid):
    if uuid != "GPU-0":  # that of the device in name only
        raise NVMLError
    return "ours"
def samples(gpu, kind, since):
    ours = [(since - 1, 5), (since + 1, reading["busy"] - 5), (since + 2, reading["busy"] + 5)]
    sample = lambda at, x: SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=x))
    return 1, [sample(at, x) for at, x in ours]
reading = {}
sys.modules["pynvml"] = SimpleNamespace(
    NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=by_uuid,
    nvmlDeviceGetHandleByIndex=lambda number: "another user's", nvmlDeviceGetSamples=samples,
    NVML_GPU_UTILIZATION_SAMPLES=1,
    nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(
        used=reading["used"] if gpu == "ours" else 1e9, total=16e9))
from support.training import make_config
from tokenfeed.trainer.loop.trainer import Trainer
logging.basicConfig(level="INFO", format="%(message)s")
for name, readings in json.loads(sys.argv[4]).items():
    reading.update(readings)
    config = make_config(sys.argv[2], Path(sys.argv[3], name), device="cuda", num_workers=0,
        steps=40, save_every=40, eval_every=40, step_tokens=128,
        model="support.training:one_layer_model")
    taken = []
    with named_cuda.device():
        trainer = Trainer(config)
        trainer.train(lambda: len(taken) == 9, lambda: bool(taken.append(0)))
        trainer.reporter.write_draft()
        trainer.close()
"""
GPU_LACKS = named_cuda.why_not()


@pytest.fixture(scope="module")
def gpu_runs(
    every_task: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, str]:
    """Two runs on a GPU in name only, which is well used in `full` and not in `idle`: their
    folder, and their log."""
    folder = tmp_path_factory.mktemp("gpu")
    readings = {"full": {"used": 8.2e9, "busy": 85}, "idle": {"used": 1.6e9, "busy": 23}}
    assert request.config.cache
    library = named_cuda.build(request.config.cache.mkdir("named_cuda"))
    words = [library, every_task / "lm", folder, json.dumps(readings)]
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_GPU, *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(GPU_LACKS is not None, reason=str(GPU_LACKS))
def test_m23_line_shows_the_gpu_of_this_rank_by_uuid(gpu_runs: tuple[Path, str]) -> None:
    folder, shown = gpu_runs[0] / "full", gpu_runs[1]
    assert len(re.findall(r"\| gpu 8.2/16.0 GB \(51%\), 85% busy \| cpu \d+% \| ram", shown)) >= 5
    for line in lines_of(folder):
        assert line["gpu_busy"] == pytest.approx(0.85)
        assert (line["gpu_bytes"], line["gpu_total_bytes"]) == (8_200_000_000, 16_000_000_000)
    call(report.main, folder)
    page = (folder / "report.html").read_text()
    assert "GPU busy" in page.split("Load of the machine")[1].split("</figure>")[0]
    assert "in use" in page.split("GPU memory, GB")[1].split("</figure>")[0]


# ---------- m24 ----------
class NVMLError(Exception):
    """As pynvml has it."""


def fake_pynvml(busy: int = 90, used: float = 12e9, pids: tuple[int, ...] = ()) -> SimpleNamespace:
    """A module with one T4, which gives its load of the latest moment and no samples."""

    def no_samples(*arguments: object) -> None:
        raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_GPU_UTILIZATION_SAMPLES=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda gpu: "Tesla T4",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=used, total=16e9),
        nvmlDeviceGetSamples=no_samples,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=busy),
        nvmlDeviceGetPowerUsage=lambda gpu: 60_000,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [SimpleNamespace(pid=n) for n in pids],
    )


@pytest.fixture(scope="module")
def trained(every_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a CPU; only to be read."""
    folder = tmp_path_factory.mktemp("trained")
    words = ("--shards", every_task / "classify", "--run-dir", folder, *ROWS, "--steps", 8)
    call(train.main, *words, "--log-every", 2)
    return folder


GB = 10**9
RUN = {
    "accumulation": 4,
    "micro_batch_tokens": 2048,
    "state_bytes": 4 * GB,
    "peak_gpu_bytes": 5 * GB,
}
"""A step of 4 micro-batches, which would take 8 of 16 GB as one."""
READINGS: list[tuple[dict[str, Any], list[float], dict[str, Any], str]] = [
    ({"busy": 23}, [50, 50], {}, r"the GPU is 23% busy, below 70 %"),
    ({"used": 6.4e9}, [50, 50], {}, r"6\.4 of 16\.0 GB of GPU memory \(40%\) are in use, below 60"),
    ({"used": 15.6e9}, [50, 50], {}, r"15\.6 of 16\.0 GB of GPU memory \(98%\) .*, above 95 %"),
    ({}, [2, 100, 3, 3], {}, r"one processor is 100% busy, all together 27%"),
    (
        {"busy": 23, "pids": (os.getpid(),)},
        [50, 50],
        {},
        r"0 loader workers: raise `--num-workers` to \d",
    ),
    ({}, [50, 50], RUN, r"accumulates 4 micro-batches, .* 8,192 tokens .* 8\.0 of 16\.0 GB"),
    (
        {"busy": 40},
        [50, 50],
        RUN | {"state_bytes": GB // 5, "accumulation": 1},
        r"the model takes 0\.20 of 16\.0 GB \(1\.2%\), and the GPU is 40% busy: .* too small",
    ),
    ({}, [50, 50], {"checkpoint": 0.12}, r"checkpoints take 12\.0% of the time: raise `--save-"),
    ({}, [50, 50], {"log": 0.034}, r"progress lines take 3\.4% of the time: raise `--log-every`"),
]
"""Readings of NVML, of each processor and of a run, and the sentence that they lead to."""


@pytest.mark.parametrize(("gpu", "cores", "run", "sentence"), READINGS)
def test_m24_monitor_recommends_by_each_reading(
    gpu: dict[str, Any],
    cores: list[float],
    run: dict[str, Any],
    sentence: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil.Process, "children", lambda process: [])

    def monitor(processors: list[float], **reading: Any) -> str:
        monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(**reading))
        monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: processors)
        return call(train.main, "--monitor-only", "--run-dir", tmp_path).stdout

    found = json.loads((trained / "report.json").read_text())
    for cause in found["stall"]["causes"].values():
        cause["fraction"] = 0.0
    quiet = json.loads(json.dumps(found | {"num_workers": None}))
    found = quiet | {name: x for name, x in run.items() if name in found}
    found["stall"] = json.loads(json.dumps(quiet["stall"]))
    for cause in run.keys() & found["stall"]["causes"].keys():
        found["stall"]["causes"][cause]["fraction"] = run[cause]
    (tmp_path / "report.json").write_text(json.dumps(found))
    shown = monitor(cores, **gpu)
    assert re.search(sentence, shown), shown
    (tmp_path / "report.json").write_text(json.dumps(quiet))
    healthy = monitor([50, 50])
    assert "Tesla T4, 90 % busy, 12.0 of 16.0 GB (75 %), 60 W" in healthy
    assert "advice" not in healthy


def test_m24_monitor_recommends_at_most_five_things(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((trained / "report.json").read_text())
    found |= RUN | {"state_bytes": GB // 10, "num_workers": 0}
    for cause in ("data", "checkpoint", "log"):
        found["stall"]["causes"][cause]["fraction"] = 0.2
    (tmp_path / "report.json").write_text(json.dumps(found))
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(busy=10, used=1e9))
    shown = call(train.main, "--monitor-only", "--run-dir", tmp_path).stdout
    assert len(shown.split("advice")[1].strip().splitlines()) == 5
    assert "the GPU is 10% busy" in shown


def test_m24_progress_lines_and_report_recommend_alike(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Tracker("wandb", 0.03))
    monkeypatch.setattr(CoreWait, "share", lambda self: None)  # of a busy machine
    words = ("--shards", every_task / "lm", "--run-dir", tmp_path, *SMALL, "--steps", 10)
    ended = call(train.main, *words, "--track", "wandb", "--log-every", 1)
    named = re.findall(
        r"step \d+ \| progress lines take \d+\.\d% .*: raise `--log-every`", ended.stderr
    )
    assert len(named) == 1
    assert re.search(r"reason +logging takes \d.*\nnext +raise `--log-every`", ended.stdout)


@pytest.mark.slow
@pytest.mark.skipif(GPU_LACKS is not None, reason=str(GPU_LACKS))
def test_m24_run_on_a_gpu_recommends_in_its_log_and_report(gpu_runs: tuple[Path, str]) -> None:
    folder, shown = gpu_runs[0] / "idle", gpu_runs[1]
    sentence = "the GPU is 23% busy, below 70 %"
    assert len(re.findall(rf"step \d+ \| {sentence}", shown)) == 1
    assert any(text.startswith(sentence) for text in report_of(folder)["recommendations"])
    assert "1.6 of 16.0 GB of GPU memory (10%)" in call(report.main, folder).stdout


# ---------- m25 ----------
def test_m25_figures_at_the_start_and_at_the_end(every_task: Path, tmp_path: Path) -> None:
    words = ("--shards", every_task / "classify", "--run-dir", tmp_path, *ROWS[2:])
    steps = ("--step-rows", 10, "--steps", 15, "--eval-every", 5, "--save-every", 5)
    ended = call(train.main, *words, *steps)
    began = ended.stderr.split("step 0 |")[0]
    assert re.search(r"a step has 10 rows and about \d+ tokens, in 2 micro-batches", began)
    assert "0 loader workers" in began
    assert "fp32 on cpu" in began

    found = report_of(tmp_path)
    speed = found["stall"]["steps"] / found["stall"]["seconds"]
    assert found["steps_per_s"] == pytest.approx(speed)
    assert found["rows_per_s"] == pytest.approx(10 * speed)  # 150 rows are 15 whole steps
    assert found["epoch_seconds"] == pytest.approx(15 / speed)
    assert found["step_rows"] == 10
    assert found["step_tokens"] == pytest.approx(found["tokens"] / 15)
    expected = {"accumulation": 2, "num_workers": 0, "precision": "fp32", "peak_gpu_bytes": None}
    assert {name: found[name] for name in expected} == expected
    assert 4 * PAUSE_SECONDS <= found["evaluation_seconds"] < found["seconds"]
    assert 0 < found["checkpoint_seconds"] < found["seconds"]
    for printed in (ended.stdout, call(report.main, tmp_path).stdout):
        assert "10 rows and" in printed
        assert "2 micro-batches; 0 loader workers" in printed
        assert re.search(r"steps/s, .* rows/s, .* an epoch", printed)
        assert re.search(r"time +\d+\.\d s in evaluations and \d+\.\d s in checkpoints", printed)


# ---------- m26 ----------
def seconds_of(shown: str) -> float:
    """The seconds of "2.5 s" or "0:02:40"."""
    parts = shown.removesuffix(" s").split(":")
    return sum(float(part) * 60**power for power, part in enumerate(reversed(parts)))


def test_m26_dry_run_and_progress_lines_say_how_long_it_takes(
    every_task: Path, tmp_path: Path
) -> None:
    words = ("--shards", every_task / "lm", "--run-dir", tmp_path / "run", *SMALL, "--steps", 400)
    planned = call(train.main, *words, "--dry-run").stderr
    assert not (tmp_path / "run").exists()
    found = re.findall(r"time of (a step|an epoch|the run).*: (.+) \((.+) to (.+)\)", planned)
    assert [name for name, *_ in found] == ["a step", "an epoch", "the run"]
    times = {name: [seconds_of(x) for x in parts] for name, *parts in found}
    for mean, least, most in times.values():
        assert least <= mean <= most
    assert times["a step"][1] >= 0.9 * PAUSE_SECONDS
    assert times["the run"][0] >= 0.9 * 400 * times["a step"][0]
    epoch_steps = float(re.findall(r"an epoch of (\d+) steps", planned)[0])
    assert times["an epoch"][0] == pytest.approx(epoch_steps * times["a step"][0], rel=0.2)

    ended = call(train.main, *words[:-1], 16, "--log-every", 4)
    shown = {
        int(s): seconds_of(t)
        for s, t in re.findall(r"step +(\d+)/16 .* \| (\S+(?: s)?) left", ended.stderr)
    }
    lines = {
        line["step"]: line["remaining_seconds"]
        for line in lines_of(tmp_path / "run")
        if "remaining_seconds" in line
    }
    assert [*shown] == [*lines] == [8, 12]
    assert shown[12] == pytest.approx(lines[12], abs=0.6)  # in whole seconds
    # Steps are measured from step 6 on. Three of them end at the line of step 8.
    speeds = {line["step"]: line.get("steps_per_s") for line in lines_of(tmp_path / "run")}
    seconds = 3 / speeds[8], 4 / speeds[12]
    assert lines[8] == pytest.approx(8 * seconds[0] / 3)
    assert lines[12] == pytest.approx(4 * sum(seconds) / 7)


# ---------- m27 ----------
@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The writers of TensorBoard, by a stand-in of its package."""
    made: list[Any] = []

    class SummaryWriter(Tracker):
        def __init__(self, folder: Path, **options: Any) -> None:
            super().__init__("writer")
            self.folder = folder
            self.scalars: dict[str, dict[int, float]] = {}
            made.append(self)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.setdefault(name, {})[step] = value

        def close(self) -> None:
            self.finish()

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", Tracker("tensorboard"))
    return made


def test_m27_trackers_get_every_line_and_a_missing_one_is_an_error(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boards: list[Any]
) -> None:
    services = [Tracker("wandb"), Tracker("trackio")]
    for service in services:
        monkeypatch.setitem(sys.modules, service.__name__, service)
    words = ("--shards", every_task / "lm", *SMALL, "--steps", 4, "--log-every", 2)
    tracked = [word for name in ("wandb", "trackio", "tensorboard") for word in ("--track", name)]
    call(train.main, *words, "--run-dir", tmp_path / "run", *tracked)
    losses = {line["step"]: line["loss"] for line in lines_of(tmp_path / "run")}
    assert [*losses] == [1, 2, 4]
    for service in services:
        assert {step: x["loss"] for step, x in service.lines if "loss" in x} == losses
        assert service.is_finished
    (board,) = boards
    assert board.folder == tmp_path / "run" / "tensorboard"
    assert board.scalars["loss"] == losses
    assert {"cpu_busy", "validation_loss"} <= board.scalars.keys()
    assert board.is_finished

    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        other = tmp_path / name
        ended = call(train.main, *words, "--run-dir", other, "--track", name, expect=2)
        assert ended.stderr.splitlines()[-1].startswith(f"error: `--track`={name}: the package")
        assert f"pip install {name}" in ended.stderr
        assert not other.exists()
