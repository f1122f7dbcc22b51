"""The stall of loops that are not ours, on the CPU and for real: a loader that sleeps is found."""

import logging
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sleeping import Sleeping, Tiny, sleep, slept
from torch.utils.data import DataLoader

from tokenfeed.trainer.stall import StallMeter, StallReport

WARMUP = 2


@pytest.fixture(autouse=True)
def no_sleeps() -> None:
    slept.clear()


def timed(batches: Iterable[Any]) -> Iterator[Any]:
    """The same; `slept` has what the loader took for each: the sleep and a little."""
    iterator = iter(batches)
    while True:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return
        slept[-1] = time.perf_counter() - began
        yield batch


def assert_slept(report: StallReport, sleeps: int = 1) -> None:
    """Data of most steps took what they slept, within 10 %, and its mean no less.

    On a quiet machine all sleeps are alike, and so are their quartiles.
    """
    data = report.causes["data"]
    short, _, long = (sleeps * quartile for quartile in statistics.quantiles(slept))
    assert 0.9 * short - 3e-4 <= data.p50_s <= 1.1 * long + 3e-4
    assert data.seconds >= 0.9 * report.steps * sleeps * min(slept)
    assert report.stall is not None
    parts = sum(part.seconds for part in report.causes.values())
    assert report.stall * report.seconds == pytest.approx(parts)
    assert parts <= report.seconds


@pytest.mark.parametrize("milliseconds", [1, 20])
def test_a_loader_that_sleeps_so_long_a_step_is_reported_so(milliseconds: float) -> None:
    def batches() -> Iterator[int]:
        for number in range(WARMUP + 5 + int(100 / milliseconds)):
            sleep(milliseconds / 1e3)
            yield number

    meter = StallMeter("cpu", skipped_steps=WARMUP)
    for _ in meter.watch(batches()):
        torch.ones(200, 200) @ torch.ones(200, 200)
        meter.step()
    assert_slept(meter.report())


def test_so_is_a_data_loader_of_torch() -> None:
    loader = DataLoader(Sleeping(WARMUP + 15, milliseconds=20), batch_size=1)
    meter = StallMeter("cpu", skipped_steps=WARMUP)
    for _ in meter.watch(timed(loader)):
        meter.step()
    assert_slept(meter.report())


@pytest.mark.slow
def test_so_is_one_with_workers_as_far_as_they_do_not_hide_it() -> None:
    milliseconds = 20
    loader = DataLoader(Sleeping(28, milliseconds), batch_size=1, num_workers=2)
    waits: list[float] = []

    def batches() -> Iterator[Any]:
        iterator = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            waits.append(time.perf_counter() - began)
            yield batch

    meter = StallMeter("cpu", skipped_steps=8)
    for _ in meter.watch(batches()):
        meter.step()
    waited = sum(waits[8:])  # by workers two at a time
    assert meter.report().causes["data"].seconds == pytest.approx(waited, rel=0.1, abs=5e-3)
    hidden = StallMeter("cpu", skipped_steps=8)
    for _ in hidden.watch(loader):
        time.sleep(2 * milliseconds / 1e3)  # the work
        hidden.step()
    stall = hidden.report().stall
    assert stall is not None
    assert stall < 0.2


@pytest.mark.slow
def test_so_is_one_in_a_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tokenfeed.integrations.transformers import StallCallback

    callback = StallCallback(skipped_steps=WARMUP)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=1,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=Tiny(),
        args=arguments,
        train_dataset=Sleeping(100, 20),
        eval_dataset=Sleeping(2, 20),
        callbacks=[callback],
    ).train()
    report = callback.report
    assert report is not None
    assert_slept(report)
    assert report.causes["evaluation"].seconds >= 2 * 20 / 1e3
    assert report.causes["log"].seconds > 0
    assert (tmp_path / "report.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning has many
def test_so_is_one_in_a_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from tokenfeed.integrations.lightning import StallCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Tiny()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = StallCallback(tokens=lambda batch: batch["input_ids"].numel(), skipped_steps=WARMUP)
    trainer = lightning.Trainer(
        max_steps=20,
        accumulate_grad_batches=2,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5)],
        val_check_interval=20,
    )
    trainer.fit(Module(), DataLoader(Sleeping(60, 50)), DataLoader(Sleeping(2, 50)))
    report = callback.report
    assert report is not None
    assert report.tokens == 18 * 2 * 8
    assert_slept(report, sleeps=2)
    assert report.causes["evaluation"].seconds > 0.03
    assert report.causes["checkpoint"].seconds > 0
    assert (tmp_path / "report.json").exists()
