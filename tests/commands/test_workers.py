"""Workers: how they start, end and leave nothing behind. `tests/outside` kills them."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support.delivery import (
    POLICIES,
    PREAMBLE,
    MakeDataset,
    open_loader,
    pool_of,
    spans,
)
from support.processes import (
    children_of,
    eventually,
    is_alive,
    open_files,
    opened_since,
    resident,
    run_script,
    workers_of,
)

from tokenfeed import Manifest, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError, LoaderError
from tokenfeed.pipeline.feeding import window_source

forked = pytest.mark.usefixtures("forked_workers")


@forked
def test_a_stopped_worker_is_named_within_the_timeout(folder: Path) -> None:
    with open_loader(folder, num_workers=1, epochs=None, timeout=60) as loader:
        feed = iter(loader)
        next(feed)
        (pid,) = workers_of()
        os.kill(pid, signal.SIGSTOP)
        pool_of(loader)._timeout = 0.5
        message = rf"loader worker \d \(process {pid}\), at window \d+ of epoch \d+, did not answer"
        with pytest.raises(LoaderError, match=message):
            list(feed)
        assert not is_alive(pid)


@pytest.mark.parametrize("label_names", [(), ("label",) * 200_000])
def test_workers_that_cannot_start_are_an_error_with_their_exit_status(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label_names: tuple[str, ...]
) -> None:
    """Also where a worker is told more than a socket holds."""
    replace(Manifest.read(folder), label_names=label_names).write(folder)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        open_loader(folder, num_workers=2, timeout=60) as loader,
        pytest.raises(LoaderError, match=r"worker \d .* died \(exit status 3\)"),
    ):
        list(loader)


def test_a_bug_in_a_worker_keeps_its_traceback(folder: Path) -> None:
    loader = open_loader(folder, num_workers=1)
    object.__setattr__(loader._plan, "batching", "no policy")
    with loader, pytest.raises(RuntimeError, match=r"(?s)worker 0 .*Traceback .*AttributeError"):
        list(loader)


LEAVE = (
    PREAMBLE
    + """
for step, batch in enumerate(open_loader(num_workers=1, epochs=None)):
    if step == 3:
        break
kept = iter(open_loader(num_workers=1, epochs=None))
next(kept)
loader = open_loader(num_workers=1)
loader.epochs = None
next(iter(loader))
loader.num_workers = 2  # the second has hardly started
"""
)


def test_loaders_that_are_left_in_the_middle_end_quietly(folder: Path) -> None:
    run_script(LEAVE, folder, flags=("-W", "error::ResourceWarning", "-X", "dev"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed without the garbage collector's help."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@forked
def test_close_leaves_no_descriptor_and_no_process(folder: Path, no_collector: None) -> None:
    before, others = open_files(), children_of("self")
    for num_workers, batches in ((0, 3), (1, 1), (2, 11)):
        with open_loader(folder, num_workers=num_workers, epochs=None) as loader:
            assert len(list(islice(loader, batches))) == batches
        assert children_of("self") == others
    assert opened_since(before) == []


@forked
def test_two_loaders_at_the_same_time_do_not_meet(folder: Path) -> None:
    first, second = (
        [spans(batch) for batch in open_loader(folder, POLICIES[number], seed=number)]
        for number in range(2)
    )
    with (
        open_loader(folder, POLICIES[0], seed=0, num_workers=1) as ours,
        open_loader(folder, POLICIES[1], seed=1, num_workers=1) as theirs,
    ):
        pairs = [(spans(a), spans(b)) for a, b in zip(ours, theirs, strict=False)]
    count = min(len(first), len(second))
    assert pairs == list(zip(first[:count], second[:count], strict=True))


@pytest.mark.slow
def test_memory_is_flat_over_epochs(make_dataset: MakeDataset) -> None:
    folder = make_dataset(np.full(1500, 1000))
    batching, megabyte = Padded(16_384), 1 << 20
    with ShardLoader(
        folder, batching=batching, num_workers=2, epochs=None, window_tokens=250_000
    ) as loader:
        held = {}
        for batch in loader:
            assert batch["labels"].numel()
            epoch = loader.position.epoch
            if epoch in (5, 30) and epoch not in held:
                held[epoch] = [resident(pid) for pid in ("self", *sorted(workers_of()))]
            if epoch > 30:
                break
    for early, late in zip(held[5], held[30], strict=True):
        assert late < early + 20 * megabyte


@forked
@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_a_worker_that_no_kill_ends_does_not_hold_up_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process in the kernel's hands is: the kill works when its disk answers."""
    monkeypatch.setattr(window_source, "END_S", 0.1, raising=False)
    before = open_files()
    with open_loader(folder, num_workers=1, epochs=None, timeout=60) as loader:
        next(iter(loader))
        [pid] = workers_of()
        pool_of(loader)._timeout = 0.1
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "kill", lambda process: None)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(LoaderError, match=rf"\(process {pid}\).* did not answer within"):
                list(loader)
        assert is_alive(pid)
        assert opened_since(before) == []
        os.kill(pid, signal.SIGCONT)
        assert eventually(lambda: not is_alive(pid)), "its socket is closed"


@forked
def test_workers_map_rows_as_the_training_process_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changing.py").write_text(
        "def change(columns, rng):\n"
        "    return {'input_ids': rng.permutation(columns['input_ids'])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    change = import_module("changing").change
    found = []
    for number in (0, 2):
        with open_loader(folder, num_workers=number, map=change) as loader:
            found.append([(spans(batch), batch["input_ids"].tolist()) for batch in loader])
    assert found[0] == found[1]
    refusal = r"row \d+ has \d+ tokens, but the function returned"
    with (
        open_loader(folder, num_workers=1, map=_longer) as loader,
        pytest.raises(ConfigError, match=refusal),
    ):
        next(iter(loader))


def _longer(columns: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"input_ids": np.append(columns["input_ids"], 1)}
