"""Tiny models of `transformers`, made on the spot, and micro-batches to show them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.models.attention import Scope
from tokenfeed.trainer.models.head import Head

__all__ = [
    "DECODERS",
    "ENCODERS",
    "SIZES",
    "VOCABULARY",
    "config_of",
    "save_model",
    "train_config",
]

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough that every token matters
    "pad_token_id": None,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OTHERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4, "head_dim": 8},
    "Gemma3Text": {"sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 48},
    "Bert": {**_NO_DROPOUT, "pad_token_id": 0},
    "Roberta": {**_NO_DROPOUT, "pad_token_id": 1, "type_vocab_size": 1},
    "ModernBert": {"local_attention": 6, "pad_token_id": 0, "global_attn_every_n_layers": 2},
    "DistilBert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Electra": {**_NO_DROPOUT, "pad_token_id": 0, "embedding_size": 32},
}
DECODERS = ("Llama", "Qwen3", "Mistral", "Gemma3Text", "GPT2")
ENCODERS = ("Bert", "Roberta", "ModernBert", "DistilBert", "Electra")


def config_of(name: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    return getattr(transformers, f"{name}Config")(**SIZES | _OTHERS.get(name, {}) | changes)


def save_model(folder: Path, kind: str, config: Any) -> Path:
    """Random weights of `AutoModelFor...kind`, saved as everybody saves them."""
    torch.manual_seed(1)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(folder)
    return folder


def train_config(model: Path | str, **changes: Any) -> TrainConfig:
    return TrainConfig(shards="out", model=f"hf:{model}", **{"sequence_length": 32} | changes)
