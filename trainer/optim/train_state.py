"""The state of training: a model, its optimizer and its number format."""

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenfeed.pipeline.planning.order import derive_key
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint, part_of, with_prefix
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.config.schedule import Phase, phase_at, phases_of
from tokenfeed.trainer.data.attention import choose_flash_attention
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import State, World
from tokenfeed.trainer.models.build import compile_model, make_model, recompute_layers
from tokenfeed.trainer.models.transformer import SIZES
from tokenfeed.trainer.models.weights import (
    count_parameters,
    given_weights,
    kept_state,
    kept_weights,
    product_weights,
    train_only,
    trainable_names,
)
from tokenfeed.trainer.optim.muon import MuonAdamW
from tokenfeed.trainer.optim.optimizer import make_optimizer, set_learning_rate
from tokenfeed.trainer.optim.optimizer_io import (
    keep_moments,
    make_moments,
    moments_of,
    random_state,
    seed_random,
    set_random_state,
)
from tokenfeed.trainer.optim.precision import Precision, tune_convolutions
from tokenfeed.trainer.tasks.task import Loss, Task

if TYPE_CHECKING:
    from tokenfeed.trainer.distributed.replicas import Replicas


_OF_DROPOUT = 1
"""Key of dropout's random numbers, different from the keys of tasks, which have the same seed."""

_log = logging.getLogger(__name__)


_SIGNS = ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in out-of-memory errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether host or device ran out of memory."""
    is_of_allocator = isinstance(error, torch.OutOfMemoryError)
    return is_of_allocator or any(sign in str(error) for sign in _SIGNS)


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches. Sums that depend on the device stay on the device."""

    loss: Tensor
    targets: Tensor
    tokens: int = 0
    slots: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> "Tally":
        """Return the sums of no micro-batch."""
        loss = torch.zeros((), device=device)
        return cls(loss, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, loss: Loss, tokens: int, slots: int) -> None:
        """Add one micro-batch."""
        self.loss += loss.sum.detach()
        self.targets += loss.targets
        self.tokens += tokens
        self.slots += slots


