"""Models of `transformers`: they give what they give alone and by themselves, or are refused."""

import itertools
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.host_waits import HostWaits
from support.hub_models import (
    DECODERS,
    ENCODERS,
    VOCABULARY,
    class_of,
    head_of,
    save_model,
    train_config,
    write_shards,
)
from support.training import make_config, read_metrics, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.policies import Packed, Padded
from tokenfeed.trainer.data.micro_batch import Head, HeadKind, MicroBatch, Shaper
from tokenfeed.trainer.models.build import make_model
from tokenfeed.trainer.models.hf_model import HubModel
from tokenfeed.trainer.tasks import vocabulary_loss
from tokenfeed.trainer.tasks.language_modeling import LanguageModelling, has_hidden

MakeModel = Any
CASES: list[tuple[str, HeadKind]] = [
    *((name, "vocabulary") for name in DECODERS),
    *((name, "token") for name in ("Qwen3", *ENCODERS)),
    *((name, "row") for name in DECODERS + ENCODERS),
]
PACKED = [case for case in CASES if case[1] != "row"]
TASK_OF: dict[HeadKind, Task] = {"vocabulary": "lm", "token": "tag", "row": "classify"}


@pytest.fixture(scope="module")
def make_hub(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes the model of a case: (name, kind) -> (folder, head, model)."""
    made: dict[tuple[str, HeadKind], tuple[Path, Head, HubModel]] = {}

    def make(name: str, kind: HeadKind) -> tuple[Path, Head, HubModel]:
        if (name, kind) not in made:
            head = head_of(kind)
            folder = save_model(tmp_path_factory.mktemp(name), class_of(head), name)
            model = make_model(train_config(folder), head)
            assert isinstance(model, HubModel)
            made[name, kind] = (folder, head, model.eval())
        return made[name, kind]

    return make


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[HeadKind, Path]:
    return {
        kind: write_shards(tmp_path_factory.mktemp(task) / "shards", task)
        for kind, task in TASK_OF.items()
    }


def shown(
    folder: Path, batching: Packed | Padded, head: Head
) -> Iterator[tuple[Batch, MicroBatch]]:
    """Three batches, and what a model is shown of them."""
    shape = Shaper(causal=head.causal, apart=True, separation="mask")
    settings = {"batching": batching, "epochs": 1, "device": "cpu", "num_workers": 0}
    with ShardLoader(folder, **settings) as loader:
        for batch in itertools.islice(loader, 3):
            yield batch, shape(batch)


def alone(model: HubModel, head: Head, ids_T: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(MicroBatch.of_ids(ids_T[None], causal=head.causal))[0]
    return logits


@pytest.mark.parametrize(("name", "kind"), PACKED)
@torch.no_grad()
def test_packed_documents_get_what_each_gets_alone(
    name: str, kind: HeadKind, make_hub: MakeModel, shards: dict[HeadKind, Path]
) -> None:
    _, head, model = make_hub(name, kind)
    compared = 0
    for batch, micro_batch in shown(shards[kind], Packed(32, batch_size=3), head):
        logits = model(micro_batch).flatten(0, 1)
        ids = batch["input_ids"].flatten()
        for begin, end in pairwise(batch.cu_seqlens.tolist()):
            expected = alone(model, head, ids[begin:end])
            torch.testing.assert_close(logits[begin:end], expected, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(("name", "kind"), CASES)
@torch.no_grad()
def test_padded_rows_get_what_each_gets_alone(
    name: str, kind: HeadKind, make_hub: MakeModel, shards: dict[HeadKind, Path]
) -> None:
    """Also where padding has the id of a token that occurs, as it has here: 0."""
    _, head, model = make_hub(name, kind)
    for batch, micro_batch in shown(shards[kind], Padded(128, multiple_of=4), head):
        logits = model(micro_batch)
        for row, length in enumerate(batch.lengths.tolist()):
            expected = alone(model, head, batch["input_ids"][row, :length])
            got = logits[row] if kind == "row" else logits[row, :length]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str, kind: HeadKind, make_hub: MakeModel) -> None:
    """Positions, windows, scales and heads are as its own attention has them."""
    folder, head, model = make_hub(name, kind)
    auto = getattr(transformers, f"AutoModelFor{class_of(head)}")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=head.outputs)
    theirs = auto.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(model.model.state_dict())
    ids_1T = torch.randint(2, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(3))
    got = model(MicroBatch.of_ids(ids_1T, causal=head.causal))
    torch.testing.assert_close(got, theirs(input_ids=ids_1T).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_the_loss_is_that_of_transformers_times_the_targets(
    name: str, make_hub: MakeModel, shards: dict[HeadKind, Path]
) -> None:
    folder, head, model = make_hub(name, "vocabulary")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    task = LanguageModelling(Manifest.read(shards["vocabulary"]))
    for batch, micro_batch in shown(shards["vocabulary"], Padded(128), head):
        loss = task.loss(model, micro_batch)
        expected = theirs(
            input_ids=micro_batch.ids_BT,
            attention_mask=micro_batch.is_token_BT.long(),
            labels=batch["labels"],
        ).loss
        torch.testing.assert_close(loss.sum, expected * loss.targets, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_forward_never_waits(
    name: str, kind: HeadKind, make_hub: MakeModel, shards: dict[HeadKind, Path]
) -> None:
    _, head, model = make_hub(name, kind)
    batching = Padded(128) if kind == "row" else Packed(32, batch_size=3)
    _, micro_batch = next(shown(shards[kind], batching, head))
    with HostWaits() as waits:
        model(micro_batch).sum().backward()
    assert waits.seen == []
    model.zero_grad()


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as caught:
        yield
    message = str(caught.value)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Gemma2", {"head_dim": 8}, "soft-capped"),
        ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "sinks"),
        ("Mamba", {"state_size": 4}, "linear_attention"),
        ("GPTJ", {"rotary_dim": 4}, "cannot be replaced"),
        ("Bloom", {}, "cannot be replaced"),
        ("Bert", {}, "reads both ways"),
    ],
)
def test_what_attention_cannot_do_is_refused_in_one_line(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / name, "CausalLM", name, **changes)
    with refused("--model", reason):
        make_model(train_config(folder), head_of("vocabulary"))


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, make_hub: MakeModel) -> None:
    decoder = head_of("vocabulary")
    folder, _, _ = make_hub("Llama", "vocabulary")
    with refused("--sequence-length", "at most 64"):
        make_model(train_config(folder, sequence_length=65), decoder)
    with refused("--sequence-length", "at most 62"):
        encoder, head, _ = make_hub("Roberta", "token")
        make_model(train_config(encoder, sequence_length=63), head)
    small = save_model(tmp_path / "small", "CausalLM", "Llama", vocab_size=96)
    with refused("knows 96 ids", "needs 97"):
        make_model(train_config(small), decoder)
    with refused("--model", "nowhere"):
        make_model(train_config(tmp_path / "nowhere"), decoder)
    for name in ("hf:", "hf", "llama", "no_such_module:model", "math:model", "math:pi", ":pi"):
        with refused("--model"):
            make_model(replace(train_config(folder), model=name), decoder)
    damaged = shutil.copytree(folder, tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with refused("--model", "damaged"):
        make_model(train_config(damaged.parent), decoder)
    (tmp_path / "empty").mkdir()
    with refused("--model", "empty"):
        make_model(train_config(tmp_path / "empty"), decoder)


@pytest.mark.parametrize(
    ("lacking", "extra", "changes"),
    [("tokenfeed.trainer.models.hf_model", "hub", {}), ("peft", "lora", {"lora": 4})],
)
def test_a_missing_library_is_named_with_its_extra(
    lacking: str,
    extra: str,
    changes: dict[str, Any],
    make_hub: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, head, _ = make_hub("Llama", "vocabulary")
    monkeypatch.delattr("tokenfeed.trainer.models.hf_model", raising=False)
    monkeypatch.setitem(sys.modules, lacking, None)
    with refused(f"pip install tokenfeed[{extra}]"):
        make_model(train_config(folder, **changes), head)


def test_dropout_is_the_configs_unless_told(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "bert", "TokenClassification", "Bert", attention_probs_dropout_prob=0.5
    )
    micro_batch = MicroBatch.of_ids(torch.arange(2, 20)[None], causal=False)
    for dropout, alike in ((None, False), (0.0, True)):
        model = make_model(train_config(folder, dropout=dropout), head_of("token")).train()
        assert torch.equal(model(micro_batch), model(micro_batch)) == alike


CAPPED: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 30.0, "attn_logit_softcapping": None},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("name", [*DECODERS, *CAPPED])
def test_only_a_head_that_does_no_more_is_taken_out_of_the_model(
    name: str, make_hub: MakeModel, tmp_path: Path
) -> None:
    if name in CAPPED:
        folder = save_model(tmp_path, "CausalLM", name, **CAPPED[name])
        model = make_model(train_config(folder), head_of("vocabulary"))
    else:
        _, _, model = make_hub(name, "vocabulary")
    assert has_hidden(model) == (name in DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_its_loss_without_logits_is_that_of_its_logits(
    name: str, make_hub: MakeModel, shards: dict[HeadKind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head, model = make_hub(name, "vocabulary")
    task = LanguageModelling(Manifest.read(shards["vocabulary"]))
    _, micro_batch = next(shown(shards["vocabulary"], Packed(32, batch_size=3), head))
    losses = []
    for least in (0, math.inf):
        monkeypatch.setattr(vocabulary_loss, "WORTH_BYTES", least)
        model.zero_grad()
        loss = task.loss(model, micro_batch).sum
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        losses.append(torch.stack((loss.detach(), norm)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    assert isinstance(model.head_weight, torch.nn.Parameter)


@pytest.mark.parametrize("name", ["Gemma3Text", "GPT2", "Qwen3"])
def test_model_in_fp16_trains_as_in_fp32(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hub", "CausalLM", name, initializer_range=0.02)
    shards, losses = write_shards(tmp_path / "shards", "lm"), []
    for precision in ("fp32", "fp16"):
        run_dir = tmp_path / precision
        own: dict[str, Any] = {
            "precision": precision,
            "learning_rate": 1e-2,
            "model": f"hf:{folder}",
        }
        run(make_config(shards, run_dir, batching="packed", **own))
        losses.append(read_metrics(run_dir, "loss"))
    assert {*read_metrics(run_dir, "loss_scale").values()} == {65536}
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1][8] < 0.97 * losses[1][1]
