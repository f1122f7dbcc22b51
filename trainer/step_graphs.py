"""A training step as CUDA graphs: the host starts a micro-batch, or an update, by one call.

The kernels of a small model are so short that a host queues them more slowly than the device
computes them. A graph of kernels is captured once, and replayed on the same memory.

    first     forward and backward of a step's first micro-batch, which makes the gradients
    later     the same for every other one, which adds to them
    update    scales, clips, changes the weights

What differs from step to step is in memory that the graphs read: the micro-batch, the learning
rate, the sums of the step, the scale of the loss. Dropout takes its seed from torch's generator at
each replay. The three share the memory of what they compute. Gradients have to outlive their graph,
so somebody has to hold them always: the weights do.

The first step of a run is computed without graphs. It makes the moments of the optimizer, and all
that libraries make when they are first used. The first micro-batch behind it is computed both ways,
and a graph with another result is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.optim.optimizer import set_learning_rate
from tokenfeed.trainer.optim.train_state import Learner, is_out_of_memory
from tokenfeed.trainer.tasks.task import Loss

_LARGEST_DIFFERENCE = 0.01
"""Relative difference of loss or norm between a graph and the step without it. Sums in another
order differ by less."""


class StepGraphs:
    """The functions of a step that `train_steps` calls, as CUDA graphs."""

    def __init__(
        self,
        learner: Learner,
        add_gradients: Callable[[Learner, MicroBatch], Loss],
        change_weights: Callable[[Learner, Tensor, Tensor], Tensor],
    ) -> None:
        """
        Args:
            learner: A model on one GPU, its optimizer and its settings.
            add_gradients: Computes the loss of a micro-batch, and adds its gradients.
            change_weights: Changes the weights, given sums of loss and targets of a step. Returns
                the norm of the gradients.
        """
        self._learner, self._add, self._change = learner, add_gradients, change_weights
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._is_warm, self._is_first = False, True
        self._graphs: dict[str, _Graph] = {}
        self._micro_batch: MicroBatch | None = None
        """The memory of micro-batches that the graphs read."""
        self._sums: tuple[Tensor, ...] = ()
        """The memory of the sums that the update reads."""
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        """All weights with gradients, and the memory of these."""
        for group in learner.optimizer.param_groups:
            group["lr"] = torch.zeros((), device=learner.device)

    def add_gradients(self, learner: Learner, micro_batch: MicroBatch, **_: object) -> Loss:
        """Compute the loss of a micro-batch, and add its gradients to those of the step. The next
        call overwrites the loss."""
        is_first, self._is_first = self._is_first, False
        if not self._is_warm:
            with self._beside():
                return self._add(learner, micro_batch)
        held = self._micro_batch
        if held is None:
            held = self._micro_batch = _copy_of(micro_batch)
        for ours, theirs in zip(_parts(held), _parts(micro_batch), strict=True):
            ours.copy_(theirs)
        if is_first and "first" not in self._graphs:
            return self._capture_first(held)
        if is_first:
            return self._graphs["first"].replay()  # type: ignore[no-any-return]
        if "later" not in self._graphs:
            self._capture("later", lambda: _detached(self._add(learner, held)))
        return self._graphs["later"].replay()  # type: ignore[no-any-return]

    def update(self, learner: Learner, step: int, loss: Tensor, targets: Tensor) -> Tensor:
        """Update the weights from the gradients of a step, and return the gradient's norm."""
        self._is_first = True
        set_learning_rate(learner.optimizer, learner.rate(step))
        if not self._is_warm:
            self._is_warm = True
            with self._beside():
                return self._change(learner, loss, targets)
        if "update" not in self._graphs:
            self._sums = loss.clone(), targets.clone()
            with self._capturable():
                self._capture("update", lambda: self._change(learner, *self._sums))
            for weight, gradient in self._gradients:
                weight.grad = gradient
        for ours, theirs in zip(self._sums, (loss, targets), strict=True):
            ours.copy_(theirs)
        norm: Tensor = self._graphs["update"].replay()
        return norm.clone()

    def _capture_first(self, held: MicroBatch) -> Loss:
        """Compute the first gradients with and without a graph, and compare them.

        Raises:
            ConfigError: They differ.
        """
        learner, device = self._learner, self._learner.device
        weights = [weight for weight in learner.model.parameters() if weight.requires_grad]
        with torch.random.fork_rng([] if device.type == "cpu" else [device]), self._beside():
            plain = _detached(self._add(learner, held)).sum, _norm_of(weights)
        learner.optimizer.zero_grad()
        self._capture("first", lambda: _detached(self._add(learner, held)))
        self._gradients = [(w, w.grad) for w in weights if w.grad is not None]
        loss: Loss = self._graphs["first"].replay()
        expected, got = torch.stack(plain), torch.stack((loss.sum, _norm_of(weights)))
        # The host waits here, once in a run.
        if not got.allclose(expected, rtol=_LARGEST_DIFFERENCE, equal_nan=True):
            raise self._error(
                f"it computes {got.tolist()} as loss and norm, and not {expected.tolist()}"
            )
        return loss

    def _capture(self, name: str, function: Callable[[], Any]) -> None:
        try:
            self._graphs[name] = _Graph(function, self._stream, self._pool)
        except RuntimeError as error:
            first: BaseException = error  # the end of a broken capture raises another one
            while first.__context__ is not None:
                first = first.__context__
            if isinstance(first, RuntimeError) and is_out_of_memory(first):
                raise first from None
            raise self._error(str(first).strip().split("\n")[0]) from error

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"`--compile`={self._learner.config.compile}: the step does not run as a CUDA graph: "
            f"{reason}. Take --compile without a mode, and report this with your versions of torch "
            "and CUDA."
        )

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Queue what is computed on the stream of the captures."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """Tell the optimizer of torch that it may be captured. A fused one computes the same."""
        groups = self._learner.optimizer.param_groups
        for group in groups:
            group["capturable"] = True
        yield
        for group in groups:
            group["capturable"] = False


class _Graph:
    """A function without arguments, captured."""

    def __init__(self, function: Callable[[], Any], stream: Any, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, like those that lock memory of batches, may call CUDA meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=mode):
            self._output = function()

    def replay(self) -> Any:
        """Compute, and return the memory of what the function returned. A replay overwrites it."""
        self._graph.replay()
        return self._output


def _parts(micro_batch: MicroBatch) -> tuple[Tensor, ...]:
    return micro_batch.ids_BT, micro_batch.targets, micro_batch.positions_BT


def _copy_of(micro_batch: MicroBatch) -> MicroBatch:
    ids_BT, targets, positions_BT = (part.clone() for part in _parts(micro_batch))
    return replace(micro_batch, ids_BT=ids_BT, targets=targets, positions_BT=positions_BT)


def _detached(loss: Loss) -> Loss:
    return Loss(loss.sum.detach(), loss.targets)


def _norm_of(weights: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
