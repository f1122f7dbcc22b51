"""The list `phases` of a file for `train --config`: what it takes, and which one --phase runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import call
from support.training import VOCABULARY, assert_same_run, counting_rows, write_labelled

from tokenfeed.tools import report as report_command
from tokenfeed.tools import train

SETTINGS: dict[str, Any] = {
    "model": "support.training:small_model",
    "steps": 2,
    "sequence_length": 32,
    "micro_batch_tokens": 128,
    "step_tokens": 256,
    "warmup_steps": 0,
    "log_every": 1,
    "device": "cpu",
}
TWO: list[dict[str, Any]] = [
    {"name": "top", "trainable": "blocks.1.*"},
    {"name": "all", "learning_rate": 1e-4},
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("lm") / "shards", "lm")


def written(folder: Path, shards: Path, phases: Any, **changes: Any) -> Path:
    path = folder / "phases.yaml"
    settings = SETTINGS | {"shards": str(shards), "run_dir": str(folder / "run")} | changes
    path.write_text(yaml.safe_dump(settings | {"phases": phases}))
    return path


WRONG: list[tuple[Any, str]] = [
    ([{"trainable": "x"}], "phases 1: expected a name of its own"),
    ([{"name": "a"}, {"name": "a"}], "phases 2: expected a name of its own"),
    ([{"name": "a/b"}], "phases 1: expected a name of its own"),
    ([{"name": "2"}], "phases 1: expected a name of its own"),
    ([{"name": "a", "learning_rte": 1}], "phases 1: unknown setting learning_rte. Did you mean"),
    ([{"name": "a", "steps": 0}], "phases 1: steps: expected a whole number of at least 1, got 0"),
    ([{"name": "a", "steps": 1, "epochs": 1}], "phases 1: `epochs` and steps both say"),
    ([{"name": "a", "from": "best"}], "phases 1: has no phase before it"),
    ([{"name": "a"}, {"name": "b", "from": "first"}], "phases 2: from: expected one of last, best"),
    ([{"name": "a", "run_dir": "x"}], "phases 1: unknown setting run_dir"),
    ([], "phases is empty"),
    (["a"], "phases: expected a list of settings"),
    ("a", "phases: expected a list of settings"),
]


@pytest.mark.parametrize(("phases", "message"), WRONG)
def test_a_wrong_phase_is_named_before_any_phase_runs(
    phases: Any, message: str, shards: Path, tmp_path: Path
) -> None:
    errors = call(train.main, "--config", written(tmp_path, shards, phases), expect=2).stderr
    assert f"phases.yaml: {message}" in errors.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_weights_that_a_later_phase_names_are_checked_before_any_phase_runs(
    more: tuple[str, ...], shards: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, shards, [TWO[1], {"name": "top", "trainable": "blocks.7.*"}])
    last = call(train.main, "--config", path, *more, expect=2).stderr.splitlines()[-1]
    assert last.startswith("error: phase 2 (top): `--trainable`: no parameter of ")
    assert "matches 'blocks.7.*'" in last
    assert not (tmp_path / "run").exists()


def test_print_config_of_phases_is_read_again(shards: Path, tmp_path: Path) -> None:
    path = written(tmp_path, shards, [*TWO, {"name": "more", "epochs": 2}])
    printed = call(train.main, "--config", path, "--print-config").stdout
    assert [phase["name"] for phase in yaml.safe_load(printed)["phases"]] == ["top", "all", "more"]
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert call(train.main, "--config", again, "--print-config").stdout == printed
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_all_phases_and_writes_nothing(shards: Path, tmp_path: Path) -> None:
    printed = call(train.main, "--config", written(tmp_path, shards, TWO), "--dry-run").stderr
    assert printed.count("model: support.training:small_model") == 2
    one = call(train.main, "--config", tmp_path / "phases.yaml", "--dry-run", "--phase", 2).stderr
    assert one.count("model: support.training:small_model") == 1
    assert not (tmp_path / "run").exists()


def test_command_line_overrides_phases(shards: Path, tmp_path: Path) -> None:
    words = ("--config", written(tmp_path, shards, TWO), "--learning-rate", 3e-4, "--print-config")
    found = yaml.safe_load(call(train.main, *words).stdout)
    assert found["learning_rate"] == 3e-4
    assert all("learning_rate" not in phase for phase in found["phases"])


def test_phases_one_by_one_equal_all_in_order(shards: Path, tmp_path: Path) -> None:
    path = written(tmp_path, shards, TWO)
    call(train.main, "--config", path)
    for phase in ("top", 2):
        call(train.main, "--config", path, "--run-dir", tmp_path / "single", "--phase", phase)
    for name in ("phase-1-top", "phase-2-all"):
        assert_same_run(tmp_path / "run" / name, tmp_path / "single" / name, 2)


def test_folder_of_a_renamed_phase_is_named(shards: Path, tmp_path: Path) -> None:
    assert "no phase of" not in call(train.main, "--config", written(tmp_path, shards, TWO)).stderr
    renamed = [TWO[0] | {"name": "first"}, TWO[1]]
    printed = call(train.main, "--config", written(tmp_path, shards, renamed)).stderr
    assert "no phase of this run has the folder phase-1-top. If you have renamed" in printed


def test_a_finished_phase_goes_on_only_by_name(shards: Path, tmp_path: Path) -> None:
    call(train.main, "--config", written(tmp_path, shards, TWO))
    path = written(tmp_path, shards, [TWO[0] | {"steps": 3}, TWO[1]])
    printed = call(train.main, "--config", path).stderr
    words = "phase 1 (top) is finished, so its changed settings are not used: steps was 2, not 3"
    assert words in printed
    call(train.main, "--config", path, "--phase", "top")
    found = json.loads((tmp_path / "run/report.json").read_bytes())
    assert [report["steps"] for report in found["phases"].values()] == [3, 2]


def test_a_run_with_phases_and_a_run_without_share_no_folder(shards: Path, tmp_path: Path) -> None:
    path = written(tmp_path, shards, TWO)
    call(train.main, "--config", path, "--phase", 1)
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(SETTINGS | {"shards": str(shards)}))
    words = ("--config", plain, "--run-dir", tmp_path / "run")
    for more in ((), ("--resume",), ("--resume", "auto")):
        assert "holds a run with phases" in call(train.main, *words, *more, expect=2).stderr
    words = ("--config", path, "--run-dir", tmp_path / "run/phase-1-top")
    assert "holds a run without phases" in call(train.main, *words, expect=2).stderr


def test_a_phase_starts_from_the_best_weights(shards: Path, tmp_path: Path) -> None:
    path = written(tmp_path, shards, [TWO[0], TWO[1] | {"from": "best"}], eval_every=1)
    printed = call(train.main, "--config", path).stderr
    best = json.loads((tmp_path / "run/phase-1-top/report.json").read_bytes())["best_step"]
    assert f"weights in {tmp_path}/run/phase-1-top/checkpoints/step-{best:08d}" in printed


def test_begun_phase_keeps_its_first_weights(shards: Path, tmp_path: Path) -> None:
    call(train.main, "--config", written(tmp_path, shards, TWO))
    edited = [TWO[0], TWO[1] | {"from": "best", "steps": 3}]
    config = written(tmp_path, shards, edited)
    errors = call(train.main, "--config", config, "--resume", "--phase", 2).stderr
    assert "phase 2 (all) has begun from" in errors
    assert "so `from: best` is not used" in errors
    assert "init_from was" not in errors
    kept = yaml.safe_load((tmp_path / "run/phase-2-all/config.yaml").read_text())
    assert kept["init_from"] == str(tmp_path / "run/phase-1-top")
    assert kept["steps"] == 3


def test_best_weights_need_an_evaluation(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    shards = write_dataset(tmp_path / "rows", {"train": counting_rows(50)}, VOCABULARY)
    path = written(tmp_path, shards, [TWO[0], TWO[1] | {"from": "best"}])
    errors = call(train.main, "--config", path, expect=2).stderr
    assert "phase 2 (all): `from: best` needs a result of phase 1 (top)" in errors


def test_report_of_a_run_with_phases_shows_each(shards: Path, tmp_path: Path) -> None:
    call(train.main, "--config", written(tmp_path, shards, TWO), "--phase", 1)
    shown = call(report_command.main, tmp_path / "run").stdout
    assert "phase-1-top\nverdict " in shown
    assert "\nmodel " in shown
    assert "phase-2-all\nnot begun" in shown
    assert "1 of 2 phases finished" in shown
    found = json.loads(call(report_command.main, tmp_path / "run", "--json").stdout)
    assert (found["finished"], found["phases"]["phase-2-all"]) == (False, None)
    page = (tmp_path / "run/report.html").read_text()
    assert "not begun" in page
    assert 'href="phase-2-all' not in page


def test_options_beside_phase_are_for_that_phase(shards: Path, tmp_path: Path) -> None:
    words = ("--config", written(tmp_path, shards, TWO), "--print-config")
    found = yaml.safe_load(call(train.main, *words, "--phase", "all", "--steps", 5).stdout)
    assert [phase["steps"] for phase in found["phases"]] == [2, 5]
    found = yaml.safe_load(call(train.main, *words, "--phase", 1, "--device", "auto").stdout)
    assert found["device"] == "auto"


def test_time_of_a_phase_counts_all_its_sessions(shards: Path, tmp_path: Path) -> None:
    path = written(tmp_path, shards, TWO)
    call(train.main, "--config", path)
    first = json.loads((tmp_path / "run/report.json").read_bytes())
    call(train.main, "--config", path, "--phase", "all", "--steps", 4)
    second = json.loads((tmp_path / "run/report.json").read_bytes())
    phase = second["phases"]["phase-2-all"]
    saved = json.loads(
        (tmp_path / "run/phase-2-all/checkpoints/step-00000002/checkpoint.json").read_bytes()
    )
    earlier = saved["meta"]["figures"]["seconds"]
    assert phase["total_seconds"] == pytest.approx(earlier + phase["seconds"], rel=1e-3)
    assert second["seconds"] > first["phases"]["phase-1-top"]["seconds"] + phase["seconds"]
