"""Copies of a run at a URL: whole or absent."""

import dataclasses
import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import (
    best_of,
    checkpoint,
    copy_of,
    files_at,
    files_in,
    make_meta,
    make_state,
    names_in,
    open_saver,
    refuse,
    saving_config,
)
from support.object_server import as_own_process, remote_store
from support.stores import URL, FaultyStore
from support.training import assert_same_run, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.checkpoints.resume import download_newest
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.checkpoints.uploader import PROBE, RemoteRun, Uploads
from tokenfeed.trainer.report.run_folder import RunData
from tokenfeed.trainer.report.run_report import Report


@pytest.fixture(scope="module")
def undisturbed(few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = saving_config(few_rows, tmp_path_factory.mktemp("undisturbed"))
    run(config)
    return config.run_dir


def test_a_url_has_at_the_end_what_the_folder_has(few_rows: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "copy")
    run(saving_config(few_rows, tmp_path / "run", upload=url, keep=1))
    assert files_at(url) == files_in(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_run_that_lost_its_disk_ends_with_the_bits_of_an_undisturbed_one(
    stop_after: int, few_rows: Path, tmp_path: Path, undisturbed: Path
) -> None:
    config = saving_config(few_rows, tmp_path / "run", upload=str(tmp_path / "copy"), resume="auto")
    run(config, stop_after)
    shutil.rmtree(config.run_dir)
    run(config)
    assert_same_run(config.run_dir, undisturbed, 8)
    best = [Checkpoints.of_run(folder).best() for folder in (config.run_dir, undisturbed)]
    assert best[0] == best[1]
    shutil.rmtree(config.run_dir)
    finished = run(config)  # nothing is trained again
    assert finished.steps == 8


def test_wherever_an_upload_breaks_off_a_checkpoint_is_whole_or_absent(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    for last in itertools.count(1):
        store.store.clear()
        store.before = staticmethod(lambda operation, path: None)
        run_dir = tmp_path / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        first, second = checkpoint(run_dir, 1), checkpoint(run_dir, 2)
        remote = RemoteRun(URL)
        remote.put_checkpoint(first)
        counted = itertools.count(1)

        def break_off(operation: str, path: str, counted: Any = counted, last: int = last) -> None:
            if next(counted) >= last:
                refuse(operation, path)

        store.before = staticmethod(break_off)
        ended = True
        try:
            remote.put_checkpoint(second)
            remote.delete_old(2, 1, None)
        except ConnectionError:
            ended = False
        store.before = staticmethod(lambda operation, path: None)
        there = remote.steps()
        assert there in ([1], [1, 2], [2])
        shutil.rmtree(run_dir)
        assert download_newest(run_dir, URL)
        assert Checkpoints.of_run(run_dir).steps() == there[-1:]
        if ended:
            assert there == [2]
            break
        if there == [1]:
            checkpoint(run_dir, 2)
        second = Checkpoints.of_run(run_dir).path(2)  # and the next try ends it
        remote.put_checkpoint(second)
        remote.delete_old(2, 1, None)
        assert files_at(URL) == {
            path: data for path, data in files_in(run_dir).items() if second.name in path
        }
    assert last > 8


def test_upload_replaces_a_checkpoint_of_more_ranks(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    path = checkpoint(tmp_path, 1)
    store.store[f"{URL}/checkpoints/{path.name}/state-1.safetensors"] = b"of another session"
    RemoteRun(URL).put_checkpoint(path)
    assert files_at(URL) == files_in(tmp_path)


def test_a_store_that_cuts_files_off_has_no_checkpoint(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    checkpoint(tmp_path, 1)
    store.kept_share = 0.9
    with pytest.raises(OSError, match="bytes there, not"):
        copy_of(tmp_path, URL)
    assert RemoteRun(URL).steps() == []


def test_the_best_is_there_before_what_came_after_it(
    tmp_path: Path, store: type[FaultyStore], few_rows: Path
) -> None:
    config = saving_config(few_rows, tmp_path / "run", upload=URL)
    checkpoints = Checkpoints.of_run(config.run_dir)
    with open_saver(config.run_dir / "checkpoints", keep=3) as saver:
        for step in (1, 2, 3):
            saver.save(make_meta(step, best=best_of(1)), make_state(step))
    markers: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "pipe" and path.endswith("checkpoint.json"):
            markers.append("/".join(path.split("/")[-2:]))

    store.before = staticmethod(note)
    Uploads(config, checkpoints).finish()
    assert markers[:2] == ["step-00000001/checkpoint.json", "step-00000003/checkpoint.json"]
    assert names_in(config.run_dir / "checkpoints") == ["step-00000001", *of(2, 3)]
    shutil.rmtree(config.run_dir)
    assert download_newest(config.run_dir, URL)
    assert checkpoints.best() == best_of(1)
    assert checkpoints.steps() == [1, 3]


def of(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_has_all_at_the_end(
    few_rows: Path, tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter(range(3))

    def fail_often(operation: str, path: str) -> None:
        if operation == "put" and PROBE not in path and next(failures, None) is not None:
            refuse(operation, path)

    store.before = staticmethod(fail_often)
    config = saving_config(few_rows, tmp_path / "run", upload=URL)
    with caplog.at_level(logging.INFO):
        run(config)
    store.before = staticmethod(lambda operation, path: None)
    assert_has_the_end(config.run_dir)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    told = [r.getMessage() for r in warnings if "fails" in r.getMessage()]
    assert len(told) == 3
    assert all(URL in line and "ConnectionError: the line is dead)" in line for line in told)
    assert all("\n" not in line for line in told)
    assert f"uploaded to {URL}" in caplog.text


def assert_has_the_end(run_dir: Path) -> None:
    """All but checkpoints that were skipped."""
    there, here = files_at(URL), files_in(run_dir)
    assert there.items() <= here.items()
    checkpoints = Checkpoints.of_run(run_dir)
    best = checkpoints.best()
    assert best is not None
    assert {best.step, checkpoints.steps()[-1]} <= {*RemoteRun(URL).steps()}
    assert {"/config.yaml", "/metrics.jsonl", "/report.json"} <= {*there}


def test_a_dead_store_does_not_fail_the_run(
    few_rows: Path, tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_later_writes(operation: str, path: str) -> None:
        if operation != "find" and PROBE not in path:
            refuse(operation, path)

    store.before = staticmethod(refuse_later_writes)
    config = saving_config(few_rows, tmp_path / "run", upload=URL)
    assert run(config).finished
    assert f"upload to {URL} fails (ConnectionError: the line is dead)" in caplog.text
    store.before = staticmethod(lambda operation, path: None)
    run(dataclasses.replace(config, resume=True))
    assert_has_the_end(config.run_dir)


@pytest.mark.parametrize("refused", ["pipe", "rm"])
def test_a_store_that_cannot_be_written_is_refused_before_training_and_warned_of_after(
    refused: str,
    few_rows: Path,
    tmp_path: Path,
    store: type[FaultyStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse_some(operation: str, path: str) -> None:
        if operation == refused:
            raise PermissionError("Access Denied\nfor no reason")

    store.before = staticmethod(refuse_some)
    config = saving_config(few_rows, tmp_path / "run", upload=URL, steps=2)
    with pytest.raises(ConfigError) as error:
        run(config)
    line = f"`--upload`: {URL} cannot be written (PermissionError: Access Denied). Make it "
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    assert not config.run_dir.exists()
    run(dataclasses.replace(config, upload=None))
    longer = dataclasses.replace(config, resume=True, steps=4)
    assert run(longer).finished
    assert f"{URL} cannot be written (PermissionError: Access Denied); the run" in caplog.text


def test_a_place_below_a_file_is_refused_at_once(few_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = saving_config(few_rows, tmp_path / "run", upload=f"{tmp_path}/file/run")
    with pytest.raises(ConfigError, match=r"cannot be read \(NotADirectoryError: "):
        run(config)


def test_upload_to_bucket_survives_the_loss_of_the_folder(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    with remote_store(monkeypatch) as remote:
        url = f"s3://{remote.prefix}"
        config = saving_config(few_rows, tmp_path / "run", upload=url, resume="auto", keep=1)
        run(config)
        left = files_in(config.run_dir)
        objects = remote.server.objects.items()
        there = {path.removeprefix(remote.prefix): each.data for path, each in objects}
        assert there == left
        shutil.rmtree(config.run_dir)
        run(config)
    assert files_in(config.run_dir) == left


def test_a_url_that_is_ahead_of_the_folder_is_refused(
    few_rows: Path, undisturbed: Path, tmp_path: Path, store: type[FaultyStore]
) -> None:
    copy_of(undisturbed, URL)
    before = files_at(URL)
    with pytest.raises(ConfigError, match=r"holds step 8, and .*second does not"):
        run(saving_config(few_rows, tmp_path / "second", upload=URL))
    assert files_at(URL) == before


@pytest.mark.parametrize("url", ["nonsense://x", "nosuch:://", "file:///tmp/x", "folder"])
def test_a_url_of_no_kind_and_the_folder_itself_are_refused(
    url: str, few_rows: Path, tmp_path: Path
) -> None:
    if url == "folder":
        url = str(tmp_path)
    with pytest.raises(ConfigError, match="--upload"):
        run(saving_config(few_rows, tmp_path, upload=url))


def test_a_url_of_a_data_set_is_refused_and_stays_as_it_is(few_rows: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in few_rows.rglob("*")}
    with pytest.raises(ConfigError, match=r"`--upload`: .* holds shards"):
        run(saving_config(few_rows, tmp_path / "run", upload=str(few_rows)))
    assert {path: path.stat().st_mtime_ns for path in few_rows.rglob("*")} == before


def test_the_report_of_a_moved_run_names_the_folder_where_it_is(
    undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "second")
    report = Report.of_run(tmp_path / "second")
    assert report is not None
    assert str(tmp_path / "second" / "report.html") in report.summary()
    page = RunData.of_folder(tmp_path / "second")
    assert page.summary() == report.summary()
