"""`tokenfeed doctor`: print what a bug report needs, as text or as JSON.

It reads facts about the machine, and reads a data set for two seconds. Without a data set it makes
a small one in a temporary folder. If a fact cannot be had, the reason is printed instead. The
command ends with 1 if the data set cannot be read.
"""

import contextlib
import logging
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import psutil

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.feeding.placement import control_groups, num_cores, usable_cores
from tokenfeed.pipeline.text import facts, public, without_secrets
from tokenfeed.tools.shell.command_line import parse_command, text
from tokenfeed.tools.shell.console import print_json, run_command

_PACKAGES = (
    *("tokenfeed", "torch", "numpy", "pyarrow", "tokenizers", "gigatoken", "datasets"),
    *("zstandard", "nvidia-ml-py", "transformers", "accelerate", "peft", "lightning", "obstore"),
)
_SECONDS = 2.0
_TIMEOUT = "TOKENFEED_REMOTE_TIMEOUT"
_NO_MEMORY_LIMIT = str((1 << 63) - 4096)
"""What control groups of version 1 show without a limit."""
_WORDS = ("the", "loader", "reads", "every", "row", "of", "a", "shard", "once", "in", "order")


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor:
    """Print what a bug report needs: versions, devices, limits, and the speed of the loader."""

    data_set: Annotated[str, text("DATA_SET")] | None = None
    """Output folder of `pretokenize`, or its address. Default: a small one that the command makes
    in a temporary folder."""
    json: bool = False
    """Print the facts as JSON."""

    def run(self) -> int:
        """Print the facts. Return 1 if the data set cannot be read."""
        found: dict[str, dict[str, Any]] = {
            "versions": _versions(),
            "machine": _tried(_machine),
            "limits": _tried(_limits),
            "devices": _tried(_devices),
        }
        with _brief():
            found["loader"] = {public(self.data_set or "a small data set"): _tried(self._read)}
        if self.json:
            print_json(found)
        else:
            for title, values in found.items():
                print(
                    facts({title: facts({name: _shown(value) for name, value in values.items()})})
                )
        return int(any("error" in value for value in found["loader"].values()))

    def _read(self) -> dict[str, Any]:
        if self.data_set:
            return _read(self.data_set)
        with _small_data_set() as place:
            return _read(place)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "\n".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _tried(fact: Callable[[], Any]) -> Any:
    """Return a fact, or the error of the attempt."""
    try:
        return fact()
    except TokenfeedError as error:
        return {"error": str(error)}
    except Exception as error:  # a driver or a file of /proc may fail in any way
        return {"error": without_secrets(f"{type(error).__name__}: {error}")}


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "cores": {"usable": usable_cores(), "of this process": num_cores(), "all": os.cpu_count()},
        "memory": {"GiB": _gib(memory.total), "available": _gib(memory.available)},
    }
    folders = {"disk, here": ".", "disk, temporary": tempfile.gettempdir()}
    folders["shared memory"] = "/dev/shm"
    for name, folder in folders.items():
        with contextlib.suppress(OSError):  # not on Linux
            usage = shutil.disk_usage(folder)
            found[name] = {"GiB": _gib(usage.total), "free": _gib(usage.free)}
    return found


def _gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 2)


def _limits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = {"open files": "NOFILE", "processes": "NPROC", "locked memory": "MEMLOCK"}
    with contextlib.suppress(ImportError):  # on Windows
        import resource

        for name, limit in names.items():
            soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{limit}"))
            found[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    # Names of control groups of version 2 and 1. The CPU time is in µs per period.
    found["memory of the container"] = _group_limit("memory", "memory.max", "memory.limit_in_bytes")
    found["CPU time of the container"] = _group_limit("cpu", "cpu.max", "cpu.cfs_quota_us")
    return found


def _group_limit(controller: str, *files: str) -> str:
    """Return the limit of the innermost control group that has one."""
    for group in control_groups(controller):
        for file in files:
            with contextlib.suppress(OSError):
                limit = (group / file).read_text().strip()
                if limit.split()[0] not in ("max", "-1", _NO_MEMORY_LIMIT):
                    return limit
    return "unlimited"


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"CUDA of torch": torch.version.cuda or "missing: torch is for CPUs"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = {"name": about.name, "GiB": _gib(about.total_memory)}
    found["driver"] = _tried(_driver)
    return found


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"missing ({error})"
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def _brief() -> Iterator[None]:
    """Show warnings only, and repeat requests for 10 s at most."""
    logger, is_set = logging.getLogger("tokenfeed"), _TIMEOUT in os.environ
    level = logger.level
    logger.setLevel(logging.WARNING)
    os.environ.setdefault(_TIMEOUT, "10")
    try:
        yield
    finally:
        logger.setLevel(level)
        if not is_set:
            del os.environ[_TIMEOUT]


@contextlib.contextmanager
def _small_data_set() -> Iterator[str]:
    from tokenfeed.tools.python_api import pretokenize

    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(_WORDS, k=draw.randint(5, 400)))} for _ in range(500)]
    with tempfile.TemporaryDirectory() as folder:
        pretokenize(rows, folder + "/out", vocab_size=500)
        yield folder + "/out"


def _read(place: str) -> dict[str, Any]:
    """Read a data set for two seconds."""
    from tokenfeed.pipeline.feeding.loader import ShardLoader
    from tokenfeed.pipeline.planning.policies import Padded

    start = time.perf_counter()
    with contextlib.closing(ShardLoader(place, batching=Padded(16_384), epochs=None)) as loader:
        tokens, first = 0, 0.0
        for batch in loader:
            tokens += batch.num_tokens
            first = first or time.perf_counter() - start
            if time.perf_counter() - start - first > _SECONDS:
                break
    seconds = time.perf_counter() - start - first
    return {"first batch, s": round(first, 2), "M tokens/s": round(tokens / seconds / 1e6, 1)}


def main() -> None:
    """Run the command `doctor`."""
    run_command(lambda: parse_command(Doctor, "tokenfeed doctor", sys.argv[1:]).run())


if __name__ == "__main__":
    main()
