"""A CUDA device in name only, on a build of torch without CUDA: code for a GPU runs where none is.

Its tensors have shapes, dtypes and devices, and no values. So every branch on the device is taken,
autocast chooses as on a GPU, and a mix of devices is an error. What asks for a value is answered
with 1, for the caller to list (`host_waits`). Streams and events exist and order nothing, for all
work is done at once: their use is another proof (`races`). Kernels and memory are not simulated.

    python -c 'import named_cuda; ...'    in a process of its own, because it changes torch:
    torch = named_cuda.begin(library)     before anything has imported torch
    with named_cuda.device(): ...
"""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import xxhash

_SOURCE = Path(__file__).with_suffix(".cpp")
_CAPABILITY = (9, 0)
"""Asked for at each call, so that a program may change it."""
keeps_parameters = False
"""Whether parameters that only change their device stay the same objects, which an optimizer may
hold. Then no memory of the device is counted for them."""


def why_not() -> str | None:
    """What it lacks here; None where it can be built."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "this build of torch has a CUDA guard and CUDA hooks of its own"
    if not (_torch_folder() / "include/c10/core/impl/DeviceGuardImplInterface.h").exists():
        return "torch came without its C++ headers"
    return None if shutil.which("g++") else "no g++"


def build(folder: Path) -> Path:
    """Compile the library against the torch that is installed, unless `folder` has it already: it
    takes a dozen seconds."""
    torch_folder = _torch_folder()
    key = _SOURCE.read_bytes() + str(torch_folder).encode() + version("torch").encode()
    library = folder / f"named_cuda-{xxhash.xxh3_64_hexdigest(key)}.so"
    if not library.exists():
        search = [
            f"-I{torch_folder}/include",
            f"-L{torch_folder}/lib",
            f"-Wl,-rpath,{torch_folder}/lib",
        ]
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(_SOURCE), "-o", str(made)]
        subprocess.run([*command, *search, "-lc10", "-ltorch_cpu"], check=True)
        made.replace(library)
    return library


def begin(library: Path) -> ModuleType:
    """Load the device, import torch and tell it of one GPU; for the rest of the process."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    for name, value in _runtime(torch).items():
        setattr(torch.cuda, name, value)
        if "rng_state" in name:
            setattr(torch.cuda.random, name, value)
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign,assignment]
    _exchange_by_gloo(torch)
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment]
    return torch


def _exchange_by_gloo(torch: ModuleType) -> None:
    """Let ranks of a group of NCCL wait for each other, as they would to exchange gradients."""
    dist = torch.distributed
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    class Group(dist.ProcessGroup):  # type: ignore[misc,name-defined]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(rank, size)
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            with unset_fake_temporarily():
                self._gloo.barrier().wait()
            future = torch.futures.Future()
            future.set_result(tensors)
            return torch._C._distributed_c10d._create_work_from_future(future)

        broadcast = allreduce

        def barrier(self, options: Any = None) -> Any:
            return self.allreduce([], options)

        def getBackendName(self) -> str:
            return "named"

    def begin(backend: str | None = None, *words: Any, **options: Any) -> None:
        start("named" if backend == "nccl" else backend, *words, **options)

    dist.Backend.register_backend("named", Group, devices=["cpu", "cuda"])
    start, dist.init_process_group = dist.init_process_group, begin
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *given: True
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # it has a timer of CUDA's
    dist.Reducer._rebuild_buckets = lambda reducer: False  # it sends values


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Within it tensors have no values, wherever they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _answers(), _host_memory(), _as_cuda_chooses():
        yield


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


class _Event:
    """Has passed as soon as it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.is_timed = enable_timing

    def record(self, stream: "_Stream | None" = None) -> None:
        pass

    def wait(self, stream: "_Stream | None" = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "_Event") -> float:
        assert self.is_timed
        assert later.is_timed
        return 1.0


class _Stream:
    """A stream whose work is done at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Device(contextlib.nullcontext[None]):
    """The current device, in a `with` block."""


def _runtime(torch: ModuleType) -> dict[str, Any]:
    """What torch.cuda has to say of one device."""
    properties = SimpleNamespace(
        name="a GPU in name only",
        uuid="0",
        total_memory=80 << 30,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=1,
    )
    runtime = SimpleNamespace(cudaHostRegister=_succeed, cudaHostUnregister=_succeed)
    default_stream = _Stream()
    return {
        "Event": _Event,
        "Stream": _Stream,
        "_lazy_init": lambda: None,
        "cudart": lambda: runtime,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: default_stream,
        "device": _Device,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: _CAPABILITY >= (8, 0),
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device="cuda": None,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }


def _succeed(*arguments: int) -> int:
    return 0


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """`Module._apply`, which would swap tensors in place: fake ones cannot be. Ties are kept."""
    import torch

    moved: dict[Any, Any] = {}
    for part in module.modules() if recurse else (module,):
        for name, value in part._parameters.items():
            if value is not None and value not in moved:
                new = function(value.detach())
                if keeps_parameters and new.dtype == value.dtype and hasattr(value, "fake_device"):
                    value.fake_device, moved[value] = new.device, value
                else:
                    moved[value] = torch.nn.Parameter(new, value.requires_grad)
            part._parameters[name] = moved.get(value)
        for name, value in part._buffers.items():
            part._buffers[name] = None if value is None else function(value)
    return module


def _answers() -> Any:
    """A mode that answers who asks for a value."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.name() == "aten::_local_scalar_dense":
                return _one(args[0])
            if function.name() == "aten::equal":
                return True
            return function(*args, **(kwargs or {}))

    return Answers()


def _one(tensor: Any) -> bool | int | float:
    if tensor.dtype.is_floating_point:
        return 1.0
    return True if str(tensor.dtype) == "torch.bool" else 1


def _host_memory() -> Any:
    """A mode that leaves page-locked memory its values, where numpy writes into it; an array of
    what has no values is full of 1."""
    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.overrides import TorchFunctionMode

    class HostMemory(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            options = kwargs or {}
            if function == torch.Tensor.pin_memory:
                return args[0]
            if function == torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
                return args[0].untyped_storage()._cdata  # to tell whether two share it
            if function == torch.Tensor.__format__ and isinstance(args[0], FakeTensor):
                return format(args[0].item(), args[1])
            if function == torch.Tensor.numpy and isinstance(args[0], FakeTensor):
                return np.ones(args[0].shape, str(args[0].dtype).removeprefix("torch."))
            if options.pop("pin_memory", False) or function == torch.Tensor.numpy:
                with unset_fake_temporarily():
                    return function(*args, **options)
            return function(*args, **options)

    return HostMemory()


def _as_cuda_chooses() -> Any:
    """A mode that attends with the kernels of a GPU: without one, torch chooses by the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Fused(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            options = kwargs or {}
            is_attention = function == torch.nn.functional.scaled_dot_product_attention
            if is_attention and args[0].dtype.itemsize == 2:
                return _fused_attention(torch, *args, **options)
            return function(*args, **options)

    return Fused()


def _fused_attention(
    torch: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention, or where there is a mask or an old GPU, the memory-efficient one."""
    assert not enable_gqa, "as many heads of keys as of queries"
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    if attn_mask is None and _CAPABILITY < (8, 0):
        return efficient(query, key, value, None, True, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
