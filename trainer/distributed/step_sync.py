"""Synchronize ranks after each step: whether to stop or to save, and the counts of tokens.

Messages are one step behind. What a rank sends after step 7, all ranks read after step 8, when the
message has long arrived. So all ranks do the same thing at the same step, and none waits. With one
rank there is no delay.
"""

from collections.abc import Callable

from tokenfeed.trainer.distributed.world import World

__all__ = ["StepSync"]


class StepSync:
    """Stop and save requests, and token counts, over all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: Callable[[], list[int]] | None = None
        self._save = False
        self.stop = False
        """Whether any rank requests a stop."""
        self.tokens = self.slots = 0
        """Counts of all ranks, up to the latest step received. After `wait`, up to the last
        step."""
        self._reported = 0, 0

    def begin(self, tokens: int, slots: int) -> None:
        """Set the counts at which a resumed run starts."""
        self.tokens, self.slots = self._reported = tokens, slots

    def after_step(self, *, stop: bool, save: bool, tokens: int, slots: int) -> tuple[int, int]:
        """Send what happened on this rank. Receive what all ranks sent one step before.

        Returns:
            Tokens and slots of all ranks received since the previous call.
        """
        self.wait()
        self._pending = self._world.all_reduce_async([stop, save, tokens, slots])
        if self._world.size == 1:
            self.wait()
        (tokens, slots), self._reported = self._reported, (self.tokens, self.slots)
        return self.tokens - tokens, self.slots - slots

    def ask(self, *, stop: bool) -> bool:
        """Return whether any rank requests a stop. For use between steps; delayed like
        `after_step`."""
        self.wait()
        self._pending = self._world.all_reduce_async([stop, False, 0, 0])
        if self._world.size == 1:
            self.wait()
        return self.stop

    def wait(self) -> None:
        """Wait for the last messages of all ranks."""
        if self._pending is None:
            return
        stop, save, tokens, slots = self._pending()
        self._pending = None
        self.stop |= stop > 0
        self._save |= save > 0
        self.tokens += tokens
        self.slots += slots

    def take_save(self) -> bool:
        """Return whether any rank requests a save, once per request."""
        save, self._save = self._save, False
        return save
