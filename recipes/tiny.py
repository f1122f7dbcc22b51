"""What the examples share and what is not their point: a command line, and a model of no use."""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenfeed import Manifest


def parse_args(doc: str) -> argparse.Namespace:
    """The settings of a run, from the command line."""
    title, *_ = doc.splitlines()
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("data", type=Path, help="output folder of `pretokenize`")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/example"))
    parser.add_argument("--steps", type=int, default=100, help="end after this step")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--micro-batches-per-step", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="from the latest checkpoint")
    return parser.parse_args()


def make_model(data: Path) -> LlamaForCausalLM:
    """Two layers, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=Manifest.read(data).tokenizer.vocabulary_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)
