"""Python processes that start warm: forks of one that has imported tokenfeed and its dependencies.

Imports take from half a second to four seconds of a core, for an optimizer imports the compiler,
and tests start hundreds of processes. What such a process does is its own: memory, descriptors,
signals, environment, exit code. Three things differ from `python` on a command line, and tests of
these start one: torch is there already, the parent is the process that forks, and the interpreter
is not taken down at the end (exit functions run; what is left sees no `__del__`).
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any
from unittest import mock

HAS_FORK = hasattr(os, "fork")
"""Whether processes start warm. On Windows they start cold."""
_context: Any = multiprocessing.get_context("forkserver" if HAS_FORK else "spawn")
if HAS_FORK:
    from multiprocessing.reduction import DupFd

    _context.set_forkserver_preload(["support.warm_imports"])


_ADDRESS = "TOKENFEED_TESTS_FORK_SERVER"


_AS_NEW = """
from huggingface_hub import constants
from support import warm
constants.HF_HUB_OFFLINE = False  # the warm process is offline
warm.ensure_running()  # else the first worker of a DataLoader starts another warm process
warm.forget("support")  # pytest rewrites its assertions when it is imported
"""
"""What a test process runs first."""


def share() -> None:
    """Start the warm process now, for this process and the test processes that it starts. These
    are forks of the warm process, too: each would need ten seconds of a core for imports."""
    if not HAS_FORK:
        return
    from execnet import gateway_base, gateway_io

    class Gateway(gateway_io.Popen2IOMaster):
        """A test process."""

        def __init__(self, args: list[str], execmodel: Any) -> None:
            pipe = subprocess.PIPE
            self.popen = Popen(["-c", _AS_NEW + args[-1]], stdin=pipe, stdout=pipe)
            ends = self.popen.stdin, self.popen.stdout
            gateway_base.Popen2IO.__init__(self, *ends, execmodel=execmodel)

    ensure_running()
    os.environ[_ADDRESS] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    gateway_io.Popen2IOMaster = Gateway  # type: ignore[misc]


def forget(package: str) -> None:
    """Have a package imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def ensure_running() -> None:
    """Start the warm process, or connect to the one that another process shares."""
    if not HAS_FORK:
        return
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = os.environ.get(_ADDRESS)
    is_watched = server._forkserver_pid is not None or "ensure_running" in vars(server)
    if address and not is_watched:  # the process that started it watches it
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # it is to hear of ended children
    try:
        with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):  # which is read by an import
            server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_turn = threading.RLock()
"""One thread at a time starts a process or asks for an exit code. To start one, multiprocessing
asks for all the others', and each can be read once: who comes second is told 255."""


