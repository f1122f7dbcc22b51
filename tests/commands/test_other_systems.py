"""What other systems lack: names are taken away before tokenfeed is imported, in a new process."""

from pathlib import Path

import pytest
from support import warm

POORER = """
import datasets, errno, mmap, msgspec, numpy, os, psutil, pyarrow.ipc, safetensors.torch, shutil
import signal
import socket, subprocess, sys, tempfile, threading, tokenizers, torch, yaml
import torch.optim, torch._dynamo, torch.distributed.checkpoint, pkgutil, importlib

for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "register_at_fork", "fork",
             "posix_fadvise", "O_DIRECTORY", "pread", "preadv", "getuid", "geteuid", "statvfs",
             "uname", "nice", "waitid", "chown", "killpg", "WNOHANG", "getpgid", "mkfifo"):
    delattr(os, name)
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGBUS", "SIGCHLD", "SIGPIPE", "SIGALRM", "SIGHUP",
             "SIGSTOP", "SIGCONT", "pthread_sigmask", "sigwait", "setitimer"):
    delattr(signal, name)
for name in ("AF_UNIX", "SOCK_SEQPACKET", "SCM_RIGHTS"):
    delattr(socket, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # an import of it is an ImportError

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/dev/shm", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
sys.addaudithook(hide)
"""

EVERY_MODULE = """
import tokenfeed
models = "tokenfeed.trainer.models."
of_frameworks = ("tokenfeed.integrations.", *(models + name for name in ("hub", "lora", "trial")))
for found in pkgutil.walk_packages(tokenfeed.__path__, "tokenfeed."):
    if not found.name.startswith(of_frameworks):
        importlib.import_module(found.name)
"""

SMALL_LOADER = """
from tokenfeed import Padded, ShardLoader
policy = Padded(512)
with ShardLoader(sys.argv[1], batching=policy, epochs=1, num_workers=0, device="cpu") as loader:
    print(sum(batch.num_tokens for batch in loader))
"""

WORKERS = """
from tokenfeed import Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
try:
    next(iter(ShardLoader(sys.argv[1], batching=Padded(512), num_workers=1, device="cpu")))
except ConfigError as error:
    print(error)
"""

SMALL_TRAIN = """
from tokenfeed.tools.train import main
sys.argv = ["train", "--shards", sys.argv[1], "--run-dir", sys.argv[1] + "-run", "--steps", "4",
            "--model", "words", "--sequence-length", "32", "--micro-batch-tokens", "128",
            "--step-tokens", "256", "--save-every", "2", "--eval-every", "2"]
main()
"""


def output_of(code: str, text_shards: Path) -> str:
    done = warm.run(["-c", POORER + code, text_shards])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_everything_can_be_imported(text_shards: Path) -> None:
    output_of(EVERY_MODULE, text_shards)


def test_a_loader_without_workers_delivers_every_row(text_shards: Path) -> None:
    assert int(output_of(SMALL_LOADER, text_shards)) > 0


def test_workers_are_refused_in_one_line_that_names_the_remedy(text_shards: Path) -> None:
    said = output_of(WORKERS, text_shards)
    assert "`num_workers`=0 needs none" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_train_trains_saves_and_reports(text_shards: Path) -> None:
    said = output_of(SMALL_TRAIN, text_shards)
    assert "trained  4 steps" in said
    assert (text_shards.with_name("out-run") / "checkpoints" / "step-00000004").is_dir()
