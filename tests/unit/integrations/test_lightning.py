"""Lightning: every validation sees the same rows; callbacks end with the training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data_sets import WriteDataset

from tokenfeed import Fixed, Mixture, Padded, ShardLoader, Stage
from tokenfeed.integrations.dataloader import StatefulShardLoader
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.planning.policies import Batching

pytestmark = [
    pytest.mark.slow,  # seconds, for the import
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

BATCHES = {"batching": Fixed(8), "num_workers": 0, "window_tokens": 1000}


def new_model(fails_at: int | None = None) -> Any:
    from lightning.pytorch import LightningModule  # seconds that other test processes need not wait

    class Model(LightningModule):  # type: ignore[misc]  # untyped
        """Notes the rows of each validation. Fails in a chosen step."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.validations: list[list[int]] = []
            self.trained: list[list[int]] = []
            self.fails_at = fails_at
            self.weights: Any = None

        def training_step(self, step: Any, index: int) -> None:
            """Train nothing. Change the weights of the data sets in the third step, if asked to."""
            if index == self.fails_at:
                raise ValueError("a loss of the user's")
            self.trained += [batch.rows.tolist() for batch in step]
            if self.weights and index == 2:
                self.trainer.datamodule.reweigh(self.weights)
            self.manual_backward(self.weight * 0.0)
            self.optimizers().step()

        def on_validation_start(self) -> None:
            """Begin a list."""
            self.validations.append([])

        def validation_step(self, batch: Any, index: int) -> None:
            """Note its rows."""
            self.validations[-1] += batch.rows.tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Make one."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def trainer(folder: Path, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        use_distributed_sampler=False,
        **{"enable_checkpointing": False} | quiet | settings,
    )


def module_of(data: Any, **settings: Any) -> Any:
    from tokenfeed.integrations.lightning import ShardDataModule

    return ShardDataModule(data, **BATCHES | settings)


@pytest.mark.parametrize("kind", ["stages", "mixture"])
def test_lightning_validation_reads_every_data_set_once(
    both_splits: Path, write_dataset: WriteDataset, tmp_path: Path, kind: str
) -> None:
    part = np.arange(500) % 997 + 1, np.full(50, 10)
    other = write_dataset(tmp_path / "other", {"train": part, "validation": part}, 1000)
    data: Any = [Stage({both_splits: 1}, until_tokens=2_000), Stage({other: 3, both_splits: 1})]
    if kind == "mixture":
        data = Mixture({both_splits: 1, other: 99})
    model = new_model()
    trainer(tmp_path, max_steps=2, val_check_interval=1, num_sanity_val_steps=0).fit(
        model, module_of(data, validation="validation")
    )
    assert [sorted(rows) for rows in model.validations] == [list(range(450))] * 2


def test_lightning_loads_loaders_anew_without_losing_rows(
    both_splits: Path, tmp_path: Path
) -> None:
    """Lightning makes two iterators of a new loader, and fetches a step with the first one."""
    model = new_model()
    trainer(tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(
        model, module_of(both_splits)
    )
    rows = np.concatenate(model.trained).reshape(3, -1)
    assert all(np.array_equal(np.unique(epoch), np.unique(rows)) for epoch in rows)
    assert rows.size == 3 * np.unique(rows).size


def test_reweighed_lightning_run_resumes_from_its_checkpoint(
    both_splits: Path, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    other = write_dataset(
        tmp_path / "other", {"train": (np.arange(4000) % 997 + 1, np.full(400, 10))}, 1000
    )
    stages = [Stage({both_splits: 1, other: 1}, until_tokens=8_000)]
    whole, first, rest = new_model(), new_model(), new_model()
    whole.weights = first.weights = {other: 1}
    trainer(tmp_path, max_steps=60).fit(whole, module_of(stages))
    stopped = trainer(tmp_path, max_steps=3)
    stopped.fit(first, module_of(stages))
    stopped.save_checkpoint(tmp_path / "reweighed.ckpt")
    trainer(tmp_path, max_steps=60).fit(
        rest, module_of(stages), ckpt_path=tmp_path / "reweighed.ckpt"
    )
    assert first.trained + rest.trained == whole.trained
    of_other = [sum(row >= 400 for row in rows) / len(rows) for rows in whole.trained]
    assert 0.2 < np.mean(of_other[:12]) < 0.8
    assert np.mean(of_other[13:]) == 1
    with pytest.raises(ConfigError, match="training has not begun"):
        module_of(stages).reweigh({other: 1})


@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize("batching", [Fixed(64), Padded(1000)], ids=str)
def test_lightning_resumes_after_the_end_of_an_epoch(
    both_splits: Path, tmp_path: Path, batching: Batching, limit: float
) -> None:
    """With a length that is known and one that is not, and with epochs of three batches.
    Lightning itself loads no state of loaders then."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(checkpoint: Path | None = None) -> Any:
        model = new_model()
        ours = trainer(
            tmp_path,
            max_epochs=3,
            limit_train_batches=limit,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)],
        )
        data = {"batching": batching, "num_workers": 0}
        trained = ShardLoader(both_splits, **data)
        loaders = (
            StatefulShardLoader(trained, transform=lambda batch: [batch]),
            StatefulShardLoader(ShardLoader(both_splits, split="validation", **data)),
        )
        ours.fit(model, *loaders, ckpt_path=checkpoint)
        return model

    whole = run()
    for epoch in (0, 1):
        checkpoint = tmp_path / f"epoch={epoch}.ckpt"
        trained = torch.load(checkpoint, weights_only=False)["global_step"]
        rest = run(checkpoint)
        assert rest.trained == whole.trained[trained:]
        assert rest.trained


@pytest.mark.parametrize("limit", [1.0, 8])
def test_lightning_resumes_after_the_batch_that_was_trained_last(
    both_splits: Path, tmp_path: Path, limit: float
) -> None:
    """With a length that Lightning knows, and one that it does not: then it fetches a batch ahead.
    The state is saved in training and after it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(data: StatefulShardLoader, steps: int, checkpoint: Path | None = None) -> Any:
        model = new_model()
        ours = trainer(
            tmp_path,
            max_steps=steps,
            limit_train_batches=limit,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)],
        )
        ours.fit(model, data, ckpt_path=checkpoint)
        ours.save_checkpoint(tmp_path / f"after {steps}.ckpt")
        return model.trained

    def opened() -> StatefulShardLoader:
        return StatefulShardLoader(ShardLoader(both_splits, **BATCHES), lambda batch: [batch])

    expected = [batch.rows.tolist() for batch in ShardLoader(both_splits, **BATCHES)]
    data = opened()
    assert run(data, 3) == expected[:3]
    for saved in ("step=2.ckpt", "after 3.ckpt"):
        assert run(opened(), 6, tmp_path / saved)[-3:] == expected[3:6]
    assert run(data, 2) == expected[3:5]  # the same loader goes on


