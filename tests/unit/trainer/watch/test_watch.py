"""A loop is measured unchanged, and the process is afterwards as it was before."""

import contextlib
import copy
import cProfile
import gc
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.data_sets import MakeDataset
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tokenfeed
from tokenfeed import Packed, ShardLoader
from tokenfeed.trainer.watch.watch import Watch

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("clock")


class Items(Dataset[torch.Tensor]):
    """Items that take some time each."""

    def __init__(self, count: int = 64, seconds: float = 0.0) -> None:
        self.count, self.seconds, self.slept = count, seconds, 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.count:
            raise IndexError
        nap(self, self.seconds)
        return torch.ones(8)


def nap(holder: Any, seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    holder.slept += time.perf_counter() - began


class Model(torch.nn.Module):
    """A model whose forward pass takes some milliseconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        result: torch.Tensor = self.layers(x)
        return result.sum()


def wakeup() -> int:
    signal.set_wakeup_fd(found := signal.set_wakeup_fd(-1))
    return found


_OTHERS = re.compile(
    r"^tokenfeed-stall$|^ThreadPool|\((process_request_thread|serve\w*|run_server|_telemetry|_a\w+)"
)
"""Matches threads that end or begin at any time: of servers of other tests, and of libraries."""


def state() -> dict[str, Any]:
    """Return everything of the process that a watch may touch."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers
    from torch.utils.data import dataloader

    return {
        "save": (torch.save, torch.serialization.save),
        "train": torch.nn.Module.train,
        "zero": torch.optim.Optimizer.zero_grad,
        "next": dataloader._BaseDataLoaderIter.__next__,
        "loader": (dataloader.DataLoader.__iter__, dataloader.DataLoader.__init__),
        "backward": torch.autograd.backward,
        "scaler": (torch.amp.GradScaler.update, torch.cuda.amp.GradScaler.update),
        "spawn": torch.multiprocessing.start_processes,
        "hooks": (
            dict(optimizers._global_optimizer_post_hooks),
            dict(optimizers._global_optimizer_pre_hooks),
            dict(modules._global_forward_pre_hooks),
            dict(modules._global_forward_hooks),
        ),
        "finders": [*sys.meta_path],
        "exit": os._exit,
        "signals": [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)],
        "wakeup": wakeup(),
        "filters": [*warnings.filters],
        "profile": (sys.getprofile(), sys.gettrace(), threading.getprofile()),
        "collector": [*gc.callbacks],
        "excepthook": sys.excepthook,
        "threads": {each.name for each in threading.enumerate() if not _OTHERS.search(each.name)},
    }


