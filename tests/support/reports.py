"""Reports of runs and of meters as they are stored, by hand."""

import json
from pathlib import Path
from typing import Any


def cause(fraction: float) -> dict[str, Any]:
    return {
        "fraction": fraction,
        "seconds": 50.0 * fraction,
        "interval": [fraction, fraction],
        "speed_up": 1 / (1 - fraction),
    }


def stall_of(**changes: Any) -> dict[str, Any]:
    return {
        "stall": 0.05,
        "interval": [0.04, 0.06],
        "at_most": 0.05,
        "causes": {"data": cause(0.04), "log": cause(0.01), "checkpoint": cause(0.0)},
        "steps": 195,
        "queued_steps": 200,
        "seconds": 50.0,
        "tokens": 300_000,
        "real_tokens_per_s": 6000.0,
        "padding": 0.01,
        "mfu": None,
        "mfu_formula": None,
        "core_wait": 0.0,
        "device": "CPU",
        "on_gpu": False,
        "method": "host clock",
        "events": {},
        "ranks": [],
        "slowest_rank": None,
        "advice": [],
    } | changes


def report_of(**changes: Any) -> dict[str, Any]:
    return {
        "run_dir": "runs/first",
        "finished": True,
        "steps": 200,
        "skipped_steps": 0,
        "tokens": 400_000,
        "seconds": 60.0,
        "real_tokens_per_s": 6000.0,
        "padding": 0.01,
        "stall": stall_of(),
        "loss_first": 9.0,
        "loss_last": 5.5,
        "validation_loss_first": 9.0,
        "validation_loss_last": 5.6,
        "task": "lm",
        "model": "tiny",
        "parameters": 2_200_000,
        "vocabulary_size": 8192,
        "device": "cpu",
        "precision": "fp32",
        "versions": {"torch": "2.13"},
    } | changes


def full_lines(count: int = 30) -> list[dict[str, Any]]:
    return [
        {
            "step": 10 * number,
            "loss": 9.0 / number,
            "validation_loss": 9.1 / number,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "real_tokens_per_s": 6000.0,
            "stall_causes": {"data": 0.04, "log": 0.01, "copy": 0.0},
            "step_seconds": {"p50": 0.01, "max": 0.05},
            "gpu_bytes": 8_000_000_000,
            "gpu_total_bytes": 16_000_000_000,
            "gpu_busy": 0.85,
            "cpu_busy": 0.45,
            "ram_used": 0.67,
        }
        for number in range(1, count + 1)
    ]


def write_run(folder: Path, report: dict[str, Any] | str, lines: str = "") -> Path:
    folder.mkdir()
    text = report if isinstance(report, str) else json.dumps(report)
    (folder / "report.json").write_text(text)
    (folder / "metrics.jsonl").write_text(lines)
    return folder
