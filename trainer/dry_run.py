"""`train --dry-run`: predict a run on any machine, without training.

Batches are planned from the row lengths in the manifest. One batch is read, to see how documents
share rows. Steps run on tensors without values (`weightless`), so their memory is that of the real
operators. The speed is a bound: the arithmetic of the GPU divided by the operations of a token.
"""

from dataclasses import dataclass

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.facts import facts
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.fitting import SHARE_OF_MEMORY
from tokenfeed.trainer.gpus import GIB
from tokenfeed.trainer.planned import Planned, find_gpu, predict_micro_batch

__all__ = ["DryRun", "dry_run"]

FORMULA = "6 N + 12 L C T: N weights in matrix products, L layers of width C, rows of T tokens"
_DISK_BYTES_PER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The prediction of a run."""

    steps: int
    epochs: float
    tokens: int
    """Approximate number of real tokens that are trained on."""
    micro_batches_per_step: int
    slots_per_step: int
    padding: float
    """Approximate fraction of token slots that will hold no token."""
    shapes: dict[str, int]
    """Micro-batches of an epoch by `rows x length`, the most frequent shapes only."""
    parameters: int
    trained_parameters: list[int]
    """Parameters that each phase trains."""
    flops_per_token: float
    flops_formula: str
    precision: str
    peak_gib: float
    """Peak of the tensors. Kernels, CUDA and the allocator need more."""
    gpu: str | None
    gpu_gib: float | None
    fits: bool | None
    """Whether the peak is within 92 % of the GPU's memory."""
    fitting_micro_batch_tokens: int | None
    """The largest micro-batch that fits, with the same step; None if none fits."""
    fitting_peak_gib: float | None
    tokens_per_s_bound: float | None
    """Bound by the GPU's arithmetic. Good runs reach a third to a half of it."""
    hours_bound: float | None
    checkpoints: int
    checkpoint_gib: float
    disk_gib: float
    """Size of the checkpoints that are kept: the latest ones and the best."""
    checkpoint_seconds: float
    """Seconds to write a checkpoint at 1 GB/s."""

    def summary(self) -> str:
        """The plan in a few lines."""
        speed = ""
        if self.tokens_per_s_bound is not None:
            bound = f"{self.tokens_per_s_bound:,.0f}"
            speed = f"at most {bound} tokens/s, so at least {_duration(self.hours_bound)}"
        return facts(
            {
                "steps": f"{self.steps:,} of {self.micro_batches_per_step} micro-batches, "
                f"{self.slots_per_step:,} slots; {self.epochs:.2f} epochs, {self.tokens:,} tokens",
                "batches": f"an epoch has {self._shapes()}; padding {self.padding:.2%}",
                "model": f"{self.parameters / 1e6:.1f} M parameters{self._trained()}, "
                f"{self.flops_per_token / 1e9:.3g} GFLOP a token ({self.flops_formula})",
                "memory": f"{self.peak_gib:.2f} GiB at the peak, {self.precision}{self._of_gpu()}",
                "fits": self._fitting() if self.gpu else "",
                "speed": speed,
                "disk": f"{self.checkpoints:,} checkpoints of {self.checkpoint_gib:.2f} GiB; "
                f"those kept take {self.disk_gib:.2f} GiB; {self.checkpoint_seconds:.1f} s each at "
                "1 GB/s",
            }
        )

    def _shapes(self) -> str:
        return ", ".join(f"{count:,} of {shape}" for shape, count in self.shapes.items())

    def _trained(self) -> str:
        if set(self.trained_parameters) == {self.parameters}:
            return ""
        listed = " then ".join(f"{count / 1e6:.3g}" for count in self.trained_parameters)
        return f" of which {listed} M are trained"

    def _of_gpu(self) -> str:
        return "" if self.gpu_gib is None else f", of {self.gpu_gib:g} GiB on {self.gpu}"

    def _fitting(self) -> str:
        if self.fitting_micro_batch_tokens is None:
            return "no micro-batch: try --recompute full, or a smaller --sequence-length"
        return (
            f"--micro-batch-tokens {self.fitting_micro_batch_tokens} and less "
            f"({self.fitting_peak_gib:.2f} GiB)"
        )


def dry_run(config: TrainConfig, gpu_name: str | None) -> DryRun:
    """Predict a run on a GPU given by name or size. Default: the device it would train on.

    Raises:
        TokenfeedError: Settings or shards do not allow the run.
    """
    config.check()
    gpu = find_gpu(config, gpu_name)
    config = predict_micro_batch(config, gpu)
    planned = Planned(config, gpu)
    epoch = planned.epoch()
    epochs = config.steps / epoch.steps
    tokens, slots = epochs * epoch.tokens, epochs * epoch.slots
    flops = planned.flops_per_token()
    peak = planned.peak(config)
    fitting, fitting_peak = planned.fitting()
    bound = gpu.tflops * 1e12 / flops if gpu and gpu.tflops else None
    state = planned.weightless.state_bytes
    checkpoints = ceil_div(config.steps, config.save_every)
    return DryRun(
        steps=config.steps,
        epochs=epochs,
        tokens=round(tokens),
        micro_batches_per_step=config.accumulation,
        slots_per_step=round(slots / config.steps),
        padding=1 - tokens / slots,
        shapes=epoch.shapes,
        parameters=sum(p.numel() for p in planned.weightless.learner.model.parameters()),
        trained_parameters=planned.weightless.learner.trained_parameters,
        flops_per_token=flops,
        flops_formula=FORMULA,
        precision=planned.precision,
        peak_gib=peak / GIB,
        gpu=gpu.name if gpu else None,
        gpu_gib=gpu.gib if gpu else None,
        fits=peak <= SHARE_OF_MEMORY * gpu.bytes if gpu else None,
        fitting_micro_batch_tokens=fitting,
        fitting_peak_gib=None if fitting_peak is None else fitting_peak / GIB,
        tokens_per_s_bound=bound,
        hours_bound=tokens / bound / 3600 if bound else None,
        checkpoints=checkpoints,
        checkpoint_gib=state / GIB,
        disk_gib=min(checkpoints, config.keep + 1) * state / GIB,
        checkpoint_seconds=state / _DISK_BYTES_PER_S,
    )


def _duration(hours: float | None) -> str:
    seconds = (hours or 0.0) * 3600
    return f"{hours:,.1f} hours" if seconds >= 3600 else f"{seconds:.3g} s"
