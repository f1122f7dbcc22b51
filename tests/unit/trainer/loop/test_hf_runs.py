"""Runs of `transformers` models: resumed, adapted, begun from earlier weights, exported."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.hub_models import LABELS, VOCABULARY, save_model, write_shards
from support.training import assert_same_run, go_on_from, load_weights, make_config, run
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.data.datasets import read_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop.model_export import load_exported
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.report.run_files import Report

pytest.importorskip("peft")

IDS = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
LORA = {"lora": 4, "learning_rate": 5e-2}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": LORA,
    "drawn": {"from_scratch": True},
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("classify") / "shards", "classify")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_model(tmp_path_factory.mktemp('llama'), 'CausalLM', 'Llama')}"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_model(tmp_path_factory.mktemp('bert'), 'MaskedLM', 'Bert')}"


@pytest.fixture(scope="module")
def whole(documents: Path, llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with an undisturbed run of eight steps, `run`, and its export, `model`, by way."""
    folders = {way: tmp_path_factory.mktemp(way) for way in WAYS}
    for way, folder in folders.items():
        export = {"export": folder / "model"}
        run(make_config(documents, folder / "run", model=llama, **WAYS[way], **export))
    return folders


def test_weights_beside_adapters_stay_in_half_precision(
    documents: Path, llama: str, tmp_path: Path
) -> None:
    config = make_config(documents, tmp_path, model=llama, precision="bf16", **LORA)
    with contextlib.closing(Trainer(config)) as trainer:
        weights = dict(trainer.learner.model.named_parameters())
    trained = {weight.dtype for weight in weights.values() if weight.requires_grad}
    frozen = {weight.dtype for weight in weights.values() if not weight.requires_grad}
    assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.slow
