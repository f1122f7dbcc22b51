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
models = "tokenfeed.trainer.models."
of_frameworks = ("tokenfeed.integrations.", *(models + name for name in ("hub", "lora", "trial")))
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

PRETOKENIZE = """
from tokenfeed.tools.main import main
texts = ["some words of a text"] * 50
sys.stdin = open(sys.argv[1] + ".txt", "w+")
sys.stdin.write("\\n".join('{"text": "%s"}' % text for text in texts))
sys.stdin.seek(0)
sys.argv = ["tokenfeed", "pretokenize", "-", sys.argv[1], "--vocab-size", "300", "--workers", "2"]
main()
"""

SMALL_TRAIN = """
from tokenfeed.tools.train import main
sys.argv = ["train", "--shards", sys.argv[1], "--run-dir", sys.argv[1] + "-run", "--steps", "4",
            "--model", "words", "--sequence-length", "32", "--micro-batch-tokens", "128",
            "--step-tokens", "256", "--save-every", "2", "--eval-every", "2"]
main()
"""

WINDOWS = """
import sys
sys.platform = "win32"
try:
    import tokenfeed
except ImportError as error:
    print(error)
"""


def output_of(code: str, folder: Path) -> str:
    done = warm.run(["-c", FORGET + LIKE_MACOS + code, folder])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_everything_can_be_imported(text_shards: Path) -> None:
    output_of(EVERY_MODULE, text_shards)


def test_loader_delivers_every_row_with_and_without_workers(text_shards: Path) -> None:
    alone, by_workers = map(int, output_of(COUNT_TOKENS, text_shards).split())
    assert alone == by_workers > 0


def test_pretokenize_reads_standard_input_and_leaves_no_copy(tmp_path: Path) -> None:
    output_of(PRETOKENIZE, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.txt"]
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.slow
def test_train_trains_saves_and_reports(text_shards: Path) -> None:
    said = output_of(SMALL_TRAIN, text_shards)
    assert "trained  4 steps" in said
    assert (text_shards.with_name("out-run") / "checkpoints" / "step-00000004").is_dir()


def test_windows_is_refused_with_the_reason_and_the_remedy() -> None:
    said = warm.run(["-c", FORGET + WINDOWS]).stdout
    assert "does not run on Windows" in said
    assert "WSL 2" in said
    assert said.count("\n") == 1
