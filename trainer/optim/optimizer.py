"""The optimizer of each weight, the learning rate of each step, and the number format of a run.

AdamW updates everything, or Muon updates the matrices of hidden layers and AdamW the rest. Muon
makes the singular values of an update equal. This suits a matrix that maps one hidden state to
another. It does not suit embeddings, which are tables of rows, heads and routers, whose outputs
have meanings, or the factors of LoRA, whose product is the matrix.

A checkpoint does not save the learning rate, a pure function of the step. If a resumed run has a
higher --steps, its rates are those of a run that had these --steps from the start. For `constant`,
and for `wsd` before its decay, the rates of the steps already trained are the same too.

The number format is bf16 on a GPU that has it, fp16 on Volta and Turing, and fp32 on older GPUs,
and on the CPU, so that a resumed run repeats it bit for bit. Weights and optimizer state are fp32
always. On Ampere and later, the remaining fp32 matrix products run as TF32.
"""

import contextlib
import math
import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.trainer.config.run_config import OptimizerName, PrecisionName, ScheduleName
from tokenfeed.trainer.distributed.world import State, World, is_sharded_tensor
from tokenfeed.trainer.optim.muon import MuonAdamW, Sections

_HEAD_NAMES = {"head", "heads", "lm_head", "classifier", "score", "cls", "qa_outputs"}
"""Names of heads in this package and in transformers."""
_LORA = re.compile(r"(^|\.)lora_")
_ROUTER = re.compile(r"router$|(^|_)gate$")
"""Names of routers. A gate with more outputs than inputs is a part of a feed-forward network."""
_FUSED = {"c_attn": 3, "Wqkv": 3, "qkv_proj": 3, "gate_up_proj": 2}
"""How many matrices a linear layer of transformers holds side by side, by its name."""
_END = 0.1
"""Last rate of `cosine` and `linear` as a share of the peak, unless another one is given."""
_WSD_DECAY = 0.2
"""Share of all steps in which `wsd` decays. A longer decay gains next to nothing."""


def make_optimizer(
    model: nn.Module,
    name: OptimizerName,
    weight_decay: float,
    world: World | None = None,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.optim.Optimizer:
    """Return an optimizer of the weights that are trainable now. `set_learning_rate` sets its rate.

    Only weights with two dimensions or more decay, so biases and gains of norms do not. A model
    without hidden matrices is trained by AdamW alone, also under the name muon. Modules with
    `by_gradient` are trained as by SGD with momentum. Their rate is so many times that of AdamW.
    `dtype` is the half precision of Muon's products.
    """
    matrices = hidden_matrices(model) if name == "muon" else {}
    by_gradient = [module for module in model.modules() if getattr(module, "by_gradient", None)]
    plain = set().union(*map(_ids, by_gradient))
    rest = [p for p in model.parameters() if p.requires_grad and p not in matrices]
    adam = [p for p in rest if id(p) not in plain]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in adam if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in adam if p.dim() < 2], "weight_decay": 0.0},
    ]
    for module in by_gradient:  # beside this epsilon, the second moment of AdamW is nothing
        settings = {"weight_decay": 0.0, "eps": 1.0, "times": module.by_gradient}
        groups.append({"params": [p for p in module.parameters() if p.requires_grad], **settings})
    adamw = torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True)
    if not matrices:
        return adamw
    world = world or World(torch.device("cpu"))
    return MuonAdamW(matrices, adamw, weight_decay, world, compiled=compiled, dtype=dtype)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


