"""Files that are either whole or absent, their checksums, and locks between processes.

A file gets its final name after it was written and synced under a temporary name. So a crash, a
full disk or a kill leaves no half-written file under a final name. The kernel releases a lock when
its owner ends, so a killed process leaves no lock behind. Torch-free.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import filelock
import xxhash

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY_SUFFIX = ".tmp"
_NO_SUCH_CALL = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def atomic_file(path: Path, *, synced: bool = True, is_shared: bool = False) -> Iterator[IO[bytes]]:
    """Open a binary file that gets the name `path` when the block ends without an error.

    The bytes go to `path` + ".tmp" in the same folder, which is made if it is missing. The file can
    also be read. After an error it is deleted.

    Args:
        path: The final name.
        synced: Whether to wait until the file is on the disk. If not, it may be lost or empty after
            a power cut.
        is_shared: Whether several processes, on any machines, may write the file at the same time.
            Each uses its own temporary name, which a kill leaves behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f".{os.urandom(8).hex()}" if is_shared else ""
    temporary = path.with_name(f"{path.name}{own}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "w+b") as file:
            yield file
            with _naming(path):
                file.flush()
                if synced:
                    os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            error.filename = str(path)  # the system names no file
        raise
    if synced:
        sync_folder(path.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to errors of the system without a path, such as those of fsync."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def atomic_write(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. After the block, it is synced and renamed to `folder`.

    If the block raises, nothing is left. What a killed process left is removed. An empty folder of
    this name is replaced.
    """
    folder = folder.absolute()
    temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            if path.is_dir():
                sync_folder(path)
            else:
                with _naming(path), path.open("rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees space on a full disk
        raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut, where the system has a call for
    it: Windows and some mounted drives have none."""
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    finally:
        os.close(descriptor)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file of a data set for reading.

    Raises:
        OSError: The file is missing, or it is not a regular file. A pipe would block the process,
            and a device could have no end.
    """
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        check_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str, status: os.stat_result) -> None:
    """Raise an OSError for a pipe, a socket or a device. `open` rejects folders itself."""
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", path)


def file_xxh3(path: Path) -> str:
    """Return the xxh3-64 of a file's bytes, 16 hex digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


_HELD_BY_ANOTHER = {errno.EWOULDBLOCK, errno.EACCES}


@contextlib.contextmanager
def held(path: Path, *, is_shared: bool = False) -> Iterator[bool]:
    """Lock a file or a folder until the block ends or the process ends.

    Yield False if another process has locked it, or another call in this process. Several processes
    may hold a shared lock at the same time. On a file system without locks, yield True. Windows has
    no shared locks: there, they always succeed.
    """
    if fcntl is None:
        with contextlib.ExitStack() as stack:
            try:
                if not is_shared:
                    stack.enter_context(_file_lock(path).acquire(blocking=False))
            except filelock.Timeout:
                yield False
                return
            yield True
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _hold(descriptor, is_shared=is_shared)
    finally:
        os.close(descriptor)


def holder_of(path: Path) -> str:
    """Return which process of this machine has locked a file or folder, as in " (process 123)";
    empty if this is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, file, *_ = line.split()
            if kind == "FLOCK" and file.rpartition(":")[2] == inode and int(process) > 0:
                return f" (process {process})"
    return ""


def _hold(descriptor: int, *, is_shared: bool = False) -> bool:
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD_BY_ANOTHER
    return True


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Lock a file until the block ends. Wait for the lock. The file is made if it is missing.

    On a file system without locks, do not wait.
    """
    if fcntl is None:
        with _file_lock(path):
            path.touch()
            yield
        return
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_lock(path: Path) -> filelock.BaseFileLock:
    """Return a lock for a path, as a file in the folder for temporary files: data sets contain no
    other files, and Windows cannot replace a locked file."""
    folder = Path(tempfile.gettempdir()) / "tokenfeed-locks"
    folder.mkdir(exist_ok=True)
    name = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.normcase(os.path.realpath(path))))
    return filelock.FileLock(folder / f"{name}.lock", is_singleton=False, thread_local=False)


_FLOCK = struct.Struct("hhqqi4x")  # kind, from where, first byte, number of bytes, process
_IS_HELD = (errno.EAGAIN, errno.EACCES)
_LOOK_AGAIN_S, PATIENCE_S = 0.001, 30.0
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def try_lock(path: str, first: int, count: int) -> Iterator[bool]:
    """Lock bytes `first` to `first + count - 1` of a file; yield whether that succeeded.

    It fails if another thread or process holds one of the bytes. Without support for such locks, or
    without disk space for the file, it always succeeds: then two processes may fetch the same data,
    which is slower but correct.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, first, count)
    finally:
        os.close(descriptor)  # this releases the lock


def _lock(descriptor: int, first: int, count: int) -> bool:
    if fcntl is None or not hasattr(fcntl, "F_OFD_SETLK"):  # Windows, macOS
        return True
    try:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _IS_HELD
    return True


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[int]:
    """Open a file with an exclusive lock among all threads and processes; yield the descriptor.

    Waits for the lock for at most 30 seconds, because its holder may be a stopped process.
    """
    descriptor = os.open(path, _FLAGS, 0o600)
    give_up_s = time.monotonic() + PATIENCE_S
    try:
        while not _hold(descriptor) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_AGAIN_S)
        yield descriptor
    finally:
        os.close(descriptor)
