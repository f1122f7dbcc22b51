"""The `train` command: shards in, a trained model and a report out.

Ctrl-C and SIGTERM end the run after the step under way, with a checkpoint and a report, so nothing
is lost and `--resume` goes on from there. A second Ctrl-C ends it at once.
"""

import dataclasses
import signal
from types import FrameType

import tyro

from tokenfeed.tools.console import print_json, run_command
from tokenfeed.trainer.config import TrainConfig

__all__ = ["main"]

_DESCRIPTION = """Train a language model on the shards of `pretokenize`, and report the stall.
Without options: a minute on a CPU. For a GPU: --model gpt2 --sequence-length 1024
--micro-batch-tokens 65536 --step-tokens 524288 --learning-rate 6e-4 --compile"""


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish that the loop can ask for."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def should_stop(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Entry point of the `train` script."""
    run_command(_run)


def _run() -> int:
    config = tyro.cli(
        TrainConfig,
        prog="train",
        description=_DESCRIPTION,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from tokenfeed.trainer.loop import train  # torch takes seconds to load; --help needs none

    stop = StopSignals()
    report = train(config, stop.should_stop)
    if config.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.summary())
    return 0 if stop.received is None else 128 + stop.received


if __name__ == "__main__":
    main()
