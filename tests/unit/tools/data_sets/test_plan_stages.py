"""`shards plan` shows what a loader of the same stages delivers."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.data_sets import VOCABULARY_SIZE, random_rows, write_rows

from tokenfeed import Padded, ShardLoader, Stage
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.data_sets.plan_stages import ShowPlan


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 500)
    return [
        write_rows(
            tmp_path / name,
            {"train": random_rows(np.random.default_rng(count).integers(1, 40, count))},
            VOCABULARY_SIZE,
            3,
        )
        for name, count in (("code", 500), ("prose", 900))
    ]


def planned(
    file: Path, capsys: pytest.CaptureFixture[str], **options: int
) -> dict[str, list[object]]:
    assert ShowPlan(file=file, json=True, **options).run() == 0
    found: dict[str, list[object]] = json.loads(capsys.readouterr().out)
    return found


def test_planned_tokens_are_those_that_a_loader_delivers(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, prose = folders
    file = tmp_path / "mixing.yaml"
    file.write_text(
        f"""
shards: {code}
step_tokens: 1000
mixing:
  - {{shards: {{{code}: 3, {prose}: 1}}, until_step: 20}}
  - {{shards: {{{code}: 1}}, to: {{{prose}: 1}}, until_tokens: 60_000}}
  - {{shards: {prose}}}
"""
    )
    assert ShowPlan(file=file, json=True).run() == 0
    found = json.loads(capsys.readouterr().out)
    stages = [
        Stage({code: 3, prose: 1}, until_tokens=20_000),
        Stage({code: 1}, to={prose: 1}, until_tokens=60_000),
    ]
    with ShardLoader(stages, batching=Padded(1000), num_workers=0) as loader:
        assert sum(1 for _ in loader)
        delivered = loader.stats().last_epoch_tokens
    for folder in folders:
        read = [
            data["tokens"]
            for stage in found["stages"][:2]
            for data in stage["data"]
            if data["name"] == str(folder)
        ]
        assert sum(read) == pytest.approx(delivered[str(folder)], abs=2 * 600)
    first, second, last = found["stages"]
    assert (first["steps"], second["steps"], last["steps"]) == (20, 40, None)
    ends = found["read_completely_at"]
    assert 10_000 < ends[str(code)] < 20_000 < ends[str(prose)]
    assert ShowPlan(file=file, ranks=4, streams=2).run() == 0
    assert "read completely at token" in capsys.readouterr().out


def test_a_file_without_stages_is_refused(folders: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(f"shards: {folders[0]}\n")
    with pytest.raises(ConfigError, match=r"plain\.yaml: has no `mixing`"):
        ShowPlan(file=file).run()
    file.write_text(f"shards: {folders[0]}\nmixing: [{{shards: {folders[0]}}}]\n")
    with pytest.raises(ConfigError, match="expected a divisor of `--ranks`, 3"):
        ShowPlan(file=file, ranks=3, streams=2).run()
    stepped = f"{{shards: {folders[0]}, until_step: 9}}"
    file.write_text(f"mixing: [{stepped}, {{shards: {folders[0]}}}]\n")
    with pytest.raises(ConfigError, match="`until_step` has no known tokens"):
        ShowPlan(file=file).run()
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file or directory"):
        ShowPlan(file=tmp_path / "missing.yaml").run()
    for folder, words in (
        (folders[0], "the stage from token 0 to 100"),
        ("gone", "gone/manifest.json"),
    ):
        file.write_text(f"mixing: [{{shards: {folder}, until_tokens: 100}}, {{shards: {folder}}}]")
        with pytest.raises(ConfigError, match=rf"plain\.yaml: mixing: {words}"):
            ShowPlan(file=file).run()
