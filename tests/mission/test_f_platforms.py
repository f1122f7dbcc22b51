"""The mission, platforms: a test for each row of docs/mission.md, by public commands and API."""

from pathlib import Path

import pytest
import yaml
from support import warm
from support.commands import run
from support.other_systems import EVERY_MODULE, FORGET, LIKE_WINDOWS, RUN

from tokenfeed import Manifest

ROOT = Path(__file__).parents[2]

# ---------- m31 ----------

ON_WINDOWS = (
    FORGET
    + LIKE_WINDOWS
    + EVERY_MODULE
    + RUN
    + """
from tokenfeed import Padded, ShardLoader
from tokenfeed.tools.pretokenizing import runner
runner.is_small = lambda units: False  # so that workers start for few texts
corpus, out, folder, plain = sys.argv[1:]
run("pretokenize", corpus, out, "--tokenizer", plain, "--workers", "2", "--shard-size", "20KB")
with ShardLoader(out, batching=Padded(512), epochs=1, num_workers=0) as loader:
    print("tokens", sum(batch.num_tokens for batch in loader))
try:
    ShardLoader(out, batching=Padded(512), num_workers=2)
except ValueError as error:
    print(error)
words = "--model words --sequence-length 32 --micro-batch-tokens 128 --step-tokens 256 --steps 4"
run("train", "--shards", out, "--run-dir", folder, *words.split(), "--save-every", "2")
"""
)


@pytest.mark.slow
def test_m32_same_script_without_a_gpu_and_on_windows(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """What Windows lacks is hidden: locks and limits of POSIX, fork, shared memory, signals."""
    done = warm.run(["-c", ON_WINDOWS, corpus, tmp_path / "out", tmp_path / "run", tokenizer])
    assert done.returncode == 0, done.stderr
    assert "`num_workers`=2: loader workers cannot run on Windows" in done.stdout
    assert "trained  4 steps" in done.stdout
    run(corpus, tmp_path / "linux", "--tokenizer", tokenizer, "--shard-size", "20KB")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "linux")
    tokens = Manifest.read(tmp_path / "out").splits["train"].tokens
    assert f"tokens {tokens}" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert "windows-latest" in workflow["jobs"]["platforms"]["strategy"]["matrix"]["os"]
    assert "No test has run on Windows" in (ROOT / "docs/limits.md").read_text()


def shards_of(out: Path) -> list[tuple[str, str, str]]:
    """The shards of a data set with their checksums."""
    splits = Manifest.read(out).splits
    return [(name, shard.file, shard.xxh3) for name in splits for shard in splits[name].shards]


# ---------- m33 ----------
