"""Who pays for idle time: not always the one during which it happens.

A host that is ahead hides the time of its loader. One that waits for a value, or stops to log,
loses its lead, and the next batch is late: the loader is not to blame, since it would have been in
time. So what is lost of the lead is a debt, and pays for idle time until the lead is as long again.
Without the wait the host had been earlier by the debt, and the device by what the debt has paid.
"""

from tokenfeed.trainer.stall.causes import Cause

__all__ = ["Debt"]


class Debt:
    """The lead that a cause has lost, and not yet won back."""

    def __init__(self) -> None:
        self.owner: Cause = "wait"
        self.seconds = 0.0
        self._lead_before = 0.0

    def lose(self, owner: Cause, before: float, after: float) -> None:
        """The host's lead shrank during `owner`; the larger debt stays."""
        lost = before - max(0.0, after)
        if lost > self.seconds:
            self.owner, self.seconds, self._lead_before = owner, lost, before

    def see(self, lead: float) -> None:
        """The host's lead is this now."""
        if self.seconds:
            self.seconds = min(self.seconds, max(0.0, self._lead_before - lead))

    def pay(self, idle: float) -> float:
        """Seconds of `idle` that the owner pays."""
        paid = min(idle, self.seconds)
        self.seconds -= paid
        return paid
