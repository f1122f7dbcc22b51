"""The built-in decoders in the format of `transformers`: each is a Starcoder2 without biases.

Both have pre-norm blocks with LayerNorm, rotary positions, a feed-forward network of four times the
width with tanh-approximated GELU, and a head tied to the embedding. `transformers` has Q, K and V
apart, and biases in its norms, which are zero here. Imports no `transformers`.
"""

from typing import Any

import torch

from tokenfeed.trainer.data.micro_batch import Head
from tokenfeed.trainer.distributed.world import State
from tokenfeed.trainer.models.transformer import ROTARY_BASE, ModelSize, Transformer

_EMBEDDING = "model.embed_tokens.weight"
_OUTSIDE = {"embedding": _EMBEDDING, "norm": "model.norm.weight"}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention_out": "self_attn.o_proj",
    "feed_norm": "post_attention_layernorm",
    "feed_in": "mlp.c_fc",
    "feed_out": "mlp.c_proj",
}
"""Modules of a block by their names in `transformers`, all but Q, K and V."""
_QKV = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]


def is_starcoder2(size: ModelSize | None, head: Head) -> bool:
    """Return whether a built-in model of this size and head is a Starcoder2."""
    return size is not None and not size.by_word and head.causal


def starcoder2_config(
    model: Transformer, size: ModelSize, head: Head, length: int
) -> dict[str, Any]:
    """Return config.json of a model that was trained on rows of `length` tokens."""
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "vocab_size": model.embedding.num_embeddings,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": length,
        "norm_epsilon": model.norm.eps,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "use_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": head.end_id,
        "pad_token_id": head.pad_id,
    }


def to_starcoder2(model: Transformer) -> State:
    """Return the weights by their names in `transformers`."""
    found: State = {
        _OUTSIDE["embedding"]: model.embedding.weight,
        **_norm("model.norm", model.norm),
    }
    for number, block in enumerate(model.blocks):
        prefix = f"model.layers.{number}."
        whole = block.get_submodule("attention_in").get_parameter("weight")
        parts = zip(_QKV, whole.chunk(3), strict=True)
        found |= {prefix + name: part.contiguous() for name, part in parts}
        for ours, theirs in _INSIDE.items():
            found |= _norm(prefix + theirs, block.get_submodule(ours))
    return {name: value.detach() for name, value in found.items()}


def _norm(name: str, module: torch.nn.Module) -> State:
    """Return the weight of a module, with a bias of zeros if the module is a norm."""
    weight = module.get_parameter("weight")
    bias = {f"{name}.bias": torch.zeros_like(weight)} if weight.dim() == 1 else {}
    return {f"{name}.weight": weight, **bias}


def from_starcoder2(state: State) -> State:
    """Return the weights by their names in `Transformer`."""
    layers = sum(name.endswith(_QKV[0]) for name in state)
    found = {f"{ours}.weight": state[theirs] for ours, theirs in _OUTSIDE.items()}
    for number in range(layers):
        ours, theirs = f"blocks.{number}.", f"model.layers.{number}."
        found[f"{ours}attention_in.weight"] = torch.cat([state[theirs + name] for name in _QKV])
        for name, other in _INSIDE.items():
            found[f"{ours}{name}.weight"] = state[f"{theirs}{other}.weight"]
    return found
