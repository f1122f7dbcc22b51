"""What other systems lack of Linux, taken away before tokenfeed is imported, in a new process."""

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

LIKE_WINDOWS = """
import concurrent.futures.process, datasets, errno, filelock, mmap, msgspec, multiprocessing, numpy
import os, psutil, pyarrow.ipc, safetensors.torch, signal, socket, subprocess, sys, tempfile
import threading, tokenizers, torch, yaml, zoneinfo
import torch.optim, torch._dynamo, torch.distributed.checkpoint, pkgutil, importlib
from multiprocessing import resource_tracker, util

resource_tracker._HAVE_SIGMASK = False
for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "fork",
             "posix_fallocate", "O_DIRECT", "O_CLOEXEC", "sendfile", "pidfd_open",
             "copy_file_range", "register_at_fork", "getuid", "geteuid", "pread", "pwrite",
             "statvfs", "EX_OK", "getpgid", "killpg", "wait3", "wait4", "mkfifo", "setsid"):
    delattr(os, name)
for name in ("pthread_sigmask", "sigtimedwait", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    delattr(signal, name)
del socket.AF_UNIX, socket.socketpair, socket.SOCK_SEQPACKET
sys.modules["fcntl"] = sys.modules["resource"] = None

temporary = tempfile.gettempdir()

def is_hidden(path):
    return str(path).startswith(("/proc", "/dev/shm", "/sys")) and temporary not in str(path)

peak = type("Memory", (), {"peak_wset": 10**9, "rss": 10**9})  # what psutil has on Windows
psutil.Process.memory_info = lambda process: peak

def hide(event, arguments):
    if event != "open" or not is_hidden(arguments[0]):
        return
    callers, frame = set(), sys._getframe(1)
    while frame:
        callers.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    if "psutil" not in callers:  # it asks Windows otherwise
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
sys.addaudithook(hide)
is_folder = os.path.isdir
os.path.isdir = lambda path: not is_hidden(path) and is_folder(path)

opened = os.open
def open_file(path, flags, *more, **options):
    if isinstance(path, (str, os.PathLike)) and is_folder(path):
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, flags, *more, **options)
os.open = open_file
"""
"""Windows lacks these of Linux, and its `os.open` opens no folder. What libraries need of them at
their import was imported before. No test has run on Windows."""
