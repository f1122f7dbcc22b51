"""Under torchrun: a run killed on two ranks goes on with one, three or four, from the same rows."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.delivery import Ranks, Span, joined, realistic_lengths, times_delivered

from tokenfeed import Padded

OPTIONS: dict[str, Any] = {"batching": Padded(512), "micro_batches_per_step": 12, "epochs": 2}

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from support.delivery import open_loader, spans
from tokenfeed import Padded

folder, state_file, log = map(Path, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
loader = open_loader(folder, Padded(512), micro_batches_per_step=12, epochs=2, num_workers=1)
assert (loader.rank, loader.world_size) == (rank, dist.get_world_size())
step = 0
if state_file.exists():
    saved = json.loads(state_file.read_text())
    loader.load_state_dict(saved["loader"])
    step = saved["step"]
lines = open(log / f"{rank}.jsonl", "w", buffering=1)
print(os.getpid(), file=open(log / f"{rank}.pid", "w"))
for number, batch in enumerate(loader):
    together = torch.ones(1)
    dist.all_reduce(together)  # ranks keep in step, as in training
    rows = [] if batch.is_filler else spans(batch)
    lines.write(json.dumps([loader.position, step, rows]) + "\\n")
    step += batch.ends_step
    if rank == 0 and number % 7 == 6 and not Path(f"{state_file}.frozen").exists():
        temporary = Path(f"{state_file}.tmp")
        temporary.write_text(json.dumps({"loader": loader.state_dict(), "step": step}))
        temporary.replace(state_file)
    time.sleep(float(os.environ.get("SECONDS_A_STEP", 0)))
dist.destroy_process_group()
"""


Step = tuple[list[int], int, list[Span]]


def launch(
    ranks: int, folder: Path, state: Path, log: Path, **environment: str
) -> subprocess.Popen[str]:
    log.mkdir()
    script = log / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, f"--nproc-per-node={ranks}", str(script), str(folder), str(state), str(log)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_log(log: Path) -> list[Step]:
    """Whole lines of all ranks; a killed one may have left half a line."""
    text = "".join(path.read_text() for path in sorted(log.glob("*.jsonl")))
    steps = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            steps.append(json.loads(line))
    return steps


def rows_by_step(steps: list[Step]) -> dict[int, list[Span]]:
    found = defaultdict(list)
    for _, step, pieces in steps:
        found[step] += [tuple(piece) for piece in pieces]
    return {step: sorted(pieces) for step, pieces in found.items()}


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_ranks_from_the_same_rows(
    folder: Path, tmp_path: Path
) -> None:
    state, first = tmp_path / "state.json", tmp_path / "first"
    with launch(2, folder, state, first, SECONDS_A_STEP="0.03") as run:
        deadline = time.monotonic() + 90
        while not (state.exists() and json.loads(state.read_text())["step"] >= 4):
            assert run.poll() is None, run.stderr and run.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        for path in first.glob("*.pid"):
            os.kill(int(path.read_text()), signal.SIGKILL)
        run.communicate()
    saved = json.loads(state.read_text())["loader"]
    Path(f"{state}.frozen").touch()
    place = [saved["epoch"], saved["window"], saved["micro_batch"]]
    kept = [step for step in read_log(first) if step[0] <= place]

    alone = Ranks(folder, 1, **OPTIONS)
    alone.run()
    whole = {
        number: sorted(span for batch in step for span in batch)
        for number, step in enumerate(joined([alone]))
    }
    assert max(rows_by_step(kept)) < len(whole) // 2, "too little is left to go on with"
    for ranks in (1, 3, 4):
        log = tmp_path / f"on {ranks}"
        with launch(ranks, folder, state, log) as run:
            _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        steps = kept + read_log(log)
        assert rows_by_step(steps) == whole
        pieces = (piece for _, _, batch in steps for piece in batch)
        assert times_delivered(pieces, realistic_lengths()) == {2}
