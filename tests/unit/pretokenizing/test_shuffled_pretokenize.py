"""`pretokenize --shuffle`: what `pretokenize` and `shards shuffle` make, by one command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import files_of

from tokenfeed.pipeline.errors import ConfigError, ManifestError, ShardFormatError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.options import Options
from tokenfeed.tools.outputs.output import FolderOutput
from tokenfeed.tools.pretokenizing import shuffled
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.shuffled import make_shuffled_dataset
from tokenfeed.tools.pretokenizing.summary import Summary
from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER
from tokenfeed.tools.shuffling.run import Settings, shuffle_dataset
from tokenfeed.tools.shuffling.unit import PARTITIONS
from tokenfeed.tools.verify import find_problems


def options_of(corpus: Path, out: Path, **options: Any) -> Options:
    return Options(paths=(str(corpus), str(out)), **{"shard_size": "40KB"} | options)


def data_of(folder: Path) -> dict[str, bytes]:
    """All files but the one that says what command made them."""
    return {name: data for name, data in files_of(folder).items() if name != ".made_by.json"}


def test_it_is_what_the_two_commands_make(corpus: Path, tmp_path: Path, tokenizer: Path) -> None:
    out, options = tmp_path / "out", {"tokenizer": str(tokenizer), "validation": 0.1}
    summary = make_shuffled_dataset(options_of(corpus, out, shuffle=True, seed=3, **options))
    make_dataset(options_of(corpus, tmp_path / "plain", **options))
    shuffle_dataset(tmp_path / "plain", tmp_path / "shuffled", Settings(seed=3, workers=1))
    assert data_of(out) == data_of(tmp_path / "shuffled")
    manifest = Manifest.read(out)
    assert list(find_problems(out, manifest)) == []
    assert summary.splits == {name: split.rows for name, split in manifest.splits.items()}
    assert summary.out == str(out)
    assert not summary.already_finished
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    assert summary.shard_bytes == sum(shard.bytes for shard in shards)


def test_the_same_command_is_already_finished_and_any_other_is_refused(
    corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_shuffled_dataset(options_of(corpus, out, shuffle=True, vocab_size=300))
    expected = files_of(out)
    (out / PARTITIONS).mkdir()  # kills at the very end leave these
    (out / UNSHUFFLED_FOLDER).mkdir()
    again = make_shuffled_dataset(options_of(corpus, out, shuffle=True, vocab_size=300))
    assert again.already_finished
    assert files_of(out) == expected
    assert not (out / PARTITIONS).exists()
    assert not (out / UNSHUFFLED_FOLDER).exists()
    with pytest.raises(ConfigError, match="--shuffle and --seed was 0, is 1"):
        make_shuffled_dataset(options_of(corpus, out, shuffle=True, vocab_size=300, seed=1))
    with pytest.raises(ConfigError, match="--shuffle and --seed was 0, is not given"):
        make_dataset(options_of(corpus, out, vocab_size=300))


def test_a_seed_beside_a_given_tokenizer_needs_a_shuffle(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    given = {"tokenizer": str(tokenizer), "seed": 1}
    with pytest.raises(ConfigError, match="`--seed` 1: is for a tokenizer that is trained"):
        options_of(corpus, tmp_path / "out", **given).check()
    options_of(corpus, tmp_path / "out", shuffle=True, **given).check()


def test_what_made_it_is_the_command_and_its_input(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make_shuffled_dataset(options_of(corpus, out, tokenizer=str(tokenizer), shuffle=True))
    made_by = json.loads((out / ".made_by.json").read_bytes())
    assert made_by["CORPUS"] == [str(corpus)]
    assert made_by["--shuffle and --seed"] == 0
    assert "--memory" not in made_by


def test_another_command_keeps_out_of_the_output_from_the_first_moment(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "out", {"tokenizer": str(tokenizer)}
    refused = []

    def beside_another(*arguments: Any) -> Summary:
        with pytest.raises(ConfigError, match="another run is writing here") as caught:
            make_dataset(options_of(corpus, out, **options))
        refused.append(str(caught.value))
        return make_dataset(*arguments)

    monkeypatch.setattr(shuffled, "make_dataset", beside_another)
    make_shuffled_dataset(options_of(corpus, out, shuffle=True, **options))
    assert len(refused) == 1
    assert Manifest.read(out).shuffled is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "is_lost"),
    [
        ("manifest.json", False),
        ("sources.jsonl", False),
        ("sources.jsonl", True),
        ("train/00000.arrow", False),
        ("train/00000.arrow", True),
    ],
)
def test_of_a_damaged_first_part_the_remedy_is_one_that_helps(
    corpus: Path, tmp_path: Path, tokenizer: Path, part: str, is_lost: bool
) -> None:
    out = tmp_path / "out"
    options = options_of(corpus, out, tokenizer=str(tokenizer), shuffle=True)
    hidden = out / UNSHUFFLED_FOLDER
    make_dataset(options, output=FolderOutput(hidden))
    damaged = hidden / part
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    if is_lost:
        damaged.unlink()
    for _ in range(2):
        with pytest.raises((ManifestError, ShardFormatError)) as caught:
            make_shuffled_dataset(options)
        assert str(hidden) in str(caught.value)
        assert str(caught.value).endswith(f"Delete {out} and repeat the command.")
    shutil.rmtree(out)
    make_shuffled_dataset(options)
