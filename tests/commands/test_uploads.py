"""Runs that are copied to a real S3 server, killed, refused and continued on an empty machine."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import PROGRAMS, warm
from support import installed_servers as servers
from support.object_server import Fault, FaultProxy, fault_proxy, set_endpoint
from support.training import write_counting

pytest.importorskip("obstore")


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """SeaweedFS behind a proxy."""
    (tmp_path / "server").mkdir()
    with servers.seaweed(tmp_path / "server") as port, fault_proxy(port) as proxy:
        set_endpoint(monkeypatch, proxy.port)
        yield proxy


@pytest.mark.slow
def test_uploads_that_are_killed_and_refused_leave_complete_checkpoints(
    proxy: FaultProxy, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    draw, refused = random.Random(0), itertools.count()

    def fault(line: str) -> Fault | None:
        proxy.seen.append(line)
        if draw.random() > 0.1:
            return None
        next(refused)
        return Fault(draw.choice(["reset", "lost", "reset body", "503"]))

    proxy.fault_of = fault  # type: ignore[method-assign]
    shards = write_counting(write_dataset, tmp_path / "shards", rows=400, validation_rows=20)
    program = [PROGRAMS / "killed_training.py", shards, tmp_path, 20, f"s3://{servers.BUCKET}"]
    ended = warm.run(program)
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, int] = json.loads(ended.stdout)
    assert seen["kills"] >= 20
    assert seen["runs"] > 0
    assert next(refused) >= 20
