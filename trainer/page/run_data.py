"""What a run left, as its page needs it; what an earlier release did not write is not there."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.trainer.config import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from tokenfeed.trainer.data_sets import read_manifest
from tokenfeed.trainer.page.plot import Series
from tokenfeed.trainer.report import Report

__all__ = ["RunData"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """A run from outside."""

    folder: Path
    report: dict[str, Any]
    """report.json."""
    lines: list[dict[str, Any]]
    """metrics.jsonl."""
    settings: dict[str, Any] = field(default_factory=dict)
    """config.yaml."""
    lengths: list[int] = field(default_factory=list)
    """Rows of 2**k up to 2**(k+1) - 1 tokens, while the shards are still there."""

    @classmethod
    def of_run(cls, folder: Path) -> "RunData":
        """Read a run's folder.

        Raises:
            ConfigError: It holds no report, or one that cannot be read.
        """
        path = folder / REPORT_FILE
        try:
            report = dataclasses.asdict(Report.of_json(path.read_bytes(), folder))
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no {REPORT_FILE}. Give the folder of a run."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is no report of `train` ({error}). The same run with --resume writes it "
                "anew."
            ) from error
        settings = _settings(folder / CONFIG_FILE)
        return cls(
            folder=folder,
            report=report,
            lines=_lines(folder / METRICS_FILE),
            settings=settings,
            lengths=_lengths(settings.get("shards")),
        )

    def summary(self) -> str:
        """The report in a few lines, as the run printed it."""
        return Report(**self.report).summary()

    def series(self, key: str, name: str, *within: str) -> Series:
        """The values of a key over the steps; of one inside others by `within`."""
        found = [(line["step"], _value(line, key, *within)) for line in self.lines]
        known = [(step, value) for step, value in found if value is not None]
        return Series(name, [step for step, _ in known], [value for _, value in known])


def _value(line: dict[str, Any], *keys: str) -> float | None:
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last may be cut short."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found.append(values)
    return found


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _lengths(shards: Any) -> list[int]:
    try:
        known = isinstance(shards, (str, dict)) and bool(shards)
        split = read_manifest(shards).split("train") if known else None
    except (TokenfeedError, OSError):
        return []
    return list(split.length_histogram) if split else []
