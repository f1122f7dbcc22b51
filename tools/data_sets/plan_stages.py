"""`shards plan`: what the stages of a run read, from the manifests alone."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Padded
from tokenfeed.pipeline.planning.stages import ENDLESS, PlannedStage, StagedOrder, paths_of
from tokenfeed.tools.data_sets.inspection import aligned
from tokenfeed.tools.shell.console import print_json
from tokenfeed.tools.train_settings import FILE_KINDS
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.config.values import Positive, read_settings
from tokenfeed.trainer.data.datasets import training_source


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowPlan:
    """Show what each stage of a mixture reads: tokens, steps, and how often each data set is read.
    Reads manifests only."""

    file: Annotated[Path, msgspec.Meta(title="FILE", description="a path")]
    """A YAML file for `train --config` with a list `mixing`. If the file sets `step_tokens`, the
    output also has the number of steps of each stage, and the tokens of stages with `until_step`.
    Both are estimates that ignore padding."""
    ranks: Positive = 1
    """Number of ranks."""
    streams: Positive = 1
    """Number of groups of ranks, each of which reads its own part of the data: the loader's
    `num_streams`."""
    json: bool = False
    """Print a JSON object."""

    def run(self) -> int:
        """Print the stages and the data sets."""
        settings = read_settings(self.file, FILE_KINDS)
        if not settings.get("mixing"):
            raise ConfigError(f"{self.file}: has no `mixing`, a list of stages. Add one.")
        if self.ranks % self.streams:
            raise ConfigError(
                f"`--streams`={self.streams}: expected a divisor of `--ranks`, {self.ranks}."
            )
        step = settings.get("step_tokens")
        try:
            sources, plan = self._planned(_without_steps(settings["mixing"], step))
        except TokenfeedError as error:
            raise ConfigError(f"{self.file}: mixing: {error}") from None
        assert isinstance(plan.order, StagedOrder)
        known = _known(plan.order, sources, step, self.streams)
        if self.json:
            print_json(known)
        else:
            print("\n".join(_lines(known)))
        return 0

    def _planned(self, mixing: Any) -> tuple[tuple[OpenedSplit, ...], Plan]:
        """Return the data sets, and the plan of a loader of the stages."""
        stages = training_source(TrainConfig(shards=mixing[0].shards, mixing=mixing))
        sources = open_splits(paths_of(stages), "train")
        longest = max(source.split.longest_row for source in sources)
        return sources, Plan.from_splits(
            sources,
            stages,
            Padded(max(longest, _LEAST_TOKENS)),
            split="train",
            micro_batches_per_step=self.ranks,
            window_tokens=None,
            seed=0,
            shuffle=True,
            num_streams=self.streams,
        )


def _without_steps(mixing: Any, step: int | None) -> Any:
    """Return stages with `until_tokens` instead of `until_step`, for steps of this many tokens."""
    if step is None and any(stage.until_step for stage in mixing):
        raise ConfigError("`until_step` has no known tokens. Set `step_tokens` in the file.")
    return tuple(
        replace(stage, until_tokens=stage.until_step * step, until_step=None)
        if stage.until_step
        else stage
        for stage in mixing
    )


_LEAST_TOKENS = 1 << 14
"""Tokens of a micro-batch. Figures hardly depend on it."""


def _known(
    order: StagedOrder, sources: tuple[OpenedSplit, ...], step: int | None, streams: int
) -> dict[str, Any]:
    """Return the figures of each stage, and where each data set was read completely."""
    stages = []
    for number, stage in enumerate(order.stages, 1):
        tokens = None if stage.until is None else stage.until - stage.begins
        stages.append(
            {
                "stage": number,
                "from": stage.begins,
                "until": stage.until,
                "tokens": tokens,
                "steps": None if tokens is None or step is None else ceil_div(tokens, step),
                "windows": None if stage.until is None else stage.num_windows,
                "window_tokens": stage.window_tokens,
                "data": [
                    _reading(order, source, opened, stage, streams)
                    for source, opened in enumerate(sources)
                    if order.data[source] in stage.weights
                ],
            }
        )
    ends = {source.name: _first_end(order, number) for number, source in enumerate(sources)}
    return {"stages": stages, "read_completely_at": ends}


def _reading(
    order: StagedOrder, source: int, opened: OpenedSplit, stage: PlannedStage, streams: int
) -> dict[str, Any]:
    """Return what a stage reads of a data set; None for each figure of a stage without an end."""
    if stage.until is None:
        return {"name": opened.name, "tokens": None, "readings": None, "gigabytes": None}
    before, after = (order.given(source, tokens) for tokens in (stage.begins, stage.until))
    size = sum(shard.bytes for shard in opened.split.shards)
    return {
        "name": opened.name,
        "tokens": round((after - before) * opened.tokens / opened.batches),
        "readings": round(after / opened.batches, 3),
        "gigabytes": round((after - before) * size / opened.batches / streams / 1e9, 3),
    }


def _first_end(order: StagedOrder, source: int) -> int | None:
    """Return the tokens of the run at which a data set was read completely; None if never."""
    size, most = order.sizes[source], order.stages[-1].until or ENDLESS
    if order.given(source, most) < size:
        return None
    return bisect_left(range(most), size, key=lambda tokens: order.given(source, tokens))


def _lines(known: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    rows = [("stage", "data set", "until token", "tokens", "readings so far", "GB", "steps")]
    for stage in known["stages"]:
        until = "no end" if stage["until"] is None else f"{stage['until']:,}"
        shown = [_number(stage[name]) for name in ("tokens", "steps")]
        rows.append((str(stage["stage"]), "", until, shown[0], "", "", shown[1]))
        rows += [
            (
                *("", each["name"], "", _number(each["tokens"])),
                *(_number(each["readings"], ",.2f"), _number(each["gigabytes"], ",.3f"), ""),
            )
            for each in stage["data"]
        ]
    lines = [*aligned(rows, num_left=2)]
    for name, end in known["read_completely_at"].items():
        when = "not read to its end" if end is None else f"read completely at token {end:,}"
        lines.append(f"{name}: {when}")
    return lines


def _number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)
