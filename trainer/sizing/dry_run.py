"""`train --dry-run`: predict a run on any machine, without training.

The speed is a bound: the arithmetic of the GPU divided by the operations per token.
"""

from dataclasses import dataclass

import torch

from tokenfeed.pipeline.facts import facts
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World, device_named
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.sensors.gpu_models import GIB, parse_gpu
from tokenfeed.trainer.sizing.run_plan import (
    SHARE_OF_MEMORY,
    RunPlan,
    choose_micro_batch,
    gpu_of,
)

_CPU = torch.device("cpu")


FORMULA = "6 N + 12 L C T: N weights in matrix products, L layers of width C, rows of T tokens"


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
    parameters: int
    trained_parameters: list[int]
    """Parameters that each phase trains."""
    flops_per_token: float
    precision: str
    peak_gib: float
    """Peak of the tensors. Kernels, CUDA and the allocator need more."""
    gpu: str | None
    gpu_gib: float | None
    fits: bool | None
    """Whether the peak is within 92 % of the GPU's memory."""
    fitting_micro_batch_tokens: int | None
    """The largest micro-batch that fits, with the same step; None if none fits."""
    tokens_per_s_bound: float | None
    """Bound by the GPU's arithmetic. Good runs reach a third to a half of it."""
    hours_bound: float | None
    checkpoint_gib: float

    def summary(self) -> str:
        """Return the prediction in a few lines."""
        trained = memory = fits = speed = ""
        if set(self.trained_parameters) != {self.parameters}:
            listed = " then ".join(f"{count / 1e6:.3g}" for count in self.trained_parameters)
            trained = f" of which {listed} M are trained"
        if self.gpu:
            memory = f", of {self.gpu_gib:g} GiB on {self.gpu}"
            fits = "no micro-batch: try --recompute, or a smaller --sequence-length"
        if self.fitting_micro_batch_tokens is not None:
            fits = f"--micro-batch-tokens {self.fitting_micro_batch_tokens} and less"
        if self.tokens_per_s_bound and self.hours_bound is not None:
            hours = self.hours_bound
            time = f"{hours:,.1f} hours" if hours >= 1 else f"{3600 * hours:.3g} s"
            speed = f"at most {self.tokens_per_s_bound:,.0f} tokens/s, so at least {time}"
        return facts(
            {
                "steps": f"{self.steps:,} of {self.micro_batches_per_step} micro-batches, "
                f"{self.slots_per_step:,} slots; {self.epochs:.2f} epochs, {self.tokens:,} tokens",
                "padding": f"{self.padding:.2%}",
                "model": f"{self.parameters / 1e6:.1f} M parameters{trained}, "
                f"{self.flops_per_token / 1e9:.3g} GFLOP a token ({FORMULA})",
                "memory": f"{self.peak_gib:.2f} GiB at the peak, {self.precision}{memory}",
                "fits": fits,
                "speed": speed,
                "disk": f"{self.checkpoint_gib:.2f} GiB for each checkpoint",
            }
        )


def dry_run(config: TrainConfig, gpu_name: str | None) -> DryRun:
    """Predict a run on a GPU given by name or size. Default: the device it would train on.

    Raises:
        TokenfeedError: Settings or shards do not allow the run.
    """
    config.check()
    gpu = parse_gpu(gpu_name) if gpu_name is not None else gpu_of(device_named(config.device))
    config = choose_micro_batch(config, World(_CPU), gpu)
    planned = RunPlan(config, gpu)
    epoch = planned.epoch()
    epochs = config.steps / epoch.steps
    tokens, slots = epochs * epoch.tokens, epochs * epoch.slots
    flops = planned.flops_per_token()
    peak = planned.peak(config)
    bound = gpu.tflops * 1e12 / flops if gpu and gpu.tflops else None
    return DryRun(
        steps=config.steps,
        epochs=epochs,
        tokens=round(tokens),
        micro_batches_per_step=config.accumulation,
        slots_per_step=round(slots / config.steps),
        padding=1 - tokens / slots,
        parameters=sum(p.numel() for p in planned.simulation.learner.model.parameters()),
        trained_parameters=planned.simulation.learner.trained_parameters,
        flops_per_token=flops,
        precision=planned.precision,
        peak_gib=peak / GIB,
        gpu=gpu.name if gpu else None,
        gpu_gib=gpu.gib if gpu else None,
        fits=peak <= SHARE_OF_MEMORY * gpu.bytes if gpu else None,
        fitting_micro_batch_tokens=planned.fitting(possible_sizes(config, planned.task)),
        tokens_per_s_bound=bound,
        hours_bound=tokens / bound / 3600 if bound else None,
        checkpoint_gib=planned.simulation.state_bytes / GIB,
    )
