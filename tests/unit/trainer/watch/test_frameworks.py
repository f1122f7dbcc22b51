"""Trainers of other projects, unchanged, beside a stopwatch that only the test knows."""

import importlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sleeping import Sleeping, Tiny
from torch.utils.data import DataLoader

import tokenfeed

pytestmark = [
    pytest.mark.usefixtures("clock"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
WARMUP = 5


class Stopwatch:
    """Seconds by cause, and their sums at the end of each step."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.marks: list[tuple[float, Counter[str]]] = []
        self._is_on = False

    @contextmanager
    def timing(self, cause: str) -> Iterator[None]:
        """Time a block. Blocks inside it do not count."""
        outermost, self._is_on = not self._is_on, True
        began = time.perf_counter()
        try:
            yield
        finally:
            if outermost:
                self._is_on = False
                self.seconds[cause] += time.perf_counter() - began  # type: ignore[assignment]

    def sleep(self, seconds: float) -> None:
        with self.timing("data"):
            time.sleep(seconds)

    def share(self, cause: str) -> float:
        (began, before), (ended, after) = self.marks[WARMUP - 1], self.marks[-1]
        return (after[cause] - before[cause]) / (ended - began)


class Marked(torch.optim.SGD):
    """An optimizer that notes when its steps end."""

    stopwatch: Stopwatch

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.03)
        result = super().step(closure)
        self.stopwatch.marks.append((time.perf_counter(), self.stopwatch.seconds.copy()))
        return result


def assert_agrees(report: Any, stopwatch: Stopwatch, *causes: str) -> None:
    for cause in causes:
        assert stopwatch.share(cause) > 0.02, cause
        found = report.causes[cause].fraction
        assert found == pytest.approx(stopwatch.share(cause), abs=0.001), cause


def test_trainer_of_transformers_agrees_with_stopwatch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    stopwatch, model = Stopwatch(), Tiny()
    optimizer = Marked(model.parameters(), lr=0.0)
    optimizer.stopwatch = stopwatch

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with stopwatch.timing("evaluation"):
                return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with stopwatch.timing("checkpoint"):
                time.sleep(0.1)
                super()._save_checkpoint(*args, **kwargs)

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=25,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        logging_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    with tokenfeed.watch() as running:
        Trainer(
            model=model,
            args=arguments,
            train_dataset=Sleeping(100, 0.04, stopwatch.sleep),
            eval_dataset=Sleeping(8, 0.04, stopwatch.sleep),
            optimizers=(optimizer, None),
        ).train()
    assert running.run.steps == 25
    assert_agrees(running.report, stopwatch, "data", "evaluation")
    found = running.report.causes["checkpoint"].fraction  # the sleep is outside of its own method
    assert 0.0 < found < stopwatch.share("checkpoint")
    assert "dataloader_num_workers" in capfd.readouterr().err


def test_trainer_of_lightning_agrees_with_stopwatch(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    stopwatch = Stopwatch()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Tiny()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def on_validation_start(self) -> None:
            self.timing = stopwatch.timing("evaluation")
            self.timing.__enter__()

        def validation_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def on_validation_end(self) -> None:
            self.timing.__exit__(None, None, None)

        def configure_optimizers(self) -> Any:
            optimizer = Marked(self.parameters(), lr=0.0)
            optimizer.stopwatch = stopwatch
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tokenfeed.watch() as running:
        lightning.Trainer(
            max_steps=24,
            accumulate_grad_batches=2,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=16,
        ).fit(
            Module(),
            DataLoader(Sleeping(60, 0.05, stopwatch.sleep)),
            DataLoader(Sleeping(8, 0.05, stopwatch.sleep)),
        )
    assert running.run.steps == 24
    assert_agrees(running.report, stopwatch, "data", "evaluation")


def test_loop_of_accelerate_agrees_with_stopwatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate, save = pytest.importorskip("accelerate"), torch.save

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.1)
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(torch.serialization, "save", slow)
    stopwatch, accelerator = Stopwatch(), accelerate.Accelerator(cpu=True)
    module = Tiny()
    optimizer = Marked(module.parameters(), lr=0.0)
    optimizer.stopwatch = stopwatch
    with tokenfeed.watch() as running:
        data = DataLoader(Sleeping(25, 0.1, stopwatch.sleep))
        model, optimizer, loader = accelerator.prepare(module, optimizer, data)
        for number, batch in enumerate(loader):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 3:
                with stopwatch.timing("checkpoint"):
                    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert running.run.steps == 25
    assert_agrees(running.report, stopwatch, "data", "checkpoint")


@pytest.mark.parametrize(
    ("module", "name", "cause"),
    [
        ("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", "work"),
        (
            "stable_baselines3.common.on_policy_algorithm",
            "OnPolicyAlgorithm.collect_rollouts",
            "data",
        ),
    ],
)
def test_calls_of_other_trainers_are_what_they_are(
    module: str, name: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of Keras is work, although it is no optimizer of torch. A policy that plays in
    eval mode makes data. Neither package is installed here: what stands for them sleeps."""
    (owner, method), package = name.split("."), module.partition(".")[0]
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(
        f"import time\nclass {owner}:\n    def {method}(self, model):\n"
        f"        model.train({cause == 'work'})\n        time.sleep(0.03)\n"
        "        model.train()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tokenfeed.watch() as running:
        call = getattr(getattr(importlib.import_module(module), owner)(), method)
        for _ in range(45):
            model(torch.ones(8), torch.ones(8))["loss"].backward()
            if cause == "data":
                optimizer.step()
            call(model)
    found = {each: part.fraction for each, part in running.report.causes.items()}
    share = 1 - running.report.stall if cause == "work" else found[cause]
    assert share > 0.8, found
    for each in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, each)
