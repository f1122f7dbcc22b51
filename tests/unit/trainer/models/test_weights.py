"""Runs that train some weights by name, and leave the others as they are."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import (
    assert_same_run,
    go_on_from,
    load_state,
    load_weights,
    make_config,
    make_transformer,
    run,
)
from torch import nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.checkpoints.checkpoint_format import part_of
from tokenfeed.trainer.models.weights import train_only, trainable_names

WAYS: dict[str, dict[str, Any]] = {
    "biases and norms": {"trainable": r"bias$|norm"},
    "one matrix, muon": {"trainable": r"blocks\.0\.feed_in\.weight", "optimizer": "muon"},
    "the embedding": {"trainable": "embed"},
    "what draws": {"trainable": r"blocks\.1", "model": "support.training:dropping_model"},
    "recomputed": {"trainable": r"blocks\.0", "recompute": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_matches_changes_and_a_resumed_run_repeats_it(
    way: str, lm_rows: Path, tmp_path: Path
) -> None:
    settings = {"steps": 4, "save_every": 1, "keep": 9} | WAYS[way]
    run(make_config(lm_rows, tmp_path / "whole", **settings))
    go_on_from(tmp_path / "whole", 2, make_config(lm_rows, tmp_path / "parts", **settings))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)
    first, last = load_weights(tmp_path / "whole", 2), load_weights(tmp_path / "whole", 3)
    assert first.keys() == set(last)
    search = re.compile(WAYS[way]["trainable"]).search
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    tied = {"head.weight"} if "embedding.weight" in changed else set()
    assert changed - tied == {name for name in first if search(name)} - tied
    assert changed


def test_frozen_weights_are_saved_and_have_no_moments(lm_rows: Path, tmp_path: Path) -> None:
    run(make_config(lm_rows, tmp_path, trainable="norm"), stop_after=1)
    state = load_state(tmp_path, 1)
    with_moments = {name.rpartition(".")[0] for name in part_of(state, "optimizer.")}
    assert with_moments == {name for name in part_of(state, "model.") if "norm" in name}
    assert any("feed_in" in name for name in part_of(state, "model."))


def test_a_run_does_not_go_on_with_other_weights(lm_rows: Path, tmp_path: Path) -> None:
    run(make_config(lm_rows, tmp_path, trainable="norm"), stop_after=1)
    with pytest.raises(ResumeError, match="--trainable"):
        run(make_config(lm_rows, tmp_path, trainable="feed", resume=True))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("blocks.0.feedin", "nearest are .*blocks.0.feed_in"), ("(", "invalid regular expression")],
)
def test_a_pattern_that_finds_nothing_is_refused_in_one_line(
    pattern: str, words: str, lm_rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(make_config(lm_rows, tmp_path, trainable=pattern))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


def test_weights_that_no_loss_hangs_on_are_refused_in_one_line(
    lm_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_idle(head: Any) -> nn.Module:
        model = make_transformer()
        model.idle = nn.Linear(2, 2)
        return model

    monkeypatch.setattr("support.training.small_model", with_idle)
    with pytest.raises(ConfigError, match="`--trainable`=idle: the loss"):
        run(make_config(lm_rows, tmp_path, trainable="idle"))


@pytest.mark.slow
@given(st.lists(st.sampled_from([".", "norm", "feed", "embed", "blocks.0"]), min_size=1))
def test_choosing_again_forgets_what_was_chosen_before(patterns: list[str]) -> None:
    model = make_transformer()
    for pattern in patterns:
        train_only(model, trainable_names(model, pattern))
    search = re.compile(patterns[-1]).search
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    assert all(w.requires_grad == any(map(search, own)) for w, own in names.items())
    assert trainable_names(model, None) == trainable_names(model, patterns[-1])
