"""Weights that come and go: into a checkpoint, out of one, and from an earlier run.

Kept is what training changes. Weights that adapters stand beside are those of the model's name, and
are read from there again.
"""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.checkpoints.folder import Checkpoints
from tokenfeed.trainer.ranks.shares import laid_like

__all__ = ["State", "load_weights", "start_from", "trained_state"]

_log = logging.getLogger(__name__)

State = dict[str, Tensor]


def trained_state(model: nn.Module) -> State:
    """The model's state but for weights that are frozen."""
    frozen = _frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_weights(model: nn.Module, state: State) -> None:
    """Take over what `trained_state` gave.

    Raises:
        ResumeError: It is of another model.
    """
    expected = {name: value.shape for name, value in trained_state(model).items()}
    given = {name: value.shape for name, value in state.items()}
    if expected != given:
        name = min(name for name, _ in expected.items() ^ given.items())
        raise ResumeError(
            f"cannot go on: the checkpoint's weights are not those of this model: {name} is "
            f"{_shape(given.get(name))} there and {_shape(expected.get(name))} here. Give the "
            "--model, --lora and --lora-target that it was made with."
        )
    ours = trained_state(model)
    model.load_state_dict(
        {name: laid_like(ours[name], value) for name, value in state.items()}, strict=False
    )


@torch.no_grad()
def start_from(source: str, model: nn.Module) -> None:
    """Take over the weights of a run or an exported folder that fit by name and shape; say which
    start fresh.

    Raises:
        ConfigError: There are none, or none fit.
    """
    found = _read(Path(source))
    fresh, ours = [], model.state_dict(keep_vars=True)
    taken: set[int] = set()
    for name, value in ours.items():
        theirs = found.get(name, found.get(name.removeprefix("model.")))
        if theirs is not None and theirs.shape == value.shape:
            value.data.copy_(theirs)
            taken.add(value.data_ptr())
    fresh = [name for name, value in ours.items() if value.data_ptr() not in taken]
    if not taken:
        raise ConfigError(
            f"`--init-from`={source}: has no weight that fits the model. Give the --model that it "
            "was made with; a run with --lora must be exported first."
        )
    _log.info("%s: starts fresh: %s", source, ", ".join(fresh) or "nothing")


def _frozen(model: nn.Module) -> set[str]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def _read(folder: Path) -> State:
    files = sorted(folder.glob("*.safetensors"))
    checkpoints = Checkpoints.of_run(folder)
    if not files and checkpoints.latest() is None:
        raise ConfigError(
            f"`--init-from`={folder}: expected the folder of a run or of `train --export`, and "
            "found neither checkpoints nor *.safetensors."
        )
    if files:
        return {name: value for file in files for name, value in _load(file).items()}
    best = checkpoints.best()
    _, state = checkpoints.load(torch.device("cpu"), best.step if best else None)
    weights: State = state["model"]
    return weights


def _load(file: Path) -> State:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ConfigError(
            f"`--init-from`: {file} is damaged ({error}). Export again, or copy it once more."
        ) from error
