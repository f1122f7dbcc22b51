"""Real ranks, by gloo: the report names the one that is late, and the others waited so long."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS, warm

pytestmark = pytest.mark.clock

SECONDS, STEPS = 0.2, 20


def python(*words: object) -> str:
    ended = warm.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def assert_late(stall: dict[str, Any], slept: float, late: int) -> None:
    """Within 10 % of what it slept, once the exchange itself is taken off, which a busy machine
    makes long."""
    ranks = stall["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1]
    data = [each["causes"].get("data", 0.0) / each["steps"] for each in ranks]
    assert data[late] - data[1 - late] == pytest.approx(slept, rel=0.1)
    waiting = ranks[1 - late]
    assert waiting["causes"]["communication"] >= waiting["waited_seconds"]
    assert waiting["waited_seconds"] / waiting["steps"] == pytest.approx(slept, rel=0.1)
    slowest = stall["slowest_rank"]
    assert (slowest["rank"], slowest["cause"]) == (late, "data")
    assert slowest["step_seconds"] == pytest.approx(slept, rel=0.1)


@pytest.mark.slow
def test_a_loop_that_is_not_ours_gathers_what_its_ranks_have_measured(tmp_path: Path) -> None:
    *told, found = python(PROGRAMS / "foreign_ranks.py", SECONDS, 15, tmp_path).splitlines()
    assert_late(json.loads(found), SECONDS, late=1)
    assert any("rank 1 keeps the others waiting: data" in line for line in told)


@pytest.mark.slow
def test_trainer_waiting_for_late_loader_of_another_rank_is_communication(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = python(PROGRAMS / "trainer_ranks.py", tmp_path, 0.05).splitlines()[-1]
    stall = json.loads(found)
    quick, late = stall["ranks"]
    assert quick["causes"]["communication"] / quick["steps"] == pytest.approx(0.05)
    assert quick["causes"].get("data", 0.0) == 0.0
    assert late["causes"]["data"] / late["steps"] == pytest.approx(0.05)
    assert (stall["slowest_rank"]["rank"], stall["slowest_rank"]["cause"]) == (1, "data")


@pytest.mark.slow
def test_late_rank_is_named_although_ddp_hides_the_waits_in_its_backward_pass(
    tmp_path: Path,
) -> None:
    """Real seconds of real ranks. A busy machine makes all ranks slower, and none of them late."""
    *told, found = python(PROGRAMS / "ddp_ranks.py", SECONDS, STEPS, tmp_path).splitlines()
    late = json.loads(found)["slowest_rank"]
    assert (late["rank"], late["cause"]) == (1, "data")
    assert late["hidden_seconds"] == pytest.approx(SECONDS, rel=0.3)
    assert late["step_seconds"] == pytest.approx(SECONDS, rel=0.3)
    verdict, reason, following = told[:3]
    assert "rank 1 keeps the others waiting: data" in reason
    assert "rank 0's work contains about" in reason
    if verdict != "verdict  SHORT OF CORES":  # of a busy machine
        assert verdict == "verdict  WAITS FOR RANK 1"
        assert following.startswith("next     rank 1: set `num_workers=")
    assert any(re.match(r" +rank 0 .* in work ", line) for line in told)
