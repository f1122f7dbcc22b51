"""Settings that suit a data set: they work together, and steps are those of epochs."""

import contextlib
import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import parsed, write_labelled

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo, SplitInfo
from tokenfeed.pipeline.format.schema import Task, task_columns
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import make_policy, read_manifest
from tokenfeed.trainer.data.recommended import (
    data_defaults,
    default_epochs,
    schedule_defaults,
    steps_of_epochs,
    tuning_defaults,
)
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.models.gpt import SIZES
from tokenfeed.trainer.tasks.registry import task_of

AUTO: dict[str, Any] = {}
CPU = torch.device("cpu")
LABELLED = ("classify", "score", "tag")
PLAIN = TrainConfig(shards="out", run_dir=Path("run"))


def make_manifest(task: str, rows: int, mean: int, longest: int) -> Manifest:
    """Of so many rows; what defaults do not read is left out."""
    split = one_shard(rows=rows, tokens=rows * mean, longest=longest)
    absent: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Manifest))
    columns = task_columns(task) if task in get_args(Task) else ()  # type: ignore[arg-type]
    known = {"task": task, "splits": {"train": split}, "columns": columns}
    return Manifest(**absent | known)


def one_shard(*, rows: int, tokens: int, longest: int = 1) -> SplitInfo:
    """A split whose rows are about as long as each other."""
    shard = ShardInfo(
        file="a", bytes=1, xxh3="", rows=rows, tokens=tokens, batches=1, longest_row=longest
    )
    bins = [0] * 32
    bins[(tokens // rows).bit_length() - 1] = rows
    return SplitInfo(shards=(shard,), length_histogram=tuple(bins))


@st.composite
def manifests(draw: st.DrawFn, tasks: tuple[str, ...] = (*LABELLED, "complete")) -> Manifest:
    mean = draw(st.integers(1, 5_000))
    rows, longest = draw(st.integers(1, 5_000)), draw(st.integers(mean, 10**5))
    return make_manifest(draw(st.sampled_from(tasks)), rows, mean, longest)


def config_for(manifest: Manifest, epochs: int | None = None, **given: Any) -> TrainConfig:
    config = PLAIN
    for choice in data_defaults(manifest, {k: given[k] for k in given if k == "step_rows"}):
        config = dataclasses.replace(config, **choice.settings)
    config = dataclasses.replace(config, **given)
    epochs = epochs or default_epochs(manifest, AUTO)
    if epochs:
        steps = steps_of_epochs(epochs, config, manifest, on_gpu=False)
        config = dataclasses.replace(config, steps=steps)
    for choice in schedule_defaults(manifest, config, given):
        config = dataclasses.replace(config, **choice.settings)
    return config


@given(manifests())
def test_whatever_the_size_the_settings_work_together(manifest: Manifest) -> None:
    config = config_for(manifest)
    config.check()
    assert config.model in SIZES
    make_policy(config, packed=manifest.task == "complete", on_gpu=False)
    assert config.warmup_steps < config.steps


@given(manifests(), st.integers(1, 100), st.integers(1, 500))
def test_steps_are_those_of_epochs(manifest: Manifest, epochs: int, rows: int) -> None:
    config = config_for(manifest, epochs, step_rows=rows, batching="padded")
    assert config.steps == epochs * math.ceil(manifest.split("train").rows / rows)


@given(
    manifests(("lm", "complete", "classify")),
    st.integers(1, 10**7),
    st.integers(0, 10**7),
    st.integers(1, 10**5),
    st.sets(st.sampled_from(["eval_every", "save_every"])),
    st.integers(0, 3),
)
def test_evaluations_take_a_twentieth_of_a_run(
    manifest: Manifest, validation: int, test: int, steps: int, given: set[str], samples: int
) -> None:
    sizes = {"validation": validation, "test": test}
    splits = {name: one_shard(rows=size, tokens=size) for name, size in sizes.items() if size}
    manifest = dataclasses.replace(manifest, splits=manifest.splits | splits)
    config = dataclasses.replace(PLAIN, steps=steps, samples=samples)
    for choice in schedule_defaults(manifest, config, dict.fromkeys(given)):
        config = dataclasses.replace(config, **choice.settings)
    count = 1 + math.ceil(steps / config.eval_every)
    tokens = min(validation, config.eval_tokens or validation)
    trained = steps * config.step_tokens
    least = 2048  # what costs hardly more than a single row
    assert (tokens - 1) * count / 3 <= 0.05 * trained or tokens <= least
    assert config.eval_tokens is not None or test <= max(count * least, int(0.15 * trained))
    of_samples = samples * 48 * 64  # at least: forward passes of 48 tokens beside a prompt of 16
    room = max(0.15 * trained / count - of_samples, 0.15 * trained / count / 2)
    assert tokens - 1 <= max(room, least) or manifest.task != "lm"
    if not given:
        assert count <= 22 or config.eval_every == 1000


@given(manifests())
def test_what_is_fine_tuned_is_so_for_few_epochs_at_a_low_rate(manifest: Manifest) -> None:
    given = {"model": "hf:folder"}
    choices = [*data_defaults(manifest, given), *tuning_defaults(manifest, given)]
    chosen = {k: v for each in choices for k, v in each.settings.items()}
    assert default_epochs(manifest, given) == 3
    rows = chosen.get("step_rows", 32)
    assert chosen["learning_rate"] == pytest.approx(5e-5 * math.sqrt(rows / 32), rel=0.005)
    assert not {"model", "dropout"} & set(chosen)


@pytest.mark.parametrize("task", ["lm", "complete", "classify"])
def test_adapters_get_a_higher_rate_and_no_decay(task: Task) -> None:
    given = {"model": "hf:folder", "lora": 4}
    manifest = make_manifest(task, 3000, 100, 400)
    choices = [*data_defaults(manifest, given), *tuning_defaults(manifest, given)]
    chosen = {k: v for each in choices for k, v in each.settings.items()}
    assert (chosen["learning_rate"], chosen["weight_decay"]) == (2e-4, 0.0)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("tag") / "shards", "tag")


def test_the_command_takes_what_suits_and_what_it_is_told_comes_first(
    shards: Path, tmp_path: Path
) -> None:
    manifest = Manifest.read(shards)
    options = ("--shards", shards, "--run-dir", tmp_path)
    same = {"shards": str(shards), "run_dir": tmp_path}
    assert parsed(*options) == config_for(manifest, **same)
    told = parsed(*options, "--step-rows", 7, "--epochs", 4, "--eval-every", 3)
    assert told == config_for(manifest, 4, **same, step_rows=7, eval_every=3)
    by_tokens = parsed(*options, "--step-tokens", 4096)
    assert (by_tokens.step_rows, by_tokens.step_tokens) == (None, 4096)
    steps = parsed(*options, "--steps", 50)
    assert (steps.steps, steps.eval_every, steps.warmup_steps) == (50, 3, 5)


@given(
    manifests(("complete", "chat")),
    st.fixed_dictionaries(
        {},
        optional={
            "sequence_length": st.integers(2, 10_000),
            "micro_batch_tokens": st.just("auto"),
            "model": st.just("hf:some/model"),
        },
    ),
)
def test_steps_of_examples_fit_the_sequence_length_that_is_given(
    manifest: Manifest, told: dict[str, Any]
) -> None:
    [choice] = data_defaults(manifest, told)
    assert not choice.settings.keys() & told.keys()
    dataclasses.replace(PLAIN, **choice.settings, **told).check()


@pytest.mark.parametrize(("written", "tokens"), [("20K", 20_000), ("0.05m", 50_000), ("777", 777)])
def test_tokens_give_steps_that_train_so_many_and_at_most_a_step_more(
    written: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = write_labelled(tmp_path / "shards", "lm", count=300)
    words = ("--micro-batch-tokens", 256, "--step-tokens", 256, "--sequence-length", 64)
    config = parsed("--shards", shards, "--tokens", written, *words)
    policy = make_policy(config, packed=True, on_gpu=False)
    with ShardLoader(shards, batching=policy, epochs=None, device="cpu", num_workers=0) as loader:
        trained = sum(batch.num_tokens for batch in itertools.islice(loader, config.steps))
    assert 0.95 * tokens <= trained <= 1.05 * tokens + config.step_tokens
    longer = ("--resume", "--run-dir", config.run_dir, "--tokens", 2 * tokens)
    monkeypatch.chdir(tmp_path)
    config.write()
    resumed = parsed(*longer).steps
    assert 2 * config.steps - 1 <= resumed <= 2 * config.steps


def test_more_epochs_lengthen_a_run_and_nothing_else(shards: Path, tmp_path: Path) -> None:
    begun = parsed("--shards", shards, "--run-dir", tmp_path, "--epochs", 2)
    begun.write()
    longer = parsed("--resume", "--run-dir", tmp_path, "--epochs", 3)
    assert longer == dataclasses.replace(begun, resume=True, steps=begun.steps // 2 * 3)


def test_without_shards_to_read_the_plain_settings_are_shown_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    config = parsed("--shards", missing, "--run-dir", tmp_path, "--print-config")
    assert config == TrainConfig(
        shards=str(missing), run_dir=tmp_path
    )  # the run says what is amiss
    with pytest.raises(SystemExit, match="0"):
        parsed("--help-all")
    assert re.search(r"Default:\s+200\s+for\s+documents", capsys.readouterr().out)


@given(manifests())
def test_of_a_small_set_the_epochs_are_some_and_of_a_large_one_few(manifest: Manifest) -> None:
    epochs = default_epochs(manifest, AUTO)
    assert epochs is not None
    assert 3 <= epochs <= 10
    train = manifest.split("train")
    steps = epochs * math.ceil(train.rows / 32) if manifest.task != "complete" else math.inf
    assert epochs == 3 or epochs * train.tokens <= 2_000_000 or steps <= 500
    long_rows = make_manifest("classify", 1000, 1000, 2000)  # 3 epochs would be 96 steps
    assert default_epochs(long_rows, AUTO) == 10


def test_documents_on_a_gpu_are_read_once() -> None:
    manifest = make_manifest("lm", 100, 10, 20)
    assert default_epochs(manifest, AUTO, on_gpu=True) == 1
    assert default_epochs(manifest, AUTO) is None


def test_steps_of_fine_tuned_completions_have_32_examples() -> None:
    manifest = make_manifest("complete", 3000, 100, 400)
    chosen = data_defaults(manifest, {"model": "hf:folder"})[0].settings
    assert 32 * 100 <= chosen["step_tokens"] < 32 * 100 + chosen["micro_batch_tokens"]
    few = make_manifest("complete", 60, 100, 400)
    assert data_defaults(few, {"model": "hf:folder"})[0].settings["step_tokens"] == 1792


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("task", ["lm", "complete", "classify"])
def test_chosen_sizes_give_each_rank_a_micro_batch_of_the_same_step(
    task: Task, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--shards", write_labelled(tmp_path, task), "--device", "cpu", "--steps", 3)
    alone = parsed(*options)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    shared = parsed(*options)
    assert alone.accumulation < ranks <= shared.accumulation
    assert (shared.step_rows, shared.step_tokens) == (alone.step_rows, alone.step_tokens)
    told = parsed(*options, "--micro-batch-tokens", alone.micro_batch_tokens)
    assert told.micro_batch_tokens == alone.micro_batch_tokens


@pytest.mark.parametrize("words", [(), ("--batching", "packed"), ("--step-tokens", 64)])
def test_rows_longer_than_sequence_length_are_cut(
    words: tuple[object, ...], tmp_path: Path
) -> None:
    shards = write_labelled(tmp_path / "tags", "tag")
    assert read_manifest(str(shards)).split("train").longest_row > 16
    config = parsed("--shards", shards, "--sequence-length", 16, "--device", "cpu", *words)
    with contextlib.closing(
        SplitLoaders(config, task_of(config, CPU), CPU).train_loader()
    ) as loader:
        batches = [*itertools.islice(loader, 20)]
    assert max(batch["input_ids"].shape[1] for batch in batches) == 16


@pytest.mark.parametrize("task", ["tag", "lm"])
def test_steps_of_padded_rows_refuse_rows_longer_than_sequence_length(
    task: Task, tmp_path: Path
) -> None:
    shards = write_labelled(tmp_path / "shards", task)
    words = ["--shards", shards, "--sequence-length", 16, "--step-rows", 4, "--device", "cpu"]
    config = parsed(*words, "--batching", "padded")
    with pytest.raises(ConfigError, match=r"rows of 24 tokens.* or give --step-tokens in place"):
        SplitLoaders(config, task_of(config, CPU), CPU)
