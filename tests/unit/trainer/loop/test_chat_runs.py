"""Runs on conversations: sampled replies, and an export with the template of the shards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.data_sets import byte_tokenizer, corpus_rows
from support.training import make_config, run

from tokenfeed import pretokenize

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
PLAIN = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}\
{{ message.content + '<|im_end|>\n' }}{% endfor %}"""
GENERATING = """{{ bos_token }}{% if brief %}user{% endif %}\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}\
{% if message.role == 'assistant' %}{% generation %}\
{{ message.content + '<|im_end|>\n' }}{% endgeneration %}\
{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
CONVERSATIONS = [
    [
        {"role": role, "content": f"{word}\n{number % 3 + 2}"}
        for word, role in zip(
            ("ask", "reply", "more", "last"), ("user", "assistant") * 2, strict=True
        )
    ]
    for number in range(40)
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of conversations, whose template is not the tokenizer's own."""
    folder = tmp_path_factory.mktemp("chat")
    texts = ["ask reply more last user assistant"] * 9
    tokenizer = byte_tokenizer(texts, end=SPECIAL[0], special=SPECIAL[1:])
    own = folder / "tokenizer"
    own.mkdir()
    tokenizer.save(str(own / "tokenizer.json"))
    about = {"chat_template": PLAIN, "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    about["bos_token"] = "<|im_start|>"
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    (own / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "template.jinja").write_text(GENERATING)
    rows = [{"messages": messages} for messages in CONVERSATIONS]
    pretokenize(
        rows,
        folder / "out",
        task="chat",
        tokenizer=own,
        chat_template=folder / "template.jinja",
        template_argument={"brief": True},
        validation=0.2,
    )
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["built-in", "transformers"])
def test_exports_have_the_template_of_the_shards(source: str, shards: Path, tmp_path: Path) -> None:
    import transformers

    model = "tiny"
    if source == "transformers":
        config = transformers.Qwen2Config(
            vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1
        )
        config.num_attention_heads = config.num_key_value_heads = 2
        transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
        own = transformers.AutoTokenizer.from_pretrained(shards.parent / "tokenizer")
        own.bos_token = "<|pad|>"  # other than in the shards
        own.save_pretrained(tmp_path / "model")
        model = f"hf:{tmp_path / 'model'}"
    folder = tmp_path / "exported"
    run(make_config(shards, tmp_path / "run", model=model, export=folder, steps=2))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template.endswith(GENERATING)
    rows = {ids for _, _, ids in corpus_rows(shards)}
    assert len(rows) == 3
    for messages in CONVERSATIONS:
        made = tokenizer.apply_chat_template(messages, return_dict=True)
        assert tuple(made["input_ids"]) in rows


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, "last"])
def test_samples_reply_to_a_conversation(targets: str | None, shards: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"samples": 3, "sequence_length": 128, "learning_rate": 3e-3}
    settings |= {"steps": 50, "eval_every": 50, "save_every": 50, "targets": targets}
    run(make_config(shards, tmp_path / "run", **settings))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    samples = [line["samples"] for line in lines if "samples" in line][-1]
    assert len(samples) == 3
    for sample in samples:
        assert sample["prompt"].endswith("assistant\n")
        assert ("more" in sample["prompt"]) == (targets == "last")
        word = "last" if targets == "last" else "reply"
        assert re.fullmatch(rf"{word}\n\d", sample["text"])  # it ends at the stop token