class Learner:
    """A model in training."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        precision: Precision,
        device: torch.device,
        world: World | None = None,
    ) -> None:
        """Draw weights from the seed. All ranks get those of rank 0."""
        self._config, self.task, self._device = config, task, device
        self._world = world or World(device)
        self.precision = precision
        self._replicas: Replicas | None = None
        torch.manual_seed(config.seed)
        is_sharded = config.shard_model and self._world.size > 1
        # The values come from rank 0, so other ranks need no memory for them. Models that this
        # package does not define may compute with their initial values, or read them from files.
        is_empty = is_sharded and not self._world.is_main and config.model in SIZES
        with torch.device("meta") if is_empty else contextlib.nullcontext():
            model = make_model(config, task.head, precision.dtype)
        self._given = given_weights(model, config)
        self.model = model if is_sharded else model.to(device)
        drops = getattr(self.model, "drops_attention", True)
        choose_flash_attention(device, precision.dtype, drops=drops)
        if config.recompute:
            recompute_layers(self.model)
        tune_convolutions(self.model)
        self._phases = phases_of(config)
        self._chosen = [trainable_names(self.model, each.config.trainable) for each in self._phases]
        train_only(self.model, self._chosen[0])
        if is_sharded:
            from tokenfeed.trainer.distributed import fsdp as sharding

            sharding.check_sharding(config, precision.name)
            sharding.shard_model(self.model, self._world, precision.dtype)
        self._replicas = self._replicate()
        self.optimizer = self._make_optimizer()

    def begin_phase(self, phase: Phase) -> None:
        """Train only the weights of a phase from now on. Weights that were trained before keep
        their moments."""
        before = self.optimizer
        before.zero_grad(set_to_none=True)
        self._replicas = None  # its hooks on the weights go first
        train_only(self.model, self._chosen[phase.number - 1])
        self._replicas = self._replicate()
        self.optimizer = self._make_optimizer()
        keep_moments(self.optimizer, before)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        return make_optimizer(
            self.model,
            config.optimizer,
            config.weight_decay,
            self._world,
            betas=(config.beta1, config.beta2),
            epsilon=config.epsilon,
            compiled=config.compile,
        )

    def _replicate(self) -> "Replicas | None":
        if self._world.size == 1 or self._config.shard_model:
            return None
        from tokenfeed.trainer.distributed.replicas import Replicas  # a second, with ranks only

        return Replicas(self.model, self.task.loss)

    @property
    def trained_parameters(self) -> list[int]:
        """The number of parameters that each phase trains."""
        return [count_parameters(self.model, names) for names in self._chosen]

    @property
    def largest_phase(self) -> Phase:
        """The phase that trains the most parameters."""
        sizes = self.trained_parameters
        return max(self._phases, key=lambda phase: sizes[phase.number - 1])

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments, over all ranks that share them."""
        trained = [group["params"] for group in self.optimizer.param_groups]
        moments: int = 2 * sum(weight.nbytes for group in trained for weight in group)
        if isinstance(self.optimizer, MuonAdamW):  # its last group has one moment
            moments -= sum(weight.nbytes for weight in trained[-1])
        gradients: int = sum(weight.nbytes for group in trained for weight in group)
        weights: int = sum(weight.nbytes for weight in self.model.parameters())
        return weights + gradients + moments

    def compile(self, micro_batches: list[MicroBatch]) -> None:
        """Compile the model for the shapes of some micro-batches and for each phase's weights,
        without training on them."""
        now, choices = trainable_names(self.model, None), dict.fromkeys(self._chosen)
        compile_model(self.model, len(choices))
        self.task.is_compiled = True
        listed = ", ".join(" x ".join(map(str, shown.ids_BT.shape)) for shown in micro_batches)
        _log.info("compiles micro-batches of %s tokens", listed)
        random = random_state(self._device)
        for names in choices:
            train_only(self.model, names)
            self._compile_for(micro_batches)
        train_only(self.model, now)
        set_random_state(random, self._device)

    def _compile_for(self, micro_batches: list[MicroBatch]) -> None:
        """Prepare the model with its current trainable weights for training and evaluation."""
        for shown in micro_batches:
            shown.scope.mark_dynamic()
            with self.precision.autocast():
                loss = self.task.loss(self.model, shown)
            self.precision.backward(loss.sum)
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        with torch.no_grad(), self.precision.autocast():
            for shown in micro_batches:
                self.task.loss(self.model, shown)
        self.model.train()

    def draw_for(self, number: int) -> None:
        """Seed dropout for the micro-batch of this number. The seed does not depend on the rank."""
        seed_random(derive_key(self._config.seed, number, _OF_DROPOUT), self._device)

    def add_gradients(
        self,
        micro_batch: MicroBatch,
        *,
        last: bool = True,
        waiting: contextlib.AbstractContextManager[object] | None = None,
    ) -> Loss:
        """Compute the loss of a micro-batch and add its gradients.

        The loss is divided by a constant, which keeps gradients of fp16 in range.

        Args:
            micro_batch: The micro-batch.
            last: Whether it is the last of its step. Replicas then sum gradients over ranks.
            waiting: Entered while all that is left is to wait for these sums.
        """
        replicas = self._replicas
        sums: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if replicas is not None and last:
            sums = replicas.with_sums(waiting or contextlib.nullcontext())
        elif replicas is not None:
            sums = replicas.without_sums()
        with sums:
            with self.precision.autocast():
                compute = replicas or functools.partial(self.task.loss, self.model)
                loss: Loss = compute(micro_batch)
            self.precision.backward(loss.sum / self._config.step_slots)
        return loss

    def step(self, number: int, loss: Tensor, targets: Tensor) -> Tensor:
        """Update the weights from the gradients of a step.

        Args:
            number: The step, counted from 1.
            loss: The sum of the losses of all targets. If it is not finite, the step is skipped.
            targets: The number of targets.

        Returns:
            The gradient's norm; not finite if the step was skipped.
        """
        set_learning_rate(self.optimizer, self.rate(number))
        correction = self._config.step_slots / targets.clamp(min=1)
        correction = torch.where(loss.isfinite(), correction, torch.nan)
        keeps = self._replicas is not None  # gradients are views of the buckets that are summed
        clip_norm = self._config.clip_norm
        return self.precision.step(self.optimizer, correction, clip_norm, keeps_gradients=keeps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1. After the run's last step, which only
        trials reach, it stays the same."""
        step = min(step, self._config.steps)
        return phase_at(self._phases, step).rate(step)

    def operations_per_token(self, length: float) -> float:
        """Return the floating-point operations to train on a token in rows of a length, averaged
        over phases.

        A weight in a matrix product takes 2 forward and 4 backward, or 2 if it is frozen. Attention
        takes 12 per layer, width and length. A model of one's own counts without attention, unless
        it has `attention_width`.
        """
        weights = product_weights(self.model)
        trained = sum(
            phase.config.steps * sum(weights.get(name, 0) for name in names)
            for phase, names in zip(self._phases, self._chosen, strict=True)
        )
        attention = 12.0 * getattr(self.model, "attention_width", 0) * length
        return 4.0 * sum(weights.values()) + 2.0 * trained / self._config.steps + attention

    def kept_weights(self) -> State:
        """The names of the weights in a checkpoint."""
        return kept_state(self.model, self._given)

    def state_dict(self) -> State:
        """Return everything that the next step depends on, except the data. Only `step` changes the
        returned tensors: buffers, which a forward pass may change, are copied."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        weights = self.kept_weights()
        return self._state(
            {name: value.clone() if name in buffers else value for name, value in weights.items()}
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a `state_dict`. Weights and moments are overwritten in place."""
        weights = kept_weights(self.model, self._given, checkpoint)
        make_moments(self.optimizer, self.model, checkpoint)
        state = checkpoint.read(self._state(weights), self._world)
        self.precision.load_state_dict(part_of(state, "precision."))
        set_random_state(part_of(state, "random."), self._device)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Overwrite the weights with a checkpoint's weights."""
        weights = kept_weights(self.model, self._given, checkpoint)
        checkpoint.read(with_prefix("model.", weights), self._world, prefix="model.")

    def _state(self, weights: State) -> State:
        return {
            **with_prefix("model.", weights),
            **with_prefix("optimizer.", moments_of(self.optimizer, self.model)),
            **with_prefix("precision.", self.precision.state_dict()),
            **with_prefix("random.", random_state(self._device)),
        }
