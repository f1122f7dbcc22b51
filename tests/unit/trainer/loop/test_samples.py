"""Samples: what a model continues, and where the texts are shown."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import VOCABULARY, make_config, run, write_labelled
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.trainer.data.datasets import read_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop.model_export import load_exported
from tokenfeed.trainer.loop.trainer import Trainer


def run_with_samples(task: Task, tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    shards = write_labelled(tmp_path / "shards", task)
    settings = {"samples": 2, "sequence_length": 64, "export": tmp_path / "model"} | changes
    run(make_config(shards, tmp_path / "run", **settings))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "samples" in line]


@pytest.mark.parametrize("task", ["lm", "complete"])
def test_samples_are_the_likeliest_tokens(task: Task, tmp_path: Path) -> None:
    # The rate keeps the weights as they are drawn, so any exported step has the same ones.
    found = run_with_samples(task, tmp_path, learning_rate=1e-12)
    assert [line["step"] for line in found] == [0, 4, 8]
    assert found[0]["samples"] == found[-1]["samples"]
    assert len(found[0]["samples"]) == 2
    tokenizer = Tokenizer.from_buffer(read_tokenizer(tmp_path / "shards"))
    model = load_exported(tmp_path / "model")
    for sample in found[0]["samples"]:
        words = [tokenizer.token_to_id(word) for word in sample["prompt"].split()]
        assert words
        expected = list(words)
        for _ in range(48):
            with torch.no_grad():
                logits_TV = model(MicroBatch.of_ids(torch.tensor([expected]), causal=True))[0]
            expected.append(int(logits_TV[-1, : tokenizer.get_vocab_size()].argmax()))
        text = [tokenizer.token_to_id(word) for word in sample["text"].split()]
        assert text == expected[len(words) :]


def test_samples_of_a_task_without_texts_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--samples.*=2: a model of classify does not continue"):
        run_with_samples("classify", tmp_path, micro_batch_tokens=256)


@pytest.mark.parametrize("name", ["shallow", "qwen3", "Gemma3Text", "GPT2", "Mistral", "own"])
def test_samples_by_cache_equal_those_of_whole_rows(name: str, tmp_path: Path) -> None:
    """The prompts have several lengths, and the windows of Gemma3 and Mistral are shorter."""
    shards = write_labelled(tmp_path / "shards", "lm")
    models = {"own": "support.training:small_model", "qwen3": "qwen3", "shallow": "shallow"}
    if name not in models:
        hub = pytest.importorskip("support.hub_models", reason="needs transformers")
        folder = hub.save_model(tmp_path / "hub", "CausalLM", name, vocab_size=VOCABULARY)
        models[name] = f"hf:{folder}"
    own: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4} if name == "qwen3" else {}
    config = make_config(
        shards, tmp_path / "run", samples=6, sequence_length=64, model=models[name], **own
    )
    with contextlib.closing(Trainer(config)) as trainer:
        model, tokenizer = trainer.learner.model, Tokenizer.from_buffer(read_tokenizer(shards))
        with torch.no_grad():
            for weight in model.parameters():  # as they are drawn, a token repeats itself
                weight.add_(0.2 * torch.randn(weight.shape))
        assert trainer.sampler is not None
        if name == "own":
            model.new_cache = lambda: None  # type: ignore[assignment]
        found, model = trainer.sampler.samples(), model.eval()
        lengths, words = set(), set()
        for sample in found:
            ids = [tokenizer.token_to_id(word) for word in sample["prompt"].split()]
            lengths.add(len(ids))
            for word in sample["text"].split():
                with torch.no_grad():
                    logits_BTV = model(MicroBatch.of_ids(torch.tensor([ids]), causal=True))
                ids.append(int(logits_BTV[0, -1, : tokenizer.get_vocab_size()].argmax()))
                assert tokenizer.id_to_token(ids[-1]) == word
                words.add(word)
    assert len(lengths) > 1
    assert len(words) > 3
