"""A run's folder in hard times: full disks, kills, second starts, hands that edit its files."""

import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.training import assert_same_run, make_config, read_metrics, run

from tokenfeed.pipeline.errors import ConfigError, LoaderError, ResumeError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.trainer import step as training_step
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.loop import evaluation
from tokenfeed.trainer.loop.evaluation import evaluate
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.report.run_files import MetricsFile, Report
from tokenfeed.trainer.tasks.task import Metrics


@pytest.fixture(scope="module")
def undisturbed(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run(make_config(counting, run_dir))
    return run_dir


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace(str(undisturbed), str(run_dir)))
    return run_dir


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The system refuses to write any file longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_start_by_a_launcher_of_ranks_is_refused(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        run(make_config(counting, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_run_removes_at_its_start_what_killed_save_left(counting: Path, tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / "step-00000004.tmp"
    left.mkdir(parents=True)
    (left / "state-0.safetensors").write_bytes(b"half")
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        run(make_config(counting, tmp_path, resume=True))
    seen: list[bool] = []
    train(make_config(counting, tmp_path, steps=2), lambda: bool(seen.append(left.exists())))
    assert seen
    assert not any(seen)
    assert sorted(path.name for path in left.parent.iterdir()) == ["step-00000002"]


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_step(
    counting: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))

    def fails_third(*args: Any) -> Metrics:
        if next(calls) == 2:
            raise OSError(5, "Input/output error")
        return evaluate(*args)

    monkeypatch.setattr(evaluation, "evaluate", fails_third)
    with pytest.raises(OSError, match="Input/output"):
        run(make_config(counting, tmp_path))
    assert (tmp_path / "checkpoints" / "step-00000008").exists()
    report = run(make_config(counting, tmp_path, resume=True))
    assert report.finished
    assert_same_run(tmp_path, undisturbed, 8)


def test_a_worker_that_finds_no_memory_is_not_taken_for_a_large_micro_batch(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise LoaderError("worker 0 cannot be started: Cannot allocate memory. Use fewer workers.")

    monkeypatch.setattr(ShardLoader, "__iter__", fail)
    with pytest.raises(LoaderError, match="Use fewer workers"):
        run(make_config(counting, tmp_path))


def test_out_of_memory_gives_advice_that_the_run_can_follow(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B")

    config = make_config(counting, tmp_path, micro_batch_tokens=256)
    with monkeypatch.context() as patch:
        patch.setattr(training_step, "add_gradients", fail)
        with pytest.raises(
            ConfigError,
            match=r"`--micro-batch-tokens`=256 .* Start again with `--micro-batch-tokens 128`",
        ):
            run(config)
    run(dataclasses.replace(config, micro_batch_tokens=128), stop_after=1)
    monkeypatch.setattr(training_step, "add_gradients", fail)
    with pytest.raises(
        ConfigError, match=rf"train --resume --run-dir {tmp_path} --micro-batch-tokens 64`"
    ):
        run(make_config(counting, tmp_path, resume=True))


def test_a_validation_loss_that_is_not_finite_is_null_in_the_report(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {"loss": math.inf})
    config = make_config(counting, tmp_path, steps=1)
    report = run(config)
    assert json.loads((tmp_path / "report.json").read_text())["validation_loss_last"] is None
    assert (tmp_path / "report.html").exists()
    found = Report.of_run(tmp_path)
    assert found is not None
    assert found.summary() == report.summary()


@pytest.mark.slow
def test_a_full_disk_costs_nothing_but_the_steps_since_the_last_checkpoint(
    counting: Path, undisturbed: Path, tmp_path: Path
) -> None:
    asked = iter(range(1, 100))
    limited = contextlib.ExitStack()

    def fill_the_disk_after_step_five() -> bool:
        if next(asked) == 5:
            limited.enter_context(files_end_at(1 << 20))
        return False

    folder = tmp_path / "checkpoints"
    with limited, pytest.raises(OSError, match="File too large") as error:
        train(make_config(counting, tmp_path), bool, fill_the_disk_after_step_five)
    assert error.value.filename == str(folder / "step-00000008")
    assert error.value.strerror.endswith(f"go on with --resume from {folder / 'step-00000004'}")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004"]
    run(make_config(counting, tmp_path, resume=True))
    assert_same_run(tmp_path, undisturbed, 8)


def test_an_export_to_a_full_disk_names_the_folder_and_the_way_on(
    counting: Path, tmp_path: Path
) -> None:
    run(make_config(counting, tmp_path, steps=1))
    with files_end_at(1 << 18), pytest.raises(OSError, match="--resume --export") as error:
        run(make_config(counting, tmp_path, steps=1, resume=True, export=tmp_path / "out"))
    assert error.value.filename == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_line_of_metrics_that_the_disk_cut_short_is_an_error(tmp_path: Path) -> None:
    with contextlib.closing(MetricsFile(tmp_path)) as metrics:
        metrics.write({"step": 1, "loss": 2.5})
        with files_end_at(40), pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
            metrics.write({"step": 2, "loss": 2.25})
        metrics.keep(until_step=1)
        metrics.write({"step": 2, "loss": 2.25})
        assert [line["loss"] for line in metrics.read()] == [2.5, 2.25]


@pytest.mark.parametrize("resume", [False, True])
def test_two_trainings_in_one_folder_are_refused_and_the_first_goes_on(
    resume: bool, counting: Path, undisturbed: Path, tmp_path: Path
) -> None:
    before: dict[Path, bytes] = {}

    def start_another() -> bool:
        if (tmp_path / "checkpoints").exists() is resume and not before:
            while resume and Checkpoints.of_run(tmp_path).latest() is None:
                time.sleep(0.01)  # it is written beside the loop
            before.update(content_of(tmp_path))
            whose = f" (process {os.getpid()})" if sys.platform == "linux" else ""
            with pytest.raises(ConfigError, match=re.escape(f"into {tmp_path}{whose}. Wait")):
                run(make_config(counting, tmp_path, seed=1, resume=resume))
            assert content_of(tmp_path) == before
        return False

    train(make_config(counting, tmp_path), bool, start_another)
    assert before
    assert_same_run(tmp_path, undisturbed, 8)


def test_a_folder_that_is_moved_or_deleted_ends_its_run_before_another_can_begin(
    counting: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    config = make_config(counting, folder, save_every=2)
    steps = iter(range(1, 9))

    def move() -> bool:
        if next(steps) == 5:
            folder.rename(moved)
        return False

    named = re.escape(f"{folder / 'metrics.jsonl'} was deleted or moved while the run went on.")
    with pytest.raises(ConfigError, match=f"{named} Move it back and add --resume"):
        train(config, bool, move)
    shutil.rmtree(folder, ignore_errors=True)
    moved.rename(folder)
    run(dataclasses.replace(config, resume=True))
    assert_same_run(folder, undisturbed, 8)

    def delete_and_begin() -> bool:
        if other.exists():
            shutil.rmtree(other)
            other.mkdir()
            (other / "metrics.jsonl").touch()
        return False

    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=r"metrics\.jsonl was deleted"):
        train(dataclasses.replace(config, run_dir=other), bool, delete_and_begin)


def test_a_finished_run_trains_nothing_more(counting: Path, finished: Path) -> None:
    before, written = content_of(finished), json.loads((finished / "report.json").read_bytes())
    with pytest.raises(ConfigError, match=r"already holds a run\. Add --resume to go on with it"):
        run(make_config(counting, finished))
    assert content_of(finished) == before
    again = dataclasses.asdict(run(make_config(counting, finished, resume=True)))
    again = json.loads(json.dumps(again))  # with lists in place of tuples
    assert again == written | {"run_dir": str(finished)}  # it was copied
    after = content_of(finished)
    assert {path.name for path in before if after[path] != before[path]} <= {
        "report.json",
        "report.html",
    }
    page = (finished / "report.html").read_text()
    assert str(finished) in page, "the page is written again, for the folder where the run is now"


@pytest.mark.parametrize("report", [None, "stale", "damaged"])
def test_a_run_killed_before_its_report_gets_it_by_resuming(
    report: str | None, counting: Path, undisturbed: Path, finished: Path
) -> None:
    path = finished / "report.json"
    expected = json.loads(path.read_bytes())
    path.unlink()
    if report:
        stale = json.dumps(expected | {"steps": 4})
        path.write_text(stale if report == "stale" else "{")
    with open(finished / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 9, "lo')  # killed while writing
    made = run(make_config(counting, finished, resume=True))
    same = ("steps", "tokens", "padding", "loss_last", "validation_loss_last", "finished")
    written = json.loads(path.read_bytes())
    assert {key: written[key] for key in same} == {key: expected[key] for key in same}
    assert made.summary()
    assert_same_run(finished, undisturbed, 8)


def test_a_new_start_in_a_folder_without_checkpoints_keeps_no_old_figures(
    counting: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 99.0}\n{"st')
    run(make_config(counting, tmp_path, steps=1))
    assert read_metrics(tmp_path, "validation_loss")[0] < 10


@pytest.mark.parametrize(
    "line", ["3", "{}", "[]", '{"step": "8"}', "[" * 100_000, '{"step": 8, "loss": "x"}']
)
def test_a_strange_line_of_metrics_is_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 1}}\n{{"step": 2}}\n')
    with contextlib.closing(MetricsFile(tmp_path)) as metrics:
        assert metrics.read() == [{"step": 1}, {"step": 2}]
        metrics.keep(until_step=1)
        assert metrics.read() == [{"step": 1}]


def test_a_run_is_not_mixed_with_the_shards(counting: Path) -> None:
    before = sorted(counting.iterdir())
    with pytest.raises(ConfigError, match=r"holds shards, and a run would mix its files with them"):
        run(make_config(counting, counting))
    assert sorted(counting.iterdir()) == before
