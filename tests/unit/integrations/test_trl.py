"""TRL's SFTTrainer over ShardLoaders trains on the same rows and losses as a Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.hub_models import config_of, write_shards
from tokenizers import Tokenizer, models

from tokenfeed import Packed, Padded, ShardLoader
from tokenfeed.integrations.transformers import ShardTrainer
from tokenfeed.pipeline.planning.policies import Batching

pytest.importorskip("trl", exc_type=ImportError)

import pytest
import trl

from tokenfeed.integrations.trl import ShardSFTTrainer
from tokenfeed.pipeline.errors import ConfigError

pytestmark = [
    pytest.mark.slow,  # seconds, for the import
    pytest.mark.filterwarnings("ignore"),  # those of TRL
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("chat") / "shards", "chat")


def loader_of(shards: Path, batching: Batching, split: str = "train") -> ShardLoader:
    epochs = None if split == "train" else 1
    return ShardLoader(
        shards,
        batching=batching,
        split=split,
        num_workers=0,
        epochs=epochs,
        micro_batches_per_step=2,
        targets="all" if split == "validation" else "last",
    )


def trainer(kind: Any, folder: Path, loader: ShardLoader, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("Llama"))
    makes = trl.SFTConfig if kind is not ShardTrainer else transformers.TrainingArguments
    args = makes(
        str(folder),
        max_steps=6,
        save_steps=3,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        logging_steps=1,
        **settings.pop("args", {}),
    )
    words = {f"w{number}": number for number in range(97)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w0", pad_token="w1"
    )
    return kind(
        model=model, args=args, train_dataset=loader, processing_class=tokenizer, **settings
    )


def losses_of(ours: Any) -> list[float]:
    return [record["loss"] for record in ours.state.log_history if "loss" in record]


@pytest.mark.parametrize("batching", [Packed(32, 2, last="fill"), Padded(128)], ids=str)
def test_sft_trainer_has_the_losses_of_a_trainer(
    shards: Path, tmp_path: Path, batching: Batching
) -> None:
    both = [
        trainer(kind, tmp_path / kind.__name__, loader_of(shards, batching))
        for kind in (ShardSFTTrainer, ShardTrainer)
    ]
    for each in both:
        each.train()
    first, second = map(losses_of, both)
    assert len(first) == 6
    assert first == pytest.approx(second, rel=2e-3)  # rounded in the log
    states = [each.train_dataset.state_dict() for each in both]
    assert states[0] == states[1]


def test_sft_trainer_evaluates_and_resumes(shards: Path, tmp_path: Path) -> None:
    batching = Packed(32, 2)
    validation = loader_of(shards, batching, "validation")
    whole = trainer(ShardSFTTrainer, tmp_path, loader_of(shards, batching), eval_dataset=validation)
    whole.train()
    assert whole.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    again = trainer(ShardSFTTrainer, tmp_path, loader_of(shards, batching))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_of(again)[-3:] == losses_of(whole)[-3:]
    assert again.train_dataset.state_dict() == whole.train_dataset.state_dict()


@pytest.mark.parametrize("name", ["packing", "padding_free", "assistant_only_loss"])
def test_preparation_by_trl_is_refused(shards: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"`batching=Packed\(...\)`"):
        trainer(ShardSFTTrainer, tmp_path, loader_of(shards, Packed(32, 2)), args={name: True})


def test_settings_of_trl_that_the_loader_replaces_are_named(shards: Path, tmp_path: Path) -> None:
    settings = {"max_length": 16, "completion_only_loss": False}
    with pytest.warns(UserWarning, match="max_length=16, completion_only_loss=False: not used"):
        trainer(ShardSFTTrainer, tmp_path, loader_of(shards, Packed(32, 2)), args=settings)


def test_formatting_function_is_refused(shards: Path, tmp_path: Path) -> None:
    loader = loader_of(shards, Packed(32, 2))
    with pytest.raises(ConfigError, match="`formatting_func`: has no effect"):
        trainer(ShardSFTTrainer, tmp_path, loader, formatting_func=str)
