"""Hooks of torch that drive a StallMeter, for a training loop that is not ours.

Rules of all hooks: they attach nothing to objects of the user, since models are pickled whole. They
never raise: the first fault ends the watch. They do nothing in another process or thread. At the
end, everything is restored.
"""

import contextlib
import functools
import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any, TypeVar

from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.cpu_work import is_of_handler
from tokenfeed.trainer.stall.meter import WARMUP_STEPS, StallMeter
from tokenfeed.trainer.stall.watchers import Loader
from tokenfeed.trainer.watch.children import Child
from tokenfeed.trainer.watch.lines import Activity, HostLines
from tokenfeed.trainer.watch.patches import CALLS, Finder, Patches
from tokenfeed.trainer.watch.places import FRAMEWORKS, Site, site_of
from tokenfeed.trainer.watch.summary import Run, Summary
from tokenfeed.trainer.watch.termination import Termination

_BACKWARDS = 16
"""Without an optimizer of torch, backward passes count as steps after this many."""
_SNAPSHOT_S = 60.0
"""Seconds between two snapshots of the report."""
_LOOK_STEPS, _LOOK_S = 16, 1.0
"""Most steps between two looks at what need not be done after each step, while these take less than
a second."""
_KEPT_BATCHES = 8
"""Batches that an ideal loader replays."""
_MOST_BETWEEN = 8
"""Most frames between a step of an optimizer and `super().step()`."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _nothing() -> None:
    """Stand for a weak reference to nothing."""


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """End the watches of the parent: what a fork of it does, such as a loader worker, is not
    measured."""
    for each in _watches:
        each.is_on = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _guarded(hook: Hook) -> Hook:
    """Do nothing in another process or thread, and end the watch at the first fault."""

    @functools.wraps(hook)
    def run(self: "Watch", *args: Any) -> Any:
        # torch.compile may trace this. It must end here, before it calls anything else.
        if self.is_compiling() or (self.thread != get_ident() and self.thread is not None):
            return None
        try:
            return hook(self, *args) if self.is_on else None
        except Exception as error:
            self._failed(error)
            return None

    return run  # type: ignore[return-value]


@dataclass(slots=True, eq=False)
class _Block:
    """A block of time that belongs to a cause."""

    cause: Cause
    meter: Any = None
    outer: Any = None
    began: float = 0.0
    site: Site | None = None
    is_pause: bool = False
    """Whether the evaluation goes on behind the block."""


@dataclass(slots=True, eq=False)
class _Optimizer:
    """An optimizer that has stepped."""

    number: int
    weights: frozenset[int]
    """The ids of its parameters, which it keeps alive."""
    is_subclass: bool
    """Whether its step may call that of a base class. Torch calls the hook after both."""
    steps: int = 0
    """Its steps since the latest one of the leader."""


class Watch:
    """Measures the training loop that runs in this process, between `start` and `finish`.

    Args:
        out: Folder for the report, with a snapshot each minute. None writes nothing.
        steps: Measure the steps after the first of these numbers, up to the second, and stop then.
        ideal_steps: Train this number of steps, then as many on replayed batches, and end the
            process.
        place: Rank and number of ranks of a child process; None to find them out.
        fail_above: Share of stall from which the exit code is 3 instead of 0.
    """

    def __init__(
        self,
        *,
        out: Path | None = None,
        steps: tuple[int, int] | None = None,
        ideal_steps: int = 0,
        place: tuple[int, int] | None = None,
        fail_above: float | None = None,
    ) -> None:
        self.pid, self.is_on = os.getpid(), True
        self.thread: int | None = None
        """The thread that trains, from its first step on."""
        self.torch: Any = None
        self.is_compiling: Callable[[], bool] = bool
        """Return whether torch.compile traces the caller."""
        self.run = Run(place=place)
        self._summary = Summary(self.run, out, fail_above)
        self._limits, self._ideal, self._out = steps, ideal_steps, out
        self._patches, self._is_finished = Patches(), False
        self._termination: Termination | None = None
        self._meter: Any = None
        self._inside: _Block | None = None
        self._evaluation: _Block | None = None
        self._fetch = _Block("data")
        """The block of the batch that is fetched. There is one at a time, and one in each step."""
        self._in_mode = False
        self._leader: Callable[[], Any] = _nothing
        """A weak reference to the optimizer whose steps count."""
        self._leading: Any = None
        """The same optimizer as it is known here."""
        self._followers: list[_Optimizer] = []
        """Others that have stepped since its latest step."""
        self._trained: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()
        self._calls_since_update = self._tokens = self._slots = 0
        self._is_fetch_timed = False
        """Whether to time how long the next fetch computes."""
        self._stepping = 0.0
        """When the step of an optimizer began, if no forward pass came before it."""
        self._training: Any = None
        """The data set of the latest batch outside of an evaluation."""
        self._stepped_on: Any = None
        """The data set of the latest batch before a step."""
        self._trained_on: set[int] = set()
        """The ids of the data sets of the latest batches before a step."""
        self._fetching: Callable[[], Any] = _nothing
        """A weak reference to the iterator of the latest batch."""
        self._iterator: Callable[[], Any] = _nothing
        """The same for the latest batch that was trained."""
        self._pass: Callable[[], Any] = _nothing
        """A weak reference to the pass of a ShardLoader that returned the latest batch."""
        self._resuming: Callable[[], Any] = _nothing
        """A weak reference to what fetched last in an evaluation."""
        self._resumed: tuple[Callable[[], Any], Any] | None = None
        """A weak reference to the same iterator, and its batch, if an epoch may have begun with
        them."""
        self._plain: type | None = None
        """The type of the latest batch that was no mapping."""
        self._kept: list[Any] = []
        self._lines: HostLines | None = None
        self._next_snapshot = self._looked = 0.0
        """When the next snapshot is due, and when `_look` was called."""
        self._next_look = 1
        """The step after which it is called."""

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(kind.__name__ if kind else "")

    @property
    def report(self) -> Any:
        """The StallReport at the end; None if no step was measured."""
        return self.run.report

    def start(self) -> None:
        """Install the hooks. Hooks of torch follow once the script imports torch."""
        _watches.add(self)
        finder = Finder(["torch", *{call.module for call in CALLS}], self._imported)
        sys.meta_path.insert(0, finder)
        self._patches.at_end(lambda: sys.meta_path.remove(finder))
        for name in ["torch", *{call.module for call in CALLS}]:
            if module := sys.modules.get(name):
                self._imported(module)
        leave = os._exit

        def exit_now(code: int) -> None:
            self.finish("os._exit")
            leave(self.exit_code(code))

        self._patches.replace(os, "_exit", exit_now)
        self._termination = Termination.install(self._terminated)

    def finish(self, end: str = "") -> None:
        """Restore everything, and report. `end` is what ended the script early."""
        if self._is_finished or self.pid != os.getpid():
            return
        self._is_finished, self.is_on = True, False
        _watches.discard(self)
        run, patched = self.run, self._patches
        run.end, run.ended = end, time.perf_counter()
        with contextlib.suppress(Exception):
            if self._lines is not None:
                self._lines.close()
                run.lines = self._lines.lines()
        patched.restore()
        is_safe = not end and self._termination is not None and self._termination.is_ours
        self._summary.close(self._meter, self.torch is not None, is_safe)
        if self._meter is not None:
            self._meter.close()
        if self._termination is not None:
            self._termination.close()

    def _failed(self, error: Exception) -> None:
        """End the watch. An error that was meant for the program goes on."""
        self.is_on, self.run.fault = False, f"{type(error).__name__}: {error}"
        if is_of_handler(error):
            raise error

    def exit_code(self, code: Any) -> Any:
        """Return the exit code of the process, for the one of the script."""
        return self._summary.exit_code(code)

    def _terminated(self) -> None:
        self.finish("SIGTERM")
        self._summary.say()  # if it waits for other ranks

    def _imported(self, module: ModuleType) -> None:
        """Patch a module whose code has run."""
        try:
            if module.__name__ == "torch":
                self._attach(module)
            for call in CALLS:
                if call.module == module.__name__:
                    self._patches.wrap(module, call, self._charged)
        except Exception as error:
            self._failed(error)

    def _attach(self, torch: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import dataloader

        spawning = sys.modules["torch.multiprocessing.spawn"]  # `spawn` of its parent is a function
        self.torch, watch, patched = torch, self, self._patches
        self.is_compiling = torch.compiler.is_dynamo_compiling
        fetch, make = dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__init__
        train, update = torch.nn.Module.train, torch.amp.GradScaler.update
        zero = self._worked(torch.optim.Optimizer.zero_grad)
        backward, start = torch.autograd.backward, spawning.start_processes
        thread_time = time.thread_time

        @functools.wraps(fetch)
        def next_batch(iterator: Any) -> Any:
            # It runs in each step, with cold caches: a further call would take microseconds.
            meter, block = watch._meter, watch._fetch
            if meter is None or watch._inside is not None or not watch.is_on or watch._ideal:
                return watch._fetch_apart(fetch, iterator)
            if watch.thread != get_ident():
                return fetch(iterator)
            phase: str | None = "data"
            if watch._iterator() is not iterator and (phase := watch._begun_by(iterator)) is None:
                return watch._fetch_apart(fetch, iterator)
            try:
                block.outer = outer = meter.phase
                block.began = began = meter.end_segment(outer)
                meter.phase, watch._inside = phase, block
                computed = thread_time() if watch._is_fetch_timed else 0.0
            except Exception as error:
                watch._failed(error)
            try:
                batch = fetch(iterator)
            except BaseException:
                watch.leave(block)
                raise
            try:
                if watch._inside is block:
                    ended = meter.end_segment(phase)
                    if computed:
                        watch._is_fetch_timed = False
                        meter.fetched(ended - began, thread_time() - computed)
                    meter.phase, watch._inside = outer, None
                    watch.run.known += ended - began
                if type(batch) is not watch._plain or watch._fetching() is not iterator:
                    watch._look_at(iterator, batch)
            except Exception as error:
                watch._failed(error)
            return batch

        @functools.wraps(make)
        def make_loader(loader: Any, *args: Any, **kwargs: Any) -> None:
            make(loader, *args, **kwargs)
            watch._made_loader(loader)

        @functools.wraps(train)
        def set_mode(module: Any, mode: bool = True) -> Any:
            is_outermost, watch._in_mode = not watch._in_mode, True
            try:
                return train(module, mode)
            finally:
                if is_outermost:
                    watch._in_mode = False
                    watch._mode_changed(module, mode)

        @functools.wraps(update)
        def update_scale(scaler: Any, *args: Any, **kwargs: Any) -> None:
            update(scaler, *args, **kwargs)
            watch._scaled(scaler)

        @functools.wraps(backward)
        def count_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            backward(tensors, *args, **kwargs)
            watch._after_backward(tensors)

        @functools.wraps(start)
        def start_processes(
            fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **given: Any
        ) -> Any:
            if watch.is_on and watch.pid == os.getpid():
                watch.run.children += nprocs
                fn = Child(fn, nprocs, watch._out, watch._limits)
            return start(fn, args, nprocs, *more, **given)

        patched.at_end(register_optimizer_step_post_hook(self._after_optimizer).remove)
        patched.replace(dataloader._BaseDataLoaderIter, "__next__", next_batch)
        patched.replace(dataloader.DataLoader, "__init__", make_loader)
        begin = self._charged(dataloader.DataLoader.__iter__, "data")  # starts workers
        patched.replace(dataloader.DataLoader, "__iter__", begin)
        patched.replace(torch.nn.Module, "train", set_mode)
        patched.replace(torch.optim.Optimizer, "zero_grad", zero)
        patched.replace(torch.amp.GradScaler, "update", update_scale)
        self._restore_backward = patched.replace(torch.autograd, "backward", count_backward)
        patched.replace(spawning, "start_processes", start_processes)
        patched.replace(torch.multiprocessing, "start_processes", start_processes)

    def _worked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call between a step and the next forward pass is work, such as `zero_grad`. Time on a
        CPU shows nothing about its use."""
        now = time.perf_counter

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            began, meter = now(), self._meter
            try:
                return call(*args, **kwargs)
            finally:
                if meter is not None and meter.phase == "before" and self.thread == get_ident():
                    meter.add_work(began)

        return run

    def _charged(self, call: Callable[..., Any], cause: Cause | None) -> Callable[..., Any]:
        if cause is None:
            return self._worked(call)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if cause == "checkpoint" and self._ideal:
                return None  # the run is thrown away
            if cause == "other" and self.thread is None:
                return call(*args, **kwargs)  # in a thread that perhaps does not train
            block = self.enter(cause, args[0] if args else None)
            try:
                result = call(*args, **kwargs)
                if cause == "data" and block is not None and args[0] is not self._pass():
                    self._passed(args[0])
                if cause == "other" and block is not None and _is_batch(result):
                    block.cause = block.meter.phase = "data"
                return result
            finally:
                self.leave(block)

        return run

    @_guarded
    def _passed(self, batches: Any) -> None:
        """Look for a ShardLoader behind what has returned a batch."""
        self._pass = weakref.ref(batches)
        if (loader := Loader.of(batches)).is_ours:
            self.run.loaders[0] = loader

    @_guarded
    def enter(self, cause: Cause, owner: Any = None) -> "_Block | None":
        """Begin a block. The outermost one counts: what an evaluation fetches is evaluation. But
        scripts often save before `train()` ends the evaluation.

        Args:
            cause: The cause of the block.
            owner: The object whose method runs, perhaps a DataLoader that starts its workers.
        """
        is_pause = self._evaluation is not None and self._inside is self._evaluation
        if is_pause and cause == "checkpoint":
            self.leave(self._evaluation)
        if self._inside is not None:
            if self._inside is self._evaluation and cause == "data" and owner is not None:
                self._fetched_in_evaluation(owner)
            return None
        site = None if cause == "data" else site_of(sys._getframe(2))
        meter = self._meter
        phase = self._phase_of(owner) if cause == "data" else cause
        outer = meter.begin(phase) if meter is not None else None
        self._inside = _Block(cause, meter, outer, time.perf_counter(), site, is_pause)
        return self._inside

    def _phase_of(self, loader: Any) -> str:
        """Return the phase of a fetch. The first batch of an evaluation may be fetched before
        `eval()`. No step was trained on a batch of its data set."""
        source = _source_of(loader)
        is_known = source is None or not self._trained_on or id(source) in self._trained_on
        return "data" if is_known else "maybe"

    @_guarded
    def _begun_by(self, iterator: Any) -> str | None:
        """Return the phase of the first fetch of an iterator; None if it begins an evaluation: one
        without gradients, of data that no step was trained on. Some scripts never call `eval()`."""
        phase = self._phase_of(iterator)
        if phase == "data" or self.torch.is_grad_enabled():
            return phase
        self._evaluation = self.enter("evaluation")
        return None

    def _fetched_in_evaluation(self, loader: Any) -> None:
        """Begin a fetch in an evaluation. The first batch of the next epoch may be fetched before
        `train()`. The second one of an iterator shows that it evaluates on the training data."""
        is_known = id(_source_of(loader)) in self._trained_on
        is_first = is_known and self._resuming() is not loader
        self._resuming = weakref.ref(loader) if is_known else _nothing
        if self._meter is not None and self._meter.phase == "maybe" and self._is_abandoned():
            self._resumed = None
            self._meter.phase = "evaluation"
        if self._meter is not None and not is_first:
            self._meter.phase = "evaluation"
        elif self._meter is not None and self._meter.phase == "evaluation":
            self._meter.leave("maybe")

    def _is_abandoned(self) -> bool:
        """Return whether the iterator of a first batch is gone: nobody takes a second batch, so
        the evaluation was on a single batch of the training data."""
        return self._resumed is not None and self._resumed[0]() is None

    @_guarded
    def leave(self, block: "_Block | None") -> None:
        """End a block. Pass the result of `enter`."""
        self._leave(block)

    def _leave(self, block: "_Block | None") -> None:
        if block is None or self._inside is not block:
            return
        self._inside = None
        if block.meter is not None and block.meter is self._meter:
            if block is self._evaluation and block.meter.phase == "maybe":
                block.meter.phase = "evaluation" if self._is_abandoned() else "data"
                if self._resumed is not None and not self._is_abandoned():
                    self._look_at(self._resumed[0](), self._resumed[1])
            self._resumed = None
            block.meter.leave(block.outer)
        self.run.spent(block.cause, time.perf_counter() - block.began, block.site)
        if block.is_pause:
            self._evaluation = self.enter("evaluation")

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # torch.compile may trace this. It must end here, before it calls anything else.
        if self.is_compiling() or not self.is_on:
            return
        if self.thread != get_ident() and self.thread is not None:
            return
        try:
            is_led = self._leader() is optimizer and not self._leading.is_subclass
            if not is_led and not self._leads(optimizer, sys._getframe(1)):
                return
            self._calls_since_update += 1
            while self._followers:
                self._followers.pop().steps = 0
            if self._stepping:
                self._count_work()
            self._end_step()
        except Exception as error:
            self._failed(error)

    def _leads(self, optimizer: Any, caller: FrameType) -> bool:
        """Return whether a step of this optimizer ends a step of the loop. Only those of one do,
        the leader: no other one steps twice between its steps."""
        known = self._trained.get(optimizer) or self._met(optimizer)
        if known is None or (known.is_subclass and _is_nested(optimizer, caller)):
            return False
        if self._leader() is optimizer:
            return True
        if known.steps or self._leader() is None:
            self._leader, self._leading = weakref.ref(optimizer), known
            self.run.leader = known.number
            return True
        known.steps += 1
        self._followers.append(known)
        self._calls_since_update += 1
        if not self._count_work():
            self._meter.end_work()
        return False

    def _before_optimizer(self, *_: Any) -> None:
        # torch.compile may trace this. It must end here, before it calls anything else.
        if not self.is_compiling() and self.is_on and self.thread == get_ident():
            self._stepping = time.perf_counter() if self._meter.phase == "before" else 0.0

    def _count_work(self) -> bool:
        """Count a step of an optimizer as work if no forward pass came before it, since another
        optimizer has stepped. Return whether that was so."""
        began, self._stepping = self._stepping, 0.0
        if began and self._meter.phase == "before":
            self._meter.add_work(began)
        return began > 0

    def _met(self, optimizer: Any) -> "_Optimizer | None":
        """Remember an optimizer at its first step. Return None if it has no parameters."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not weights:
            return None
        steps = [vars(each).get("step") for each in type(optimizer).__mro__]
        known = _Optimizer(
            number=len(self.run.optimizers),
            weights=frozenset(map(id, weights)),
            # Its own, and that of torch.optim.Optimizer. Torch wraps a method that is inherited.
            is_subclass=len({id(inspect.unwrap(each)) for each in steps if each}) > 2,
        )
        if len(self.run.optimizers) == 1:  # this is the second one
            hook = register_optimizer_step_pre_hook(self._before_optimizer)
            self._patches.at_end(hook.remove)
        self._trained[optimizer] = known
        self.run.optimizers.append(type(optimizer).__name__)
        if not self.run.by_optimizer:  # it counted backward passes so far
            self._begin(weights[0].device)
            self.run.by_optimizer = True
            self._restore_backward()
        return known

    @_guarded
    def _scaled(self, scaler: Any) -> None:
        """Count a step that the scaler skipped, because a gradient was infinite."""
        if scaler.is_enabled() and not self._calls_since_update and self.run.by_optimizer:
            self.run.skipped += 1
            self._end_step()
        self._calls_since_update = 0

    @_guarded
    def _after_backward(self, tensors: Any) -> None:
        """Count a backward pass as a step, if no optimizer of torch was seen in many of them."""
        self.run.backwards += 1
        if self.run.backwards <= _BACKWARDS:
            return
        if self._meter is None:
            self._begin((tensors if hasattr(tensors, "device") else tensors[0]).device)
        self._end_step()

    @_guarded
    def _mode_changed(self, module: Any, mode: bool) -> None:
        """Begin an evaluation at `eval()` of a trained module, and end it at `train()`."""
        if self._inside is not (self._evaluation if mode else None):
            return
        held = {id(p) for p in module.parameters()}
        trained = [each.weights for each in self._trained.values()]
        if trained and not any(2 * len(held & ids) > len(ids) for ids in trained):
            return  # a teacher, a metric, or a frozen part of the model
        if mode:
            self.leave(self._evaluation)
        else:
            self._evaluation = self.enter("evaluation")

    @_guarded
    def _made_loader(self, loader: Any) -> None:
        site = site_of(sys._getframe(2))
        place = str(site.places[0]) if site.places else ""
        setting = FRAMEWORKS.get(site.framework, {}).get("data", "").removeprefix("raise ")
        self.run.loaders[id(loader.dataset)] = Loader.of(loader, place, setting)

    @_guarded
    def _before_fetch(self, iterator: Any) -> Any:
        """End an evaluation of a loop that never calls `train()`. Return a batch to replay."""
        source = getattr(iterator, "_dataset", None)
        if self._evaluation is not None and self._inside is self._evaluation:
            if self._iterator() is not iterator:
                self._fetched_in_evaluation(iterator)
                return None
            self.leave(self._evaluation)
        is_replayed = self._ideal and self._kept and self.run.steps >= self._warmup + self._ideal
        if not is_replayed or self._inside is not None or source is not self._training:
            return None
        self.run.replayed += 1
        return self._kept[self.run.steps % len(self._kept)]

    def _fetch_apart(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetch a batch before the first step, in a block, or with an ideal loader."""
        if (kept := self._before_fetch(iterator)) is not None:
            return kept
        block = self.enter("data")
        try:
            batch = fetch(iterator)
        finally:
            self.leave(block)
        if block is not None and self._meter is not None:
            self._look_at(iterator, batch)
        elif self._meter is not None and self._meter.phase == "maybe":
            self._resumed = weakref.ref(iterator), batch
        return batch

    @_guarded
    def _look_at(self, iterator: Any, batch: Any) -> None:
        """Look at a batch that is not like the one before."""
        source = getattr(iterator, "_dataset", None)
        self._fetching = weakref.ref(iterator)
        if source is not self._training:
            self._training = source
        if isinstance(batch, Mapping):
            self._count_tokens(batch.get("input_ids"), batch.get("attention_mask"))
        else:
            self._plain = type(batch)
        if self._ideal and source is self._training:
            kept = type(batch)(batch) if isinstance(batch, dict | list) else batch
            self._kept = [*self._kept, kept][-_KEPT_BATCHES:]

    def _count_tokens(self, rows: Any, mask: Any) -> None:
        if not isinstance(rows, self.torch.Tensor):
            return
        is_known = isinstance(mask, self.torch.Tensor) and mask.device.type == "cpu"
        self._slots += rows.numel()
        self._tokens += int(mask.count_nonzero()) if is_known else rows.numel()

    @property
    def _warmup(self) -> int:
        return max(1, self._limits[0]) if self._limits is not None else WARMUP_STEPS

    def _begin(self, device: Any) -> None:
        if self._meter is not None:
            self._meter.close()
            self.run.restart()
        self.thread = get_ident()
        self._meter = self._fetch.meter = StallMeter(device, skipped_steps=self._warmup)
        self._summary.begin(self.torch)
        if self._lines is not None:
            self._lines.close()
        run = self.run
        self._lines = HostLines(self.thread, self._activity, lambda: run.known, lambda: run.steps)
        self._next_snapshot, self._next_look = time.perf_counter() + _SNAPSHOT_S, 1

    def _activity(self) -> Activity:
        """Return what the training thread does now. On a GPU, no phase is between two steps."""
        if self._inside is not None:
            return "known"
        return "in the work" if self._meter.phase == "work" else "between"

    def _end_step(self) -> None:
        if self._inside is not None:
            self.leave(self._inside)
        run, tokens, slots = self.run, 0, 0
        if self._slots:
            tokens, slots = self._tokens, max(self._tokens, self._slots)
            self._tokens = self._slots = 0
            self._meter.knows_padding = True
        run.last = self._meter.end_step(tokens, slots, slots or 1.0)
        self._iterator, run.known_before = self._fetching, run.known
        if self._training is not self._stepped_on:
            self._stepped_on = self._training
            run.trained_on = id(self._training)
            self._trained_on.add(run.trained_on)
        run.steps += 1
        if run.parts:
            run.parts.clear()
        if run.steps >= self._next_look:
            self._look(run)

    def _look(self, run: Run) -> None:
        """Do what need not be done after each step."""
        now = run.last
        if run.steps == 1:
            run.first = now
            run.sites.clear()
        is_timing = self._lines is not None and self._lines.look()
        if self._out is not None and now > self._next_snapshot:
            self._next_snapshot = now + _SNAPSHOT_S
            self._summary.write_snapshot(self._meter)
        is_rare = not (is_timing or self._ideal) and now - self._looked < _LOOK_S
        self._is_fetch_timed = True
        self._looked, self._next_look = now, run.steps + (_LOOK_STEPS if is_rare else 1)
        if self._limits is not None:
            self._next_look = min(self._next_look, self._limits[1])
        if self._limits is not None and run.steps >= self._limits[1]:
            self.finish(f"step {run.steps}")
        elif self._ideal:
            self._end_ideal_step(run)

    def _end_ideal_step(self, run: Run) -> None:
        """Time steps with the loader, then as many with replayed batches, and end the process."""
        begin, middle = self._warmup, self._warmup + self._ideal
        end = middle + self._warmup + self._ideal
        replayed = middle + self._warmup
        if begin <= run.steps <= middle or replayed <= run.steps <= end:
            is_border = run.steps in (begin, middle, replayed, end)
            if is_border and self.torch.cuda.is_initialized():
                self.torch.cuda.synchronize()
            run.ideal_marks.append((time.perf_counter(), run.other_seconds))
        if run.steps == middle:
            run.report = self._meter.report()
        if run.steps == end:
            run.ideal_steps = self._ideal
            self.finish("the last replayed step")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self.exit_code(0))


