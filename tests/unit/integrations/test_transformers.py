"""`transformers.Trainer` over ShardLoaders: what it evaluates, resumes from and refuses."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.hub_models import config_of, write_shards
from support.simulated_clocks import SimulatedClock
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LabelSmoother

from tokenfeed import Fixed, Packed, Padded, ShardDataset, ShardLoader, Stage
from tokenfeed.integrations.dataloader import StatefulShardLoader, checked_loader
from tokenfeed.integrations.transformers import ShardTrainer, StallCallback
from tokenfeed.pipeline.errors import ConfigError, ResumeError

pytestmark = pytest.mark.slow  # seconds, for the import


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


def open_split(shards: Path, split: str = "train", **settings: Any) -> ShardLoader:
    defaults = {"batching": Padded(128), "num_workers": 0, "epochs": None}
    return ShardLoader(shards, split=split, **defaults | settings)


def trainer(folder: Path, loader: ShardLoader, **settings: Any) -> ShardTrainer:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("Llama"))
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=12,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_steps=6,
        logging_steps=1,
    )
    return ShardTrainer(model=model, args=args, train_dataset=loader, **settings)


def test_settings_of_the_trainer_that_the_loader_replaces_are_named(
    shards: Path, tmp_path: Path
) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        per_device_train_batch_size=2,
        dataloader_num_workers=3,
        data_seed=4,
        auto_find_batch_size=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config_of("Llama"))
    named = "per_device_train_batch_size=2, dataloader_num_workers=3, data_seed=4, auto_find_batch"
    unused = f"^{named}_size=True: not used"
    with pytest.warns(UserWarning, match=unused):
        ShardTrainer(model=model, args=args, train_dataset=open_split(shards))


def test_trainer_evaluates_the_same_rows_each_time(shards: Path, tmp_path: Path) -> None:
    validation = open_split(shards, "validation", epochs=1, shuffle=False)
    next(iter(validation))  # someone looks at a batch, and leaves
    ours = trainer(tmp_path, open_split(shards), eval_dataset=validation)
    losses = [ours.evaluate()["eval_loss"] for _ in range(2)]
    fresh = trainer(
        tmp_path,
        open_split(shards),
        eval_dataset=open_split(shards, "validation", epochs=1, shuffle=False),
    )
    assert losses == [fresh.evaluate()["eval_loss"]] * 2


@pytest.mark.parametrize("epochs", [None, 1])
def test_trainer_reports_the_rows_that_it_has_trained(
    shards: Path, tmp_path: Path, epochs: int | None
) -> None:
    trained = trainer(tmp_path, open_split(shards, epochs=epochs)).train()
    loader = open_split(shards, epochs=epochs)
    batches = itertools.chain(loader, loader)
    rows = sum(len(batch.rows) for batch in itertools.islice(batches, trained.global_step))
    metrics = trained.metrics
    shown = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert shown == pytest.approx(rows, rel=0.01)


def test_evaluation_without_an_end_is_refused(shards: Path, tmp_path: Path) -> None:
    endless = open_split(shards, "validation")
    with pytest.raises(ConfigError, match="`eval_dataset`: the loader has no end"):
        trainer(tmp_path, open_split(shards), eval_dataset=endless)
    named = {"endless": open_split([Stage({shards: 1})], "validation", epochs=1)}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`endless`: the loader has no end"):
        trainer(tmp_path, open_split(shards), eval_dataset=named)
    with pytest.raises(ConfigError, match="`eval_dataset`: the loader has no end"):
        trainer(tmp_path, open_split(shards)).evaluate(endless)


def test_loaders_that_do_not_suit_trainer_are_refused(shards: Path, tmp_path: Path) -> None:
    train = open_split(shards, epochs=1)
    with pytest.raises(ConfigError, match="the training would miss the rows"):
        trainer(tmp_path, train, eval_dataset=train)
    with pytest.raises(ConfigError, match="`eval_dataset`: list is not a ShardLoader"):
        trainer(tmp_path, train, eval_dataset=[])
    with pytest.raises(ConfigError, match="`data_collator`: has no effect"):
        trainer(tmp_path, train, data_collator=list)
    with pytest.raises(ConfigError, match="`train_dataset`: NoneType is not a ShardLoader"):
        trainer(tmp_path, None).train()  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatches", [None, False])
def test_plain_trainer_names_the_trainer_that_takes_shards(
    shards: Path, tmp_path: Path, dispatches: bool | None
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_of("Llama"))
    settings = {"max_steps": 1, "use_cpu": True, "report_to": "none"}
    settings["accelerator_config"] = {"dispatch_batches": dispatches}
    args = transformers.TrainingArguments(str(tmp_path), **settings)
    data: Any
    loader = open_split(shards, epochs=1)
    for data in (ShardDataset(shards, Padded(128)), loader, StatefulShardLoader(loader)):
        plain = transformers.Trainer(model=model, args=args, train_dataset=data)
        with pytest.raises(ConfigError, match=r"for `transformers\.Trainer`, .*ShardTrainer"):
            plain.train()
    seen: list[Any] = []  # a builtin method has no module
    list(DataLoader(ShardDataset(shards, Padded(128)), batch_size=None, collate_fn=seen.append))
    assert seen


def test_trainer_refuses_models_that_mix_packed_documents(shards: Path, tmp_path: Path) -> None:
    ours = trainer(tmp_path, open_split(shards, batching=Packed(32, 2)))
    ours.model = transformers.AutoModelForCausalLM.from_config(config_of("Bloom"))
    ours.model_wrapped = ours.model
    with pytest.raises(ConfigError, match=r"`model`: BloomFor\w+ mixes the documents"):
        ours.train()


def test_resume_without_a_checkpoint_raises(shards: Path, tmp_path: Path) -> None:
    ours = trainer(tmp_path / "wrong", open_split(shards))
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*wrong"):
        ours.train(resume_from_checkpoint=True)
    with pytest.raises(ResumeError, match=r"loader\.json: .* cannot be read"):
        ours.train(resume_from_checkpoint=str(tmp_path))


def test_resume_after_the_last_step_trains_nothing(shards: Path, tmp_path: Path) -> None:
    whole = trainer(tmp_path, open_split(shards))
    whole.train()
    again = trainer(tmp_path, open_split(shards))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert again.state.global_step == 12
    assert again.train_dataset.state_dict() == whole.train_dataset.state_dict()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_is_the_mean_over_all_targets(tmp_path: Path, smoothing: float) -> None:
    """Some batches of one row have no target."""
    data = write_shards(tmp_path / "shards", "complete")
    one_row = {"batching": Fixed(1), "epochs": 1}
    validation = open_split(data, "validation", **one_row)
    assert min(batch.num_targets for batch in validation) == 0
    ours = trainer(tmp_path, open_split(data), eval_dataset=validation)
    if smoothing:
        ours.label_smoother = LabelSmoother(epsilon=smoothing)
    ours.model.eval()
    losses = torch.zeros(())
    with torch.no_grad():
        for batch in validation:
            logits = ours.model(batch["input_ids"]).logits[0, :-1]
            targets = batch["labels"][0, 1:]
            losses += cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    expected = losses / sum(batch.num_targets for batch in validation)
    assert ours.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_resumed_trainer_logs_the_epochs_of_a_loader_with_an_end(
    shards: Path, tmp_path: Path
) -> None:
    def run(per_step: int = 1, **settings: Any) -> list[tuple[int, float]]:
        ours = trainer(tmp_path, open_split(shards, epochs=1))
        ours.args.max_steps, ours.args.num_train_epochs = -1, 2
        ours.args.gradient_accumulation_steps, ours.args.save_steps = per_step, 3
        ours.train(**settings)
        return [(log["step"], log["epoch"]) for log in ours.state.log_history]

    batches = len(open_split(shards, epochs=1))
    for per_step in (2, 1):  # as Trainer counts them without a resume
        steps = -(-batches // per_step)  # the last one may be completed by a filler
        expected = [epoch + step / steps for epoch in range(2) for step in range(1, steps + 1)]
        whole = run(per_step)
        assert whole == [*enumerate(expected, 1), (len(expected), 2.0)]
    assert run(resume_from_checkpoint=str(tmp_path / "checkpoint-3")) == whole


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_loader_on_another_device_than_trainer_is_refused(
    shards: Path, tmp_path: Path, name: str
) -> None:
    elsewhere, here = open_split(shards), open_split(shards)
    elsewhere.device = torch.device("cuda:1")
    loaders = {"train_dataset": here, "eval_dataset": here} | {name: elsewhere}
    train = loaders.pop("train_dataset")
    with pytest.raises(ConfigError, match=rf"`{name}`: the loader delivers to cuda:1, .* on cpu"):
        trainer(tmp_path, train, **loaders)


def test_cpu_with_a_number_is_the_device_of_a_loader_on_the_cpu(shards: Path) -> None:
    loader = open_split(shards)  # torch.distributed makes the Trainer's device "cpu:0"
    assert checked_loader("train_dataset", loader, torch.device("cpu:0"), None) is loader


def test_sum_of_targets_over_ranks_is_communication(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    count = transformers.Trainer._get_num_items_in_batch

    def slow(*args: Any) -> Any:
        clock.sleep(1.0)  # another rank is late
        return count(*args)

    monkeypatch.setattr(transformers.Trainer, "_get_num_items_in_batch", slow)
    stall = StallCallback(skipped_steps=2)
    trainer(tmp_path, open_split(shards), callbacks=[stall]).train()
    assert stall.report is not None
    causes = stall.report.causes
    assert causes["communication"].seconds == pytest.approx(stall.report.steps, rel=1e-3)
    assert causes["data"].seconds < 0.1
