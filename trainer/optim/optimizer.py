"""Which optimizer updates which weight.

AdamW for everything, or Muon for the matrices of hidden layers and AdamW for the rest. Muon makes
an update's singular values equal, which suits a matrix that maps one hidden state to another, and
neither a table of rows, as embeddings are, nor a head, whose outputs have meanings.
"""

from typing import Any, cast

import torch
from torch import nn

from tokenfeed.trainer.config.run_config import OptimizerName
from tokenfeed.trainer.optim.muon import MuonAdamW

__all__ = ["hidden_matrices", "is_embedding", "make_optimizer", "set_learning_rate"]

_BETAS = (0.9, 0.95)
_HEAD_NAMES = {"head", "heads", "lm_head", "classifier", "score", "cls", "qa_outputs"}
"""What the heads of models are called, here and in transformers."""


def make_optimizer(
    model: nn.Module, name: OptimizerName, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer of the weights that are trainable now; its rate is `set_learning_rate`'s.

    Only weights of two and more dimensions decay: biases and gains of norms do not. A model
    without hidden matrices is trained by AdamW alone, also under the name muon.
    """
    matrices = hidden_matrices(model) if name == "muon" else []
    rest = _decaying_and_kept(model, {id(matrix) for matrix in matrices}, weight_decay)
    adamw = torch.optim.AdamW(rest, betas=_BETAS, fused=True)
    return MuonAdamW(matrices, adamw, weight_decay) if matrices else adamw


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of linear layers, without those of heads or tied to an embedding.

    A head is what is called like one, and in transformers what surrounds a model's `base_model`.
    A bare parameter of two dimensions is left out: it may be a table of positions or a router.
    """
    linear = [module for module in model.modules() if _is_linear(module)]
    weights = dict.fromkeys(p for module in linear for p in module.parameters(recurse=False))
    others = _of_embeddings_and_heads(model)
    return [w for w in weights if w.requires_grad and w.dim() == 2 and id(w) not in others]


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is a table of rows by id."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _is_linear(module: nn.Module) -> bool:
    # Conv1D: the linear layer of GPT-2 in transformers, which need not be installed.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _of_embeddings_and_heads(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for path, module in model.named_modules():
        if is_embedding(module) or _HEAD_NAMES.intersection(path.split(".")):
            found |= _ids(module)
        if hasattr(module, "base_model_prefix"):  # of transformers; it may be its own base model
            found |= _ids(module) - _ids(cast(nn.Module, module.base_model))
    return found


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _decaying_and_kept(
    model: nn.Module, taken: set[int], weight_decay: float
) -> list[dict[str, Any]]:
    """AdamW's groups: what decays and what does not, of the trainable weights not `taken`."""
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    return [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
