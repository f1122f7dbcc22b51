"""States of loaders, as a file would keep them."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

from delivery import open_loader

__all__ = ["State", "state_after"]

State = dict[str, Any]


def state_after(folder: Path, batches: int, **options: Any) -> State:
    """The state of a loader that has delivered so many batches."""
    with open_loader(folder, **{"epochs": None} | options) as loader:
        for _ in islice(loader, batches):
            pass
        state: State = json.loads(json.dumps(loader.state_dict()))
    return state