def test_adapters_of_another_rank_do_not_resume(
    documents: Path, llama: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    other = make_config(documents, tmp_path, model=llama, lora=2)
    with pytest.raises(ResumeError, match="has --lora 4, this run has 2"):
        go_on_from(whole["adapters"] / "run", 4, other)


def test_lora_is_refused_in_one_line_where_it_cannot_be(
    documents: Path, llama: str, tmp_path: Path
) -> None:
    for changes, words in (
        ({"lora": 4}, "--lora"),
        ({"from_scratch": True}, "--from-scratch"),
        ({"lora": 4, "from_scratch": True, "model": llama}, "--from-scratch"),
        ({"lora": 4, "lora_target": "nothing", "model": llama}, "--lora-target"),
        ({"lora_target": "q_proj", "model": llama}, "Add --lora"),
        ({"lora_alpha": 8, "model": llama}, "--lora-alpha"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(make_config(documents, tmp_path / "run", **changes))


def test_every_layer_that_is_named_gets_adapters_with_the_given_alpha_and_dropout(
    documents: Path, llama: str, tmp_path: Path
) -> None:
    settings = {"lora": 4, "lora_target": "q_proj, v_proj", "lora_alpha": 12, "dropout": 0.25}
    folder = tmp_path / "exported"
    run(make_config(documents, tmp_path / "run", model=llama, steps=1, export=folder, **settings))
    names = "".join(load_weights(tmp_path / "run", 1))
    assert "q_proj.lora_A" in names
    assert "v_proj.lora_A" in names
    assert "k_proj.lora_A" not in names
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 12)
    assert described["lora_dropout"] == 0.25
    again = make_config(documents, tmp_path / "run", model=llama, steps=2, resume=True)
    with pytest.raises(ResumeError, match="has --lora-alpha 12, this run has 8"):
        run(dataclasses.replace(again, **settings | {"lora_alpha": None}))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all", "adapters"])
def test_from_pretrained_loads_what_was_exported(
    way: str, llama: str, whole: dict[str, Path]
) -> None:
    folder = whole[way] / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = load_exported(folder)
    with torch.no_grad():
        got = ours(MicroBatch.of_ids(IDS, causal=True))
        torch.testing.assert_close(got, theirs(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    about = json.loads((folder / "tokenfeed.json").read_text())
    report = Report.of_run(whole[way] / "run")
    assert report is not None
    assert (about["step"], about["task"]) == (report.best_step, "lm")
    before = transformers.AutoModelForCausalLM.from_pretrained(llama.removeprefix("hf:"))
    after = theirs.state_dict()
    changed = {n for n, value in before.state_dict().items() if not torch.equal(value, after[n])}
    assert "model.layers.1.mlp.up_proj.weight" in changed
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w5")["input_ids"] == [5]


@pytest.mark.parametrize("changes", [{}, LORA])
def test_export_keeps_tokenizer_files_dtype_and_limits(
    changes: dict[str, Any], documents: Path, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "source", "CausalLM", "Llama", max_position_embeddings=128)
    transformers.AutoModelForCausalLM.from_pretrained(source).bfloat16().save_pretrained(source)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(read_tokenizer(documents)),
        bos_token="w1",
        unk_token="w0",
        model_max_length=128,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    folder = tmp_path / "exported"
    model = {"model": f"hf:{source}", "export": folder}
    run(make_config(documents, tmp_path / "run", steps=1, **model, **changes))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.max_position_embeddings == 128
    assert theirs.generation_config.eos_token_id == [3, 4]
    after = transformers.AutoTokenizer.from_pretrained(folder)
    for name in ("chat_template", "bos_token", "unk_token", "eos_token", "model_max_length"):
        assert getattr(after, name) == getattr(tokenizer, name)
    weights = ("model.safetensors",)
    sizes = [sum((each / name).stat().st_size for name in weights) for each in (source, folder)]
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.slow
def test_model_by_numbers_exports_as_qwen3(documents: Path, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2}
    folder = tmp_path / "exported"
    settings = {"model": "qwen3", "export": folder, "learning_rate": 1e-2, **numbers}
    run(make_config(documents, tmp_path / "whole", **settings))
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        got = load_exported(folder)(MicroBatch.of_ids(IDS, causal=True))
        torch.testing.assert_close(got, theirs(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert got.std() > 0.1  # the model has learnt something
    config = theirs.config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "tied"), [({}, True), (LORA, False)])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_embeddings_grow_and_learn_added_tokens(
    changes: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    import peft

    shards = write_shards(tmp_path / "shards", "lm", added=2)
    known = VOCABULARY - 2
    sizes = {"vocab_size": known, "tie_word_embeddings": tied}
    source = save_model(tmp_path / "source", "CausalLM", "Llama", **sizes)
    settings: dict[str, Any] = {"model": f"hf:{source}", **changes}
    folder = tmp_path / "exported"
    run(make_config(shards, tmp_path / "whole", export=folder, **settings))
    go_on_from(tmp_path / "whole", 4, make_config(shards, tmp_path / "parts", **settings))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 8)
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    after = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert after.config.vocab_size == VOCABULARY
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(before, name)().weight, getattr(after, name)().weight
        assert not torch.allclose(new[known], new[known + 1], atol=1e-3)
        assert torch.equal(old, new[:known]) == bool(changes)
    with torch.no_grad():
        expected = after(input_ids=IDS).logits
        got = load_exported(folder)(MicroBatch.of_ids(IDS, causal=True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        if changes:
            before.resize_token_embeddings(VOCABULARY)
            adapted = peft.PeftModel.from_pretrained(before, folder / "adapter").eval()
            got = adapted(input_ids=IDS).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_head_of_classes_is_trained_whole_and_exported_with_their_names(
    classes: Path, bert: str, tmp_path: Path
) -> None:
    run(make_config(classes, tmp_path / "run", model=bert, export=tmp_path / "model", **LORA))
    whole = {name for name in load_weights(tmp_path / "run", 8) if ".lora_" not in name}
    assert any("classifier" in name for name in whole)
    assert any("pooler" in name for name in whole)
    assert all("modules_to_save" in name for name in whole)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert theirs.config.id2label == dict(enumerate(LABELS["classify"]))
    ours = load_exported(tmp_path / "model")
    with torch.no_grad():
        got = ours(MicroBatch.of_ids(IDS, causal=False))
        expected = theirs.eval()(input_ids=IDS).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
