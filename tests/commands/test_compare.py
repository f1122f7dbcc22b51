"""An compare names the first difference between two runs, and which of them left the plan."""

from pathlib import Path

from delivery import open_loader
from states import state_after


def test_runs_that_delivered_the_same_have_no_difference(folder: Path) -> None:
    state = state_after(folder, 30)
    assert open_loader(folder).compare(state, state_after(folder, 30, num_workers=1)) is None
