"""metrics.jsonl of a run: one object per progress line and per evaluation."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.storage import hold
from tokenfeed.trainer.config.run_config import METRICS_FILE
from tokenfeed.trainer.report.run_report import encode_json

__all__ = ["MetricsFile"]


class _Line(TypedDict):
    """The fields of a line that are read again."""

    step: int
    loss: NotRequired[float]
    validation_loss: NotRequired[float | None]
    skipped_steps: NotRequired[int]


class MetricsFile:
    """metrics.jsonl of a run. Each line is written at once.

    The open file locks the run's folder: a second run in the folder is refused.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        if not hold(self._file):
            self.close()
            raise ConfigError(
                f"`--run-dir`: another run is writing into {run_dir}. Wait for it or end it, or "
                "give another folder."
            )

    def keep(self, until_step: int) -> None:
        """Drop the lines after a step. A resumed run writes them again."""
        kept = [line for line in self.read() if line["step"] <= until_step]
        self._file.truncate(sum(map(len, self._lines()[: len(kept)])))

    def write(self, values: dict[str, Any]) -> None:
        """Append a line. `values` has at least `step`."""
        line = encode_json(values).encode() + b"\n"
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        for listen in self._followers:
            listen(values)

    def follow(self, listen: Callable[[dict[str, Any]], None]) -> None:
        """Call `listen` with each line written from now on. It must not raise."""
        self._followers.append(listen)

    def evaluation(self, step: int, split: str) -> dict[str, float]:
        """Return the metrics of a split at a step by name; empty if no line has them."""
        return {
            key.removeprefix(f"{split}_"): math.nan if value is None else value
            for line in self.read()
            if line["step"] == step
            for key, value in line.items()
            if key.startswith(f"{split}_")
        }

    def read(self) -> list[dict[str, Any]]:
        """Return all whole lines. A killed run may have cut the last one short; it is left out.

        Raises:
            ResumeError: A line is not a metrics record.
        """
        return [self._parse(number, line) for number, line in enumerate(self._lines(), 1)]

    def close(self) -> None:
        """Close the file, which unlocks the folder."""
        self._file.close()

    def _lines(self) -> list[bytes]:
        content = self._path.read_bytes()
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(line)
            msgspec.convert(values, _Line)
        except (ValueError, RecursionError) as error:  # such as 10,000 brackets
            raise ResumeError(
                f"{self._path}: line {number} is not a metrics record ({error}). Delete that line."
            ) from error
        return values
