"""What ranks agree on after each step: whether to stop or to save, and what was counted.

What a rank says after a step is known to all after the next one, when the message has long arrived;
so every rank does the same at the same step, and none waits. Alone it is known at once.
"""

from collections.abc import Callable

from tokenfeed.trainer.distributed.world import World

__all__ = ["Agreement"]


class Agreement:
    """Flags and sums over ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: Callable[[], list[int]] | None = None
        self._save = False
        self.stop = False
        """Whether any rank is to stop."""
        self.tokens = self.slots = 0
        """Of all ranks, up to the latest step that is known; `settle` makes it the last one."""
        self._told = 0, 0

    def begin(self, tokens: int, slots: int) -> None:
        """Count from here on."""
        self.tokens, self.slots = self._told = tokens, slots

    def after_step(self, *, stop: bool, save: bool, tokens: int, slots: int) -> tuple[int, int]:
        """Tell what happened on this rank, and take in what the others told one step before.

        Returns:
            Tokens and slots of all ranks that have become known since the last call.
        """
        self.settle()
        self._pending = self._world.add_up_later([stop, save, tokens, slots])
        if self._world.size == 1:
            self.settle()
        (tokens, slots), self._told = self._told, (self.tokens, self.slots)
        return self.tokens - tokens, self.slots - slots

    def ask(self, *, stop: bool) -> bool:
        """Whether any rank is to stop; between steps, with the delay of `after_step`."""
        self.settle()
        self._pending = self._world.add_up_later([stop, False, 0, 0])
        if self._world.size == 1:
            self.settle()
        return self.stop

    def settle(self) -> None:
        """Wait for what ranks told last."""
        if self._pending is None:
            return
        stop, save, tokens, slots = self._pending()
        self._pending = None
        self.stop |= stop > 0
        self._save |= save > 0
        self.tokens += tokens
        self.slots += slots

    def take_save(self) -> bool:
        """Whether any rank is to save; told once."""
        save, self._save = self._save, False
        return save
