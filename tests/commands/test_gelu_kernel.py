"""The kernel of products with GELU, in Triton's interpreter and compiler: without a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
from support import PROGRAMS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


@pytest.mark.parametrize(("words", "says"), [((), "equal"), (("80", "90"), "compiled")])
def test_kernel_compiles_and_is_right_within_rounding(words: tuple[str, ...], says: str) -> None:
    environment = os.environ | ({} if words else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, str(PROGRAMS / "gelu_kernel.py"), *words]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.stdout.splitlines()[-1:] == [says], said.stderr
