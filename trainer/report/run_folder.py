"""The folder of a run, or of a StallMeter's report, decoded into types."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from tokenfeed.trainer.report.metrics import MetricsLine
from tokenfeed.trainer.report.run_report import Report
from tokenfeed.trainer.stall.stall_report import StallReport


class _LoopReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """report.json of a meter, which has no other fields."""

    stall: StallReport


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The files of a run."""

    folder: Path
    stall: StallReport
    report: Report | None = None
    """None for a loop that only has a meter."""
    lines: list[MetricsLine] = field(default_factory=list)
    """metrics.jsonl."""
    config: str = ""
    """config.yaml."""

    @classmethod
    def of_folder(cls, folder: Path) -> "RunData":
        """Read the folder of a run, or of the report of a `StallMeter`.

        Raises:
            ConfigError: The folder holds no report, or a report that cannot be decoded.
        """
        path, config = folder / REPORT_FILE, _read(folder / CONFIG_FILE)
        try:
            data = path.read_bytes()
            if not config:
                with contextlib.suppress(ValueError):
                    loop = msgspec.json.decode(data, type=_LoopReport)
                    return cls(folder=folder, stall=loop.stall)
            report = Report.of_json(data, folder)
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no {REPORT_FILE}. Give the folder of a run of `train`, or the one "
                "that a StallMeter has written its report to."
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}. Give the folder of a run.") from error
        except (ValueError, RecursionError) as error:
            again = f" `train --resume --run-dir {folder}` writes it again." if config else ""
            raise ConfigError(
                f"{path} is damaged, or from another version of tokenfeed ({error}).{again}"
            ) from error
        lines = _lines(folder / METRICS_FILE)
        return cls(folder=folder, stall=report.stall, report=report, lines=lines, config=config)

    def summary(self) -> str:
        """The report in a few lines, as the run printed it."""
        return str(self.stall) if self.report is None else self.report.summary()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[MetricsLine]:
    """Whole lines, in order. The last line of a killed run is cut short; damaged ones are left
    out."""
    found = []
    for line in _read(path).splitlines():
        try:
            found.append(msgspec.json.decode(line, type=MetricsLine))
        except (ValueError, RecursionError):
            continue
    return found
