"""Trackers: told what metrics.jsonl is told, and no run ends by one."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.training import make_config, read_metrics, run

from tokenfeed.trainer.report import run_files as trackers


class Service(types.ModuleType):
    """Stands for the module `wandb`, or `trackio`."""

    def __init__(self, name: str, fails: str = "", error: type[BaseException] = OSError) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.fails, self.error = fails, error

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self.fails:
            raise self.error(f"{name} found\nno network")

    def init(self, **settings: Any) -> None:
        self._note("init", settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self._note("log", (step, values))

    def finish(self) -> None:
        self._note("finish", None)

    def called(self, name: str) -> list[Any]:
        return [what for called, what in self.calls if called == name]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a service in name only."""

    def install(name: str, *fails: Any) -> Service:
        service = Service(name, *fails)
        monkeypatch.setitem(sys.modules, name, service)
        monkeypatch.setattr(trackers, "find_spec", lambda _: True)
        return service

    return install


def test_the_metrics_of_the_test_split_are_told_once_however_often_a_run_ends(
    serve: Any, lm_rows: Path, tmp_path: Path
) -> None:
    service = serve("wandb")
    config = make_config(lm_rows, tmp_path / "run", track=("wandb",), steps=2)
    run(config)
    (tmp_path / "run" / "report.json").unlink()  # as a kill just before it leaves the run
    run(dataclasses.replace(config, resume=True))
    run(dataclasses.replace(config, resume=True, steps=4))
    told = [step for step, values in service.called("log") if "test_loss" in values]
    assert told == [2, 4]
    assert [*read_metrics(tmp_path / "run", "test_loss")] == [2, 4]


def test_a_resumed_run_goes_on_under_its_name(serve: Any, lm_rows: Path, tmp_path: Path) -> None:
    service = serve("wandb")
    config = make_config(lm_rows, tmp_path / "a run", track=("wandb",))
    run(config, stop_after=2)
    run(make_config(lm_rows, tmp_path / "a run", track=("wandb",), resume=True), stop_after=1)
    run(make_config(lm_rows, tmp_path / "other" / "a run", track=("wandb",)), stop_after=1)
    first, again, other = service.called("init")
    assert first["id"] == again["id"] != other["id"]
    assert first["id"].startswith("a-run-")
    assert first["resume"] == "allow"
    assert first["config"]["steps"] == config.steps


@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_service_that_fails_is_named_once_and_the_run_goes_on(
    fails: str,
    error: type[BaseException],
    serve: Any,
    lm_rows: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service, other = serve("wandb", fails, error), serve("trackio")
    report = run(make_config(lm_rows, tmp_path / "run", track=("wandb", "trackio"), steps=4))
    assert report.finished
    warnings = [record.getMessage() for record in caplog.records if "--track" in record.msg]
    assert warnings == [f"--track wandb: {fails} found no network. The run goes on without it"]
    assert len(service.called(fails)) == 1
    assert len(other.called("finish")) == 1
