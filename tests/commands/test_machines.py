"""More than one machine, as far as one machine shows it: whoever encodes, one folder of bytes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import COMMAND, run
from support.corpora import write_ballast, write_long_corpus
from support.data_sets import files_of

SHARDS = ("--shard-size", "30KB", "--validation", "0.1")

DASK = """
import os, sys
from distributed import Client, LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            print(cluster.scheduler_address, *client.run(os.getpid).values(), flush=True)
            sys.stdin.read()
"""

RAY = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(second, allow_graceful=False)
print("removed", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.fixture
def big(corpus: Path) -> Path:
    """A corpus that is worth worker processes, in a dozen units."""
    write_ballast(corpus)
    return corpus


@contextlib.contextmanager
def program(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A program that says when it is ready, and ends when it is told nothing more."""
    (folder / "program.py").write_text(code)
    with subprocess.Popen(
        [sys.executable, str(folder / "program.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    ) as started:
        try:
            yield started
            assert started.stdin
            started.stdin.close()
            started.wait(300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline().strip()


def wait_for_shards(out: Path, process: subprocess.Popen[str], number: int = 1) -> None:
    while len(list((out / "train").glob("*.arrow"))) < number:
        assert process.poll() is None
        time.sleep(0.01)


CLUSTERS = {
    "dask": ("distributed", DASK, "DASK_SCHEDULER_ADDRESS", 150),
    "ray": ("ray", RAY, "RAY_ADDRESS", 600),
}
"""The package of each runner, its program, the variable with its address, and lines of input."""


@pytest.mark.long
@pytest.mark.parametrize("runner", CLUSTERS)
def test_a_cluster_that_loses_a_worker_gives_the_bytes_of_one_command(
    runner: str, big: Path, tmp_path: Path, tokenizer: Path
) -> None:
    """A worker of Dask is killed, a node of Ray removed."""
    package, code, variable, lines = CLUSTERS[runner]
    if not find_spec(package):
        pytest.skip(f"needs {package}")
    write_long_corpus(big, lines)
    options = ("--tokenizer", tokenizer, *SHARDS)
    run(big, tmp_path / "plain", *options, "--workers", 1)
    out = tmp_path / "out"
    with program(tmp_path, code) as cluster:
        address, *workers = line_of(cluster).split()
        process = subprocess.Popen(
            [*COMMAND, *map(str, (big, out, *options, "--runner", runner))],
            env=os.environ | {variable: address},
            stdout=subprocess.DEVNULL,
            text=True,
        )
        wait_for_shards(out, process)
        if workers:
            os.kill(int(workers[0]), signal.SIGKILL)
        else:
            print(file=cluster.stdin, flush=True)
            assert line_of(cluster) == "removed"
        assert process.poll() is None, "it ended before"
        assert process.wait(300) == 0
    assert files_of(out) == files_of(tmp_path / "plain")
