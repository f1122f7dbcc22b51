"""report.html of a run, from the files in its folder: figures, stall by cause, what to change, and
plots over the steps as SVG. The template adds titles and tables."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from tokenfeed.trainer.report.run_files import INTERVAL, MetricsLine, Report, decode_lines, duration
from tokenfeed.trainer.stall.plots import Plot, Series, compact, fits, stall_plot
from tokenfeed.trainer.stall.stall_page import render_page, sample_plots, save_page, stall_cards
from tokenfeed.trainer.stall.stall_report import StallReport, share_of


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
        lines = decode_lines(_read(folder / METRICS_FILE).encode(), MetricsLine)
        return cls(folder=folder, stall=report.stall, report=report, lines=lines, config=config)

    def summary(self) -> str:
        """The report in a few lines, as the run printed it."""
        return str(self.stall) if self.report is None else self.report.summary()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def write_page(folder: Path) -> Path:
    """Write report.html of a run, atomically, from the files in its folder.

    Raises:
        ConfigError: The folder holds no report.
    """
    return save_page(folder, page_of(RunData.of_folder(folder)))


def page_of(run: RunData) -> str:
    """Return the page as text. It loads nothing from anywhere."""
    return render_page(
        run.folder,
        run.stall,
        cards=None if run.report is None else _cards(run.report),
        samples=next((line for line in reversed(run.lines) if line.samples), None),
        plots=plots_of(run),
        lengths=_lengths(run.report.rows_by_length) if run.report else [],
        report=run.report,
        config=run.config,
    )


def plots_of(run: RunData) -> list[Plot]:
    """Return the plots of a run, or of a loop with only a meter. Stall by cause is the first."""
    if run.report is not None:
        return _plots(run)
    return sample_plots(run.stall.samples, run.stall.of_rank)


def _cards(report: Report) -> dict[str, str]:
    return {
        **stall_cards(report.stall),
        "padding": share_of(report.padding),
        "loss": _figure(report.loss_last),
        "validation loss": _figure(report.validation_loss_last),
        "steps": f"{report.steps:,}",
        "steps a second": "" if report.steps_per_s is None else f"{report.steps_per_s:,.3g}",
        "rows a second": "" if report.rows_per_s is None else f"{report.rows_per_s:,.3g}",
        "an epoch": "" if report.epoch_seconds is None else duration(report.epoch_seconds),
        "peak GPU memory": ""
        if report.peak_gpu_bytes is None
        else f"{report.peak_gpu_bytes / 1e9:.2f} GB",
        "real tokens": compact(report.tokens),
        **_metrics(report),
    }


def _metrics(report: Report) -> dict[str, str]:
    """Metrics of the last split that was measured. The loss has a card already."""
    split = next(reversed(report.metrics), "")
    return {
        f"{name.replace('_', ' ')}, {split}": f"± {value:.2g}"
        if name == INTERVAL
        else f"{value:.4g}"
        for name, value in report.metrics.get(split, {}).items()
        if name != "loss" and value is not None
    }


def _lengths(counts: list[int]) -> list[tuple[str, int, float]]:
    """Return lengths of rows, how many rows have them, and this number relative to the largest.

    Entry k of `counts` counts the rows of 2**k up to 2**(k+1) - 1 tokens.
    """
    known = [power for power, rows in enumerate(counts) if rows]
    powers = range(known[0], known[-1] + 1) if known else range(0)
    names = {power: f"{1 << power:,} to {(2 << power) - 1:,}" if power else "1" for power in powers}
    return [(name, counts[power], counts[power] / max(counts)) for power, name in names.items()]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _plots(run: RunData) -> list[Plot]:
    return [
        stall_plot(_stall_causes(run)),
        Plot(
            "Real tokens a second",
            "Without padding, stall included. It should be flat: a dip is an evaluation, a "
            "checkpoint, or another program on the machine.",
            [_series(run, "tokens/s", "real_tokens_per_s")],
        ),
        Plot(
            "Loss",
            "Mean per target since the line before, and on the validation split. If the second "
            "rises while the first falls, the model memorizes its training data.",
            [_series(run, "training", "loss"), _series(run, "validation", "validation_loss")],
            from_zero=False,
        ),
        Plot(
            "Seconds a step",
            "Half of the steps since the line before took less than p50; max is the longest one. "
            "A max far above p50 is a step that waited.",
            [_series(run, "p50", "step_seconds.p50"), _series(run, "max", "step_seconds.max")],
        ),
        Plot(
            "Gradient norm",
            "Before clipping. A jump is an unusual batch, or a learning rate that is too high.",
            [_series(run, "norm", "gradient_norm")],
        ),
        Plot(
            "Learning rate",
            "From the schedule.",
            [_series(run, "rate", "learning_rate")],
            format=lambda rate: f"{rate:.2g}",
        ),
        Plot(
            "Load of the machine",
            "Share of the time in which the GPU and the processors worked, and share of the "
            "machine's memory in use. A GPU below 70 % waits: the table above lists what for.",
            [
                _series(run, "GPU busy", "gpu_busy"),
                _series(run, "processors", "cpu_busy"),
                _series(run, "memory of the machine", "ram_used"),
            ],
            format=lambda share: f"{share:.0%}",
        ),
        Plot(
            "GPU memory, GB",
            "In use by all processes. Near the size of the GPU, running out of memory is near too.",
            [
                _series(run, "in use", "gpu_bytes", factor=1e-9),
                _series(run, "there is", "gpu_total_bytes", factor=1e-9),
            ],
        ),
    ]


def _series(run: RunData, name: str, path: str, factor: float = 1.0) -> Series:
    """Return one value of each line over the steps. Lines without the value are left out.

    Args:
        run: The run.
        name: Name of the series.
        path: Field of `MetricsLine`, or of an object in it, as in "step_seconds.p50".
        factor: Multiplies the values.
    """
    found = [(line.step, _value_at(line, path)) for line in run.lines]
    known = [(step, value) for step, value in found if value is not None and fits(value)]
    return Series(name, [step for step, _ in known], [factor * value for _, value in known])


def _stall_causes(run: RunData) -> list[tuple[int, dict[str, float]]]:
    """Step and stall by cause of each line that has them."""
    return [
        (line.step, {cause: share for cause, share in causes.items() if fits(share)})
        for line in run.lines
        if (causes := line.stall_causes)
    ]


def _value_at(line: MetricsLine, path: str) -> float | None:
    found: Any = line
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found if isinstance(found, (int, float)) else None
