"""Copies of runs at another place: complete or absent, and never waited for."""

import dataclasses
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import (
    CPU,
    best_of,
    checkpoint,
    make_meta,
    make_state,
    names_in,
    saving_config,
)
from support.object_server import FAST, Fault, Remote, as_own_process, remote_store
from support.training import run

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.remote.retrying import Timing
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.loop import uploads
from tokenfeed.trainer.loop.uploads import (
    RunCopy,
    Uploads,
    check_upload,
    fetch_newest,
)

QUICK = dataclasses.replace(FAST, give_up_s=0.2)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    monkeypatch.setattr(Timing, "from_environment", lambda: QUICK)
    with remote_store(monkeypatch, QUICK) as remote:
        yield remote


def address_of(remote: Remote) -> str:
    return f"s3://{remote.prefix}"


def names_at(remote: Remote) -> set[str]:
    return {name.removeprefix(f"{remote.prefix}/") for name in remote.server.objects}


class Held:
    """Puts of checkpoints that wait until the test lets them go."""

    def __init__(self, put: Callable[..., None]) -> None:
        self._put, self.begun, self.opened = put, threading.Event(), threading.Event()
        self.steps: list[str] = []

    def put(self, copy: RunCopy, folder: Path) -> None:
        self.steps.append(folder.name)
        self.begun.set()
        assert self.opened.wait(60)
        self._put(copy, folder)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(RunCopy.put)
    monkeypatch.setattr(RunCopy, "put", lambda copy, folder: held.put(copy, folder))
    yield held
    held.opened.set()
    for thread in threading.enumerate():
        if thread.name == uploads.THREAD:
            thread.join(60)