def _source_of(loader: Any) -> Any:
    """Return the data set of a DataLoader or of its iterator; None for others."""
    return getattr(loader, "_dataset", getattr(loader, "dataset", None))


def _is_batch(value: Any) -> bool:
    """Return whether a value contains tensors or arrays."""
    parts = value.values() if isinstance(value, Mapping) else value
    is_group = isinstance(value, Mapping | list | tuple)
    return any(hasattr(each, "dtype") for each in (parts if is_group else [value]))


def _is_nested(optimizer: Any, frame: FrameType) -> bool:
    """Return whether a subclass calls `super().step()`. Torch calls the hook after both methods.

    Args:
        optimizer: The optimizer that the hook got.
        frame: The wrapper of torch that called the hook.
    """
    wrapper, outer = frame.f_code, frame.f_back
    for _ in range(_MOST_BETWEEN):
        if outer is None:
            return False
        if outer.f_code is wrapper and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False


@contextlib.contextmanager
def watch(out: str | os.PathLike[str] | None = None) -> Iterator[Watch]:
    """Measure the training loop in a `with` block, and print where its time went.

    Use it in notebooks. `tokenfeed stall train.py` does the same for a script.

    Args:
        out: Folder for report.json and report.html. None writes nothing.

    Returns:
        A watch. After the block, its `report` is a StallReport, or None if no step was measured.
    """
    with Watch(out=None if out is None else Path(out)) as running:
        yield running
