"""The commands of tokenfeed as a shell finds them, in processes that start warm.

Each is a program of some lines: it sends its arguments, environment, folder and descriptors to the
test's process, which starts the command with them (`warm.Popen`), and ends with its exit code. A
program that is ended, and the end of the server, end the command by SIGTERM.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

import warm

__all__ = ["serve"]

_COMMANDS = ("pretokenize", "report", "shards", "train")
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = ["-m", "tokenfeed.tools.{command}", *sys.argv[1:]]
    told = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(told)
    code = server.recv(1)
    sys.exit(code[0] if code else "its server has failed")
"""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[None]:
    """Write the commands into `folder`, which is to be the first in PATH, and serve them."""
    address = f"\0tokenfeed-{uuid.uuid4()}"  # of no file, whose name would have to be short
    folder.mkdir()
    for command in _COMMANDS:
        program = folder / command
        program.write_text(_PROGRAM.format(python=sys.executable, address=address, command=command))
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
            process = warm.Popen(
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
