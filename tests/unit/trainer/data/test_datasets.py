"""Runs on several data sets by weight: what they read, how they are judged, what is refused."""

from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.stores import MemoryStore, keep_in_memory
from support.training import assert_same_run, make_config, parsed, read_metrics, run

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policies import Packed
from tokenfeed.trainer.data.datasets import DataSets, shown
from tokenfeed.trainer.loop.evaluation import over_all


def weights(sets: Path, **shares: float) -> dict[str, float]:
    return {str(sets / name): share for name, share in shares.items()}


def test_a_run_reads_the_mixture_and_resumes_bit_for_bit(sets: Path, tmp_path: Path) -> None:
    shards = weights(sets, code=0.6, prose=0.4)
    for name, stop in (("whole", None), ("parts", 3)):
        run(make_config(shards, tmp_path / name), stop_after=stop)
    run(make_config(shards, tmp_path / "parts", resume=True))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 8)
    with ShardLoader(
        Mixture(shards),
        batching=Packed(32, batch_size=4),
        num_workers=0,
        epochs=None,
        micro_batches_per_step=2,
    ) as loader:
        tokens = [batch.num_tokens for _, batch in zip(range(16), loader, strict=False)]
    assert read_metrics(tmp_path / "whole", "tokens")[8] == sum(tokens)


def test_each_validation_split_is_told_and_their_mean_by_weight_decides(
    sets: Path, tmp_path: Path
) -> None:
    report = run(make_config(weights(sets, code=3, prose=1), tmp_path))
    code, prose, both, perplexity = (
        read_metrics(tmp_path, f"validation_{name}")[8]
        for name in ("loss/code", "loss/prose", "loss", "perplexity")
    )
    assert both == pytest.approx((3 * code + prose) / 4)
    assert perplexity == pytest.approx(torch.tensor(both).exp().item(), rel=1e-5)
    assert report.metrics["validation"]["loss"] == min(
        read_metrics(tmp_path, "validation_loss")[step] for step in (4, 8)
    )
    assert {"loss", "loss/code", "loss/prose"} < report.metrics["test"].keys()


metrics = st.fixed_dictionaries({"loss": st.floats(0, 9), "accuracy": st.floats(0, 1)})


@given(
    st.dictionaries(st.sampled_from("abcd"), st.one_of(metrics, st.just({})), min_size=1), st.data()
)
def test_a_mean_lies_between_its_parts_and_one_that_is_empty_does_not_count(
    found: dict[str, dict[str, float]], data: st.DataObject
) -> None:
    shares = {name: data.draw(st.floats(0.01, 100)) for name in found}

    class Plain:
        def of_loss(self, loss: float) -> dict[str, float]:
            return {}

    together = over_all(found, DataSets(shares, ()), Plain())  # type: ignore[arg-type]
    known = [each for each in found.values() if each]
    assert bool(together) == bool(known)
    for metric in together.keys() & {"loss", "accuracy"}:
        values = [each[metric] for each in known]
        assert min(values) - 1e-9 <= together[metric] <= max(values) + 1e-9


@given(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)))
def test_one_manifest_for_all_has_what_an_epoch_reads(
    sets: Path, shares: tuple[float, float]
) -> None:
    both = DataSets.read(weights(sets, code=shares[0], prose=shares[1]))
    code, prose = (each.split("train") for each in both.manifests)
    train = both.manifest.split("train")
    duration = max(code.tokens / shares[0], prose.tokens / shares[1])
    assert train.tokens == pytest.approx(duration * sum(shares), abs=2)
    assert train.rows == sum(train.length_histogram)
    assert train.rows >= code.rows + prose.rows
    assert train.longest_row == max(code.longest_row, prose.longest_row)
    validation = both.manifest.split("validation")
    assert validation.rows == sum(each.split("validation").rows for each in both.manifests)


def test_command_line_list_and_mapping_say_the_same(sets: Path, tmp_path: Path) -> None:
    shards = weights(sets, code=0.7, prose=0.3)
    words = [f"{path}={share}" for path, share in shards.items()]
    said = [parsed("--shards", *words)]
    for value in (shards, words):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"shards": value}))
        said.append(parsed("--config", file))
    assert [config.shards for config in said] == [shards] * 3
    assert shown(shards) == " ".join(words)


def test_a_folder_may_have_an_equals_sign_in_its_name(sets: Path, tmp_path: Path) -> None:
    odd = tmp_path / "part=1"
    odd.symlink_to(sets / "prose")
    assert parsed("--shards", odd).shards == str(odd)
    both = parsed("--shards", f"{odd}=2", f"{sets / 'code'}=1").shards
    assert both == {str(odd): 2.0, str(sets / "code"): 1.0}
    with pytest.raises(ConfigError, match="part=1 has no weight"):
        parsed("--shards", odd, f"{sets / 'code'}=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["code", "prose=1"], "code has no weight"),
        (["code=1", "prose=0"], "--shards`: the weight of prose: expected a number above 0, got 0"),
        (
            ["code=1", "prose=much"],
            "--shards`: the weight of prose: expected a number above 0, got much",
        ),
        (["code=1", "code=2"], "occurs twice"),
    ],
)
def test_weights_that_say_nothing_are_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed("--shards", *words)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"code": 1, "other": 1}, "a mixture needs one tokenizer"),
        ({"code": 1, "classes": 1}, "one task: .*code has lm, .*classes has classify. Train on"),
        ({"code": 1, "nowhere": 1}, "nowhere"),
        ({"code": 1, "prose": -1}, "the weight of .*prose: expected a number above 0, got -1"),
    ],
)
def test_data_sets_that_do_not_fit_are_refused_in_one_line(
    names: dict[str, float], message: str, sets: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ManifestError), match=message):
        run(make_config(weights(sets, **names), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def asked(sets: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The small files that are read of `memory://`, which has the data set `code`."""
    keep_in_memory(monkeypatch, sets / "code")
    names: list[str] = []
    read = MemoryStore.read

    def noted(store: MemoryStore, name: str) -> bytes:
        names.append(name)
        return read(store, name)

    monkeypatch.setattr(MemoryStore, "read", noted)
    return names


def small_files(asked: list[str]) -> list[str]:
    return sorted(name for name in asked if not name.endswith(".arrow"))


def test_each_run_reads_what_is_there(asked: list[str], tmp_path: Path) -> None:
    for name in ("first", "second"):
        run(make_config("memory://x", tmp_path / name, steps=1))
    assert small_files(asked) == [*["manifest.json"] * 2, *["tokenizer"] * 2]
    for _ in range(2):
        Manifest.read("memory://x")
    again = [*["manifest.json"] * 4, *["tokenizer"] * 2]
    assert small_files(asked) == again, "outside of a run nothing is kept"
