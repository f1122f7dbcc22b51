"""A damaged data set gives an error that names the file, or what it gave before: nothing else."""

import json
from pathlib import Path

import pytest
from support import warm
from support.delivery import MakeDataset, realistic_lengths

DAMAGE = """
import json, random, re, sys
from pathlib import Path

folder, first, count, num_workers = Path(sys.argv[1]), *map(int, sys.argv[2:5])

from support.delivery import open_loader, spans, tokens_of
from tokenfeed import Padded
from tokenfeed.pipeline.errors import ManifestError, ShardFormatError, TokenfeedError


def everything():
    with open_loader(folder, Padded(512), window_tokens=1500, num_workers=num_workers) as loader:
        return [(spans(batch), tokens_of(batch).tobytes()) for batch in loader]


expected = everything()
assert len(expected) > 10
files = [folder / "manifest.json", *sorted((folder / "train").glob("*.arrow"))]
outcomes = {"unchanged": 0, "record batch": 0, "shard": 0, "manifest": 0}
for seed in range(first, first + count):
    draw = random.Random(seed)
    path = draw.choice(files)
    good = path.read_bytes()
    bad, at = bytearray(good), draw.randrange(len(good))
    kind = draw.choice(["bit", "bit", "byte", "zeros", "swap", "cut", "grow"])
    if kind == "bit":
        bad[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        bad[at] = draw.randrange(256)
    elif kind == "zeros":
        size = draw.randrange(1, 600)
        bad[at : at + size] = bytes(len(bad[at : at + size]))
    elif kind == "swap":
        to = draw.randrange(len(good))
        bad[at : at + 64], bad[to : to + 64] = bad[to : to + 64], bad[at : at + 64]
    elif kind == "cut":
        del bad[at:]
    else:
        bad += draw.randbytes(draw.randrange(1, 99))
    path.write_bytes(bad)
    try:
        assert everything() == expected, f"seed {seed}: other tokens or rows"
        assert path != files[0] or json.loads(bad) == json.loads(good), f"seed {seed}: accepted"
        outcomes["unchanged"] += 1
    except TokenfeedError as error:
        message = str(error)
        assert "\\n" not in message and path.name in message, f"seed {seed}: {message!r}"
        if path == files[0]:
            assert isinstance(error, ManifestError), f"seed {seed}: {error!r}"
            outcomes["manifest"] += 1
        else:
            assert isinstance(error, ShardFormatError), f"seed {seed}: {error!r}"
            in_batch = re.search(r"record batch \\d+", message)
            outcomes["record batch" if in_batch else "shard"] += 1
    except Exception as error:
        raise AssertionError(f"seed {seed} ({kind} of {path.name} at {at})") from error
    path.write_bytes(good)
assert everything() == expected
print(json.dumps(outcomes))
"""


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard.BATCH_TOKENS", 500)
    return make_dataset(realistic_lengths(60), num_shards=3)


def damage(folder: Path, first: int, count: int, num_workers: int = 0) -> dict[str, int]:
    """Try many damages in a process of their own, which a crash would end; count what came of it.

    Only flips that Arrow itself ignores may pass: padding between buffers, and the like.
    """
    ended = warm.run(["-c", DAMAGE, folder, first, count, num_workers], timeout=280)
    assert (ended.returncode, ended.stderr) == (0, "")
    outcomes: dict[str, int] = json.loads(ended.stdout)
    assert sum(outcomes.values()) == count
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"), [(0, 50), pytest.param(50, 1950, marks=pytest.mark.long)]
)
def test_damages_are_named_or_change_nothing(folder: Path, first: int, count: int) -> None:
    outcomes = damage(folder, first, count)
    assert min(outcomes.values()) > 0, outcomes
    assert outcomes["unchanged"] < count / 3, "most of a shard is data"


@pytest.mark.slow
def test_damages_that_workers_meet_are_named_or_change_nothing(folder: Path) -> None:
    damage(folder, 0, 3, num_workers=1)
