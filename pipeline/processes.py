"""Child processes: how tokenfeed starts a program beside this one, talks to it, and ends it.

Loader workers, the workers of `pretokenize`, and the program that reads a store for a training
process are children of this kind. A child is a new Python program, not a fork: it inherits no CUDA
handle, no lock and no copy of the model, and it does not run the script of the user again.

A child calls the functions that its parent sends: first those of `prepare`, which have no answers,
then those of `call`, each with one answer, in order. A child that has prepared can be multiplied by
`copies`: it forks, so that the copies share the memory of what it has loaded.

A child ends when its channel closes or its parent has ended, whatever it is doing. So no child
outlives a killed parent. Terminals and schedulers send signals to children too, but only the parent
decides when they end: a child keeps all signals blocked except those of a crash. What a child
prints goes to stderr. Torch-free.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import IO, Any, Literal, NamedTuple, NoReturn, TypeVar

from tokenfeed.pipeline.errors import TokenfeedError

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",  # else importing numpy starts a thread per core in every child
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",  # a library in Rust that runs out of memory prints one line
    "MALLOC_ARENA_MAX": "2",  # memory freed by fetching threads is reused for the next window
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
"""Variables of children. They keep libraries from starting threads, and freed memory in the
process: the arrays of a window are about as large as those of the last window, so the kernel need
not map new pages (17 page faults per window instead of 4,646)."""
_DEFAULTS = {"ARROW_DEFAULT_MEMORY_POOL": "system"}

_HAS_FORK = hasattr(os, "fork")
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
_PARENT_CHECK_S = 1.0  # a socket stays open while any fork of the parent lives
_LONGEST_TRACEBACK = 1 << 14
_Kind = Literal["prepare", "copy", "call"]
T = TypeVar("T")


class Ended(Exception):
    """The other process has ended, or has closed the channel."""

    progress: Any = None
    """The last progress of the unfinished call; None without a report."""


class Failure(NamedTuple):
    """The answer of a child whose function raised."""

    error: BaseException
    """The exception. If it is a bug, and no error that tokenfeed raises on purpose, the traceback
    in the child is a note of it."""


class Channel:
    """The parent's end of a connection to a child, or to a copy of a child."""

    def __init__(self, connection: "Connection | _Pipes") -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor of the socket, to wait for an answer."""
        return self._connection.fileno()

    def prepare(self, function: Callable[[], object]) -> None:
        """Let the child call a function before all others, without waiting. If it raises, its
        exception is the answer to each call."""
        self._send("prepare", pickle.dumps(function))

    def call(self, function: Callable[[], object]) -> None:
        """Let the child call a function. `answer` raises if the child has ended."""
        self._send("call", pickle.dumps(function))

    def answer(self, on_progress: Callable[[Any], None] | None = None) -> "Any | Failure":
        """Wait for the answer to the first unanswered call: the function's result, or a failure.

        Args:
            on_progress: Called with each argument of `report` in the child.

        Raises:
            Ended: The child has ended.
        """
        ended = Ended()
        try:
            while True:
                is_answer, value = pickle.loads(self._connection.recv_bytes())
                if is_answer:
                    return value
                ended.progress = value
                if on_progress:
                    on_progress(value)
        except (EOFError, OSError):
            raise ended from None

    def kill(self) -> None:
        """End the process at once, and the calls of `answer` that wait in other threads."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the channel, which ends the process soon."""
        self._connection.close()

    def _send(self, kind: _Kind, content: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: `answer` raises
            self._connection.send_bytes(pickle.dumps((kind, content)))


class Child(Channel):
    """A child that this process has started."""

    def __init__(self, name: str, files: Sequence[int] = ()) -> None:
        """Start the program. Call this within `undisturbed`.

        Args:
            name: What the child is, for lists of processes.
            files: Descriptors that it inherits, with the same numbers.

        Raises:
            OSError: The system refuses the process or a descriptor.
        """
        self._name = name
        self._prepared: list[Callable[[], object]] = []
        path = [str(entry) for entry in sys.path if isinstance(entry, str)]
        code = (
            "import sys; sys.path[:], sys.argv[1:] = sys.argv[1:], []; "
            f"from tokenfeed.pipeline.processes import main; main({name!r}, {_HAS_FORK})"
        )
        words = [sys.executable, "-c", code, *path]
        environment = _DEFAULTS | os.environ | ENVIRONMENT
        if not _HAS_FORK:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment)
            assert self.process.stdin
            assert self.process.stdout
            super().__init__(_Pipes(self.process.stdout, self.process.stdin))
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            end = theirs.fileno()
            self.process = subprocess.Popen(
                words, stdin=end, stdout=end, pass_fds=files, env=environment
            )
            super().__init__(Connection(ours.detach()))

    def prepare(self, function: Callable[[], object]) -> None:
        """See `Channel.prepare`."""
        self._prepared.append(function)
        super().prepare(function)

    def copies(self, number: int) -> Sequence[Channel]:
        """Return copies of this child, which itself only waits for their end then. Without `fork`,
        they are programs of their own, which prepare again.

        Raises:
            Ended: The child has ended.
            OSError: The system refuses a process or a descriptor.
        """
        if not _HAS_FORK:
            others = [Child(self._name) for _ in range(number - 1)]
            for other in others:
                for function in self._prepared:
                    other.prepare(function)
            return [self, *others]
        copies: list[Channel] = []
        self._send("copy", pickle.dumps(number))
        try:
            for _ in range(number):
                ours, theirs = Pipe()
                copies.append(Channel(ours))
                with theirs:
                    send_handle(self._connection, theirs.fileno(), None)
        except ConnectionError:
            for copy in copies:
                copy.close()
            raise Ended from None
        return copies

    def kill(self) -> None:
        """Kill the process, with the calls of `answer` that wait in other threads."""
        self.process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end of the process, at most some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)


