"""Saving beside the loop: what is saved, who waits for whom, and who is told of errors."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import CPU, assert_same, make_meta, make_state, names_in, open_saver
from support.simulated_cuda import CUDA_1, SimulatedCuda, simulate
from support.training import make_config, write_counting

from tokenfeed.trainer.checkpoints import async_saver
from tokenfeed.trainer.checkpoints.async_saver import HostCopy, Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.loop.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator["Disk"]:
    disk = Disk(async_saver.write_tensors)
    monkeypatch.setattr(async_saver, "write_tensors", disk.write)
    yield disk
    disk.opened.set()


class Disk:
    """One that writes when the test says so, or refuses."""

    def __init__(self, write: Callable[..., str]) -> None:
        self._write = write
        self.opened = threading.Event()
        self.is_full = False

    def write(self, *args: Any) -> str:
        assert self.opened.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        return self._write(*args)


def test_what_changes_after_a_save_has_its_old_value_on_disk(folder: Path, disk: Disk) -> None:
    weight = torch.arange(1000.0)
    with open_saver(folder) as saver:
        saver.save(make_meta(1), {"weight": weight})
        weight.zero_()
        threading.Timer(0.2, disk.opened.set).start()
        saver.save(make_meta(2), {"weight": weight})
    for step, expected in ((1, torch.arange(1000.0)), (2, torch.zeros(1000))):
        assert torch.equal(Checkpoints(folder).open(step).read()["weight"], expected)


@pytest.mark.parametrize("tell", ["save", "wait", "check"])
def test_an_error_of_the_disk_is_told_once_and_leaves_the_earlier_checkpoint_the_latest(
    folder: Path, disk: Disk, tell: str
) -> None:
    disk.opened.set()
    saver = Saver(Checkpoints(folder), 2, CPU)
    saver.save(make_meta(1), make_state(1))
    saver.wait()
    disk.is_full = True
    saver.save(make_meta(2), make_state(2))
    tellers: dict[str, Callable[[], None]] = {
        "save": lambda: saver.save(make_meta(3), make_state(3)),
        "wait": saver.wait,
        "check": lambda: until_told(saver),
    }
    with pytest.raises(OSError, match="No space") as error:
        tellers[tell]()
    assert error.value.filename == str(folder / "step-00000002")
    assert error.value.strerror.endswith(f"go on with --resume from {folder / 'step-00000001'}")
    saver.wait()
    assert names_in(folder) == ["step-00000001"]


def until_told(saver: Saver) -> None:
    while True:
        saver.check()
        time.sleep(0.01)


def test_an_error_of_the_disk_behind_another_error_is_logged(
    folder: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True
    disk.opened.set()
    saver = Saver(Checkpoints(folder), 2, CPU)
    saver.save(make_meta(1), make_state(1))
    saver.wait_after_error()
    (record,) = caplog.records
    assert "was not saved: [Errno 28] No space left" in record.getMessage()
    assert "step-00000001" in record.getMessage()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]) -> Path:
    return write_counting(write_dataset, tmp_path_factory.mktemp("shards"), validation_rows=0)


def test_steps_go_on_while_a_disk_writes_nothing(shards: Path, tmp_path: Path, disk: Disk) -> None:
    steps = iter(range(1, 100))

    def open_after_six() -> bool:
        if next(steps) == 6:
            assert names_in(tmp_path / "checkpoints") == ["step-00000004.tmp"]
            disk.opened.set()
        return False

    train(make_config(shards, tmp_path, save_every=4), open_after_six)
    assert names_in(tmp_path / "checkpoints") == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize("error", [None, ValueError("in the loop"), KeyboardInterrupt()])
def test_close_without_finish_waits_for_the_checkpoint(
    error: BaseException | None, shards: Path, tmp_path: Path, disk: Disk
) -> None:
    def end_after_save() -> bool:
        if not (tmp_path / "checkpoints").exists():
            return False
        threading.Timer(0.5, disk.opened.set).start()
        if error:
            raise error
        return True

    with (
        contextlib.nullcontext() if error is None else pytest.raises(type(error)),
        contextlib.closing(Trainer(make_config(shards, tmp_path, save_every=4))) as trainer,
    ):
        trainer.train(end_after_save)
    assert names_in(tmp_path / "checkpoints") == ["step-00000004"]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_ranks_that_save_together_all_fail_or_make_one_checkpoint(
    failing: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = async_saver.write_tensors

    def write_or_fail(path: Path, copy: HostCopy) -> str:
        if path.name == f"state-{failing}.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, copy)

    monkeypatch.setattr(async_saver, "write_tensors", write_or_fail)
    gathers = Gathers(2)
    savers = [
        Saver(Checkpoints(folder), 2, CPU, rank, gathers.of(rank)) for rank in range(gathers.size)
    ]
    for saver in savers:
        saver.save(make_meta(1), make_state(1))
    for saver in savers:
        with contextlib.nullcontext() if failing is None else pytest.raises(OSError, match="space"):
            saver.wait()
    if failing is None:
        path = folder / "step-00000001"
        assert names_in(path) == ["checkpoint.json", "state-0.safetensors", "state-1.safetensors"]
        assert_same(Checkpoints(folder).open().read(), make_state(1))
    else:
        assert names_in(folder) == []


def test_ranks_without_a_shared_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "another machine"
    (other / "step-00000001.tmp").mkdir(parents=True)
    gathers = Gathers(2)
    savers = [
        Saver(Checkpoints(place), 2, CPU, rank, gathers.of(rank))
        for rank, place in enumerate((folder, other))
    ]
    for saver in savers:
        saver.save(make_meta(1), make_state(1))
    with pytest.raises(OSError, match=r"state-1.safetensors: all ranks need the same --run-dir"):
        savers[0].wait()


class Gathers:
    """Messages between ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(60)
            values = [*self._values]
            self._barrier.wait(60)
            return values

        return gather


def copied(cuda: SimulatedCuda) -> None:
    tensors = {"weight": torch.arange(4.0)}
    copy = HostCopy(CUDA_1)
    for _ in range(3):
        copy.take(tensors)
        copy.wait()
    copy.close()


def test_memory_is_page_locked_once_and_unlocked_when_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate(monkeypatch) as cuda:
        copied(cuda)
    assert cuda.marks == ["register", "unregister"]
    assert cuda.contexts == {1}
    events = cuda.copy.recorded
    assert len(events) == 3
    assert all(event.was_waited_for for event in events)


def test_copy_is_beside_the_next_step_and_before_its_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate(monkeypatch) as cuda:
        copy = HostCopy(CUDA_1)
        copy.before_update()
        assert not cuda.compute.waited, "nothing was copied"
        copy.take({"weight": torch.arange(4.0)})
        assert cuda.copy.waited == cuda.compute.recorded, "copies follow the last update"
        assert not cuda.compute.waited, "the next forward pass does not wait"
        copy.before_update()
        copy.before_update()
        assert cuda.compute.waited == cuda.copy.recorded
        assert not any(event.was_waited_for for event in cuda.copy.recorded), "the host waited"
        copy.close()


def test_where_no_memory_can_be_locked_a_warning_says_so_and_copies_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with simulate(monkeypatch) as cuda:
        cuda.refuses = True
        copy = HostCopy(CUDA_1)
        copy.take({"weight": torch.arange(4.0)})
        copy.close()
    assert torch.equal(copy.places["weight"].view(copy.memory), torch.arange(4.0))
    assert "refused to page-lock" in caplog.text
    assert cuda.last_error == 0
