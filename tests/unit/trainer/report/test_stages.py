"""The stages of a run's data in its report: planned tokens."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.trainer.report.run_files import planned_tokens

SHARES = st.floats(0, 1).map(lambda share: {"a": share, "b": 1 - share})


def test_a_stage_plans_its_tokens_by_its_shares() -> None:
    half, only = {"a": 0.5, "b": 0.5}, {"a": 1.0}
    found = planned_tokens([(100, half), (None, only)], 200)
    assert [stage.planned for stage in found] == [{"a": 50.0, "b": 50.0}, {"a": 100.0}]
    assert planned_tokens([(100, half), (None, only)], 50)[0].planned == {"a": 25.0, "b": 25.0}
    assert len(planned_tokens([(100, half), (None, only)], 100)) == 1, "the second has not begun"


@given(st.integers(0, 900), st.lists(st.integers(1, 300), max_size=3), st.data())
def test_stages_plan_each_token_once(tokens: int, lengths: list[int], data: st.DataObject) -> None:
    ends = [*accumulate(lengths), None]
    stages = [(end, data.draw(SHARES)) for end in ends]
    found = planned_tokens(stages, tokens)
    assert sum(sum(each.planned.values()) for each in found) == pytest.approx(tokens)