def test_loader_without_adapter_is_refused_by_the_trainer_of_lightning(
    both_splits: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"Pass `StatefulShardLoader\(loader\)`"):
        trainer(tmp_path, max_steps=1).fit(new_model(), ShardLoader(both_splits, **BATCHES))


def test_device_of_a_data_module_is_refused(both_splits: Path) -> None:
    with pytest.raises(ConfigError, match="`device`='cuda': the batches are on the device of the"):
        module_of(both_splits, device="cuda")


def test_fabric_saves_the_state_after_the_last_batch(both_splits: Path, tmp_path: Path) -> None:
    """Fabric does not fetch ahead, also where the length is unknown."""
    from lightning.fabric import Fabric

    def opened() -> StatefulShardLoader:
        return StatefulShardLoader(ShardLoader(both_splits, epochs=None, **BATCHES))

    fabric, source, rest = Fabric(accelerator="cpu"), opened(), opened()
    batches = iter(fabric.setup_dataloaders(source, use_distributed_sampler=False))
    for _ in range(3):
        next(batches)
    fabric.save(tmp_path / "saved", {"loader": source})
    fabric.load(tmp_path / "saved", {"loader": rest})
    assert next(iter(rest)).rows.tolist() == next(batches).rows.tolist()


def test_stall_callback_after_exception_fits_again(both_splits: Path, tmp_path: Path) -> None:
    from tokenfeed.integrations.lightning import StallCallback

    stall = StallCallback(skipped_steps=2)
    data = module_of(both_splits)
    ours = trainer(tmp_path, max_steps=20, callbacks=[stall], enable_checkpointing=True)
    with pytest.raises(ValueError, match="a loss of the user's"):
        ours.fit(new_model(fails_at=10), data)
    assert stall.report is not None
    failed = stall.report
    ours.fit(new_model(), data)
    assert stall.report is not failed
    assert stall.report.steps == 8  # of the 10 that were left
    ours.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()


def test_checkpoint_without_state_of_data_module_is_refused(
    both_splits: Path, tmp_path: Path
) -> None:
    data, model = module_of(both_splits), new_model()
    ours = trainer(tmp_path, max_steps=2)
    ours.fit(model, data)
    ours.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    del saved["ShardDataModule"]
    torch.save(saved, tmp_path / "foreign.ckpt")
    ours.fit_loop.epoch_loop.max_steps = 4
    for resumed in (trainer(tmp_path, max_steps=4), ours):  # `ours` has trained as many steps
        with pytest.raises(ResumeError, match="has no state of a ShardDataModule"):
            resumed.fit(new_model(), module_of(both_splits), ckpt_path=tmp_path / "foreign.ckpt")
    ours.fit(model, module_of(both_splits))  # other data for the same trainer
    assert model.trained[2:] == model.trained[:2]
