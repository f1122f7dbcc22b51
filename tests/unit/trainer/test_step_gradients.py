"""A micro-batch that is too large for the memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import make_config, run, write_labelled

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.models.transformer import Transformer


def test_out_of_memory_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: Transformer, micro_batch: MicroBatch) -> Tensor:
        raise torch.OutOfMemoryError("simulated")

    config = make_config(write_labelled(tmp_path / "shards", "lm"), tmp_path / "run", steps=2)
    monkeypatch.setattr(Transformer, "hidden", fails)
    with pytest.raises(ConfigError, match=r"needs more memory than there is. Halve it: [^\n]*$"):
        run(config)
