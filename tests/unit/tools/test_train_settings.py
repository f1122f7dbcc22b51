"""What `train` is told: by flags, by a file, by a preset, and by what suits, in this order."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.commands import call
from support.data_sets import random_rows, write_rows
from support.hub_models import LABELS
from support.training import make_config, parsed, write_labelled

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.tools import train
from tokenfeed.tools.shell.command_line import Page, read_command_line
from tokenfeed.tools.train_settings import FILE_KINDS, GROUPS, Command, layered
from tokenfeed.trainer.config.run_config import ScheduleName, TrainConfig
from tokenfeed.trainer.config.values import preset_names, read_preset, read_settings
from tokenfeed.trainer.data.datasets import make_policy
from tokenfeed.trainer.loop.trainer import Trainer

SCHEDULES = get_args(ScheduleName)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["mini", "hf:some/model", "module:factory"]),
    "sequence_length": st.integers(2, 10**6),
    "learning_rate": st.floats(1e-9, 10, allow_nan=False),
    "dropout": st.none() | st.floats(0, 0.99),
    "eval_tokens": st.none() | st.integers(1, 10**6),
    "compile": st.booleans(),
    "seed": st.integers(0, 2**63 - 1),
    "run_dir": st.sampled_from([Path("runs/a"), Path("é/b")]),
    "export": st.none() | st.just(Path("out")),
}
settings_of_runs = st.fixed_dictionaries({}, optional=VALUES)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("tag") / "shards", "tag")


def written(path: Path, **settings: object) -> Path:
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.mark.slow
@given(settings_of_runs)
def test_what_is_written_to_yaml_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("yaml") / "some.yaml"
    config = TrainConfig(shards="out", **{"run_dir": Path("run")} | settings)
    path.write_text(yaml.safe_dump(config.as_dict()), encoding="utf-8")
    assert TrainConfig(**read_settings(path, FILE_KINDS)) == config


def test_flags_come_before_the_file_and_the_file_before_the_preset(
    shards: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.yaml", shards=str(shards), steps=7, **{"log-every": 3})
    config = parsed("--config", file, "--preset", "quick", "--log-every", 4)
    assert (config.log_every, config.steps, config.eval_every) == (4, 7, 10)
    assert config.model == "words"  # what suits the data set, since none of them says otherwise


def test_epochs_in_a_file_become_steps_but_steps_on_the_command_line_count(
    shards: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.yaml", shards=str(shards), epochs=3, step_rows=10)
    assert parsed("--config", file).steps == 3 * math.ceil(40 / 10)
    assert parsed("--config", file, "--steps", 5).steps == 5


@pytest.mark.parametrize("words", [(), ("--preset", "quick"), ("--step-rows", 5)])
def test_what_is_printed_is_read_again_as_the_same(
    words: tuple[object, ...], shards: Path, tmp_path: Path
) -> None:
    given = ("--shards", shards, "--run-dir", tmp_path / "run", *words)
    printed = tmp_path / "printed.yaml"
    printed.write_text(call(train.main, *given, "--print-config").stdout)
    assert parsed("--config", printed) == parsed(*given)
    again = call(train.main, "--config", printed, "--print-config").stdout
    assert again == printed.read_text()
    assert not (tmp_path / "run").exists()


def test_config_yaml_of_a_run_begins_another_run(shards: Path, tmp_path: Path) -> None:
    begun = make_config(shards, tmp_path, resume=True, json=True, step_rows=4)
    begun.write()
    config = parsed("--config", tmp_path / "config.yaml", "--run-dir", tmp_path / "other")
    fresh = {"run_dir": tmp_path / "other", "resume": False, "json": False}
    assert config.as_dict() == dataclasses.replace(begun, **fresh).as_dict()


@pytest.mark.parametrize(
    ("share", "words", "chosen"),
    [
        (0.1, (), 0.0),
        (0.0, (), None),
        (0.1, ("--dropout", 0.2), 0.2),
        (0.1, ("--batching", "padded"), None),
    ],
)
def test_packed_rows_on_a_gpu_drop_no_attention_weights(
    share: float,
    words: tuple[object, ...],
    chosen: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`varlen_attn` cannot, and GPT-2 does by its config."""
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(attn_pdrop=share).save_pretrained(tmp_path / "gpt2")
    shards = write_rows(tmp_path / "shards", {"train": random_rows(np.full(20, 10))}, 1000)
    monkeypatch.setattr("tokenfeed.tools.train_settings._is_on_gpu", lambda command: True)
    config = parsed("--shards", shards, "--model", f"hf:{tmp_path / 'gpt2'}", *words)
    assert config.dropout == chosen


