"""Workers: their death is an error at once, and nothing of them outlives the training process."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import warm
from delivery import (
    POLICIES,
    PREAMBLE,
    MakeDataset,
    children_of,
    eventually,
    is_alive,
    memfds,
    open_files,
    open_loader,
    opened_since,
    realistic_lengths,
    resident,
    run_script,
    spans,
    workers_of,
)

from tokenfeed import Manifest, Padded, ShardLoader
from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding import worker_process as process


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_named_at_once(folder: Path, victim: int) -> None:
    with open_loader(folder, num_workers=3, epochs=None, timeout=600) as loader:
        feed = iter(loader)
        next(feed)
        pid = sorted(workers_of())[victim]
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        message = rf"loader worker \d \(process {pid}\), at window \d+ of epoch \d+, died \(killed"
        with pytest.raises(LoaderError, match=message) as caught:
            list(feed)
        assert time.monotonic() - started < 60, "it waited for the timeout"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_stopped_worker_is_named_within_the_timeout(folder: Path, num_workers: int) -> None:
    with open_loader(folder, num_workers=num_workers, epochs=None, timeout=60) as loader:
        feed = iter(loader)
        assert len(list(islice(feed, 40))) == 40  # all have started by now
        pid = workers_of()[-1]
        os.kill(pid, signal.SIGSTOP)
        loader._delivery._feed._pool._timeout = 5.0  # type: ignore[union-attr]
        message = rf"loader worker \d \(process {pid}\), at window \d+ of epoch \d+, did not answer"
        with pytest.raises(LoaderError, match=message):
            list(feed)
        assert not is_alive(pid)


def test_after_a_killed_worker_the_loop_goes_on_where_it_stopped(folder: Path) -> None:
    """Through more windows than there are slots, so that the dead one is asked again."""
    whole = [spans(batch) for batch in open_loader(folder, epochs=4)]
    delivered = []
    with open_loader(folder, num_workers=2, epochs=4) as loader:
        delivered += [spans(batch) for batch in islice(loader, 5)]
        os.kill(workers_of()[0], signal.SIGKILL)
        with pytest.raises(LoaderError):
            delivered.extend(spans(batch) for batch in loader)
        delivered += [spans(batch) for batch in loader]
    assert delivered == whole


@pytest.mark.parametrize("label_names", [(), ("label",) * 200_000])
def test_workers_that_cannot_start_are_an_error_with_their_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, label_names: tuple[str, ...]
) -> None:
    """Also where a worker is told more than a socket holds."""
    replace(Manifest.read(folder), label_names=label_names).write(folder)
    monkeypatch.setattr(
        process, "command", lambda *fds: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with (
        open_loader(folder, num_workers=2, timeout=60) as loader,
        pytest.raises(LoaderError, match=r"worker \d .* died \(exit status 3\)"),
    ):
        list(loader)


def test_a_program_that_is_not_there_is_an_error_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "command", lambda *fds: ["/no/such/python"])
    loader = open_loader(folder, num_workers=2)
    with pytest.raises(LoaderError, match="loader worker 0 cannot be started: No such file"):
        list(loader)


def test_a_bug_in_a_worker_keeps_its_traceback(folder: Path) -> None:
    loader = open_loader(folder, num_workers=1)
    object.__setattr__(loader._plan, "batching", "no policy")
    with loader, pytest.raises(RuntimeError, match=r"(?s)worker 0 .*Traceback .*AttributeError"):
        list(loader)


ORPHANS = (
    PREAMBLE
    + """
loader = open_loader(num_workers=3, epochs=None)
for step, batch in enumerate(loader):
    if step == 3:
        print("ready", flush=True)
        time.sleep(60)
"""
)


def start(script: str, folder: Path) -> warm.Popen:
    pipe = subprocess.PIPE
    process = warm.Popen(
        ["-c", script, folder], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_nothing_outlives_a_killed_training_process(folder: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    with start(ORPHANS, folder) as process:
        workers = workers_of(process.pid)
        assert len(workers) == 3
        ours = {str(pid) for pid in (process.pid, *workers)}
        assert memfds() >= ours
        process.kill()
        process.wait()  # not for the ends of its pipes, which workers hold as well
        assert eventually(lambda: not any(is_alive(pid) for pid in workers))
    assert not memfds() & ours
    assert set(os.listdir("/dev/shm")) <= shared


HANDLE_SIGNALS = (
    PREAMBLE
    + """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
