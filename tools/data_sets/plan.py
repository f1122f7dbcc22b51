"""`shards plan`: what the stages of a run read, from the manifests alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Padded
from tokenfeed.pipeline.planning.stages import ENDLESS, StagedOrder, paths_of
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
    numbers of steps are shown too, estimated without padding."""
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
        try:
            sources, plan = self._planned(settings["mixing"])
        except TokenfeedError as error:
            raise ConfigError(f"{self.file}: mixing: {error}") from None
        assert isinstance(plan.order, StagedOrder)
        step = settings.get("step_tokens")
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


_LEAST_TOKENS = 1 << 14
"""Tokens of a micro-batch. Figures hardly depend on it."""


def _known(
    order: StagedOrder, sources: tuple[OpenedSplit, ...], step: int | None, streams: int
) -> dict[str, Any]:
    """Return the figures of each stage, and where each data set was read completely."""
    stages = []
    for number, stage in enumerate(order.stages, 1):
        end = stage.until
        tokens = None if end is None else end - stage.begins
        of_sources = []
        for source, opened in enumerate(sources):
            if order.data[source] not in stage.weights:
                continue
            read = None
            if end is not None:
                batches = order.given(source, end) - order.given(source, stage.begins)
                read = round(batches * opened.tokens / opened.batches)
            of_sources.append(
                {
                    "name": opened.name,
                    "tokens": read,
                    "readings": None
                    if end is None
                    else round(order.given(source, end) / opened.batches, 3),
                    "gigabytes": None
                    if read is None
                    else round(read * _bytes_per_token(opened) / streams / 1e9, 3),
                }
            )
        stages.append(
            {
                "stage": number,
                "from": stage.begins,
                "until": end,
                "tokens": tokens,
                "steps": None if tokens is None or step is None else ceil_div(tokens, step),
                "windows": None if end is None else stage.num_windows,
                "window_tokens": stage.window_tokens,
                "data": of_sources,
            }
        )
    ends = {source.name: _first_end(order, number) for number, source in enumerate(sources)}
    return {"stages": stages, "read_completely_at": ends}


def _bytes_per_token(source: OpenedSplit) -> float:
    return sum(shard.bytes for shard in source.split.shards) / source.tokens


def _first_end(order: StagedOrder, source: int) -> int | None:
    """Return the tokens of the run at which a data set was read completely; None if never."""
    size = order.sizes[source]
    least, most = 0, order.stages[-1].until or ENDLESS
    if order.given(source, most) < size:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if order.given(source, middle) >= size else (middle, most)
    return most


def _lines(known: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    head = ("stage", "data set", "until token", "tokens", "readings so far", "GB", "steps")
    rows: list[tuple[str, ...]] = [head]
    for stage in known["stages"]:
        until = "no end" if stage["until"] is None else f"{stage['until']:,}"
        steps = _number(stage["steps"])
        rows.append((str(stage["stage"]), "", until, _number(stage["tokens"]), "", "", steps))
        rows += [
            ("", each["name"], "", _number(each["tokens"]), *_shown(each), "")
            for each in stage["data"]
        ]
    lines = [*aligned(rows, num_left=2)]
    for name, end in known["read_completely_at"].items():
        when = "not read to its end" if end is None else f"read completely at token {end:,}"
        lines.append(f"{name}: {when}")
    return lines


def _shown(source: dict[str, Any]) -> tuple[str, str]:
    if source["readings"] is None:
        return "", ""
    return f"{source['readings']:,.2f}", f"{source['gigabytes']:,.3f}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
