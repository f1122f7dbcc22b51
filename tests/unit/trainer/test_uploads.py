"""Copies of a run at a URL: whole or absent, never waited for; and going on from the newest."""

import contextlib
import dataclasses
import itertools
import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faulty_store import URL, FaultyStore, faulty_store
from saves import best_of, make_state, names_in, save
from training import assert_same_run, make_config, run, write_counting

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.tools.train_command import parse_config
from tokenfeed.trainer.checkpoints import remote as remote_module
from tokenfeed.trainer.checkpoints import uploads as uploads_module
from tokenfeed.trainer.checkpoints.folder import Checkpoints
from tokenfeed.trainer.checkpoints.newest import bring_newest
from tokenfeed.trainer.checkpoints.remote import RemoteRun
from tokenfeed.trainer.checkpoints.uploads import Uploads
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.page.run_data import RunData
from tokenfeed.trainer.report import Report
from tokenfeed.trainer.run import train


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(remote_module, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(uploads_module, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(uploads_module, "LONGEST_WAIT_S", 0.05)


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    with faulty_store() as store:
        yield store


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return write_counting(write_dataset, folder, rows=400, validation_rows=20)


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(shards, tmp_path_factory.mktemp("undisturbed"))
    run(config)
    return config.run_dir


def config_of(shards: Path, run_dir: Path, **changes: Any) -> TrainConfig:
    return make_config(
        shards, run_dir, **{"save_every": 2, "eval_every": 2, "eval_batches": 2} | changes
    )


def files_at(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root): files.cat_file(path) for path in files.find(root)}


def files_in(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {f"/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def refuse(operation: str, path: str) -> None:
    raise ConnectionError("the line is dead\nand so on")


@pytest.mark.parametrize("kind", ["memory", "file", "faulty"])
def test_a_url_has_at_the_end_what_the_folder_has(
    kind: str, shards: Path, tmp_path: Path, store: type[FaultyStore]
) -> None:
    url = {"memory": f"memory:/{tmp_path}", "file": f"file://{tmp_path}/copy", "faulty": URL}[kind]
    run(config_of(shards, tmp_path / "run", upload=url, keep=1))
    assert files_at(url) == files_in(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_run_that_lost_its_disk_ends_with_the_bits_of_an_undisturbed_one(
    stop_after: int, shards: Path, tmp_path: Path, undisturbed: Path
) -> None:
    config = config_of(shards, tmp_path / "run", upload=f"memory:/{tmp_path}", resume="auto")
    run(config, stop_after)
    shutil.rmtree(config.run_dir)
    run(config)
    assert_same_run(config.run_dir, undisturbed, 8)
    best = [Checkpoints.of_run(folder).best() for folder in (config.run_dir, undisturbed)]
    assert best[0] == best[1]
    shutil.rmtree(config.run_dir)
    finished = run(config)  # nothing is trained again
    assert finished.steps == 8


def copy_of(folder: Path, url: str) -> RemoteRun:
    remote = RemoteRun(url)
    for path in sorted(folder.glob("checkpoints/step-????????")):
        remote.put_checkpoint(path)
    return remote


def checkpoint(run_dir: Path, step: int) -> Path:
    return save(run_dir / "checkpoints", step, keep=9)


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
        assert bring_newest(run_dir, URL)
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


def test_a_finished_report_at_a_url_promises_the_last_checkpoint_and_the_best(
    shards: Path, tmp_path: Path, store: type[FaultyStore]
) -> None:
    config = config_of(shards, tmp_path / "run", steps=8, upload=URL)
    run(config, 5)
    early = dict(store.store)
    run(dataclasses.replace(config, resume=True))
    ends = Checkpoints.of_run(config.run_dir)
    finished = []
    for last in itertools.count(1):
        store.store.clear()
        store.store.update(early)
        counted = itertools.count(1)

        def break_off(operation: str, path: str, counted: Any = counted, last: int = last) -> None:
            if next(counted) >= last:
                refuse(operation, path)

        store.before = staticmethod(break_off)
        with contextlib.suppress(ConnectionError):
            Uploads(config, ends)._copy()
        store.before = staticmethod(lambda operation, path: None)
        there = json.loads(RemoteRun(URL).get("report.json") or b'{"finished": false}')
        finished.append(there["finished"])
        if there["finished"]:
            assert RemoteRun(URL).steps()[-1] == 8
            assert RemoteRun(URL).best() == ends.best()
            break
    assert finished.count(True) == 1
    assert len(finished) > 8


def test_a_store_that_cuts_files_off_has_no_checkpoint(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    checkpoint(tmp_path, 1)
    store.kept_share = 0.9
    with pytest.raises(OSError, match="bytes there, not"):
        copy_of(tmp_path, URL)
    assert RemoteRun(URL).steps() == []


def test_steps_never_wait_for_a_store_and_only_the_latest_is_copied_then(
    shards: Path, tmp_path: Path, store: type[FaultyStore]
) -> None:
    opened, begun = threading.Event(), threading.Event()
    puts: list[str] = []

    def wait(operation: str, path: str) -> None:
        if operation == "put":
            puts.append(path.split("/")[-2])
            begun.set()
            assert opened.wait(60)

    steps = iter(range(1, 100))

    def open_after_last() -> bool:
        if next(steps) == 16:
            opened.set()
        return False

    store.before = staticmethod(wait)
    config = config_of(shards, tmp_path, upload=URL, steps=16, keep=1, eval_every=100)
    train(config, open_after_last)
    assert begun.is_set()
    assert puts[-1] == "step-00000016"
    assert len(puts) <= 3
    assert RemoteRun(URL).steps()[-1] == 16
    assert names_in(tmp_path / "checkpoints") == ["best.json", "step-00000016"]


def test_what_is_being_copied_is_kept_and_then_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    save(folder, 1)
    with checkpoints.hold() as held:
        save_beside(checkpoints, 2)
        assert held.latest == 1
        assert checkpoints.steps() == [1, 2]
    save_beside(checkpoints, 3)
    assert checkpoints.steps() == [3]


def save_beside(checkpoints: Checkpoints, step: int) -> None:
    shutil.copytree(checkpoints.path(checkpoints.steps()[-1]), checkpoints.path(step))
    checkpoints.delete_old(keep=1)


def test_the_best_is_there_before_what_came_after_it(
    tmp_path: Path, store: type[FaultyStore], shards: Path
) -> None:
    config = config_of(shards, tmp_path / "run", upload=URL)
    checkpoints = Checkpoints.of_run(config.run_dir)
    for step in (1, 2, 3):
        checkpoint(config.run_dir, step)
    checkpoints.keep_best(best_of(1))
    markers: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "mv":
            markers.append("/".join(path.split("/")[-2:]))

    store.before = staticmethod(note)
    uploads = uploads_module.Uploads(config, checkpoints)
    uploads.begin()
    uploads.finish()
    assert markers[:3] == [
        "step-00000001/checkpoint.json",
        "checkpoints/best.json",
        "step-00000003/checkpoint.json",
    ]
    assert names_in(config.run_dir / "checkpoints")[1:] == ["step-00000001", *of(2, 3)]
    shutil.rmtree(config.run_dir)
    assert bring_newest(config.run_dir, URL)
    assert checkpoints.best() == best_of(1)
    assert checkpoints.steps() == [1, 3]


def of(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_has_all_at_the_end(
    shards: Path, tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    asked: Counter[tuple[str, str]] = Counter()

    def fail_often(operation: str, path: str) -> None:
        asked[operation, path] += 1
        is_first = remote_module.PROBE in path  # before training it is waited for, for a while
        if operation != "find" and not is_first and asked[operation, path] in (1, 2):
            refuse(operation, path)

    store.before = staticmethod(fail_often)
    config = config_of(shards, tmp_path / "run", upload=URL)
    with caplog.at_level(logging.INFO):
        run(config)
    store.before = staticmethod(lambda operation, path: None)
    assert_has_the_end(config.run_dir)
    told = [r.getMessage() for r in caplog.records if "fails" in r.getMessage()]
    assert told
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
    assert {"/config.yaml", "/metrics.jsonl", "/report.json", "/checkpoints/best.json"} <= {*there}


def test_a_dead_store_delays_the_end_by_its_bound_and_does_not_fail_the_run(
    shards: Path,
    tmp_path: Path,
    store: type[FaultyStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads_module, "FINISH_S", 0.5)

    def refuse_later_writes(operation: str, path: str) -> None:
        if operation != "find" and remote_module.PROBE not in path:
            refuse(operation, path)

    store.before = staticmethod(refuse_later_writes)
    config = config_of(shards, tmp_path / "run", upload=URL)
    assert run(config).finished
    assert "no checkpoint is there (ConnectionError: the line is dead)" in caplog.text
    store.before = staticmethod(lambda operation, path: None)
    run(dataclasses.replace(config, resume=True))
    assert_has_the_end(config.run_dir)


@pytest.mark.parametrize("refused", ["pipe", "mv", "mv half", "rm"])
def test_a_store_that_cannot_be_written_is_refused_before_training_and_warned_of_after(
    refused: str,
    shards: Path,
    tmp_path: Path,
    store: type[FaultyStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads_module, "FINISH_S", 0.2)

    def refuse_some(operation: str, path: str) -> None:
        if operation == refused:
            raise PermissionError("Access Denied\nfor no reason")

    store.before = staticmethod(refuse_some)
    config = config_of(shards, tmp_path / "run", upload=URL, steps=2)
    with pytest.raises(ConfigError) as error:
        run(config)
    line = f"`--upload`: {URL} cannot be written (PermissionError: Access Denied). Mend this, or"
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    assert not config.run_dir.exists()
    run(dataclasses.replace(config, upload=None))
    longer = dataclasses.replace(config, resume=True, steps=4)
    assert run(longer).finished
    assert f"{URL} cannot be written (PermissionError: Access Denied); the run" in caplog.text


def test_a_place_below_a_file_is_refused_at_once(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = config_of(shards, tmp_path / "run", upload=f"file://{tmp_path}/file/run")
    with pytest.raises(ConfigError, match=r"cannot be written \(NotADirectoryError: "):
        run(config)


def test_trying_to_write_leaves_nothing(tmp_path: Path, store: type[FaultyStore]) -> None:
    RemoteRun(URL).check_writable()
    assert files_at(URL) == {}


def test_a_hanging_store_delays_the_end_by_its_bound(
    shards: Path,
    tmp_path: Path,
    store: type[FaultyStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads_module, "FINISH_S", 0.3)
    opened = threading.Event()

    def hang(operation: str, path: str) -> None:
        if operation == "pipe" and remote_module.PROBE not in path:
            opened.wait(60)

    store.before = staticmethod(hang)
    started = time.monotonic()
    assert run(config_of(shards, tmp_path / "run", upload=URL)).finished
    assert time.monotonic() - started < 30
    assert "was not uploaded, no checkpoint is there (it takes longer)" in caplog.text
    opened.set()


def spoil(path: Path) -> None:
    file = path / "state-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_auto_takes_the_one_before_a_damaged_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 1)
    damaged = checkpoint(tmp_path, 2)
    spoil(damaged)
    assert bring_newest(tmp_path, None)
    assert Checkpoints.of_run(tmp_path).steps() == [1]
    assert f"{damaged} is damaged (state-00000.safetensors fails its checksum)" in caplog.text
    assert names_in(tmp_path / "checkpoints") == ["step-00000001", "step-00000002.damaged"]


def test_auto_takes_a_good_copy_instead_of_a_damaged_one(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    checkpoint(tmp_path, 1)
    path = checkpoint(tmp_path, 2)
    copy_of(tmp_path, URL)
    good = files_in(path)
    spoil(path)
    assert bring_newest(tmp_path, URL)
    assert Checkpoints.of_run(tmp_path).steps() == [1, 2]
    assert files_in(path) == good


def test_auto_takes_no_damaged_copy(
    tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 1)
    shutil.copytree(tmp_path, tmp_path / "other")
    spoiled = checkpoint(tmp_path / "other", 2)
    copy_of(tmp_path / "other", URL)
    files, root = fsspec.core.url_to_fs(URL)
    spoil(spoiled)
    place = f"{root}/checkpoints/{spoiled.name}/state-00000.safetensors"
    files.put_file(str(spoiled / "state-00000.safetensors"), place)
    assert bring_newest(tmp_path, URL)
    assert Checkpoints.of_run(tmp_path).steps() == [1]
    assert f"{URL}: step 2 is damaged there" in caplog.text
    assert RemoteRun(URL).steps() == [1]


def test_where_all_are_damaged_auto_begins_nothing_anew(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    spoil(path)
    with pytest.raises(ResumeError, match="every checkpoint is damaged"):
        bring_newest(tmp_path, None)
    assert path.exists()


def test_auto_does_not_begin_anew_where_the_url_does_not_answer(
    tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    store.before = staticmethod(refuse)
    with pytest.raises(ResumeError, match=f"{URL}: cannot be read .*the line is dead"):
        bring_newest(tmp_path, URL)
    checkpoint(tmp_path, 1)
    assert bring_newest(tmp_path, URL)
    assert f"{URL} cannot be read" in caplog.text


def test_auto_without_a_checkpoint_begins(tmp_path: Path, store: type[FaultyStore]) -> None:
    assert not bring_newest(tmp_path / "new", URL)
    assert not bring_newest(tmp_path / "new", None)


def test_auto_takes_the_newer_of_here_and_there(tmp_path: Path, store: type[FaultyStore]) -> None:
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    checkpoint(behind, 3)
    save(ahead / "checkpoints", 5, make_state(5))
    copy_of(ahead, URL)
    assert bring_newest(behind, URL)
    assert Checkpoints.of_run(behind).steps() == [3, 5]
    save(behind / "checkpoints", 7, make_state(7))
    store.before = staticmethod(lambda operation, path: operation != "get" or refuse("", ""))
    assert bring_newest(behind, URL)


def test_of_several_processes_that_a_launcher_starts_one_brings_the_checkpoint(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    checkpoint(tmp_path / "first", 1)
    copy_of(tmp_path / "first", URL)
    gets: list[str] = []
    store.before = staticmethod(
        lambda operation, path: operation == "get" and (gets.append(path), time.sleep(0.05))
    )
    run_dir = tmp_path / "run"
    with ThreadPoolExecutor(4) as pool:  # a file that is opened twice is locked as by two processes
        assert all(pool.map(lambda _: bring_newest(run_dir, URL), range(4)))
    assert len(gets) == 2


def test_a_url_that_is_ahead_of_the_folder_is_refused(
    shards: Path, tmp_path: Path, store: type[FaultyStore]
) -> None:
    run(config_of(shards, tmp_path / "first", upload=URL))
    before = files_at(URL)
    with pytest.raises(ConfigError, match=r"holds step 8, and .*second does not"):
        run(config_of(shards, tmp_path / "second", upload=URL))
    assert files_at(URL) == before


@pytest.mark.parametrize("url", ["nonsense://x", "nosuch:://", "memory"])
def test_a_url_of_no_kind_and_the_folder_itself_are_refused(
    url: str, shards: Path, tmp_path: Path
) -> None:
    if url == "memory":
        url = str(tmp_path)
    with pytest.raises(ConfigError, match="--upload"):
        run(config_of(shards, tmp_path, upload=url))


def test_a_url_of_a_data_set_is_refused_and_stays_as_it_is(shards: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shards.rglob("*")}
    with pytest.raises(ConfigError, match=r"`--upload`: .* holds shards"):
        run(config_of(shards, tmp_path / "run", upload=shards.as_uri()))
    assert {path: path.stat().st_mtime_ns for path in shards.rglob("*")} == before


def test_the_report_of_a_moved_run_names_the_folder_where_it_is(
    shards: Path, tmp_path: Path
) -> None:
    run(config_of(shards, tmp_path / "first"))
    (tmp_path / "first").rename(tmp_path / "second")
    report = Report.of_run(tmp_path / "second")
    assert report is not None
    assert str(tmp_path / "second" / "report.html") in report.summary()
    page = RunData.of_run(tmp_path / "second")
    assert page.summary() == report.summary()


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> TrainConfig:
    monkeypatch.setattr("sys.argv", ["train", *words])
    return parse_config()


def test_the_same_command_line_begins_a_run_and_goes_on_with_its_settings(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[FaultyStore]
) -> None:
    run_dir = tmp_path / "run"
    words = ["--shards", str(shards), "--run-dir", str(run_dir), "--upload", URL]
    begun = parsed(monkeypatch, *words, "--resume", "auto", "--steps", "4")
    assert begun.resume is False
    small = config_of(shards, run_dir, upload=URL, steps=4, learning_rate=0.01)
    run(small)
    shutil.rmtree(run_dir)
    again = parsed(monkeypatch, *words, "--resume", "auto", "--steps", "4")
    assert again == dataclasses.replace(small, resume=True)
    longer = parsed(monkeypatch, "--run-dir", str(run_dir), "--resume", "--steps", "6")
    assert longer == dataclasses.replace(small, resume=True, steps=6)
    run(longer)
    assert RemoteRun(URL).steps()[-1] == 6


def test_resume_alone_needs_a_run(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--shards", str(shards), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        run(parsed(monkeypatch, *words, "--resume"))
    with pytest.raises(ConfigError, match="needs --run-dir"):
        parsed(monkeypatch, *words[:2], "--resume", "auto")
