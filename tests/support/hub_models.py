"""Tiny models of `transformers`, made on the spot, and data sets to train them on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

from support.data_sets import random_rows, write_rows
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.micro_batch import Head, HeadKind

VOCABULARY, LONGEST = 97, 20
LABELS: dict[Task, tuple[str, ...]] = {
    "classify": ("joy", "fear", "anger"),
    "tag": ("O", "B-A", "I-A", "B-B", "I-B"),
}
DECODERS = ("Llama", "Qwen3", "Mistral", "Gemma3Text", "GPT2")
ENCODERS = ("Bert", "Roberta", "ModernBert")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough that every token matters
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_SPECIAL = {"cls_token_id": None, "sep_token_id": None}
_OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4, "head_dim": 8},
    "Gemma3Text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 48},
    "Bert": {**_NO_DROPOUT, "pad_token_id": 0},
    "Roberta": {**_NO_DROPOUT, "pad_token_id": 1, "type_vocab_size": 1},
    "ModernBert": {
        **_NO_SPECIAL,
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
        "pad_token_id": 0,
        "classifier_pooling": "mean",
    },
}


def config_of(name: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    return getattr(transformers, f"{name}Config")(**_SIZES | _OTHERS.get(name, {}) | changes)


def save_model(folder: Path, kind: str, name: str, **changes: Any) -> Path:
    """Random weights of `AutoModelFor{kind}`, saved as everybody saves them."""
    torch.manual_seed(1)
    transformers.utils.logging.disable_progress_bar()
    config = config_of(name, **changes)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(folder)
    return folder


def class_of(head: Head) -> str:
    """What `save_model` calls it."""
    if head.kind == "vocabulary":
        return "CausalLM"
    return {"row": "SequenceClassification", "token": "TokenClassification"}[head.kind]


def head_of(kind: HeadKind) -> Head:
    labels = {"vocabulary": (), "row": LABELS["classify"], "token": LABELS["tag"]}[kind]
    outputs = len(labels) or VOCABULARY
    return Head(kind=kind, outputs=outputs, vocabulary_size=VOCABULARY, labels=labels)


def train_config(model: Path | str, **changes: Any) -> TrainConfig:
    settings = {"shards": "out", "sequence_length": 32, "model": f"hf:{model}"}
    return TrainConfig(**settings | changes)


def write_shards(folder: Path, task: Task, *, rows: int = 60, added: int = 0) -> Path:
    """Random rows with a tokenizer of words w0, w1, ..., the last ones as added tokens."""
    rng = np.random.default_rng(1)
    splits = {
        split: random_rows(
            rng.integers(2, LONGEST + 1, count).astype(np.int64), task, vocabulary_size=VOCABULARY
        )
        for split, count in (("train", rows), ("validation", 12))
    }
    known = {f"w{id}": id for id in range(VOCABULARY - added)}
    words = Tokenizer(models.WordLevel(known, "w0"))
    words.add_special_tokens([f"w{id}" for id in range(VOCABULARY - added, VOCABULARY)])
    content = json.dumps({"added_tokens": []} | json.loads(words.to_str())).encode()
    return write_rows(
        folder,
        splits,
        VOCABULARY,
        task=task,
        label_names=LABELS.get(task, ()),
        tokenizer=content,
    )