def train(model: Model, steps: int, data: Iterator[Any] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        model(next(data) if data else torch.ones(4, 8)).backward()
        optimizer.step()


train(Model(), 1)  # torch imports more, which changes filters of warnings


def test_watch_restores_everything_twice_and_after_an_error() -> None:
    before = state()
    for _ in range(2):
        running = Watch()
        with contextlib.suppress(ZeroDivisionError), running:
            train(Model(), 12)
            raise ZeroDivisionError
        after = state()
        assert running.report.queued_steps == 12
        for name, value in before.items():
            assert after[name] == value, name


def test_watches_that_overlap_restore_everything() -> None:
    """As in threads: the first one ends first."""
    before = state()
    first, second, third = Watch(), Watch(), Watch()
    first.start()
    second.start()
    third.start()
    train(Model(), 8)
    for each in (first, second, third):
        each.finish()
        assert each.report.queued_steps == 8
    after = state()
    for name, value in before.items():
        assert after[name] == value, name


class LateError(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("calls", ["end_segment", "begin_work", "end_step"])
def test_error_of_a_signal_handler_is_not_swallowed(
    calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout of the program may come at any moment, also while a hook runs."""

    def give_up(*_: object) -> None:
        raise LateError

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with tokenfeed.watch() as running:
            batches = iter(DataLoader(Items(400), batch_size=4))
            train(Model(), 8, batches)
            if calls == "begin_work":
                monkeypatch.setattr(running._meter._forward, "_trained", interrupted)
            else:
                monkeypatch.setattr(running._meter, calls, interrupted)
            with pytest.raises(LateError):
                train(Model(), 8, batches)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_watch_changes_no_random_number() -> None:
    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Items(48), batch_size=4, shuffle=True):
            model(batch + torch.rand(4, 8)).backward()
            optimizer.step()
        return model.layers[0].weight, torch.rand(3)  # type: ignore[return-value,union-attr]

    plain = outcome()
    with tokenfeed.watch():
        watched = outcome()
    assert all(map(torch.equal, plain, watched))


def test_watch_keeps_what_the_user_replaced_meanwhile() -> None:
    original = torch.save
    try:
        with tokenfeed.watch():
            train(Model(), 8)
            inner = torch.save
            torch.save = replaced = lambda *args, **kwargs: inner(*args, **kwargs)
        assert torch.save is replaced
        torch.save({}, io.BytesIO())  # through the former hook, which does nothing now
    finally:
        torch.save = original


def test_models_stay_picklable_and_equal() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    loader = DataLoader(Items(), batch_size=8)
    keys = model.__dict__.keys(), loader.__dict__.keys()
    with tokenfeed.watch():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            torch.save(model, io.BytesIO())
            copy.deepcopy(model)
            pickle.dumps((optimizer, loader, torch.save, torch.nn.Module.train))
    assert (model.__dict__.keys(), loader.__dict__.keys()) == keys
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert all(not getattr(each, name) for each in model.modules() for name in hooks)
    assert isinstance(iter(loader), torch.utils.data.dataloader._BaseDataLoaderIter)


class BadBatch(dict[str, Any]):
    """A batch that raises when a hook looks into it."""

    def get(self, *_: Any) -> Any:
        raise RuntimeError("keys are secret")


class BadBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield BadBatch(x=torch.ones(4, 8))


def test_fault_of_a_hook_ends_the_watch_only(capfd: pytest.CaptureFixture[str]) -> None:
    before = state()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trained = 0
    with tokenfeed.watch() as running:
        for number, batch in zip(
            range(20), DataLoader(BadBatches(), batch_size=None), strict=False
        ):
            model(batch["x"]).backward()
            optimizer.step()
            trained = number + 1
    assert trained == 20
    assert running.run.steps == 1
    assert "ended at step 1 by RuntimeError: keys are secret" in capfd.readouterr().err
    assert state() == before


def counted(loop: Any) -> Any:
    with tokenfeed.watch() as running:
        loop()
    return running.run


def backward(model: Model, factor: float = 1.0) -> None:
    (model(torch.ones(4, 8)) * factor).backward()


def gan() -> None:
    first, second = Model(), Model()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.0) for each in (first, second)]
    for _ in range(10):
        for number in (1, 0, 0, 0):
            backward((first, second)[number])
            optimizers[number].step()


def optimizer_for_each_weight() -> None:
    model = Model()
    parts = [torch.optim.SGD([each], lr=0.0) for each in model.parameters()]
    for _ in range(20):
        backward(model)
        for each in parts:
            each.step()


def subclass_that_calls_its_base() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    base = torch.optim.SGD(Model().parameters(), lr=0.0)  # torch wraps its method from now on
    model = Model()
    optimizer = Own(model.parameters(), lr=0.0)
    for _ in range(20):
        backward(model)
        optimizer.step()
    base.step()


def scaler_that_skips() -> None:
    model = Model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu")
    for number in range(40):
        loss = scaler.scale(model(torch.ones(4, 8)))
        (loss * (float("inf") if number in (7, 8, 20, 39) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def scaler_that_only_skips() -> None:
    model = Model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu")
    for _ in range(40):
        scaler.scale(model(torch.ones(4, 8)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()


def no_optimizer() -> None:
    model = Model()
    for _ in range(40):
        backward(model)


def late_optimizer() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(8):
        for _ in range(40):
            backward(model)
        optimizer.step()


def compiled_step() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = model.layers[0].weight.clone()  # type: ignore[union-attr,operator]
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(20):
        model(torch.rand(4, 8)).backward()
        step()
    assert not torch.equal(weight, model.layers[0].weight)  # type: ignore[arg-type,union-attr]


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
@pytest.mark.parametrize(
    ("loop", "steps", "words"),
    [
        (gan, (30, 31), "Adam, number 2 of 2 optimizers"),  # the other optimizer led first
        (optimizer_for_each_weight, (20,), "of 4 optimizers"),
        (subclass_that_calls_its_base, (20,), "20 steps, at last of Own"),
        (scaler_that_skips, (40,), "40 steps of SGD; the scaler skipped 4 of them"),
        (scaler_that_only_skips, (24,), "24 steps, which are backward passes"),
        (no_optimizer, (24,), "24 steps, which are backward passes"),  # 16 are needed to be sure
        (late_optimizer, (8,), "8 steps of SGD"),
        (compiled_step, (4, 19, 20), "steps"),
    ],
)
def test_steps_of_a_loop_are_counted(
    loop: Any, steps: tuple[int, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = counted(loop)
    assert run.steps in steps
    assert run.report.queued_steps == run.steps
    assert words in capfd.readouterr().err


def test_optimizers_that_are_gone_are_forgotten() -> None:
    """A new object may have the id of an old one."""
    with tokenfeed.watch() as running:
        for _ in range(6):
            train(Model(), 2)
            gc.collect()
        assert len(running._trained) <= 1
    assert len(running.run.optimizers) == 6


class Naps:
    slept = 0.0


def share(slept: float, report: Any) -> float:
    return slept / report.seconds


@pytest.mark.parametrize("calls_train", [True, False])
def test_eval_mode_is_evaluation(calls_train: bool) -> None:
    """Also without `train()`: the next batch of the training data ends the evaluation."""
    model, naps = Model(0.04), Naps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    slept = 0.0
    with tokenfeed.watch() as running:
        for number, batch in enumerate(DataLoader(Items(240), batch_size=4)):
            model(batch).backward()
            optimizer.step()
            if number == 4:
                slept = naps.slept
            if number % 5 == 4:
                model.eval()
                began = time.perf_counter()
                for held_out in DataLoader(Items(8), batch_size=4):
                    model(held_out)
                    time.sleep(0.1)
                naps.slept += time.perf_counter() - began
                if calls_train:
                    model.train()
            if number == 22:
                break
    report = running.report
    expected = share(naps.slept - slept, report)
    assert report.causes["evaluation"].fraction == pytest.approx(expected, abs=0.001)
    assert report.causes["other"].fraction < 0.1  # a forward pass of an evaluation is no step's


def test_zero_grad_between_steps_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    zero_grad, model = torch.optim.Optimizer.zero_grad, Model(0.04)

    def slow(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        time.sleep(0.04)
        zero_grad(optimizer, set_to_none)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", slow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        for _ in range(20):
            model(torch.ones(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
    report = running.report
    assert 0.1 < report.causes["other"].fraction < 0.3  # 20 of 100 ms
    assert torch.optim.Optimizer.zero_grad is slow


def test_save_before_train_mode_is_checkpoint_and_not_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving, evaluating = Items(), Items()

    def slow(*_: object, **__: object) -> None:
        nap(saving, 0.1)

    monkeypatch.setattr(torch.serialization, "save", slow)
    monkeypatch.setattr(torch, "save", slow)
    model = Model(0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        for number in range(31):
            model.train()
            model(torch.ones(4, 8)).backward()
            optimizer.step()
            if number == 4:
                saving.slept = evaluating.slept = 0.0
            if number % 5 == 4 and number < 30:
                model.eval()
                nap(evaluating, 0.1)
                torch.save(model, "nowhere")
                nap(evaluating, 0.1)
    causes = running.report.causes
    assert causes["checkpoint"].seconds == pytest.approx(saving.slept, rel=0.001)
    assert causes["evaluation"].seconds == pytest.approx(evaluating.slept, rel=0.001)


def test_evaluation_on_the_training_data_is_no_data() -> None:
    """As ignite's engines do: an iterator of its own, and `eval()` again in each step."""
    model, naps = Model(0.03), Naps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(Items(40, 0.01), batch_size=4)
    slept = 0.0
    with tokenfeed.watch() as running:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                model.train()
                model(batch).backward()
                optimizer.step()
                if (epoch, number) == (0, 4):
                    slept = naps.slept
            began = 0.0
            for batch in loader:
                began = began or time.perf_counter()  # before the first batch, none can know
                model.eval()
                model(batch)
            naps.slept += (time.perf_counter() - began) * (epoch < 2)
    report = running.report
    expected = share(naps.slept - slept, report)
    assert report.causes["evaluation"].fraction == pytest.approx(expected, abs=0.001)


def test_eval_of_a_part_or_of_a_teacher_is_no_evaluation() -> None:
    model, teacher = Model(0.002), Model(0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        for _ in range(20):
            model.train()
            model.layers[1].eval()  # type: ignore[union-attr,operator]
            teacher.eval()
            loss = model(teacher(torch.ones(4, 8)) * torch.ones(4, 8))
            loss.backward()
            optimizer.step()
    assert running.report.causes["evaluation"].seconds == 0


def test_time_after_last_step_is_in_the_run_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = Model()
    with tokenfeed.watch() as running:
        train(model, 10)
        evaluating, others = Items(), Items()
        model.eval()
        nap(evaluating, 0.4)
        model.train()
        nap(others, 0.2)
    times = running.report.run
    assert times.after == pytest.approx(evaluating.slept + others.slept, abs=0.001)
    assert times.after_by_cause["evaluation"] == pytest.approx(evaluating.slept, abs=0.001)
    assert times.before + times.warmup + running.report.seconds + times.after == pytest.approx(
        times.total, abs=0.001
    )
    assert f"after the last (evaluation {evaluating.slept:.1f})" in capfd.readouterr().err


def test_training_in_another_thread_is_measured() -> None:
    def loop() -> None:
        worker = threading.Thread(target=train, args=(Model(), 20))
        worker.start()
        while worker.is_alive():
            torch.save({}, io.BytesIO())  # the training thread does not wait for it
        worker.join()

    run = counted(loop)
    assert run.steps == 20
    assert run.report.causes["checkpoint"].seconds == 0


def test_step_of_a_plain_loop_makes_few_calls() -> None:
    """The cost of the hooks by a count: calls of Python and of C, where a stopwatch would show the
    load of the machine."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = iter(DataLoader(Items(1000), batch_size=1))

    def loop(steps: int) -> None:
        for _ in range(steps):
            model(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def calls() -> float:
        profiler = cProfile.Profile()
        profiler.enable()
        loop(256)
        profiler.disable()
        return sum(each.callcount for each in profiler.getstats()) / 256

    loop(40)
    plain = calls()
    with tokenfeed.watch():
        loop(70)
        watched = calls()
    assert watched - plain < 100  # 77 in torch 2.13


def test_loop_without_step_names_what_was_seen(capfd: pytest.CaptureFixture[str]) -> None:
    with tokenfeed.watch() as running:
        model = Model()
        for batch in DataLoader(Items(8), batch_size=4):
            model(batch).backward()
    assert running.report is None
    found = capfd.readouterr().err
    assert "verdict  NOT MEASURED" in found
    assert "0 optimizer steps, 2 backward passes, 1 DataLoader in this process" in found


def test_next_step_names_setting_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = Model(0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    eval_interval = 4

    def validate() -> None:
        model.eval()
        time.sleep(0.05)
        model.train()

    with tokenfeed.watch():
        for number in range(30):
            model(torch.ones(4, 8)).backward()
            optimizer.step()
            if number % eval_interval == 0:
                validate()
    line = validate.__code__.co_firstlineno + 9
    found = capfd.readouterr().err
    assert f"raise `eval_interval` (test_watch.py:{line})" in found


def test_steps_limit_ends_the_cost_and_prints_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before, model = state(), Model()
    with Watch(steps=(10, 20)) as running:
        train(model, 20)
        assert state() == before
        found = capfd.readouterr().err
        train(model, 20)
    assert "10 measured steps" in found
    assert running.report.steps == 10
    assert capfd.readouterr().err == ""


def test_mapping_batches_count_tokens() -> None:
    class Rows(IterableDataset[Mapping[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
            while True:
                mask = torch.ones(4, 8, dtype=torch.long)
                mask[:, 6:] = 0
                yield {"input_ids": torch.ones(4, 8), "attention_mask": mask}

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        for number, batch in enumerate(DataLoader(Rows(), batch_size=None)):
            model(batch["input_ids"]).backward()
            optimizer.step()
            if number == 20:
                break
    assert running.report.padding == pytest.approx(0.25)


def test_advice_names_the_shard_loader_behind_a_generator(make_dataset: MakeDataset) -> None:
    path = make_dataset([16] * 64)
    loader = ShardLoader(path, batching=Packed(16, batch_size=4), num_workers=0)

    def steps() -> Iterator[Any]:
        for batch in loader:
            time.sleep(0.01)
            yield batch

    with tokenfeed.watch() as running:
        optimizer = torch.optim.SGD((model := torch.nn.Linear(16, 1)).parameters(), lr=0.0)
        for batch in steps():
            model(batch["input_ids"].float()).sum().backward()
            optimizer.step()
    assert running.report.queued_steps == 16
    assert (running.run.loaders[0].name, running.run.loaders[0].is_ours) == ("ShardLoader", True)


def test_code_after_the_second_of_two_optimizers_is_other() -> None:
    """As in a GAN. Steps of both without a forward pass between them are work."""
    first, second = Model(0.01), Model(0.01)
    slept: dict[str, Items] = {each: Items() for each in ("apart", "together")}
    for kind, holder in slept.items():
        one, two = (torch.optim.SGD(each.parameters(), lr=0.0) for each in (first, second))
        with tokenfeed.watch() as running:
            for step in range(14):
                first(torch.ones(4, 8)).backward()
                if kind == "apart":
                    one.step()
                second(torch.ones(4, 8)).backward()
                two.step()
                if kind == "together":
                    one.step()
                if step >= 5:
                    nap(holder, 0.02)
        report = running.report
        found = report.causes["other"].seconds
        after_last = 0.02 * (report.queued_steps == 14)
        assert found == pytest.approx(holder.slept - after_last, rel=0.001), kind


def test_validation_without_gradients_needs_no_eval_mode() -> None:
    model, held_out = Model(), Items(4, 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        for step, batch in enumerate(DataLoader(Items(64), batch_size=4)):
            model(batch).backward()
            optimizer.step()
            if step == 10:
                with torch.no_grad():
                    for batch in DataLoader(held_out, batch_size=2):
                        model(batch)
    assert running.report.causes["evaluation"].seconds == pytest.approx(held_out.slept, rel=0.001)