def test_steps_go_on_while_place_takes_nothing(
    few_rows: Path,
    tmp_path: Path,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(uploads, "_QUIET_S", 0.1)
    config = saving_config(few_rows, tmp_path / "run", upload=str(tmp_path / "copy"), keep=1)
    with caplog.at_level(logging.INFO):
        assert run(config).finished
    assert held.steps == ["step-00000002"]
    assert f"waiting for the upload to {tmp_path}/copy, for at most " in caplog.text
    warned = f"copy lacks the end of the run (it takes too long). `train --run-dir {tmp_path}/run "
    assert f"{warned}--resume` uploads it" in caplog.text


def of(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def test_best_checkpoint_is_uploaded_first_and_kept(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saving_config(tmp_path, tmp_path / "run", upload=address_of(remote), keep=1)
    check_upload(config)
    checkpoints = Checkpoints.of_run(config.run_dir)
    saver = Saver(checkpoints, 1, CPU)
    for step in (1, 2, 3):
        saver.save(make_meta(step, best=best_of(1)), make_state(step))
        saver.wait()
        Uploads(config, checkpoints).finish()
    assert RunCopy(address_of(remote)).steps() == [1, 3]
    puts = [line for line in remote.proxy.seen if "PUT" in line and "checkpoint.json" in line]
    assert [line.split("/")[-2] for line in puts] == of(1, 2, 3)
    shutil.rmtree(config.run_dir)
    resumed, read = dataclasses.replace(config, resume=True), RunCopy.read

    def broken_off(copy: RunCopy, name: str) -> bytes | None:
        if name == "upload.json":
            return read(copy, name)
        raise ConnectionResetError

    with monkeypatch.context() as broken:
        broken.setattr(RunCopy, "read", broken_off)
        with pytest.raises(ResumeError, match="cannot be downloaded"):
            fetch_newest(resumed)
    assert checkpoints.steps() == [1]  # of this run, though the download goes on with the newest
    fetch_newest(resumed)
    assert (checkpoints.steps(), checkpoints.best()) == ([1, 3], best_of(1))


def test_bucket_never_lists_a_part_wherever_an_upload_breaks_off(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    copy = RunCopy(address_of(remote))
    copy.put(first)
    left = 0

    def counted(request: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            nonlocal left
            if (left := left - 1) < 0:
                raise ConnectionError("the line is dead")
            return request(*args)

        return send

    for name in ("read", "has", "write", "delete", "names"):
        monkeypatch.setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))
    for allowed in range(100):
        left, is_done = allowed, True
        try:
            copy.put(second)
            copy.delete_old(1, 2, None)
        except ConnectionError:
            is_done = False
        left = 1000
        steps = copy.steps()
        assert steps in ([1], [1, 2], [2])
        for step in steps:
            (tmp_path / f"{allowed}-{step}").mkdir()
            assert copy.get(step, tmp_path / f"{allowed}-{step}").meta.step == step
        if is_done:
            break
    assert (is_done, steps) == (True, [2])
    assert allowed > 5
    folder = "checkpoints/step-00000002/"
    assert names_at(remote) == {f"{folder}checkpoint.json", f"{folder}state-0.safetensors"}


def test_run_whose_bucket_fails_to_the_end_warns_and_resume_uploads(
    few_rows: Path, tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    config = saving_config(few_rows, tmp_path / "run", upload=address_of(remote))
    remote.proxy.match, remote.proxy.always = "/checkpoints/", Fault("reset")
    assert run(config).finished
    assert "lacks the end of the run (s3://" in caplog.text
    assert "Traceback" not in caplog.text
    remote.proxy.always = None
    run(dataclasses.replace(config, resume=True))
    assert RunCopy(address_of(remote)).steps() == Checkpoints.of_run(config.run_dir).steps()


def test_upload_to_unreachable_bucket_ends_a_new_run_before_it_trains(
    few_rows: Path, tmp_path: Path, remote: Remote
) -> None:
    remote.proxy.always = Fault("reset")
    config = saving_config(few_rows, tmp_path / "run", upload=address_of(remote))
    with pytest.raises(ConfigError, match=r"`--upload`: s3://.* cannot be written \(") as error:
        run(config)
    assert "\n" not in str(error.value)
    with pytest.raises(ResumeError, match="may have the newest checkpoint"):
        run(dataclasses.replace(config, resume="auto"))


def test_resume_goes_on_from_folder_if_bucket_cannot_be_read(
    few_rows: Path, tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    config = saving_config(few_rows, tmp_path / "run", steps=4)
    run(config)
    remote.proxy.always = Fault("reset")
    more = {"resume": True, "steps": 6, "upload": address_of(remote)}
    assert run(dataclasses.replace(config, **more)).finished
    assert "cannot be read (" in caplog.text
    assert "Going on without it" in caplog.text


def test_damaged_checkpoint_of_copy_is_named(
    few_rows: Path, tmp_path: Path, remote: Remote
) -> None:
    config = saving_config(few_rows, tmp_path / "run", steps=2, upload=address_of(remote))
    run(config)
    name = "checkpoints/step-00000002/state-0.safetensors"
    remote.put(name, remote.content(name)[:-1] + b"?")
    shutil.rmtree(config.run_dir)
    with pytest.raises(ResumeError, match="the checkpoint is damaged") as error:
        run(dataclasses.replace(config, resume="auto"))
    assert str(error.value).startswith(f"{address_of(remote)}/checkpoints/step-00000002: ")
    assert Checkpoints.of_run(config.run_dir).steps() == []


def test_address_with_another_run_is_refused(
    few_rows: Path, tmp_path: Path, remote: Remote
) -> None:
    run(saving_config(few_rows, tmp_path / "run", steps=2, upload=address_of(remote)))
    before = dict(remote.server.objects)
    with pytest.raises(ConfigError, match=r"holds step 2 of a run. Add --resume auto"):
        run(saving_config(few_rows, tmp_path / "other", upload=address_of(remote)))
    assert remote.server.objects == before


def test_resumed_run_does_not_overwrite_another_run(
    few_rows: Path, tmp_path: Path, remote: Remote
) -> None:
    address = address_of(remote)
    for name, steps in (("one", 4), ("two", 2)):
        upload = address if name == "one" else None
        run(saving_config(few_rows, tmp_path / name, steps=steps, upload=upload))
    before = dict(remote.server.objects)
    for _ in range(2):  # before and after the second run has a mark of its own
        again = saving_config(few_rows, tmp_path / "two", steps=6, upload=address, resume=True)
        with pytest.raises(ConfigError) as error:
            run(again)
        assert str(error.value).startswith(f"`--upload`: {address} holds another run than ")
        assert f"{tmp_path / 'two'}: {tmp_path / 'one'}, begun at " in str(error.value)
        assert remote.server.objects == before
        run(dataclasses.replace(again, steps=4, upload=str(tmp_path / "copy")))
    elsewhere = saving_config(few_rows, tmp_path / "three", steps=6, upload=address, resume="auto")
    assert run(elsewhere).steps == 6  # the same run, on another machine
    assert json.loads((tmp_path / "three" / "upload.json").read_bytes()) == json.loads(
        (tmp_path / "one" / "upload.json").read_bytes()
    )


def test_new_run_takes_an_address_over_from_its_own_folder_only(
    few_rows: Path, tmp_path: Path, remote: Remote
) -> None:
    address = address_of(remote)
    check_upload(saving_config(few_rows, tmp_path / "one", upload=address))
    shutil.rmtree(tmp_path / "one")  # the machine is lost before the first checkpoint
    with pytest.raises(ConfigError, match="holds another run than"):
        check_upload(saving_config(few_rows, tmp_path / "two", upload=address))
    check_upload(saving_config(few_rows, tmp_path / "one", upload=address))


def test_drive_that_is_not_mounted_is_a_warning(
    few_rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "drive/MyDrive/first"
    run(saving_config(few_rows, tmp_path / "run", upload=str(place)))
    assert f"there is no folder {tmp_path / 'drive'}" in caplog.text
    assert (place / "report.json").exists()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nonsense://x", "no store for `nonsense://`"),
        ("https://host/x?X-Amz-Signature=hunter2", "nothing can be written there"),
        ("s3://someone:hunter2@bucket/x", "contains a user, a key or a query"),
        ("{run}/copy", "is in --run-dir"),
        ("{shards}", "holds shards"),
        ("{file}/x", "cannot be written ("),
    ],
)
def test_place_that_cannot_hold_a_copy_is_refused(
    place: str, reason: str, few_rows: Path, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    file = tmp_path / "file"
    file.touch()
    address = place.format(run=tmp_path / "run", shards=few_rows, file=file)
    with pytest.raises(ConfigError) as error:
        run(saving_config(few_rows, tmp_path / "run", upload=address))
    assert str(error.value).startswith("`--upload`: ")
    assert reason in str(error.value)
    assert "hunter2" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_slow_place_gets_latest_checkpoint_next(tmp_path: Path, held: Held) -> None:
    config = saving_config(tmp_path, tmp_path / "run", upload=str(tmp_path / "copy"), keep=2)
    checkpoints = Checkpoints.of_run(config.run_dir)
    copies = Uploads(config, checkpoints)
    saver = Saver(checkpoints, 2, CPU, on_saved=copies.start)
    for step in range(1, 7):
        saver.save(make_meta(step), make_state(step))
        saver.wait()
        assert held.begun.wait(60)
    assert names_in(config.run_dir / "checkpoints") == of(1, 5, 6)  # 1 is being uploaded
    held.opened.set()
    copies.finish()
    assert held.steps[:3] == of(1, 6, 5)
    assert names_in(config.run_dir / "checkpoints") == of(5, 6)
    assert names_in(tmp_path / "copy" / "checkpoints") == of(5, 6)
