"""Run mutations against the parsers, and report every broken promise.

The promises: an error of tokenfeed with one line, or a result; no other exception, no hang, no
wrong tokens, and no allocation beyond twice the files (with some slack). A mutation depends only on
the parser, the file and its number, so `--first N --count 1` repeats it.
"""

import argparse
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz.mutations import mutated
from fuzz.parsers import ADDRESS, LAYERS, PARSERS, Parser

from tokenfeed.pipeline.errors import TokenfeedError

_HANG_S = 30
_SLACK_BYTES = 48 << 20
_LONGEST_LINE = 2000
_AT_ONCE, _TRACED = 100_000, 200
"""Mutations per process of a long run. The first of them are tried in a process before, which
traces allocations: this takes five times as long. A process traces always or never, because
`tracemalloc.stop` of Python 3.11 crashes if another thread is alive. The peak of resident memory is
read for every mutation."""
_IN_MEMORY = "/dev/shm"
"""Files are written here, because a file system on a disk takes a hundred times as long."""

os.environ["RUST_BACKTRACE"] = "0"  # a backtrace of a panic takes megabytes of symbols


class _Hang(BaseException):
    """A parser takes too long."""

    @classmethod
    def stop(cls, number: int, frame: FrameType | None) -> None:
        raise cls(f"no result after {_HANG_S} s")


class Fuzzer:
    """The files of one parser, and the mutations of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._parser: Parser = PARSERS[name]
        folder.mkdir(parents=True, exist_ok=True)
        self.files = list(self._parser.make(folder))
        self._valid = {file: (folder / file).read_bytes() for file in self.files}
        self._changed = self.files[0]
        """The only file that may differ from the valid one."""
        signal.signal(signal.SIGALRM, _Hang.stop)
        self._clear_refs = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def mutation(self, number: int) -> tuple[str, bytes]:
        """Return a file to mutate and its new content."""
        draw = random.Random(f"{self.name} {number}")
        file = draw.choice(self.files)
        layer = self._parser.layers.get(file) or LAYERS.get(file.rpartition(".")[2])
        return file, mutated(draw, self._valid[file], layer)

    def try_mutation(self, number: int) -> tuple[str, str]:
        """Read one mutation; return one of `_OUTCOMES`, and a broken promise."""
        file, data = self.mutation(number)
        if data == self._valid[file]:
            return "same", ""
        outcome, what = self.try_bytes(file, data, every=number % 8 == 0)
        outcome = outcome if self._is_past else "unread"
        return outcome, what and f"{self.name} {file} --first {number}: {what}"

    def try_bytes(self, file: str, data: bytes, *, every: bool = True) -> tuple[str, str]:
        """Read the files with another content of one; return the outcome, and what is broken.

        If the first reader rejects the file, the other readers read it only if `every`: they begin
        with the same checks.
        """
        if file != self._changed:
            (self.folder / self._changed).write_bytes(self._valid[self._changed])
            self._changed = file
        (self.folder / file).write_bytes(data)
        outcome, what, self._is_past = "rejected", "", False
        for place, read in enumerate(self._parser.reads):
            if place and outcome == "rejected" and not every:
                break
            found, broken = self._read(read, file, len(data))
            outcome = found if found == "accepted" else outcome
            what = what or broken
        return outcome, what

    def _read(
        self, read: Callable[[Path, str], bool | None], file: str, size: int
    ) -> tuple[str, str]:
        tracemalloc.reset_peak()
        already = tracemalloc.get_traced_memory()[0]
        os.pwrite(self._clear_refs, b"5", 0)  # the peak becomes the present resident memory
        before = _peak()
        try:
            signal.setitimer(signal.ITIMER_REAL, _HANG_S)
            self._is_past |= read(self.folder, file) is not False
        except TokenfeedError as error:
            line = str(error)
            if "\n" in line or len(line) > _LONGEST_LINE:
                return "rejected", f"an error of {len(line):,} characters: {line[:200]!r}"
            if ADDRESS in line:
                return "rejected", f"an error with an address: {line[:200]!r}"
            outcome = "rejected"
            self._is_past |= not _FIRST_CHECKS.search(line)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of a library in Rust
            return "rejected", _described(error)
        else:
            outcome = "accepted"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = _peak() - before
            traced = tracemalloc.get_traced_memory()[1] - already
        if (peak := traced or grown) > (limit := 2 * (self._bytes + size) + _SLACK_BYTES):
            return outcome, f"{peak:,} bytes of memory, expected at most {limit:,}"
        return outcome, ""


def _peak() -> int:
    """Return the largest resident memory of this process since `clear_refs` was written."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _described(error: BaseException) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in f.filename]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in own[-1:-6:-1])
    return f"{type(error).__name__}: {str(error)[:200]!r} at {where}"


