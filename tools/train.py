"""The `train` command: reads shards, writes a trained model and a report.

Ctrl-C, SIGTERM and SIGHUP (a closed terminal) stop the run after the current step or evaluation
batch, with a checkpoint and a report; `--resume` continues from there. A second Ctrl-C stops it at
once. SIGUSR1 saves a checkpoint, and the run continues.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import psutil
import yaml

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.format.store import reading_once
from tokenfeed.pipeline.text import facts
from tokenfeed.tools.shell.console import print_json, run_command
from tokenfeed.tools.train_phases import as_yaml, check_later, named_phases, read_phases, run_phases
from tokenfeed.tools.train_settings import Command, Parsed, read_command, read_options
from tokenfeed.trainer.config.memory import set_allocator
from tokenfeed.trainer.config.values import flag_of
from tokenfeed.trainer.report.machine import Gpu, Host
from tokenfeed.trainer.report.recommendations import Readings, recommended
from tokenfeed.trainer.report.run_files import Report

_MOST_ADVICE = 5
"""Most recommendations of the monitor."""


class SignalRequests:
    """Turn the first signal to stop, and every SIGUSR1, into requests that the loop polls."""

    def __init__(self) -> None:
        self.ended_by: int | None = None
        """The signal that requested a stop."""
        self._save = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop_later)
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            signal.signal(signal.SIGUSR1, self._save_later)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
                signal.signal(signal.SIGHUP, self._stop_later)

    def should_stop(self) -> bool:
        """Whether to save and stop."""
        return self.ended_by is not None

    def should_save(self) -> bool:
        """Whether to save and continue; True once for each request."""
        if not self._save:
            return False
        self._save = False
        return True

    def _stop_later(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # before the line promises it
        _say(b"stopping: saving a checkpoint and the report. Press Ctrl-C again to stop at once\n")

    def _save_later(self, number: int, frame: FrameType | None) -> None:
        self._save = True
        _say(b"saving after this step\n")


def _say(line: bytes) -> None:
    """Write to stderr. Its terminal may be closed."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line)


def main() -> None:
    """Entry point of the `train` script."""
    run_command(_run)


@reading_once()
def _run() -> int:
    if "--monitor-only" in sys.argv[1:]:
        return monitor()
    set_allocator(os.environ)
    if "WORLD_SIZE" in os.environ:  # torch would advise against an option that `Replicas` needs
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    is_main = os.environ.get("RANK", "0") == "0"
    if not is_main:
        logging.getLogger("tokenfeed").setLevel(logging.WARNING)
    parsed = read_command()
    command = parsed.command
    if command.phases:
        return _run_phases(command)
    config = command.settings()
    if command.print_config:
        print(yaml.safe_dump(parsed.as_dict(), sort_keys=False), end="")
        return 0

    if command.dry_run:
        return _dry_run([parsed])
    from tokenfeed.trainer.loop.run import train  # torch takes seconds to load

    requests = SignalRequests()
    report = train(config, requests.should_stop, requests.should_save, settle=parsed.settle)
    if not is_main:
        pass  # rank 0 prints it
    elif config.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.summary())
    return 0 if requests.ended_by is None else 128 + requests.ended_by


def _run_phases(command: Command) -> int:
    if command.print_config:
        print(as_yaml(command, read_phases(command)), end="")
        return 0
    if command.dry_run:
        phases = named_phases(read_phases(command), command.phase)
        check_later(phases)
        return _dry_run([phase.parsed for phase in phases])
    requests = SignalRequests()
    run_phases(command, requests.should_stop, requests.should_save)
    return 0 if requests.ended_by is None else 128 + requests.ended_by


def _dry_run(runs: list[Parsed]) -> int:
    from tokenfeed.trainer.distributed.world import join_world  # torch takes seconds to load
    from tokenfeed.trainer.loop.run import announce

    world = join_world(runs[0].command.device)
    for each in runs:
        announce(each.command.settings(), world, each.settle)
    world.close()
    return 0


def monitor() -> int:
    """Show the load of GPUs and host with recommendations, once a second until Ctrl-C, or once if
    the output is not a terminal. With --run-dir, recommendations also use the report of that
    run."""
    options = read_options()
    unread = [flag_of(name) for name in options if name not in ("monitor_only", "run_dir")]
    if unread:
        raise ConfigError(f"`{unread[0]}`: --monitor-only takes only --run-dir. Leave it out.")
    run_dir = options.get("run_dir")
    gpus, host = [*Gpu.all()], Host()
    time.sleep(0.25)
    if not sys.stdout.isatty():
        print(view(gpus, host, run_dir))
        return 0
    from rich.live import Live  # which only a terminal should cost
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(Text(view(gpus, host, run_dir))) as live:
        while True:
            time.sleep(1.0)
            live.update(Text(view(gpus, host, run_dir)))
    return 0


def view(gpus: list[Gpu], host: Host, run_dir: Path | None) -> str:
    """Return a reading as text: a line for each GPU, the host, and up to five recommendations."""
    cores, memory, load = psutil.cpu_count() or 1, psutil.virtual_memory(), host.read()
    report = Report.of_run(run_dir) if run_dir else None
    readings = report.readings if report else Readings(cores=usable_cores())
    readings, shown = readings.updated(**load), {}
    advice: dict[str, str] = {} if gpus else recommended(readings)
    for number, gpu in enumerate(gpus):
        if (reading := gpu.read()) is None:
            continue
        shown[f"GPU {number}"] = gpu.describe(reading)
        found = recommended(readings.updated(**gpu.workers(), **dataclasses.asdict(reading)))
        for name, text in found.items():  # the first GPU stands for others with the same advice
            advice.setdefault(name, f"GPU {number}: {text}" if len(gpus) > 1 else text)
    return facts(
        {
            **shown,
            "GPU": "" if shown else "NVML finds none",
            "host": f"{load['cpu_busy'] * cores:.1f} of {cores} cores busy, "
            f"{(memory.total - memory.available) / 1e9:.1f} of {memory.total / 1e9:.1f} GB",
            "run": f"{run_dir} has no report yet" if run_dir and not report else "",
            "advice": "\n".join([*advice.values()][:_MOST_ADVICE]),
        }
    )


if __name__ == "__main__":
    main()
