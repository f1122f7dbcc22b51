"""`shards inspect|verify|cat`: what is inside, whether it is whole, and what it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [f"document {index}: déjà vu 漢字 🎉\n" * (index + 1) for index in range(120)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several shards, both splits, with one reject."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        initial_alphabet=alphabet, special_tokens=special, vocab_size=300, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "in.jsonl").write_text(lines + "{\n")
    options = ("--tokenizer", folder, "--shard-size", "40KB", "--validation", 0.2)
    run(folder / "in.jsonl", folder / "out", *options)
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def test_cat_into_a_closed_pipe_is_quiet(made: Path) -> None:
    command = f"'{sys.executable}' -m tokenfeed.tools.shards cat '{made}' --rows 90 | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith("--- train row 0 ")
    assert result.stderr == ""