def learning_rate(
    step: int,
    *,
    schedule: ScheduleName,
    peak: float,
    steps: int,
    warmup_steps: int,
    least: float | None = None,
) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then the schedule.

    `cosine` and `linear` fall to the least rate, which the last step has. `wsd` (warm-up, stable,
    decay) stays at the peak until the last fifth of all steps. There it falls as 1 - √x, and would
    reach the least rate one step after the last. `constant` stays at the peak.

    Example: `wsd` with steps=100, warmup_steps=10: 0.1, 0.2, ... of the peak up to step 10, the
        peak up to step 80, then 1 - √(1/21) = 0.78 of it at step 81 and 1 - √(20/21) = 0.02 at step
        100.

    Args:
        step: The step, counted from 1.
        schedule: The schedule after the warm-up.
        peak: The largest rate.
        steps: The last step.
        warmup_steps: The step that reaches the peak; 0 starts at the peak.
        least: The rate to fall to. Default: a tenth of the peak; 0 for `wsd`.
    """
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    start, default = warmup_steps, _END
    if schedule == "wsd":
        start, default = max(warmup_steps, steps - math.ceil(_WSD_DECAY * steps)), 0.0
    if step <= start or schedule == "constant":
        return peak
    done, of = step - start, steps - start
    if schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done / of))
    elif schedule == "linear":
        left = 1 - done / of
    else:
        left = 1 - math.sqrt(done / (of + 1))
    end = default if least is None else least / peak
    return peak * (end + (1 - end) * left)


def hidden_matrices(model: nn.Module) -> dict[Tensor, Sections]:
    """Return the trainable weights of linear layers, and the matrices that each of them holds.

    Left out are routers, LoRA's factors, heads, and weights that an embedding shares. A layer is a
    head if its name is in `_HEAD_NAMES`, or if it is outside the `base_model` of a model of
    transformers. A bare parameter with two dimensions is left out: it may be a table of positions.
    """
    others = _of_embeddings_and_heads(model)
    found: dict[Tensor, Sections] = {}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            weight = getattr(layer, "weight", None)
            # Conv1D is the linear layer of GPT-2 in transformers, which may not be installed.
            is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
            if not is_linear or not isinstance(weight, nn.Parameter):
                continue
            dim = 0 if isinstance(layer, nn.Linear) else 1
            is_router = _ROUTER.search(name) and weight.shape[dim] < weight.shape[1 - dim]
            is_left_out = is_router or _LORA.search(f"{path}.{name}") or id(weight) in others
            if weight.requires_grad and not is_left_out:
                found[weight] = Sections(dim, _sizes(parent, name, weight.shape[dim]))
    return found


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is a table of rows by id."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _sizes(parent: nn.Module, name: str, outputs: int) -> tuple[int, ...]:
    """Return the numbers of outputs of the matrices in a linear layer.

    A module may declare them: `fused = {"qkv": 3}` for three equal parts of its layer `qkv`.
    """
    parts = getattr(parent, "fused", _FUSED).get(name, 1)
    config = getattr(parent, "config", None)
    queries, keys = (
        getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value")
    )
    if name == "qkv_proj" and queries and keys:  # grouped queries
        width = outputs // (queries + 2 * keys)
        return queries * width, keys * width, keys * width
    return (outputs // parts,) * parts if outputs % parts == 0 else (outputs,)


def _of_embeddings_and_heads(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for path, module in model.named_modules():
        if is_embedding(module) or _HEAD_NAMES.intersection(path.split(".")):
            found |= _ids(module)
        if hasattr(module, "base_model_prefix"):  # of transformers; it may be its own base model
            found |= _ids(module) - _ids(cast(nn.Module, module.base_model))
    return found


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000
"""The defaults of `torch.amp.GradScaler`."""


def choose_precision(name: PrecisionName, device: torch.device) -> tuple[PrecisionName, str]:
    """Return the number format of a run, and the reason in words."""
    if device.type == "cpu":
        return ("fp32", "cpu") if name == "auto" else (name, "as set")
    capability = tuple(cuda.get_device_capability(device))
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if name != "auto":
        is_slow = name == "bf16" and capability < (8, 0)
        return name, f"as set; {shown} only emulates bf16" if is_slow else "as set"
    if capability >= (8, 0):
        return "bf16", f"{shown} has bf16"
    if capability >= (7, 0):
        return "fp16", f"{shown} has no bf16, but fast fp16"
    return "fp32", f"{shown} has neither bf16 nor fast fp16"


class Precision:
    """Autocast, the scale of the loss, and the optimizer's step.

    A step whose gradients are not finite is skipped on the device, without a wait: weights, moments
    and step count stay, and the skip is counted.

    With fp16, the loss is scaled up before the backward pass, so that small gradients do not become
    0. The scale follows the rules of `torch.amp.GradScaler`: it halves when gradients overflow, and
    doubles after 2,000 steps without an overflow. `GradScaler` itself would read values of the
    device to save its state, or to step an optimizer that is not fused.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name, self.reason = choose_precision(name, device)
        self.is_scaled = self.name == "fp16"
        self._device = device
        self.dtype = _DTYPES[self.name]
        self._skips = torch.zeros(2, device=device)
        self._scale = torch.full((), _FIRST_SCALE, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        allow_tf32(device)

    def line(self) -> str:
        """Return the number format in words, and the reason for it."""
        scaled = f", the loss scaled by {_FIRST_SCALE:,.0f} at first" if self.is_scaled else ""
        is_tf32 = self._device.type == "cuda" and cuda.get_device_capability(self._device)[0] >= 8
        rest = ", the rest of fp32 products in TF32" if is_tf32 else ""
        return f"precision: {self.name} ({self.reason}){scaled}{rest}"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def factor(self, divisor: float) -> Tensor | float:
        """Return what to multiply a loss by before its backward pass, instead of a division."""
        return self._scale / divisor if self.is_scaled else 1 / divisor

    def step(
        self, optimizer: torch.optim.Optimizer, scale: Tensor | float, clip_norm: float
    ) -> Tensor:
        """Scale and clip the gradients, update the weights, free the gradients; return the norm
        before clipping. With fp16, also take back the scale of the loss, and update it.

        The norm stays on the device; where it is not finite, nothing was updated.

        Args:
            optimizer: From `make_optimizer`: one that heeds `grad_scale` and `found_inf`.
            scale: A number, or a tensor without dimensions that nobody has waited for.
            clip_norm: Longer gradients, after scaling, are shortened to this.
        """
        if self.is_scaled:
            scale = scale / self._scale
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        norm = _whole(nn.utils.get_total_norm(gradients)) * scale
        # One divisor scales and clips. The optimizer's kernel applies it to what it reads anyway.
        divisor = ((norm + 1e-6) / clip_norm).clamp(min=1.0) / scale
        skip = (~norm.isfinite()).float()
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        with _replicated_scalars(gradients):
            optimizer.step()
        optimizer.zero_grad()
        self._count(skip, scale)
        return norm

    @property
    def skips(self) -> Tensor:
        """Skipped steps so far, and skipped steps in a row until now: two numbers on the device.

        With fp16, the number in a row leaves out overflows of gradients while the scale is at least
        1: a smaller scale cures these.
        """
        return self._skips.clone()

    @property
    def scale(self) -> Tensor:
        """The scale of the loss of the next step, on the device. Only fp16 uses it."""
        return self._scale.clone()

    def state_dict(self) -> State:
        """Return the skipped steps, the scale, and the steps since it changed: of every precision,
        so that a run can go on with another one."""
        return {"skips": self.skips, "scale": self.scale, "growth": self._growth.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue with a saved state."""
        self._skips.copy_(state["skips"])
        self._scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])

    def _count(self, skip: Tensor, scale: Tensor | float) -> None:
        """Count a step that was skipped or not, and update the scale, on the device."""
        hopeless = skip
        if self.is_scaled:  # `scale` is not finite if the loss was not
            hopeless = skip * (~torch.as_tensor(scale).isfinite() | (self._scale < 1))
            settings = _GROWTH, _BACKOFF, _GROWTH_STEPS
            torch._amp_update_scale_(self._scale, self._growth, skip, *settings)  # pyright: ignore[reportPrivateImportUsage]
        self._skips[0] += skip
        self._skips[1] = (self._skips[1] + hopeless) * skip


def tune_convolutions(model: nn.Module, *, repeats: bool) -> None:
    """Let cuDNN choose its kernels by trial, once for each shape of a batch, if the model has
    convolutions and few shapes of batches repeat.

    Which one is fastest may differ between runs, and the last bits of their results with it.
    """
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    torch.backends.cudnn.benchmark = convolves and repeats


def allow_tf32(device: torch.device) -> None:
    """Let products of fp32 matrices use TF32 on a GPU."""
    if device.type == "cuda":
        # The older switch: after the newer one, code that reads the older gets an error.
        torch.set_float32_matmul_precision("high")


def _whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole, on every rank; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded_tensor(tensor) else tensor
    return whole


def _replicated_scalars(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which plain tensors count as equal on all ranks, if others are
    sharded."""
    if not any(map(is_sharded_tensor, tensors)):
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()
