"""The stall of loops that are not ours, on the CPU: a loader that sleeps is found."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_clocks import SimulatedClock
from support.sleeping import Sleeping, Tiny
from torch.utils.data import DataLoader

from tokenfeed.trainer.stall import StallReport

pytestmark = pytest.mark.clock

WARMUP = 2
SECONDS = 0.02


def assert_slept(report: StallReport, seconds: float = SECONDS) -> None:
    """Data of each step took so long."""
    data = report.causes["data"]
    assert data.seconds == pytest.approx(report.steps * seconds, rel=0.01)
    assert report.stall is not None
    parts = sum(part.seconds for part in report.causes.values())
    assert report.stall * report.seconds == pytest.approx(parts)
    assert parts <= report.seconds


@pytest.mark.slow
def test_so_is_one_in_a_trainer_of_transformers(tmp_path: Path, clock: SimulatedClock) -> None:
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
        train_dataset=Sleeping(100, SECONDS),
        eval_dataset=Sleeping(2, SECONDS),
        callbacks=[callback],
    ).train()
    report = callback.report
    assert report is not None
    assert_slept(report)
    assert report.causes["evaluation"].seconds >= 2 * SECONDS
    assert report.causes["log"].seconds > 0
    assert (tmp_path / "report.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning has many
def test_so_is_one_in_a_trainer_of_lightning(tmp_path: Path, clock: SimulatedClock) -> None:
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
    trainer.fit(Module(), DataLoader(Sleeping(60, SECONDS)), DataLoader(Sleeping(2, SECONDS)))
    report = callback.report
    assert report is not None
    assert report.tokens == 18 * 2 * 8
    assert_slept(report, 2 * SECONDS)
    assert report.causes["evaluation"].seconds >= SECONDS
    assert report.causes["checkpoint"].seconds > 0
    assert (tmp_path / "report.json").exists()
