"""The way to a GPU where things go wrong: refused page locks, failed kernels, ends of all kinds."""

import gc
import json
import os
import subprocess
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from support.delivery import open_loader, pool_of, same_values
from support.processes import workers_of
from support.simulated_cuda import CUDA_1, SimulatedCuda, started

from tokenfeed import ShardLoader
from tokenfeed.pipeline.feeding import transfer

TOO_EARLY = "unregister while it is copied from"

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_refused_page_lock_warns_once_and_changes_no_batch(
    folder: Path, cuda: SimulatedCuda, num_workers: int
) -> None:
    cuda.refuses = True
    host = list(open_loader(folder))
    options = {"device": CUDA_1, "num_workers": num_workers, "epochs": None}
    with (
        open_loader(folder, **options) as loader,
        pytest.warns(RuntimeWarning, match=r"refused to page-lock.*`ulimit -l`.*`window_tokens`"),
    ):
        batches = list(islice(loader, len(host)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(loader))
        loader.close()
    for ours, theirs in zip(batches, host, strict=True):
        assert same_values(ours, theirs)
    assert loader.stats().windows > 3
    assert json.loads(json.dumps(loader.stats().as_dict()))["pageable"]


def test_memory_is_page_locked_for_all_devices_in_no_context_but_the_loaders(
    folder: Path, cuda: SimulatedCuda
) -> None:
    with started(folder, device="cpu") as loader:
        assert not loader.stats().pageable, "it needs no page lock"
    assert "register" not in cuda.marks
    with started(folder) as loader:
        assert {flags for _, flags in cuda.locked.values()} == {1}
        assert not loader.stats().pageable
    assert not cuda.locked
    assert cuda.contexts == {1}


def close(loaders: list[ShardLoader]) -> None:
    loaders[0].close()


def drop(loaders: list[ShardLoader]) -> None:
    loaders.clear()


def collect(loaders: list[ShardLoader]) -> None:
    cycle: list[Any] = [loaders.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def replace_workers(loaders: list[ShardLoader]) -> None:
    loaders[0].num_workers = 0


def load(loaders: list[ShardLoader]) -> None:
    loaders[0].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize("end", [close, drop, collect, replace_workers, load])
def test_copies_are_waited_for_before_their_memory_is_unlocked(
    folder: Path, cuda: SimulatedCuda, end: Callable[[list[ShardLoader]], None]
) -> None:
    loaders = [started(folder)]
    assert not cuda.copy.is_done, "there is something to wait for"
    end(loaders)
    assert "unregister" in cuda.marks
    assert TOO_EARLY not in cuda.marks
    assert not cuda.locked
    assert workers_of() == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_a_copy_that_no_event_covers_is_waited_for(
    folder: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    loader = started(folder)

    def fail(*arguments: object) -> None:
        cuda.marks.clear()
        raise error

    monkeypatch.setattr(transfer, "make_batches", fail)
    with pytest.raises(type(error)):
        list(islice(loader, 200))
    assert cuda.marks.index("wait") < cuda.marks.index("unregister")
    assert workers_of() == []


def test_the_end_of_the_interpreter_waits_for_copies_too(folder: Path) -> None:
    script = f"""if True:
        import json, sys, weakref
        from itertools import islice
        import pytest
        from support.delivery import open_loader
        from support.simulated_cuda import CUDA_1, started, simulate
        with simulate(pytest.MonkeyPatch()) as cuda:
            weakref.finalize(cuda, lambda: print(json.dumps(cuda.marks)))  # after the loader's
            loader = open_loader({str(folder)!r}, device="cuda:1", num_workers=1, epochs=None)
            batches = list(islice(loader, 5))
    """
    ended = warm.run(["-c", script])
    assert (ended.returncode, ended.stderr) == (0, "")
    marks = json.loads(ended.stdout)
    assert "unregister" in marks
    assert TOO_EARLY not in marks


def test_a_failed_device_ends_the_workers_and_its_own_error_comes_out(
    folder: Path, cuda: SimulatedCuda
) -> None:
    loader = started(folder)
    cuda.is_broken = True
    with pytest.raises(torch.AcceleratorError, match="device-side assert") as caught:
        list(islice(loader, 200))
    assert caught.value.__context__ is None, "it is the first one"
    assert workers_of() == []


def test_a_loader_of_a_failed_device_closes_without_an_error(
    folder: Path, cuda: SimulatedCuda
) -> None:
    loader = started(folder)
    cuda.is_broken = True
    loader.close()
    assert workers_of() == []


def test_a_forked_child_leaves_the_device_alone(
    folder: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = started(folder)
    workers = list(pool_of(loader)._workers)
    of_the_parent = [os.dup(worker.child.fileno()) for worker in workers]  # a child keeps them
    before = list(cuda.marks)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        loader.close()
    assert cuda.marks == before
    assert cuda.locked, "the parent still uses it"
    for worker, end in zip(workers, of_the_parent, strict=True):
        with pytest.raises(subprocess.TimeoutExpired):
            worker.child.process.wait(0.2)  # it goes on
        os.close(end)
        assert worker.child.process.wait(300) == 0