class _Inherited:
    """A descriptor on its way to another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


class Popen(subprocess.Popen[str]):
    """`python WORDS...`, started warm; to be used as what it derives from, with text in pipes."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """
        Args:
            words: `-c CODE`, `-m MODULE` or the path of a program, and what is given to it.
            stdin, stdout, stderr: As of `subprocess.Popen`.
            env: Its environment; None for that of this process.
            cwd: Its folder; None for that of this process.
            start_new_session: It leads a session and a group of its own.
            pass_fds: Descriptors that it gets: none, for they would have other numbers.
        """
        assert not pass_fds
        with _turn:  # the environment is empty for a moment when `patch.dict` restores it
            own = dict(env or os.environ)
        self._settings = own, str(cwd or Path.cwd()), start_new_session
        command = [sys.executable, *map(str, words)]
        super().__init__(command, stdin=stdin, stdout=stdout, stderr=stderr, text=True)

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: ready once the process has ended."""
        return self._process.sentinel

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Fork the warm process where `subprocess.Popen` would execute `args`."""
        ends = rest[9:15]  # of three pipes, where the process reads and where it is written to
        theirs = ends[0], ends[3], ends[5]
        streams = [_Inherited(number if end == -1 else end) for number, end in enumerate(theirs)]
        self._process = _context.Process(target=_become, args=(args[1:], streams, *self._settings))
        try:
            with _turn:
                ensure_running()
                self._process.start()
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
        self._child_created = True
        self.pid = self._process.pid or 0

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with _turn:
            if self.returncode is None:
                self.returncode = self._process.exitcode
            return self.returncode

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        """Wait for its end; a test that fails meanwhile will not end it, so it is killed."""
        if kind is not None:
            self.kill()
        super().__exit__(kind, *raised)

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            connection.wait([self.sentinel], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


if not HAS_FORK:

    def _cold(words: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(command, text=True, **{"stdin": subprocess.DEVNULL, **options})

    Popen = _cold  # type: ignore[assignment,misc]


def _program(words: list[str], **options: Any) -> "Popen | subprocess.Popen[bytes]":
    if options.get("pass_fds"):  # a loader's workers, whose descriptors keep their numbers
        return subprocess.Popen(words, **options)
    return Popen(words[1:], **options)


PROGRAMS = SimpleNamespace(Popen=_program, TimeoutExpired=subprocess.TimeoutExpired)
"""What `pipeline.processes` takes for `subprocess` to start children warm: the workers of
`pretokenize` would import for a second."""


def run(
    words: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """What `python WORDS...` prints, and its exit code.

    Raises:
        subprocess.TimeoutExpired: It was killed after that time.
    """
    pipe = subprocess.PIPE
    with Popen(words, stdout=pipe, stderr=pipe, env=env, cwd=cwd) as process:
        try:
            said = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def _become(
    words: list[str],
    streams: list[_Inherited],
    env: dict[str, str],
    cwd: str,
    is_leader: bool,
) -> None:
    # At the exit, the finalizers of torch's operators would take 50 ms.
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    if is_leader:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
        os.close(stream.number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in env
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if env.get("HF_HUB_OFFLINE") == "0":
        forget("huggingface_hub")  # it reads the environment when it is imported
    os.chdir(cwd)
    try:
        _execute(words)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _execute(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # else runpy warns of the warm one
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


_COMMANDS = {name: name for name in ("pretokenize", "report", "shards", "train")} | {
    "tokenfeed": "main"
}
"""The module of each command in `tokenfeed.tools`."""
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = ["-c", {code!r}, *sys.argv[1:]]
    told = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(told)
    code = server.recv(1)
    sys.exit(code[0] if code else "its server has failed")
"""


@contextlib.contextmanager
def serve_commands(folder: Path, before: str = "", **others: str) -> Iterator[None]:
    """Write the commands into `folder`, which is to be the first in PATH, and serve them.

    Args:
        before: Python code that each of them runs first.
        others: Code of other programs, by their names.
    """
    address = f"\0tokenfeed-{uuid.uuid4()}"  # of no file, whose name would have to be short
    folder.mkdir()
    runs = "import sys\nfrom tokenfeed.tools.{} import main\nsys.exit(main())"
    codes = {command: f"{before}\n{runs.format(module)}" for command, module in _COMMANDS.items()}
    for command, code in (codes | others).items():
        program = folder / command
        program.write_text(_PROGRAM.format(python=sys.executable, address=address, code=code))
        program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        accepting = threading.Thread(target=_accept, args=(server,))
        accepting.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(server: socket.socket) -> None:
    clients, answering = [], []
    with contextlib.suppress(OSError):  # it was shut down
        while True:
            clients.append(server.accept()[0])
            answering.append(threading.Thread(target=_answer, args=(clients[-1],)))
            answering[-1].start()
    for client in clients:
        with contextlib.suppress(OSError):  # it has its answer
            client.shutdown(socket.SHUT_RDWR)
    for thread in answering:
        thread.join()


def _answer(client: socket.socket) -> None:
    with client:
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        try:
            told = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            if not told:
                return  # the program was ended before it said what it wants
            words, cwd, env = json.loads(told)
            stdin, stdout, stderr = streams
            process = Popen(
                words, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=Path(cwd)
            )
        finally:
            for stream in streams:
                os.close(stream)
        if client in connection.wait([client, process.sentinel]):  # it says no more: it is gone
            process.terminate()
        code = process.wait()
        with contextlib.suppress(OSError):  # nobody is there
            client.sendall(bytes([code if code >= 0 else 128 - code]))  # as a shell has signals
