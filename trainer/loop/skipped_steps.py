"""Name the records of steps that were skipped because their loss or gradients are not finite."""

import contextlib
import json
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.planning.stages import paths_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.pipeline.windows.origins import origins_of
from tokenfeed.trainer.data.datasets import training_source
from tokenfeed.trainer.loop.run_state import Run
from tokenfeed.trainer.report.progress_lines import MOST_SKIPPED, Skips

if TYPE_CHECKING:
    from tokenfeed.trainer.loop.parts import Saving

_BAD_STEP_FILE = "bad-step.jsonl"
"""Files and records of the first step that was skipped."""

_log = logging.getLogger(__name__)


class SkippedSteps:
    """Remembers the rows of the latest steps, to name the records of a skipped one."""

    def __init__(self, run: Run, saving: "Saving") -> None:
        self._run, self._saving = run, saving
        most = run.config.accumulation * (MOST_SKIPPED + run.config.log_every)
        self._rows_of_steps = deque[tuple[int, np.ndarray]](maxlen=most)
        """Step and rows of the latest micro-batches."""
        self._has_named = False

    def add(self, step: int, rows: Sequence[np.ndarray]) -> None:
        """Add the rows of the micro-batches of a step."""
        self._rows_of_steps.extend((step, each) for each in rows)

    def name(self, skips: Skips, *, ends: bool) -> None:
        """Log the records of the first skipped step, once per session. If the run ends, raise.

        If that step was before the run was resumed, take the first step since.

        Raises:
            ConfigError: `ends` is true.
        """
        if self._has_named and not ends:
            return
        self._has_named, run = True, self._run
        step, named = max(skips.first, self._rows_of_steps[0][0]), "see rank 0"
        own = [rows for number, rows in self._rows_of_steps if number == step]
        rows = np.concatenate(run.world.all_gather(np.concatenate(own)))
        if run.world.is_main:
            with contextlib.suppress(TokenfeedError, OSError):  # records may be gone
                named = f"its records, {self._write_records(rows)}"
        if not ends:
            reason = "its loss or gradients are not finite"
            _log.warning("step %d was skipped: %s; %s", step, reason, named)
            return
        if self._saving.saver:
            self._saving.saver.wait_after_error()
        other = "or take --precision fp32, " if run.learner.precision.is_scaled else ""
        again = "If the run fails again from there, delete that checkpoint to use the one before."
        raise ConfigError(
            f"loss or gradients are not finite, {count_of(skips.in_a_row, 'step')} in a row, from "
            f"step {skips.first} on. Lower --learning-rate or raise --warmup-steps, {other}and "
            f"{run.checkpoints.way_on()}. {f'{again} ' if run.checkpoints.latest() else ''}"
            f"Step {step}: {named}."
        )

    def _write_records(self, rows: np.ndarray) -> str:
        """Write the origin of each row to bad-step.jsonl, and return words for a message. Rows are
        numbers in the train split, counted through all data sets."""
        config = self._run.config
        sources = open_splits(paths_of(training_source(config)), "train")
        rows = np.unique(rows)
        whole = np.zeros(len(rows), np.int64)
        places = origins_of(sources, rows, whole, whole)
        keys = ("file", "record", "data_set", "row")
        lines = [json.dumps({key: getattr(each, key) for key in keys}) for each in places]
        path = config.run_dir / _BAD_STEP_FILE
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
        return f"{places[0].file} record {places[0].record} and others, are listed in {path}"
