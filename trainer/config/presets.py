"""The presets of `train`: YAML files of settings for a GPU or for a purpose.

A GPU's preset sets neither model, nor task, nor the length of rows, so that it suits any data.
Does not import torch.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.values import nearest, read_settings

FOLDER = Path(__file__).parent.parent / "presets"
OF_GPU = "auto"
"""The preset of the GPU of this machine."""
_GPUS = {"t4": "T4", "v100": "V100", "rtx4090": "RTX 4090", "a100": "A100", "h100": "H100"}
"""Presets for GPUs, with the words in the name of the GPU."""
_CONSUMER, _LARGEST_CONSUMER_BYTES = "rtx4090", 35e9


def preset_names() -> list[str]:
    """Return the names of all presets: GPUs, then purposes."""
    files = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [OF_GPU, *_GPUS, *(name for name in files if name not in _GPUS)]


def read_preset(name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a preset by field.

    Raises:
        ConfigError: There is no such preset.
    """
    names = preset_names()[1:]
    if name not in names:
        hint = nearest(name.lower(), names)
        raise ConfigError(
            f"`--preset`: expected {OF_GPU}, {', '.join(names)}, or several like t4,production, "
            f"got {name or 'an empty name'}.{hint}"
        )
    return read_settings(FOLDER / f"{name}.yaml", kinds)


def preset_of(gpu: str, capability: tuple[int, int], memory: float) -> str | None:
    """Return the preset that suits a GPU: by its name, or by its capability and memory in bytes;
    None for a GPU without tensor cores."""
    for name, words in _GPUS.items():
        if re.search(rf"\b{words}\b", gpu):
            return name
    if capability < (7, 0):
        return None
    if capability < (8, 0):
        return "v100" if capability < (7, 5) else "t4"
    if memory < _LARGEST_CONSUMER_BYTES:
        return _CONSUMER
    return "a100" if capability < (9, 0) else "h100"
