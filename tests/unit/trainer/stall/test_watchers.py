"""What a meter watches beside its marks, and the table of causes in the documentation."""

import hashlib
import os
import re
import threading
from pathlib import Path

import pytest
from support import ROOT

from tokenfeed.trainer.stall import CAUSES
from tokenfeed.trainer.stall.causes import ABOUT
from tokenfeed.trainer.stall.watchers import CoreWait


def test_the_table_of_causes_in_the_documentation_has_all_and_says_the_same() -> None:
    text = (ROOT / "docs/stall.md").read_text().split("\n## Causes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z ]+)` \| ([^|]+) \|", text, re.MULTILINE)
    told = {cause: meaning.replace("`", "") for cause, meaning in rows if cause in CAUSES}
    assert list(told.items()) == [(cause, about.meaning) for cause, about in ABOUT.items()]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="counted by Linux alone")
def test_core_wait_counts_the_time_without_a_core() -> None:
    def hash_much() -> None:
        for _ in range(5):
            hashlib.blake2b(bytes(10_000_000))  # without the lock of Python

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    try:
        others = [threading.Thread(target=hash_much) for _ in range(2)]
        watch = CoreWait()
        for other in others:
            other.start()
        hash_much()
        share = watch.share()
        for other in others:
            other.join()
    finally:
        os.sched_setaffinity(0, cores)
    assert share is not None
    assert 0.3 < share <= 1.0
