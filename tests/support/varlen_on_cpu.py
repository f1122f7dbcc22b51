"""`varlen_attn` on the CPU, by the formula: torch has kernels for GPUs only."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@cache
def register() -> list[tuple[int, int]]:
    """Let `varlen_attn` work on the CPU. Return the list that gets each call's number of ends, and
    its bound of a segment's length."""
    from torch.nn.attention import varlen

    calls: list[tuple[int, int]] = []

    def forward(*inputs: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, ends, _, longest, *_ = inputs
        assert ends.dtype == torch.int32
        assert int(ends.diff().max()) <= longest
        calls.append((len(ends), longest))
        out = torch.empty_like(query)
        window = settings.get("window_size") or inputs[9]
        for part, weights, _, _, values in _segments(ends, query, key, value, window):
            out[part] = (weights @ values).transpose(0, 1).to(out.dtype)
        log_sum = torch.empty(query.shape[1], query.shape[0])
        return out, log_sum, torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Tensor, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _, ends, *_ = inputs
        window = settings.get("window_size") or inputs[12]
        grads = [torch.empty_like(each) for each in (query, key, value)]
        for part, weights, queries, keys, values in _segments(ends, query, key, value, window):
            of_out = grad[part].transpose(0, 1).float()
            of_weights = of_out @ values.mT
            of_products = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
            of_products = of_products / query.shape[-1] ** 0.5
            found = (of_products @ keys, of_products.mT @ queries, weights.mT @ of_out)
            for total, value_of_part in zip(grads, found, strict=True):
                shared = value_of_part.unflatten(0, (total.shape[1], -1)).sum(1)
                total[part] = shared.transpose(0, 1).to(total.dtype)
        return grads[0], grads[1], grads[2]

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    return calls


def _segments(
    ends: Tensor, query: Tensor, key: Tensor, value: Tensor, window: list[int]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield the slots of a segment, its attention weights, and its queries, keys and values."""
    left, right = window
    repeats = query.shape[1] // key.shape[1]
    for begin, end in pairwise(ends.tolist()):
        slot = torch.arange(end - begin)
        behind = slot[:, None] - slot
        visible = ((left < 0) | (behind <= left)) & ((right < 0) | (-behind <= right))
        queries = query[begin:end].transpose(0, 1).float()
        keys, values = (
            each[begin:end].repeat_interleave(repeats, 1).transpose(0, 1).float()
            for each in (key, value)
        )
        products = queries @ keys.mT / query.shape[-1] ** 0.5
        weights = products.masked_fill(~visible, -torch.inf).softmax(-1)
        yield slice(begin, end), weights, queries, keys, values
