"""What a run says while it runs: one line on the console, one JSON object in metrics.jsonl.

Both come from the same `StepLog`, so that they cannot disagree. A figure that is not known is null
in the file and left out of the line. Asking the GPU for its memory and use is best effort: where
NVML is missing or refuses, training goes on without these two figures.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import atomic_write

__all__ = ["GpuGauge", "GpuUse", "Metrics", "StepLog"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What NVML says of a GPU at this moment."""

    memory_bytes: int
    """In use by everybody, not only by this run."""
    utilization: float
    """Share of NVML's last sampling period in which any kernel ran, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """The state of a run at a step; rates are those of the steps since the line before."""

    step: int
    loss: float
    """Mean per target token, in nats, over the steps since the line before."""
    learning_rate: float
    gradient_norm: float | None
    """Of this step, before clipping; None where fp16 overflowed and the step was skipped."""
    tokens: int
    """Real tokens trained since the first step."""
    real_tokens_per_s: float | None
    """None during warm-up."""
    stall: float | None
    """Fraction of the wall time, 0 to 1; None during warm-up."""
    gpu: GpuUse | None

    def line(self, steps: int) -> str:
        """For the console; `steps` is where the run ends."""
        parts = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
        ]
        if self.real_tokens_per_s is not None and self.stall is not None:
            parts += [f"{self.real_tokens_per_s:,.0f} real tok/s", f"stall {self.stall:.2%}"]
        else:
            parts.append("warming up")
        if self.gpu is not None:
            parts.append(f"gpu {self.gpu.memory_bytes / 1e9:.1f} GB {self.gpu.utilization:.0%}")
        return " | ".join(parts)


class Metrics:
    """metrics.jsonl of a run directory: appended line by line, each flushed.

    A resumed run first drops the lines after its checkpoint, which it is about to write again.
    """

    def __init__(self, path: Path, *, keep_until_step: int) -> None:
        self._path = path
        kept = [line for line in self.read() if line["step"] <= keep_until_step]
        atomic_write(path, b"".join(map(_encode, kept)))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; it holds at least `step`."""
        self._file.write(_encode(values))

    def values(self, key: str) -> list[Any]:
        """All values of `key` so far, in order."""
        return [line[key] for line in self.read() if key in line]

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; the last may be cut short where a run was killed."""
        if not self._path.exists():
            return []
        whole = self._path.read_bytes().split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in whole]
        except ValueError as error:
            raise ResumeError(
                f"{self._path}: has a line that is no JSON ({error}). Delete that line."
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class GpuGauge:
    """Memory and use of one GPU by NVML; always None where there is no GPU or no NVML."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type == "cuda":
            self._handle = _nvml_handle(device)

    def read(self) -> GpuUse | None:
        """What the GPU is doing now."""
        if self._handle is None:
            return None
        import pynvml

        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle).used
            busy_percent = pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except pynvml.NVMLError:
            self._handle = None  # a partitioned GPU has no such figures: do not ask again
            return None
        return GpuUse(memory_bytes=memory, utilization=busy_percent / 100)


def _nvml_handle(device: torch.device) -> Any:
    """NVML's name of a torch device, found by UUID: the two number GPUs differently."""
    import pynvml

    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def _encode(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"
