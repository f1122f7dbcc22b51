"""Where workers cannot start or have no room: one line with the remedy, nothing left behind."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.delivery import open_loader, spans
from support.processes import children_of, open_files, opened_since, workers_of

from tokenfeed.pipeline.errors import ConfigError, LoaderError
from tokenfeed.pipeline.feeding import worker


@pytest.fixture
def limit() -> Iterator[Callable[[int, int], None]]:
    """Sets a limit of this process, and of workers it starts, until the test ends."""
    before: dict[int, tuple[int, int]] = {}

    def set_limit(what: int, value: int) -> None:
        before.setdefault(what, resource.getrlimit(what))
        resource.setrlimit(what, (value, before[what][1]))

    yield set_limit
    for what, values in before.items():
        resource.setrlimit(what, values)


class _Text(str):
    """A path that is a string and more."""


@pytest.mark.parametrize(
    "entries", [[Path("/no/such"), b"/no/such", None, _Text("/no/such")], [f"/{'x' * 4000}"] * 40]
)
def test_any_module_search_path_reaches_the_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: list[Any]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *entries])
    assert deliver(folder, num_workers=1) == deliver(folder, num_workers=0)


def test_a_module_in_the_working_directory_does_not_stand_for_one_of_pythons(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle", "struct", "signal", "socket", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert deliver(folder, num_workers=1)


def deliver(folder: Path, **options: Any) -> list[Any]:
    with open_loader(folder, **options) as loader:
        return [spans(batch) for batch in loader]


def refuse(number: int) -> Callable[..., None]:
    def refused(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize(
    ("module", "function", "number"),
    [
        (os, "memfd_create", errno.EPERM),
        (os, "memfd_create", errno.ENOSYS),
        (subprocess, "Popen", errno.EAGAIN),
    ],
)
def test_refused_memory_or_process_is_an_error_that_names_the_way_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, number: int
) -> None:
    before = open_files()
    monkeypatch.setattr(module, function, refuse(number))
    loader = open_loader(folder, num_workers=2)
    with pytest.raises(LoaderError, match=r"cannot be started: .*`num_workers`=0") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    assert opened_since(before) == []
    loader.num_workers = 0
    assert len(list(loader)) > 5


def test_no_temporary_folder_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert deliver(folder, num_workers=1)


def test_no_standard_input_is_needed(folder: Path) -> None:
    kept = os.dup(0)
    os.close(0)  # as some daemons do: the next file gets the number
    try:
        assert deliver(folder, num_workers=1)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_each_descriptor_that_is_refused_is_an_error_in_one_line(
    folder: Path, limit: Callable[[int, int], None]
) -> None:
    before, children = open_files(), children_of("self")
    for spare in range(8):  # three slots, two ends of a socket, the orders, two for the start
        loader = open_loader(folder, num_workers=1)
        with pytest.raises(
            LoaderError, match=r"cannot be started: Too many open .*`num_workers`=0"
        ):
            starve(loader, limit, spare)
        assert opened_since(before) == []
        assert children_of("self") == children


def starve(loader: Any, limit: Callable[[int, int], None], spare: int) -> None:
    """Deliver where only so many more descriptors can be had."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < highest:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    limit(resource.RLIMIT_NOFILE, taken[-1] + 1 + spare)
    try:
        list(loader)
    finally:
        limit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


def test_ctrl_c_while_a_worker_starts_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupted)
        loader = open_loader(folder, num_workers=2)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert opened_since(before) == []
    assert len(list(loader)) > 5
    loader.close()
    assert opened_since(before) == []


def test_memory_that_is_refused_to_a_worker_is_an_error_and_no_bug(
    folder: Path, limit: Callable[[int, int], None]
) -> None:
    limit(resource.RLIMIT_FSIZE, 1 << 20)
    with pytest.raises(LoaderError, match=r"2,097,152 bytes .*File too large.*`num_workers`"):
        deliver(folder, num_workers=1)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.ENOMEM, LoaderError, r"[\d,]+ bytes .*Cannot allocate memory.*`num_workers`"),
        (errno.EMFILE, LoaderError, r"[\d,]+ bytes .*Too many open files.*`ulimit -a`"),
        (errno.EBADF, OSError, "Bad file descriptor"),  # our bug: a traceback
    ],
)
def test_memory_that_is_refused_to_the_parent_is_an_error_and_no_bug(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(worker.mmap, "mmap", refuse(number))
    with pytest.raises(error, match=message):
        deliver(folder, num_workers=1)


def test_a_worker_that_ends_by_itself_is_not_said_to_lack_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/no/such/home")
    with pytest.raises(
        LoaderError, match=r"died \(exit status 1\)\. See its error above"
    ) as caught:
        deliver(folder, num_workers=1)
    assert "memory" not in str(caught.value)
    assert capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [1, "auto"])
@pytest.mark.parametrize("where", ["frozen", "embedded"])
def test_where_no_worker_can_run_the_loader_says_so_and_reads_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, num_workers: Any
) -> None:
    if where == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigError, match=r"loader workers cannot run here: .*`num_workers`=0"):
        open_loader(folder, num_workers=num_workers)
    loader = open_loader(folder, num_workers=0)
    assert len(list(loader)) > 5
    with pytest.raises(ConfigError, match="loader workers cannot run here"):
        loader.num_workers = 2


@pytest.mark.parametrize("pool", [None, "mimalloc"])
def test_a_worker_computes_in_one_thread_and_in_the_users_memory_pool(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pool: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    if pool:
        monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", pool)
    with open_loader(folder, num_workers=1) as loader:
        next(iter(loader))
        proc = Path(f"/proc/{workers_of()[0]}")
        words = dict(
            word.split("=", 1) for word in (proc / "environ").read_text().split("\0") if word
        )
    assert (words["OMP_NUM_THREADS"], words["OPENBLAS_NUM_THREADS"]) == ("1", "1")
    assert words["ARROW_DEFAULT_MEMORY_POOL"] == (pool or "system")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("timeout", [float("inf"), 1e7])
def test_a_timeout_may_be_as_long_as_one_likes(folder: Path, timeout: float) -> None:
    assert deliver(folder, num_workers=1, timeout=timeout)
