"""A GPU of any compute capability that computes on the CPU: values are real, speed is not.

`named_cuda` has devices, dtypes and kernels of a GPU without values. Here are the values: tensors
for the GPU are on the CPU, and so is its autocast. Streams and events exist and order nothing.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import named_cuda, varlen_on_cpu
from support.simulated_cuda import _OnTheCpu


@contextlib.contextmanager
def simulated_gpu(name: str, capability: tuple[int, int]) -> Iterator[None]:
    """Let torch find one GPU of this name and compute capability."""
    varlen_on_cpu.register()
    autocast = torch.autocast
    runtime = named_cuda._runtime(torch) | {
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "memory_reserved": lambda device=None: 0,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
        "memory_stats_as_nested_dict": lambda device=None: {},
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "mem_get_info": lambda device=None: (15 << 30, 16 << 30),
    }

    def on_the_cpu(kind: str, *values: Any, **named: Any) -> Any:
        return autocast("cpu", *values, **named)

    with pytest.MonkeyPatch.context() as patch:
        for each, value in runtime.items():
            patch.setattr(torch.cuda, each, value)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch, "autocast", on_the_cpu)
        with _OnTheCpu(SimpleNamespace(refuses=False)):  # type: ignore[arg-type]
            yield
