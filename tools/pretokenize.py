"""`pretokenize CORPUS... OUT`: tokenize a corpus once, into shards.

This file imports little, so that the handlers for Ctrl-C and for a wrong locale are installed at
once. The command then imports the rest. `pretokenizing.make` is the run itself.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from itertools import pairwise

from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.tools.shell.console import print_json, run_command, signals_held


def main() -> None:
    """Run the command `pretokenize`."""
    run_command(_command)


def _command() -> None:
    own_process()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of no use here, and 0.1 s to start and end
    from tokenfeed.tools.jobs.executors import end_early, start_early

    if needs_workers(sys.argv[1:]):
        is_ids = not {"ids", "--task=ids"}.isdisjoint(sys.argv)  # a wrong guess only costs time
        start_early(has_texts=not is_ids)  # the imports of the workers run beside ours
    try:
        _make()
    finally:
        end_early()


def _make() -> None:
    gc.disable()  # until all is imported
    with signals_held():  # extension modules turn an interruption into an ImportError
        from dataclasses import asdict

        from tokenfeed.pipeline.format.manifest import Manifest
        from tokenfeed.tools.data_sets.inspection import describe
        from tokenfeed.tools.pretokenizing.make import make_dataset, make_part
        from tokenfeed.tools.pretokenizing.options import parse_options
    gc.freeze()  # what was imported stays: no collection need look through it, at the end neither
    gc.enable()
    options = parse_options()
    try:
        if options.part:
            part = make_part(options)
            print_json(asdict(part)) if options.json else print(part)
            return
        summary = make_dataset(options)
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(str(interruption) or "the same command continues") from None
    if options.json:
        print_json(asdict(summary))
    else:
        print(describe(Manifest.read(options.paths[-1]), summary.facts()))


def needs_workers(arguments: list[str]) -> bool:
    """Return whether a command line names so much input that workers will be needed.

    The arguments are not parsed yet, so the result is a guess. A wrong guess only costs time.
    """
    if {"--runner", "--finish"} & set(arguments):
        return False  # others do the work, or have done it
    from tokenfeed.tools.jobs.executors import IN_CHILDREN, SMALL_BYTES

    if not IN_CHILDREN.isdisjoint(word.removeprefix("--task=") for word in arguments):
        return True
    num_bytes = 0
    for before, argument in pairwise(["", *arguments]):
        if not before.startswith("-") and not argument.startswith("-"):
            for size in _sizes(argument):
                num_bytes += size
                if num_bytes > SMALL_BYTES:
                    return True
    return False


def _sizes(path: str) -> Iterator[int]:
    """Yield the size of a file, or of each file below a folder."""
    if os.path.isfile(path):
        yield os.path.getsize(path)
    folders = [path] if os.path.isdir(path) else []
    while folders:  # not os.walk, which recurses in Python 3.11
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file():
                    yield entry.stat().st_size


if __name__ == "__main__":
    main()
