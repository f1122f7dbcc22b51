"""The state of training: a model, its optimizer and its number format, and what a checkpoint keeps
of them.

A checkpoint stores the optimizer's state by the names of the weights, because their order may
change.
"""

import contextlib
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.checkpoints.checkpoint_files import (
    Checkpoint,
    part_of,
    unshared,
    with_prefix,
)
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.attention import choose_flash_attention
from tokenfeed.trainer.data.datasets import expected_targets, is_packed
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import State, World
from tokenfeed.trainer.models.build import (
    Begin,
    compile_model,
    make_model,
    outside_graphs,
    recompute_layers,
)
from tokenfeed.trainer.models.gpt import SIZES
from tokenfeed.trainer.optim.muon import MuonAdamW
from tokenfeed.trainer.optim.optimizer import (
    is_embedding,
    learning_rate,
    make_optimizer,
)
from tokenfeed.trainer.optim.precision import Precision, tune_convolutions
from tokenfeed.trainer.tasks.task import Task

if TYPE_CHECKING:
    from tokenfeed.trainer.distributed.parallel import Replicas


_log = logging.getLogger(__name__)


_SIGNS = ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in out-of-memory errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether host or device ran out of memory."""
    is_of_allocator = isinstance(error, torch.OutOfMemoryError)
    return is_of_allocator or any(sign in str(error) for sign in _SIGNS)


_MODES = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""The mode of torch.compile that does the same but for CUDA graphs."""