loader = open_loader(num_workers=2, epochs=3)
tokens = 0
for step, batch in enumerate(loader):
    tokens += batch.num_tokens
    if step == 40:  # both workers made windows by now
        loader.num_workers = NUMBER
        print("ready", flush=True)
        sys.stdin.readline()
print(tokens)
"""
)


@pytest.mark.parametrize(
    ("number", "num_workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGINT, 4)]
)
def test_workers_ignore_a_signal_that_their_parent_handles(
    folder: Path, number: int, num_workers: int
) -> None:
    """Terminals and schedulers signal the whole process group, also while a worker starts."""
    script = HANDLE_SIGNALS.replace("NUMBER", str(num_workers))
    with start(script, folder) as process:
        assert process.stdin
        os.killpg(process.pid, number)
        time.sleep(0.2)
        rest, errors = process.communicate("go on\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert int(rest) == 3 * realistic_lengths().sum()


LEAVE = (
    PREAMBLE
    + """
for step, batch in enumerate(open_loader(num_workers=2, epochs=None)):
    if step == 3:
        break
kept = iter(open_loader(num_workers=2, epochs=None))
next(kept)
loader = open_loader(num_workers=1)
loader.epochs = None
next(iter(loader))
loader.num_workers = 3  # these have hardly started
"""
)


@pytest.mark.parametrize("flags", [(), ("-W", "error::ResourceWarning", "-X", "dev")])
def test_loaders_that_are_left_in_the_middle_end_quietly(
    folder: Path, flags: tuple[str, ...]
) -> None:
    run_script(LEAVE, folder, flags=flags)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed without the garbage collector's help."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_close_leaves_no_descriptor_and_no_process(folder: Path, no_collector: None) -> None:
    before, others = open_files(), children_of("self")
    for number in range(12):
        with open_loader(folder, num_workers=number % 3, epochs=None) as loader:
            assert len(list(islice(loader, 1 + 2 * number))) == 1 + 2 * number
        assert children_of("self") == others
    assert opened_since(before) == []


def test_dropping_a_loader_ends_its_workers(folder: Path, no_collector: None) -> None:
    feed = iter(open_loader(folder, num_workers=2, epochs=None))
    next(feed)
    workers = workers_of()
    assert len(workers) == 2
    del feed
    assert not any(is_alive(pid) for pid in workers)


def test_a_shrunk_pool_ends_the_workers_that_left(folder: Path) -> None:
    with open_loader(folder, num_workers=4, epochs=None) as loader:
        next(iter(loader))
        staying = set(workers_of())
        loader.num_workers = 1
        for _ in islice(loader, 200):
            pass
        assert len(workers_of()) == 1
        assert set(workers_of()) <= staying


def test_asking_twice_for_the_same_number_replaces_no_worker(folder: Path) -> None:
    with open_loader(folder, num_workers=3, epochs=None) as loader:
        next(iter(loader))
        loader.num_workers = 1
        loader.num_workers = 2
        now = children_of("self")
        loader.num_workers = 2
        assert children_of("self") == now


def test_two_loaders_at_the_same_time_do_not_meet(folder: Path) -> None:
    first, second = (
        [spans(batch) for batch in open_loader(folder, POLICIES[number], seed=number)]
        for number in range(2)
    )
    with (
        open_loader(folder, POLICIES[0], seed=0, num_workers=2) as ours,
        open_loader(folder, POLICIES[1], seed=1, num_workers=1) as theirs,
    ):
        pairs = [(spans(a), spans(b)) for a, b in zip(ours, theirs, strict=False)]
    count = min(len(first), len(second))
    assert pairs == list(zip(first[:count], second[:count], strict=True))


def test_workers_import_no_torch(folder: Path) -> None:
    with open_loader(folder, num_workers=2) as loader:
        next(iter(loader))
        for pid in workers_of():
            maps = Path(f"/proc/{pid}/maps")
            assert eventually(lambda: "libarrow" in maps.read_text(), 60), "it reads a window"  # noqa: B023
            assert "torch" not in maps.read_text()


@pytest.mark.slow
def test_memory_is_flat_over_epochs(make_dataset: MakeDataset) -> None:
    folder = make_dataset(np.full(3000, 1000))
    batching, megabyte = Padded(16_384), 1 << 20
    with ShardLoader(
        folder, batching=batching, num_workers=2, epochs=None, window_tokens=500_000
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
