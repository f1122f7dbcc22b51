"""Run the kernel of trainer/models/gelu_products.py in Triton's interpreter, or compile it for some
GPUs. Needs triton, and no GPU.

usage: TRITON_INTERPRET=1 gelu_kernel.py
       gelu_kernel.py CAPABILITY...         such as 80 90
"""

import sys

import torch
import torch.nn.functional as F

from tokenfeed.trainer.models import gelu_products
from tokenfeed.trainer.models.gelu_products import BLOCK, TILES, launch

SHARED_BYTES = {"80": 163 << 10, "90": 227 << 10}


def interpret() -> None:
    """Compare with the operators of torch, in fp16: Triton's interpreter does not multiply bf16."""
    torch.manual_seed(0)
    for rows, inner, columns in ((300, 64, 256), (128, 128, 512), (5, 192, 256)):
        x, grad = torch.randn(2, rows, inner).half()
        first = (2 * torch.randn(columns, inner) * inner**-0.5).half()
        second = torch.randn(inner, columns).half()
        for tiles in TILES:
            room = torch.full((3, rows + 200, columns), 7.0).half()
            before, hidden, slope = room[:, :rows]
            launch(x, first.t(), before, hidden, is_gradient=False, tiles=tiles)
            launch(grad, second, before, slope, is_gradient=True, tiles=tiles)
            assert (room[:, rows:] == 7).all(), "written behind the last row"
            expected = (
                F.linear(x, first),
                F.gelu(before, approximate="tanh"),
                torch.ops.aten.gelu_backward(grad @ second, before, approximate="tanh"),
            )
            for found, value in zip((before, hidden, slope), expected, strict=True):
                torch.testing.assert_close(found, value, rtol=2e-3, atol=1e-3)
                assert (found != value).float().mean() < 0.01
    print("equal")


def compile_for(capability: str) -> None:
    """Compile all tiles for bf16, and print the most shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gelu_products._kernel
    shared = []
    for tiles in TILES:
        for is_gradient in (False, True):
            sizes = {name: size for name, size in tiles.items() if name.isupper()}
            step_of_one = "right_column" if is_gradient else "right_inner"
            known = {
                "IS_GRADIENT": is_gradient,
                "BLOCK": BLOCK,
                "GROUP": 8,
                step_of_one: 1,
                **sizes,
            }
            tensors = ("left", "right", "before", "out")
            signature = {
                name: "constexpr" if name in known else "*bf16" if name in tensors else "i32"
                for name in kernel.arg_names
            }
            rest = [n for n, name in enumerate(kernel.arg_names) if name not in known]
            source = ASTSource(
                kernel,
                signature=signature,
                constexprs={(kernel.arg_names.index(name),): known[name] for name in known},
                attrs={(number,): [["tt.divisibility", 16]] for number in rest},
            )
            options = {name: value for name, value in tiles.items() if name.islower()}
            made = triton.compile(source, GPUTarget("cuda", int(capability), 32), options)
            shared.append(made.metadata.shared)
            is_hopper = capability.startswith("9")
            assert ("wgmma" if is_hopper else "mma.sync") in made.asm["ptx"], "no tensor cores"
    assert max(shared) <= SHARED_BYTES[capability]
    print("compiled")


for each in sys.argv[1:]:
    compile_for(each)
if not sys.argv[1:]:
    interpret()
