"""Attention within documents and windows: the kernel of ends and the mask say the same."""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import varlen_on_cpu
from torch.nn import attention

from tokenfeed.trainer.data.attention import (
    Reach,
    Scope,
    attend,
    choose_flash_attention,
    kernel_line,
    size_only,
)

HEADS, GROUPS, WIDTH = 4, 2, 8


@pytest.fixture(scope="module", autouse=True)
def varlen() -> None:
    varlen_on_cpu.register()


def sees(query: int, key: int, reach: Reach) -> bool:
    near = reach.window is None or abs(query - key) <= reach.window
    return near and (key <= query or not reach.causal)


def slow_attention(parts: list[torch.Tensor], visible_TT: torch.Tensor) -> torch.Tensor:
    """Of (H, T, K), by the formula."""
    query, key, value = parts
    products = query @ key.transpose(-1, -2) / WIDTH**0.5
    weights: torch.Tensor = products.masked_fill(~visible_TT, -torch.inf).softmax(-1) @ value
    return weights


windows = st.none() | st.integers(0, 12)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(st.lists(lengths, min_size=1, max_size=3), st.booleans(), st.booleans(), windows)
def test_mask_ends_and_calls_reach_the_same_slots(
    rows: list[list[int]], task_is_causal: bool, layer_is_causal: bool, window: int | None
) -> None:
    """And these are the slots of the document that the layer sees."""
    length = max(map(sum, rows))
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in rows]
    ends = torch.tensor([0, *(n for row in rows for n in row)], dtype=torch.int32).cumsum(0)
    ends = ends.to(torch.int32)
    segment_BT = torch.tensor([[s for s, n in enumerate(row) for _ in range(n)] for row in rows])
    mask_BHTT = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
    if task_is_causal:
        mask_BHTT = mask_BHTT.tril()
    shape = (len(rows), HEADS, length, WIDTH)
    random = torch.Generator().manual_seed(0)
    query = torch.randn(shape, generator=random)
    key, value = (torch.randn(len(rows), GROUPS, length, WIDTH, generator=random) for _ in range(2))
    reach = Reach(layer_is_causal, window)
    by_mask = Scope(task_is_causal, mask_BHTT).narrowed(reach, segment_BT)
    by_ends = Scope(task_is_causal, cu_seqlens=ends, longest=size_only(length, ends.device))
    by_ends = by_ends.narrowed(reach, segment_BT)
    by_calls = Scope(task_is_causal, cu_seqlens=ends).narrowed(reach, segment_BT)
    got = attend(query, key, value, by_mask)
    for scope in (by_ends, by_calls):
        torch.testing.assert_close(attend(query, key, value, scope), got, rtol=1e-4, atol=1e-5)
    seen = Reach(task_is_causal or layer_is_causal, window)
    visible = torch.tensor([[sees(q, k, seen) for k in range(length)] for q in range(length)])
    whole = [query, *(part.repeat_interleave(HEADS // GROUPS, 1) for part in (key, value))]
    for row in range(len(rows)):
        together = segment_BT[row][:, None] == segment_BT[row]
        expected = slow_attention([part[row] for part in whole], visible & together)
        torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), windows)
def test_padding_changes_no_token_and_is_a_number(
    row_lengths: list[int], causal: bool, window: int | None
) -> None:
    length = max(row_lengths) + 3
    is_token_BT = torch.arange(length) < torch.tensor(row_lengths)[:, None]
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(len(row_lengths), HEADS, length, WIDTH, generator=random) for _ in "qkv"]
    scope = Scope(False, is_token_BT[:, None, None]).narrowed(Reach(causal, window), is_token_BT)
    got = attend(*parts, scope)
    assert scope.mask_BHTT is None or scope.mask_BHTT.any(-1).all()  # no softmax of nothing
    for row, tokens in enumerate(row_lengths):
        alone = Scope(False).narrowed(Reach(causal, window), is_token_BT[row : row + 1, :tokens])
        cut = [part[row : row + 1, :, :tokens] for part in parts]
        expected = attend(*cut, alone)
        torch.testing.assert_close(got[row : row + 1, :, :tokens], expected, rtol=1e-4, atol=1e-5)


