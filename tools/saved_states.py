"""What a run has saved of its loader: a state by itself, or in a checkpoint of `train`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError

__all__ = ["SavedState"]

_CHECKPOINT_FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state, and after which step of a run it was saved; 0 where it does not say."""

    state: dict[str, Any]
    step: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a state or a checkpoint.

        Raises:
            ConfigError: It is neither.
        """
        path = path / _CHECKPOINT_FILE if path.is_dir() else path
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"`--state` {path}: {error.strerror}. Give a file that there is, or a checkpoint."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"`--state` {path}: is no JSON ({error}). Give what `state_dict()` gave, saved by "
                "`json.dump`, or a checkpoint of `train`."
            ) from None
        meta = content.get("meta", content) if isinstance(content, dict) else {}
        if not isinstance(meta, dict) or not isinstance(meta.get("loader"), dict):
            return cls(content, 0)
        return cls(meta["loader"], _step_of(meta, path))

    @property
    def num_streams(self) -> int:
        """Streams that the state is of, if it is one of several."""
        streams = self.state.get("streams") if isinstance(self.state, dict) else None
        return len(streams) if streams and isinstance(streams, list) else 1


def _step_of(meta: dict[str, Any], path: Path) -> int:
    """After which step of its run a checkpoint was saved.

    Raises:
        ConfigError: It does not say.
    """
    step = checks.as_int(meta.get("step"))
    if step is None:
        raise ConfigError(
            f"`--state` {path}: a checkpoint that says no step (step={meta.get('step')!r}). Give "
            "one as `train` left it."
        )
    return step
