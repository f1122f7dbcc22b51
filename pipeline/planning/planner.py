"""Plans of one loader: they differ in the size of a step alone. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.state import saved_step_size

__all__ = ["Planner"]


@dataclass(frozen=True, slots=True)
class Planner:
    """Decides how many micro-batches a step has: as was said, else as a loaded state says, else one
    for each rank."""

    make: Callable[..., Plan]
    """Makes a plan with so many `micro_batches_per_step`; all else is settled."""
    step_size: int | None
    """What was said."""
    ranks: int

    def first(self) -> Plan:
        """The plan before a state is loaded."""
        return self._of(self.ranks if self.step_size is None else self.step_size)

    def of_state(self, state: dict[str, Any], present: Plan) -> Plan:
        """The plan to load a state into; the present one, where it brings no step size of use."""
        step_size = saved_step_size(state) if self.step_size is None else None
        return present if step_size is None else self._of(step_size)

    def _of(self, step_size: int) -> Plan:
        return self.make(micro_batches_per_step=step_size)
