"""What a step on the CPU frees, the next one takes: in a process that has set nothing before."""

import os
import platform
import resource

import pytest
from support import warm

from tokenfeed.trainer.config.memory import SET_BY_USER

STEPS, MEGABYTES = 10, 16
PROGRAM = f"""
import resource, sys
from types import SimpleNamespace
from tokenfeed.trainer.config.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [bytearray(1 << 20) for _ in range({MEGABYTES})]
    del blocks

keep_freed_memory(SimpleNamespace(type=sys.argv[1]))
step()
before = faults()
for _ in range({STEPS}):
    step()
print((faults() - before) / {STEPS})
"""


def faults_of_a_step(device: str) -> float:
    env = {name: value for name, value in os.environ.items() if name not in SET_BY_USER}
    return float(warm.run(["-c", PROGRAM, device], env=env).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_that_a_step_frees_costs_the_next_one_no_pages() -> None:
    pages = (MEGABYTES << 20) / resource.getpagesize()
    assert faults_of_a_step("cuda") > 0.5 * pages, "else there is nothing to keep"
    assert faults_of_a_step("cpu") < 0.05 * pages