class Learner:
    """A model in training."""

    runs_as_graphs = False
    """Whether a step is a few CUDA graphs: see `trainer/step_graphs.py`."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        world: World,
        begin: Begin = lambda *_: None,
    ) -> None:
        """Draw weights from the seed. All ranks get those of rank 0.

        Args:
            config: The settings.
            task: The task.
            world: The ranks.
            begin: Reads the weights of `init_from`.
        """
        self.config, self.task, self.world, self.device = config, task, world, world.device
        self.precision = Precision(config.precision, self.device)
        self.replicas: Replicas | None = None
        torch.manual_seed(config.seed)
        is_sharded = config.shard_model and world.size > 1
        # The values come from rank 0, so other ranks need no memory for them. Models that this
        # package does not define may compute with their initial values, or read them from files.
        is_empty = is_sharded and not world.is_main and config.model in SIZES
        with torch.device("meta") if is_empty else contextlib.nullcontext():
            model = make_model(config, task.head, self.precision.dtype, begin)
        self.model = model if is_sharded else model.to(self.device)
        drops = getattr(self.model, "drops_attention", True)
        choose_flash_attention(self.device, self.precision.dtype, drops=drops)
        if config.recompute:
            recompute_layers(self.model)
        repeats = bool(config.compile) or is_packed(config, task.manifest)
        tune_convolutions(self.model, repeats=repeats)
        if world.size > 1:
            from tokenfeed.trainer.distributed import parallel  # a second, with ranks only
        if is_sharded:
            if config.optimizer == "muon":
                raise ConfigError(
                    "`--optimizer`=muon takes whole matrices: take adamw with --shard-model, or "
                    "leave --shard-model out."
                )
            parallel.shard_model(self.model, world, self.precision.dtype)
        elif world.size > 1:
            self.replicas = parallel.Replicas(self.model, task.loss)
        self.optimizer = make_optimizer(
            self.model,
            config.optimizer,
            config.weight_decay,
            betas=(config.beta1, config.beta2),
            epsilon=config.epsilon,
            compiled=bool(config.compile),
            dtype=torch.float16 if self.precision.is_scaled else torch.bfloat16,
        )
        self.use(config)

    def use(self, config: TrainConfig) -> None:
        """Train with other settings of steps: their size, number and rates."""
        self.config, task = config, self.task
        self.divisor: float = config.step_slots
        if self.precision.is_scaled:
            self.divisor = expected_targets(config, task.manifest, per_row=task.kind == "row")

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that the run trains."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    @property
    def ranks(self) -> int:
        """Number of ranks that share weights, gradients and moments."""
        return self.world.size if self.config.shard_model else 1

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments, over all ranks that share them."""
        trained = [group["params"] for group in self.optimizer.param_groups]
        moments: int = 2 * sum(weight.nbytes for group in trained for weight in group)
        if isinstance(self.optimizer, MuonAdamW):  # its last group has one moment
            moments -= sum(weight.nbytes for weight in trained[-1])
        return moments

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments, over all ranks that share them."""
        weights = [*self.model.parameters()]
        gradients: int = sum(weight.nbytes for weight in weights if weight.requires_grad)
        return sum(weight.nbytes for weight in weights) + gradients + self.moment_bytes

    def compile(self, micro_batches: list[MicroBatch], evaluated: list[MicroBatch]) -> None:
        """Compile the model for the shapes of some micro-batches, for training and evaluation,
        without training on them."""
        mode: str | None = None if self.config.compile is True else self.config.compile or None
        has_graphs = mode is not None
        if mode and self._has_one_step(micro_batches):
            self.runs_as_graphs, has_graphs, mode = True, False, _MODES[mode]
        if not self.config.shard_model:
            from tokenfeed.trainer.models.gelu_products import fuse_gelu

            tokens = max(shown.num_slots for shown in micro_batches)
            fuse_gelu(self.model, tokens, self.precision.dtype)
        compile_model(self.model, mode)
        self.task.is_compiled, self.task.has_graphs = True, has_graphs
        shapes = [shown.ids_BT.shape for shown in (*micro_batches, *evaluated)]
        listed = ", ".join(" x ".join(map(str, shape)) for shape in dict.fromkeys(shapes))
        chosen = "" if self.config.compile is True else f", {self.config.compile}"
        whole = ", a step as CUDA graphs" if self.runs_as_graphs else ""
        _log.info("compiles micro-batches of %s tokens%s%s", listed, chosen, whole)
        for shown in (*micro_batches, *evaluated):
            shown.scope.mark_dynamic()
        self.rehearse(micro_batches, evaluated)

    def _has_one_step(self, micro_batches: list[MicroBatch]) -> bool:
        """Return whether all steps queue the same kernels, which nothing but the next batch
        interrupts. Others get the CUDA graphs of torch, for each part of the model."""
        is_ours = self.config.model in SIZES and not self.config.recompute
        has_graphs = self.device.type == "cuda" and torch.version.hip is None
        is_one = len(micro_batches) == 1 and micro_batches[0].is_plain
        return is_ours and has_graphs and is_one and self.world.size == 1

    def rehearse(
        self,
        micro_batches: list[MicroBatch],
        evaluated: list[MicroBatch],
        *,
        spare_bytes: int = 0,
    ) -> None:
        """Compute losses and gradients of some micro-batches, then losses alone of others, as in an
        evaluation. Nothing changes.

        Args:
            micro_batches: Micro-batches of training.
            evaluated: Micro-batches of an evaluation.
            spare_bytes: Memory that is taken meanwhile, for what a run needs besides.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            spare = torch.empty(spare_bytes, dtype=torch.uint8, device=self.device)
            for shown in micro_batches:
                self.task.begin_pass()
                with self.precision.autocast():
                    loss = self.task.loss(self.model, shown)
                with outside_graphs(self.model, has_graphs=self.task.has_graphs):
                    loss.sum.backward()  # type: ignore[no-untyped-call]
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
            with torch.no_grad(), self.precision.autocast():
                for shown in evaluated:
                    self.task.begin_pass()
                    self.task.loss(self.model, shown)
            del spare
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.train()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        config = self.config
        return learning_rate(
            step,
            schedule=config.schedule,
            peak=config.learning_rate,
            steps=config.steps,
            warmup_steps=config.warmup_steps,
            least=config.min_learning_rate,
        )

    def operations_per_token(self, length: float) -> float:
        """Return the floating-point operations to train on a token in rows of a length.

        A weight in a matrix product takes 2 forward and 4 backward. A frozen weight takes 2
        backward, or 0 before the first trained one. Attention takes 12 per layer, width and length.
        A model of one's own counts without attention, unless it has `attention_width`.
        """
        weights, products = _product_weights(self.model), 0
        first = next((n for n, each in enumerate(weights) if each.requires_grad), len(weights))
        for number, weight in enumerate(weights):  # in about the order of the forward pass
            backward = 4 if weight.requires_grad else 2 if number > first else 0
            products += (2 + backward) * weight.numel()
        return products + 12.0 * getattr(self.model, "attention_width", 0) * length

    def state_dict(self) -> State:
        """Return everything that the next step depends on, except the data and the random numbers,
        which `seed_dropout` sets. Only `update` changes the returned tensors: buffers, which a
        forward pass may change, are copied."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        weights = kept_state(self.model, self.config)
        return self._state(
            {name: value.clone() if name in buffers else value for name, value in weights.items()}
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a `state_dict`. Weights and moments are overwritten in place."""
        weights = kept_weights(self.model, self.config, checkpoint)
        make_moments(self.optimizer, self.model, checkpoint)
        state = checkpoint.read(self._state(weights), self.world)
        self.precision.load_state_dict(part_of(state, "precision."))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Overwrite the weights with a checkpoint's weights."""
        read_weights(self.model, self.config, checkpoint, self.world)

    def _state(self, weights: State) -> State:
        return {
            **with_prefix("model.", weights),
            **with_prefix("optimizer.", moments_of(self.optimizer, self.model)),
            **with_prefix("precision.", self.precision.state_dict()),
        }