def test_a_switch_of_a_file_can_be_turned_off(shards: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", compile=True, shards=str(shards))
    assert parsed("--config", file).compile
    assert not parsed("--config", file, "--no-compile").compile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dropout: 1", r"dropout: expected a number of at least 0 and below 1, got 1\."),
        ("compile: perhaps", r"compile: expected true or false or one of reduce-.*, got perhaps\."),
        ("schedule: step", f"schedule: expected one of {', '.join(SCHEDULES)}, got step"),
        ("run_dir: ''", r"run_dir is empty: expected a path"),
        ("shards: {}", r"shards is empty: expected a folder"),
        ("mixing: [{shards: {}}]", r"mixing 1: shards is empty"),
        ("mixing: [{shards: a, sequence_length: 1}]", "sequence_length"),
        ("cache_bytes: 5 bags", r"cache_bytes: expected a size like 50GB, or 0, got 5 bags\."),
        ("steps: 2\nepochs: 1", "`epochs` and steps both say how long to train. Leave one out."),
        ("step-tokens: 64\nstep_rows: 4", "`step_rows` and step_tokens both say what a step is"),
        ("config: other.yaml", "unknown setting config"),
        ("steps: 2\nkeep: 1\nsteps: 3", r"steps occurs twice in .*, line 3, column 1"),
        ("shards: {a: 1, a: 2}", "a occurs twice"),
        ("save-every: 2\nsave_every: 3", r"save_every occurs twice\. Leave one of the two out"),
        ("steps: [1", "invalid YAML"),
        (f"shards: {'[' * 1200}", "invalid YAML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_line(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        parsed("--config", path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "8"], "Did you mean --step-rows"),
        (["--mixed-precision", "bf16"], r"Did you mean --precision\?"),
        (["--gradient-accumulation-steps=4"], "Did you mean --step-tokens or --step-rows"),
        (
            ["--config", "production"],
            r"`--config`=production: no such file\. Did you mean --preset production\?",
        ),
        (["--steps"], r"`--steps`: expected a value: N\. See train --help"),
        (["--shards", "a", "--track", "wandb", "x"], r"`x`: unexpected word\. See train --help"),
        (
            ["--preset", "t4,H100"],
            r"`--preset`: expected auto, t4, .* or several like t4,production, got H100\. Did",
        ),
        (["--preset", "t4,"], r"`--preset`: expected auto, t4, .*, got an empty name\."),
        (["--export", ""], r"`--export` is empty: expected a path\. Is a shell variable unset"),
        (["--resume", "perhaps"], "`--resume`: expected true or false or auto, got perhaps"),
    ],
)
def test_words_that_cannot_be_meant_are_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*words)


@pytest.mark.parametrize(
    ("text", "number"), [(".3", 0.3), ("0.", 0.0), ("+.5", 0.5), ("1.e-1", 0.1), (".1E0", 0.1)]
)
def test_number_without_leading_or_trailing_zero_is_read(
    text: str, number: float, shards: Path, tmp_path: Path
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"shards: {shards}\ndropout: '{text}'\n")
    assert parsed("--shards", shards, "--dropout", text).dropout == number
    assert parsed("--config", file).dropout == number


def test_options_may_be_written_with_underscores_and_equal_signs() -> None:
    config = parsed("--shards=a_b", "--log_every", 3, "--save_every=4", "--print-config")
    assert (config.shards, config.log_every, config.save_every) == ("a_b", 3, 4)


def test_numbers_of_a_model_imply_qwen3(shards: Path) -> None:
    config = parsed("--shards", shards, "--layers", 4, "--kv-heads", 2)
    assert (config.model, config.model_numbers) == ("qwen3", (4, 256, 4, 2))


