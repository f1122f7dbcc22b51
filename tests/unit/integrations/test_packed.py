"""Packed batches in models of transformers: which keep documents apart, and which are refused."""

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.hub_models import config_of, write_shards
from transformers import modeling_flash_attention_utils as flash_attention

from tokenfeed import Batch, Packed, Padded, ShardLoader
from tokenfeed.integrations.packed import check_documents_apart
from tokenfeed.pipeline.errors import ConfigError

DECODERS = ("Llama", "Qwen3", "Mistral", "GPT2")
MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


def packed(shards: Path, rows: int = 3) -> Batch:
    with ShardLoader(shards, batching=Packed(32, batch_size=rows), num_workers=0) as loader:
        return next(iter(loader))


def model_of(name: str, auto: str = "CausalLM", attention: str = "eager", **sizes: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"AutoModelFor{auto}")
    model = kind.from_config(config_of(name, **sizes), attn_implementation="eager").eval()
    model.config._attn_implementation = attention  # also where its package is not installed
    return model


class FlashAttention:
    """FlashAttention's functions by their definition; notes which of them were called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.longest: list[object] = []

    def dense(self, q: Any, k: Any, v: Any, *, causal: bool, **_: Any) -> torch.Tensor:
        self.called.append("dense")
        return torch.stack([self._attend(*qkv, causal) for qkv in zip(q, k, v, strict=True)])

    def varlen(self, q: Any, k: Any, v: Any, *, causal: bool, **settings: Any) -> torch.Tensor:
        self.called.append("varlen")
        self.longest += [settings["max_seqlen_q"], settings["max_seqlen_k"]]
        ends = settings["cu_seqlens_q"]
        assert torch.equal(ends, settings["cu_seqlens_k"])
        assert ends.dtype == torch.int32
        pieces = [
            self._attend(q[begin:end], k[begin:end], v[begin:end], causal)
            for begin, end in pairwise(ends.tolist())
        ]
        assert max(map(len, pieces)) <= settings["max_seqlen_q"]
        return torch.cat(pieces)

    def _attend(self, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(0, 1)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    made = FlashAttention()

    def settings(**given: Any) -> dict[str, Any]:
        names = {"is_causal": "causal"} | {f"max_seqlen_{x}": f"max_seqlen_{x}" for x in "qk"}
        return {name: given[key] for key, name in names.items() if key in given}

    functions = (made.dense, made.varlen, None, None, None), (settings, settings)
    monkeypatch.setattr(flash_attention, "lazy_import_flash_attention", lambda *_, **__: functions)
    return made


@torch.no_grad()
def compare_with_documents_alone(model: Any, batch: Batch) -> None:
    """Compare the logits and the loss of a packed batch with those of each document alone."""
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    together = model(**batch, num_items_in_batch=1)
    logits, loss = together.logits.flatten(0, 1), 0.0
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        document = {"input_ids": ids[begin:end][None], "labels": labels[begin:end][None]}
        alone = model(**document, num_items_in_batch=1, use_cache=False)
        scale = alone.logits.abs().max()
        assert (logits[begin:end] - alone.logits[0]).abs().max() < 1e-5 * scale
        loss += alone.loss if end - begin > 1 else 0.0
    torch.testing.assert_close(together.loss, loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_flash_attention_takes_packed_rows_by_document(
    shards: Path, flash: FlashAttention, rows: int
) -> None:
    model, batch = model_of("Llama", attention="flash_attention_2"), packed(shards, rows)
    assert len(batch.cu_seqlens) > rows + 1
    with torch.no_grad():
        model(**batch)
    assert set(flash.called) == {"varlen"}
    assert {(type(longest), longest) for longest in flash.longest} == {(int, 32)}
    compare_with_documents_alone(model, batch)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_packed_batch_in_decoder_equals_each_document_alone(
    shards: Path, name: str, attention: str
) -> None:
    """With the default config, whose `use_cache` is True."""
    model = model_of(name, attention=attention)
    assert model.config.use_cache
    for rows in (1, 2, 8):
        compare_with_documents_alone(model, packed(shards, rows))
    check_documents_apart(model, packed(shards))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_filled_batches_in_decoder_have_the_same_loss(
    shards: Path, name: str, attention: str
) -> None:
    model = model_of(name, attention=attention)
    for plain in (Packed(32, batch_size=11), Padded(256, 16)):
        filled = replace(plain, last="fill")
        both = [ShardLoader(shards, batching=each, num_workers=0) for each in (plain, filled)]
        pairs = [
            pair for pair in zip(*both, strict=True) if len(pair[0].lengths) < len(pair[1].lengths)
        ]
        assert pairs
        for pair in pairs[:2]:
            with torch.no_grad():
                first, second = (
                    model(**batch, num_items_in_batch=batch.num_targets).loss for batch in pair
                )
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "auto", "attention", "sizes"),
    [
        ("Mamba2", "CausalLM", "eager", MAMBA),
        ("Bloom", "CausalLM", "eager", {}),
        ("Bert", "MaskedLM", "eager", {}),
        ("ModernBert", "MaskedLM", "eager", {}),
        ("ModernBert", "MaskedLM", "sdpa", {}),
    ],
)
def test_check_of_model_that_mixes_documents_raises(
    shards: Path, name: str, auto: str, attention: str, sizes: dict[str, Any]
) -> None:
    model = model_of(name, auto, attention, **sizes)
    with pytest.raises(ConfigError, match=rf"{name}For\w+ mixes the documents of a packed row"):
        check_documents_apart(model.train(), packed(shards))
    assert model.training


class OwnModel(torch.nn.Module):
    """A model of a user: one layer of attention, which needs `seq_idx` or ignores it."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        self.embedding, self.masks = torch.nn.Embedding(2_000, 16), masks

    def forward(self, ids: torch.Tensor, seq_idx: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        mask = (seq_idx[:, :, None] == seq_idx[:, None, :]).tril()
        mask = mask if self.masks else torch.ones_like(mask).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_check_of_own_model_passes_each_key_of_a_batch_and_names_the_missing_mask(
    shards: Path,
) -> None:
    batch = packed(shards)
    assert int(batch["input_ids"].max()) < 2_000
    right, wrong = OwnModel(masks=True), OwnModel(masks=False)

    def adapted(model: OwnModel) -> Any:
        return lambda **batch: model(batch["input_ids"], batch["seq_idx"])

    check_documents_apart(adapted(right), batch)
    with pytest.raises(ConfigError, match="attention needs a mask from `seq_idx`"):
        check_documents_apart(adapted(wrong), batch)
    with pytest.raises(ConfigError, match=r"OwnModel cannot be called as .*: missing .* 'ids'"):
        check_documents_apart(right, batch)


def test_check_of_rows_with_one_document_raises(shards: Path) -> None:
    with ShardLoader(shards, batching=Packed(8, 1, split=True), num_workers=0) as loader:
        alone = next(b for b in islice(loader, 50) if len(b.rows) == 1)
    with pytest.raises(ConfigError, match="every row has a single document"):
        check_documents_apart(model_of("Llama"), alone)