def _product_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights in matrix products, the head's last: the weight of an embedding only if
    the head shares it."""
    tables = [part for part in model.modules() if is_embedding(part)]
    head: nn.Parameter | None = getattr(model, "head_weight", None)
    outside = {weight for table in tables for weight in table.parameters()} | {head}
    found = [w for w in model.parameters() if w.dim() >= 2 and w not in outside]
    return found if head is None else [*found, head]


def kept_state(model: nn.Module, config: TrainConfig) -> State:
    """Return the model's state without weights that are read again when a run resumes: frozen
    weights of an hf: model."""
    state = model.state_dict()
    if not config.reads_again:
        return state
    drawn = {f"model.{name}" for name in getattr(model, "fresh", ())}
    weights = model.named_parameters(remove_duplicate=False)
    again = {name for name, weight in weights if not weight.requires_grad} - drawn
    return {name: value for name, value in state.items() if name not in again}


def kept_weights(model: nn.Module, config: TrainConfig, checkpoint: Checkpoint) -> State:
    """Return the weights of `kept_state`, which a checkpoint overwrites.

    Raises:
        ResumeError: The checkpoint is of another model.
    """
    ours = kept_state(model, config)
    expected = {name: tuple(each.shape) for name, each in unshared(ours).items()}
    found = {name: kind.shape for name, kind in part_of(checkpoint.tensors, "model.").items()}
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise ResumeError(
            f"cannot resume: the checkpoint has other weights than this model: {name} is "
            f"{_shape(found.get(name))} there and {_shape(expected.get(name))} here. Give the "
            "--model, --lora, --lora-target and --trainable that it was made with. If these are "
            "the same, another version of tokenfeed made it: start a new run in another --run-dir."
        )
    return ours


def read_weights(
    model: nn.Module, config: TrainConfig, checkpoint: Checkpoint, world: World | None = None
) -> None:
    """Overwrite the weights of a model with those of a checkpoint. All ranks call this."""
    weights = with_prefix("model.", kept_weights(model, config, checkpoint))
    checkpoint.read(weights, world, prefix="model.")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def moments_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """Return the moments, named NAME.MOMENT by the names of the weights. Settings of groups come
    from the run's settings."""
    return {
        f"{name}.{key}": value
        for name, weight in _weights_of(optimizer, model).items()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def make_moments(
    optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint
) -> None:
    """Create the optimizer's moments that a checkpoint has. Reading it overwrites their values. The
    settings of groups stay the optimizer's own.

    Raises:
        ResumeError: The checkpoint has moments of other weights.
    """
    weights = _weights_of(optimizer, model)
    for name, (dtype, shape) in part_of(checkpoint.tensors, "optimizer.").items():
        weight, _, key = name.rpartition(".")
        if weight not in weights:
            raise ResumeError(
                f"cannot resume: the checkpoint's optimizer trains {weight}, and this run does "
                "not. Use the same --model, --lora and --trainable, or start a new run in another "
                "--run-dir."
            )
        like = weights[weight]
        optimizer.state[like][key] = (
            torch.empty_like(like, dtype=dtype)  # with its layout and its shards
            if like.shape == shape
            else torch.empty(shape, dtype=dtype, device=like.device)
        )


def _weights_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of all groups by name."""
    trained = {weight for group in optimizer.param_groups for weight in group["params"]}
    return {name: weight for name, weight in model.named_parameters() if weight in trained}