ORDERED = ("--order", "file", "--step-tokens", 2048)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((*ORDERED, "--epochs", 1), "`--order`=file: .* Give --steps, or --step-rows"),
        (ORDERED, "`--order`=file: .* Give --steps"),
        ((*ORDERED, "--tokens", 1000), "`--order`=file: .* Give --steps"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(
    words: tuple[object, ...], reason: str, shards: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parsed("--shards", shards, *words).check()
    assert parsed("--shards", shards, *ORDERED, "--steps", 3)


def test_epochs_of_a_sorted_file_have_every_row_as_often(tmp_path: Path) -> None:
    rows = random_rows(np.sort(np.arange(90) % 45 + 2), "tag", vocabulary_size=64)
    shards = write_rows(
        tmp_path / "shards", {"train": rows}, 64, task="tag", label_names=LABELS["tag"]
    )
    words = ("--order", "file", "--epochs", 2, "--step-rows", 10, "--model", "shallow")
    config = parsed("--shards", shards, *words)
    seen: Counter[int] = Counter()
    with closing(Trainer(dataclasses.replace(config, run_dir=tmp_path / "run"))) as trainer:
        due = config.steps * config.accumulation
        for batch in itertools.islice(iter(trainer.loader), due):
            seen.update(batch.rows.tolist())
    assert seen == dict.fromkeys(range(90), 2)


@pytest.mark.parametrize("size", ["auto", 1000])
def test_step_that_rows_do_not_divide_is_named(size: object, tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "lm")
    words = ("--step-tokens", 1000, "--sequence-length", 256, "--micro-batch-tokens", size)
    named = "step-tokens" if size == "auto" else "micro-batch-tokens"
    with pytest.raises(ConfigError, match=f"^`--{named}`: expected a multiple of --sequence"):
        Trainer(parsed("--shards", shards, "--steps", 2, *words))


OF_FILES = ("mixing", "skip", "phases")
"""Settings that only files have."""
SIZES = [("50GB", 50 * 10**9), ("512 MiB", 2**29), ("10000", 10_000), ("0", 0), (10_000, 10_000)]


@pytest.mark.parametrize(
    ("words", "step", "micro"),
    [
        ("--step-tokens 512", 512, 512),
        ("--step-tokens 3072", 3072, 1536),
        ("--sequence-length 300", 2100, 2100),
        ("--sequence-length 4096", 4096, 4096),
        ("--step-tokens 4096", 4096, 2048),
        ("--step-tokens 512 --micro-batch-tokens 256", 512, 256),
    ],
)
def test_sizes_that_are_left_open_suit_the_given_ones(
    words: str, step: int, micro: int, tmp_path: Path
) -> None:
    shards = write_labelled(tmp_path / "shards", "lm")
    config = parsed("--shards", shards, *words.split())
    assert (config.step_tokens, config.micro_batch_tokens) == (step, micro)
    make_policy(config, packed=True, on_gpu=False)  # raises if they do not fit


@pytest.mark.parametrize(("said", "meant"), SIZES)
def test_a_size_has_a_unit_or_is_plain_bytes(said: str | int, meant: int, tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", shards="a", cache_bytes=said)
    flags = ("--shards", "a", "--cache-bytes", said)
    for words in (flags, ("--config", file)):
        config = parsed(*words, "--print-config")
        assert config.cache_bytes == meant
        assert config.as_dict()["cache_bytes"] == meant


@pytest.mark.parametrize("task", ["complete", "tag"])
def test_chosen_lines_name_each_open_setting_once(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = write_labelled(tmp_path, task)
    parsed("--shards", folder, "--step-rows", 4, "--patience", 8, "--steps", 30)
    words = [w for m in caplog.messages for w in m.split(" (")[0].split() if w.startswith("--")]
    assert "--eval-every" in words
    assert len(words) == len({*words})
    assert not {"--step-rows", "--step-tokens", "--patience", "--steps"} & {*words}


@pytest.mark.parametrize("name", ["quick", "test", "production", "gpt2"])
def test_every_preset_works_and_is_named(name: str, shards: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    config = parsed("--shards", shards, "--preset", name)
    config.check()
    make_policy(config, packed=True, on_gpu=True)
    settings = {k: v for k, v in read_preset(name, FILE_KINDS).items() if k != "epochs"}
    assert dataclasses.asdict(config).items() >= settings.items()
    assert f"(preset {name})" in caplog.text


def test_every_preset_is_in_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "how" / "settings.md").read_text(encoding="utf-8")
    table = page[page.index("| `--preset` |") : page.index("Give a GPU and a purpose")]
    assert all(f"`{name}`" in table for name in preset_names())


def test_every_option_is_in_one_group_of_the_help() -> None:
    grouped = list(itertools.chain(*GROUPS.values()))
    fields = [field.name for field in dataclasses.fields(Command) if field.name not in OF_FILES]
    assert sorted(grouped) == sorted(fields)


def test_help_shows_ten_options_and_three_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    printed = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", printed, re.MULTILINE)
    assert len(flags) == 1 + 10
    assert {"--help-all", "--preset", "--precision", "--monitor-only"} < {*flags}
    examples = re.findall(r": +train (--.*)", printed)
    assert len(examples) == 3
    for example in examples:  # each option exists
        read_command_line(Command, "train", example.split(), Page(groups=GROUPS))
    number = len(dataclasses.fields(Command)) - len(OF_FILES)
    assert printed.endswith(f"`train --help-all` shows all {number} options.\n")
    assert len(printed.splitlines()) <= 50


def test_help_shows_every_option_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        parsed("--help-all")
    printed = capsys.readouterr().out
    shown = " ".join(printed.split())
    for field in dataclasses.fields(Command):
        if field.name not in OF_FILES:
            assert f" --{field.name.replace('_', '-')}" in shown
    assert all(f" {title} options: " in shown for title in GROUPS)
    assert " --recompute, --no-recompute " in shown
    assert " --compile [reduce-overhead|max-autotune] " in shown
    assert " --print-config, " not in shown  # a file cannot turn it on
    assert "Tokens of one optimizer step, padding included. auto: one micro-batch" in shown
    assert len(printed.splitlines()) <= 165


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("--scale-learning-rate", "sqrt", "--reference-step-tokens", 8, "--learning-rate", 1),
            "the step is a number of rows, .* Give --reference-step-rows",
        ),
        (
            ("--reference-step-tokens", 8, "--reference-step-rows", 8),
            "and --reference-step-tokens both say the step that the rate is for",
        ),
        (("--step-rows", "auto", "--shard-model"), "`--step-rows`=auto does not work with"),
    ],
)
def test_scales_and_steps_that_cannot_be_meant_are_rejected(
    words: tuple[object, ...], reason: str, shards: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parsed("--shards", shards, *words)


def test_a_scaled_rate_is_not_scaled_again_when_the_run_resumes(
    shards: Path, tmp_path: Path
) -> None:
    words = ("--scale-learning-rate", "sqrt", "--reference-step-rows", 8, "--learning-rate", 1e-4)
    begun = parsed("--shards", shards, "--run-dir", tmp_path, *words)
    assert begun.learning_rate == pytest.approx(2e-4)
    begun.write()
    again = ("--resume", "--run-dir", tmp_path)
    for more in ((), words, words[:4]):
        assert parsed(*again, *more).learning_rate == begun.learning_rate
    file = tmp_path / "config.yaml"
    assert (
        parsed("--config", file, "--run-dir", tmp_path / "b").learning_rate == begun.learning_rate
    )


@pytest.mark.parametrize("before", [None, Path("first")])
def test_begun_run_takes_no_other_initial_weights(
    shards: Path, tmp_path: Path, before: Path | None
) -> None:
    first = () if before is None else ("--init-from", before)
    begun = parsed("--shards", shards, "--run-dir", tmp_path, *first)
    begun.write()
    again = ("--resume", "--run-dir", tmp_path)
    for same in ((), first, [Path(word).absolute() if word is before else word for word in first]):
        assert parsed(*again, *same).steps == begun.steps
    with pytest.raises(ConfigError, match=r"`--init-from`=other: the run in .* has begun from"):
        parsed(*again, "--init-from", "other")


@pytest.mark.parametrize(
    "pair",
    [("steps", "epochs"), ("tokens", "epochs"), ("steps", "tokens"), ("step_tokens", "step_rows")],
)
def test_later_setting_of_a_pair_removes_the_other(pair: tuple[str, str]) -> None:
    one, other = pair
    assert layered({one: 1}, {other: 2}) == {other: 2}
    assert layered({other: 1}, {one: 2}) == {one: 2}
    assert layered({one: 1}, {one: None, other: 2}) == {one: None, other: 2}


def test_a_single_tracker_needs_no_list(tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", shards="a", track="tensorboard")
    assert parsed("--config", file, "--print-config").track == ("tensorboard",)
    error = call(train.main, "--config", written(tmp_path / "b.yaml", track="mlflow"), expect=2)
    assert (
        "track: expected one or several of wandb, trackio, tensorboard, got mlflow" in error.stderr
    )
