"""Object stores that others wrote, started for a session of tests where they are installed."""

import base64
import contextlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from support.processes import free_ports

BUCKET = "bucket"
AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
    "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1"
    "SZFPTOtr/KBHBeksoGMGw==",
}
"""The account that the emulator knows; its key is no secret."""
KEYS = ("someone", "a secret")
_START_S = 200


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[int]:
    """The port of SeaweedFS, which keeps every condition of a write and checks signatures."""
    program = _program("weed")
    keys = [{"accessKey": KEYS[0], "secretKey": KEYS[1]}]
    identity = {"name": "tests", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(4)
    names = ("-master.port", "-volume.port", "-filer.port", "-s3.port")
    options = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    options += [
        f"-dir={folder}",
        f"-s3.config={folder / 's3.json'}",
        "-master.volumeSizeLimitMB=64",
    ]
    with _running([program, "server", *options], folder, ports[-1]):
        _until_answered(f"http://127.0.0.1:{ports[2]}/buckets/{BUCKET}/", "POST")
        yield ports[-1]


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """The port of Azure's own emulator, with a container."""
    program, (port,) = _program("azurite-blob"), free_ports()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--skipApiVersionCheck"]
    with _running([program, *options, "--silent", "--location", str(folder)], folder, port):
        _make_container(port)
        yield port


def _make_container(port: int) -> None:
    """Ask for it with a signature: the client has no such request."""
    account, place = AZURE["AZURE_STORAGE_ACCOUNT_NAME"], f"devstoreaccount1/{BUCKET}"
    signed = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
    text = f"PUT{chr(10) * 12}{lines}/{account}/{place}\nrestype:container"
    key = base64.b64decode(AZURE["AZURE_STORAGE_ACCOUNT_KEY"])
    signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
    url = f"http://127.0.0.1:{port}/{place}?restype=container"
    headers = signed | {"Authorization": f"SharedKey {account}:{signature}"}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def _program(name: str) -> str:
    """A program of this environment or of the system; the test is skipped where there is none."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed")


@contextlib.contextmanager
def _running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """A server that listens; it ends with the block."""
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            deadline = time.monotonic() + _START_S
            while not _listens(port):
                assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
                assert time.monotonic() < deadline, (folder / "server.log").read_text()[-2000:]
                time.sleep(0.05)
            yield
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _until_answered(url: str, method: str) -> None:
    """A server listens before it can do anything."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
