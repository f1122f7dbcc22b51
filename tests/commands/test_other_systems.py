"""What macOS lacks of Linux is taken away before tokenfeed is imported, in a new process."""

from pathlib import Path

import pytest
from support import warm

FORGET = """
import sys
from support import warm
warm.forget("tokenfeed")
"""
"""A warm process has imported tokenfeed. It is imported again, on the other system."""

LIKE_MACOS = """
import datasets, errno, fcntl, mmap, msgspec, numpy, os, psutil, pyarrow.ipc, safetensors.torch
import signal, socket, subprocess, sys, tempfile, threading, tokenizers, torch, yaml
import torch.optim, torch._dynamo, torch.distributed.checkpoint, pkgutil, importlib

for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise",
             "posix_fallocate", "O_DIRECT", "sendfile", "copy_file_range", "pidfd_open"):
    delattr(os, name)
del signal.sigtimedwait, socket.SOCK_SEQPACKET, fcntl.F_OFD_SETLK

temporary = tempfile.gettempdir()

def is_hidden(path):
    return str(path).startswith(("/proc", "/dev/shm", "/sys")) and temporary not in str(path)

def hide(event, arguments):
    if event == "open" and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
sys.addaudithook(hide)
is_folder = os.path.isdir
os.path.isdir = lambda path: not is_hidden(path) and is_folder(path)
"""

EVERY_MODULE = """
import tokenfeed
of_frameworks = ("tokenfeed.integrations.", "tokenfeed.trainer.models.hf_")
for found in pkgutil.walk_packages(tokenfeed.__path__, "tokenfeed."):
    if not found.name.startswith(of_frameworks):
        importlib.import_module(found.name)
"""

COUNT_TOKENS = """
from tokenfeed import Padded, ShardLoader
for number in (0, 2):
    with ShardLoader(sys.argv[1], batching=Padded(512), epochs=1, num_workers=number) as loader:
        print(sum(batch.num_tokens for batch in loader))
"""

RUN = """
def run(command, *words):
    sys.argv = [command, *words]
    try:
        importlib.import_module(f"tokenfeed.tools.{command}").main()
    except SystemExit as ended:
        assert not ended.code, ended.code
"""

PRETOKENIZE = """
texts = ["some words of a text"] * 50
sys.stdin = open(sys.argv[2] + ".txt", "w+")
sys.stdin.write("\\n".join('{"text": "%s"}' % text for text in texts))
sys.stdin.seek(0)
out, shards, folder = sys.argv[2], sys.argv[1], sys.argv[2] + "-run"
run("pretokenize", "-", out, "--vocab-size", "300", "--workers", "2")
"""

SMALL_TRAIN = """
words = "--model words --sequence-length 32 --micro-batch-tokens 128 --step-tokens 256 --steps 4"
run("train", "--shards", shards, "--run-dir", folder, *words.split(), "--save-every", "2")
"""

WINDOWS = """
import sys
sys.platform = "win32"
try:
    import tokenfeed
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_all_but_frameworks_works_without_features_of_linux(
    text_shards: Path, tmp_path: Path
) -> None:
    """Every module is imported, rows are read, standard input is tokenized, a model is trained."""
    code = FORGET + LIKE_MACOS + EVERY_MODULE + COUNT_TOKENS + RUN + PRETOKENIZE + SMALL_TRAIN
    out = tmp_path / "out"
    done = warm.run(["-c", code, text_shards, out])
    assert done.returncode == 0, done.stderr
    alone, by_workers = map(int, done.stdout.split()[:2])
    assert alone == by_workers > 0
    assert "trained  4 steps" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-run", "out.txt"]
    assert (out / "manifest.json").is_file()
    assert (tmp_path / "out-run" / "checkpoints" / "step-00000004").is_dir()


def test_windows_is_refused_with_the_reason_and_the_remedy() -> None:
    said = warm.run(["-c", FORGET + WINDOWS]).stdout
    assert "does not run on Windows" in said
    assert "WSL 2" in said
    assert said.count("\n") == 1