def test_what_sees_all_anyway_keeps_its_scope() -> None:
    """So that the fastest kernel stays."""
    ids_BT = torch.zeros(2, 8, dtype=torch.int64)
    rows = Scope(causal=True)
    assert rows.narrowed(Reach(causal=True, window=None), ids_BT) is rows
    assert rows.narrowed(Reach(causal=True, window=7), ids_BT) is rows
    padded = Scope(causal=False, mask_BHTT=torch.ones(2, 1, 1, 8, dtype=torch.bool))
    assert padded.narrowed(Reach(causal=True, window=None), ids_BT) == Scope(causal=True)


class Library:
    """What torch keeps while an implementation is active."""

    def remove(self) -> None:
        pass


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Pretend to have a Hopper. Return a folder for the package of FlashAttention 3."""
    flash_3 = pytest.importorskip("torch.nn.attention._fa3")  # newer than the oldest torch

    def load() -> Library:
        importlib.import_module("flash_attn_interface")
        return Library()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    attention.register_flash_attention_impl("FA3", register_fn=load)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    yield tmp_path
    attention.register_flash_attention_impl("FA3", register_fn=flash_3.register_flash_attention_fa3)
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


CUDA = torch.device("cuda")


def test_flash_attention_3_is_used_where_installed(hopper: Path) -> None:
    choose_flash_attention(CUDA, torch.bfloat16, drops=False)
    assert attention.current_flash_attention_impl() is None
    line = partial(kernel_line, CUDA, torch.bfloat16, "ends", packed=True, drops=False)
    assert "flash attention, version 2 (" in line()
    (hopper / "flash_attn_interface.py").write_text("")
    importlib.invalidate_caches()
    choose_flash_attention(CUDA, torch.bfloat16, drops=False)
    assert attention.current_flash_attention_impl() == "FA3"
    assert line().endswith("flash attention, version 3")


KERNELS = """
from types import SimpleNamespace
import torch

library = torch.library.Library("flash_attn3_of_hub", "FRAGMENT")
schema = "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
for name in ("fwd", "bwd"):
    if not hasattr(torch.ops.flash_attn3_of_hub, name):
        library.define(name + schema)

def get_kernel(repository, *, version):
    assert (repository, version) == ("kernels-community/flash-attn3", 1)
    ops = SimpleNamespace(ops=torch.ops.flash_attn3_of_hub)
    return SimpleNamespace(__name__="kernels", _ops=ops)
"""


def test_flash_attention_3_comes_from_the_hub_where_only_kernels_is_installed(
    hopper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_3 = pytest.importorskip("torch.nn.attention._fa3")
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.setattr(torch.ops, "flash_attn_3", None)  # and back
    (hopper / "kernels.py").write_text(KERNELS)
    importlib.invalidate_caches()
    choose_flash_attention(CUDA, torch.bfloat16, drops=False)
    assert flash_3._FA3_CUDA_FWD is torch.ops.flash_attn3_of_hub.fwd
    assert flash_3._FA3_CUDA_BWD is torch.ops.flash_attn3_of_hub.bwd
    line = kernel_line(CUDA, torch.bfloat16, "ends", packed=True, drops=False)
    assert line.endswith("version 3 (kernels-community/flash-attn3)")
    choose_flash_attention(CUDA, torch.bfloat16, drops=True)
    assert attention.current_flash_attention_impl() is None


def test_a_hub_that_cannot_be_reached_leaves_version_2_and_a_line(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    (hopper / "kernels.py").write_text(
        "def get_kernel(*args, **named):\n    raise ConnectionError('no route to the Hub')\n"
    )
    importlib.invalidate_caches()
    choose_flash_attention(CUDA, torch.bfloat16, drops=False)
    assert attention.current_flash_attention_impl() is None
    assert "no route to the Hub" in caplog.text


def test_damaged_flash_attention_3_falls_back_with_a_warning(
    hopper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hopper / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: x')")
    choose_flash_attention(CUDA, torch.bfloat16, drops=False)
    assert attention.current_flash_attention_impl() is None
    assert "undefined symbol: x" in caplog.text