_OUTCOMES = ("same", "unread", "rejected", "accepted")
"""Of a mutation: it changes nothing; a first check rejects it; a later one; a reader accepts it."""
_FIRST_CHECKS = re.compile(
    r"checksum|cut short|JSON|Not an Arrow file|File is too small|"
    r"is not a loader state\.|Expecting|Extra data|control character|codec can't|gzip|"
    r"decompress|end-of-stream|buffer: (expected|invalid unicode|lone|trailing|EOF)|"
    r"header (too|length)|line [\d,]+ is b'"
)
"""Errors by checksums, sizes, or the syntax of the whole file."""


def _try_all(
    name: str, folder: Path, numbers: range, until: float, is_traced: bool, tried: Any, pipe: Any
) -> None:
    if is_traced:
        tracemalloc.start()
    fuzzer = Fuzzer(name, folder)
    gc.freeze()  # what was imported is not searched for garbage again and again
    for number in numbers:
        if time.monotonic() > until:
            break
        outcome, finding = fuzzer.try_mutation(number)
        tried[_OUTCOMES.index(outcome)] += 1
        if finding:
            pipe.send(finding)


def _run_apart(
    name: str, folder: Path, numbers: range, until: float, *, is_traced: bool
) -> tuple[Counter[str], list[str], int]:
    """Try mutations in another process, which may crash. Return the counts, what is broken, and
    the number to go on with."""
    context = multiprocessing.get_context("fork")  # the imports take seconds
    ours, theirs = context.Pipe(duplex=False)
    tried = context.RawArray("q", len(_OUTCOMES))  # shared, so that a crash loses no count
    arguments = (name, folder, numbers, until, is_traced, tried, theirs)
    child = context.Process(target=_try_all, args=arguments)
    child.start()
    theirs.close()
    findings = []
    with contextlib.suppress(EOFError):
        while True:
            findings.append(ours.recv())
    child.join()
    counts = Counter(dict(zip(_OUTCOMES, tried, strict=True)))
    last = numbers.start + counts.total()
    if child.exitcode:
        counts["crashed"] += 1
        findings.append(f"{name} --first {last}: the process ended with {child.exitcode}")
        last += 1
    return +counts, findings, last


def _processor_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _fuzz(name: str, folder: Path, first: int, count: int, until: float) -> list[str]:
    counts, findings, started = Counter[str](), [], time.monotonic()
    number, before = first, _processor_s()
    while number < first + count and time.monotonic() < until:
        numbers = range(number, min(number + _AT_ONCE, first + count))
        place = folder / str(number)
        _, traced, _ = _run_apart(name, place / "traced", numbers[:_TRACED], until, is_traced=True)
        some, found, number = _run_apart(name, place, numbers, until, is_traced=False)
        found += traced
        counts += some
        print("".join(f"{finding}\n" for finding in found[:20]), end="", flush=True)
        findings += found
    seconds, processor = time.monotonic() - started, _processor_s() - before
    outcomes = ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    print(
        f"{name}: mutations {counts.total():,} ({outcomes}), findings {len(findings):,}, "
        f"{seconds:.0f} s, {processor:.0f} s of processor time"
    )
    return findings


def main() -> None:
    """`python -m tests.fuzz`: run mutations by hand, print counts, exit with 1 for findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="time for all parsers together")
    parser.add_argument("--parser", action="append", choices=sorted(PARSERS), metavar="NAME")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--count", type=int, default=10**12, help="mutations of each parser")
    options = parser.parse_args()
    logging.getLogger("tokenfeed").setLevel(logging.CRITICAL)
    import_module("torch.distributed.checkpoint.hf_storage")  # takes seconds in each process
    names = options.parser or list(PARSERS)
    each, is_broken = 60 * options.minutes / len(names), False
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as folder:
        for name in names:
            until = time.monotonic() + each
            found = _fuzz(name, Path(folder, name), options.first, options.count, until)
            is_broken |= bool(found)
    sys.exit(int(is_broken))