def undisturbed(work: Callable[[], T]) -> T:
    """Do what starts children in a separate thread, and wait for it.

    Ctrl-C interrupts only the main thread, where it could lose a process that was just started. The
    children inherit the signal mask of the thread, which blocks all signals except crashes.

    Raises:
        RuntimeError: The system refuses another thread.
        BaseException: What `work` raised.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        if hasattr(signal, "pthread_sigmask"):
            known = signal.Signals.__members__
            faults = {known[name] for name in _FAULTS if name in known}
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokenfeed starts children")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def report(progress: Any) -> None:
    """Send progress to the parent, in a child. Do nothing elsewhere."""
    if _to_parent is not None:
        _to_parent.send(False, progress)


def is_child() -> bool:
    """Return whether this process is a child that `Child` has started, or a copy of one."""
    return _to_parent is not None


class _Pipes:
    """Two pipes as a connection, for systems where a child inherits no socket."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes]) -> None:
        self._reads, self._writes = reads, writes

    def fileno(self) -> int:
        return self._reads.fileno()

    def send_bytes(self, message: bytes) -> None:
        self._writes.write(len(message).to_bytes(8, "little") + message)
        self._writes.flush()

    def recv_bytes(self) -> bytes:
        return self._read(int.from_bytes(self._read(8), "little"))

    def _read(self, size: int) -> bytes:
        found = self._reads.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def close(self) -> None:
        for file in (self._reads, self._writes):
            with contextlib.suppress(OSError):  # what could not be written is lost
                file.close()


class _ToParent:
    """The child's end of the connection. The process ends if the parent has ended."""

    def __init__(self, connection: Connection | _Pipes, parent: int | None) -> None:
        """`parent`: its process id, as long as it lives; None if the socket alone tells."""
        self._connection, self._parent = connection, parent

    def send(self, is_answer: bool, value: Any) -> None:
        with self._ending():
            self._connection.send_bytes(pickle.dumps((is_answer, value)))

    def receive(self) -> tuple[_Kind, bytes]:
        with self._ending():
            if self._parent is not None:
                self._wait(self._parent)
            message: tuple[_Kind, bytes] = pickle.loads(self._connection.recv_bytes())
            return message

    def receive_channels(self, number: int) -> "list[_ToParent]":
        """Return the channels for copies of this process."""
        with self._ending():
            sockets = [recv_handle(self._connection) for _ in range(number)]
            return [_ToParent(Connection(each), None) for each in sockets]

    def _wait(self, parent: int) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        while not poll.poll(_PARENT_CHECK_S * 1000):
            if os.getppid() != parent:
                raise EOFError

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            os._exit(0)

    def close(self) -> None:
        self._connection.close()


_to_parent: _ToParent | None = None


def main(name: str, has_socket: bool) -> NoReturn:
    """Run a child: call what the parent sends."""
    global _to_parent
    gc.disable()  # until all is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows, which has no signal masks
    connection: Connection | _Pipes
    if has_socket:
        connection, parent = Connection(os.dup(0)), os.getppid()
    else:
        connection, parent = _Pipes(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")), None
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # the parent has no stderr
        os.dup2(nothing, 1)
    os.close(nothing)
    _to_parent = _ToParent(connection, parent)
    failure: Failure | None = None
    kind, content = _to_parent.receive()
    while kind != "call":
        if kind == "copy":
            copies = _to_parent.receive_channels(pickle.loads(content))
            _to_parent.close()
            _to_parent = _fork(copies)
        elif failure is None:
            answer = _answer(content)
            failure = answer if isinstance(answer, Failure) else None
        kind, content = _to_parent.receive()
    gc.enable()
    functions: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(_to_parent, functions), daemon=True).start()
    while True:
        _to_parent.send(True, failure or _answer(content))
        content = functions.get()


def _receive(parent: _ToParent, functions: "SimpleQueue[bytes]") -> None:
    """Take calls until the channel closes or the parent ends, which ends the process."""
    while True:
        functions.put(parent.receive()[1])


def _fork(channels: list[_ToParent]) -> _ToParent:
    """Fork a copy of this process for each channel, and return it in the copy. This process itself
    ends when all copies have ended. It has no other thread, because none survives a fork."""
    gc.freeze()  # a collection would copy the memory that they share
    while channels:
        channel = channels.pop()
        try:
            is_copy = os.fork() == 0
        except OSError as error:
            channel.send(True, Failure(sendable(error)))
            is_copy = False
        if is_copy:
            for other in channels:
                other.close()
            return channel
        channel.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # the parent waits, and to take the interpreter down takes 30 ms


def _answer(function: bytes) -> Any:
    try:
        return pickle.loads(function)()
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        return Failure(sendable(error))


def sendable(error: BaseException) -> BaseException:
    """Return an exception that can be pickled. A bug has its traceback as a note."""
    trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, TokenfeedError):
        error.add_note(trace)
    return error
