"""Tokenizers: of --init-from weights that learnt other ids, and of shards that have another."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import random_rows, write_rows
from support.training import VOCABULARY, make_config, run, word_tokenizer

from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.config.run_config import TrainConfig


def write_shards(folder: Path, tokenizer: bytes) -> Path:
    lengths = np.random.default_rng(1).integers(4, 24, 60)
    rows = random_rows(lengths, "lm", vocabulary_size=VOCABULARY)
    return write_rows(folder, {"train": rows}, VOCABULARY, tokenizer=tokenizer)


def swapped(tokenizer: bytes) -> bytes:
    """One of as many ids, of which two are each other's."""
    content = json.loads(tokenizer)
    ids = content["model"]["vocab"]
    ids["w0"], ids["w1"] = ids["w1"], ids["w0"]
    return json.dumps(content).encode()


def written_otherwise(tokenizer: bytes) -> bytes:
    return json.dumps(json.loads(tokenizer), indent=3).encode()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run, also exported."""
    folder = tmp_path_factory.mktemp("begun")
    config = make_config(
        write_shards(folder / "shards", word_tokenizer()),
        folder / "run",
        export=folder / "exported",
        model="shallow",
        steps=1,
    )
    run(config)
    return config


def warnings_of(config: TrainConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    run(config)
    return [line for line in caplog.messages if "its tokenizer is not" in line]


@pytest.mark.parametrize("source", ["run", "exported"])
def test_a_tokenizer_of_equal_size_and_other_tokens_is_named_with_a_remedy(
    source: str, begun: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = begun.run_dir.parent
    shards = write_shards(tmp_path / "other", swapped(word_tokenizer()))
    later = dataclasses.replace(
        begun,
        shards=str(shards),
        run_dir=tmp_path / "run",
        init_from=str(origin / source),
        export=None,
    )
    (line,) = warnings_of(later, caplog)
    assert line.startswith(
        f"`--init-from`={origin / source}: its tokenizer is not that of {shards}"
    )
    assert "2 of 64 ids are other tokens" in line
    resumed = dataclasses.replace(later, resume=True, steps=2)
    assert warnings_of(resumed, caplog) == []


def test_the_same_tokens_in_other_bytes_are_no_other_tokenizer(
    begun: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = write_shards(tmp_path / "other", written_otherwise(word_tokenizer()))
    later = dataclasses.replace(
        begun,
        shards=str(shards),
        run_dir=tmp_path / "run",
        init_from=str(begun.run_dir),
        export=None,
    )
    assert warnings_of(later, caplog) == []


@pytest.mark.parametrize(
    "settings",
    [{"model": "words"}, {"export": Path("exported")}, {"init_from": ""}],
    ids=str,
)
def test_train_refuses_a_tokenizer_that_did_not_make_the_shards(
    settings: dict[str, Any], begun: TrainConfig, tmp_path: Path
) -> None:
    shards = write_shards(tmp_path / "shards", word_tokenizer())
    file = shards / Manifest.read(shards).tokenizer.file
    file.write_bytes(swapped(word_tokenizer()))
    if "init_from" in settings:
        settings = {"init_from": str(begun.run_dir)}
    with pytest.raises(ManifestError, match=r"has checksum \w{16}, but is \w{16} in") as caught:
        run(make_config(shards, tmp_path / "run", steps=1, **settings))
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
