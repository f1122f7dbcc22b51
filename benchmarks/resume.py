"""Does a run that is killed, and resumed on another number of ranks, have the losses of a run that
was never stopped?

usage: python -m benchmarks.resume

Trains a small model on the CPU, on 2 ranks with gloo. A second run of the same settings is killed
with SIGKILL (all its processes) and resumed on 3 ranks. Writes results/resume.json and resume.svg.
What would refute it: losses of a step that differ by more than rounding in fp32 (1e-4).
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.protocol import RESULTS, environment
from tokenfeed.trainer.stall.plots import Plot, Series

__all__ = ["picture"]

PACKAGES = ("asyncio", "email", "http", "importlib", "json", "unittest", "xml")
"""Of the standard library: the corpus."""
STEPS, KILLED_AFTER, SAVE_EVERY = 120, 66, 20
BEFORE, AFTER = 2, 3
"""Ranks before and after the kill. A step has 6 micro-batches, so both divide it."""
SETTINGS = (
    f"--device cpu --model shallow --steps {STEPS} --save-every {SAVE_EVERY} --log-every 1 "
    "--sequence-length 64 --micro-batch-tokens 512 --step-tokens 3072 --learning-rate 1e-3"
).split()
STYLE = Path(__file__).parents[1] / "trainer/stall/style.css"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder))
    content = {"environment": environment(), "results": results}
    (RESULTS / "resume.json").write_text(json.dumps(content) + "\n")
    (RESULTS / "resume.svg").write_text(picture(results))


def measure(folder: Path) -> list[dict[str, object]]:
    """Return the losses of both runs by step."""
    library = Path(sysconfig.get_path("stdlib"))
    corpus = [str(library / name) for name in PACKAGES]
    command = [sys.executable, "-m", "tokenfeed", "pretokenize", *corpus, str(folder / "shards")]
    subprocess.run([*command, "--vocab-size", "2048"], check=True)
    data = ["--shards", str(folder / "shards")]
    whole = start(BEFORE, folder / "whole", [*data, *SETTINGS])
    if whole.wait() != 0:
        sys.exit("error: the uninterrupted run failed")
    killed = start(BEFORE, folder / "killed", [*data, *SETTINGS])
    while latest_step(folder / "killed") < KILLED_AFTER:
        if killed.poll() is not None:
            sys.exit("error: the run ended before it could be killed")
        time.sleep(0.05)
    for process in [*psutil.Process(killed.pid).children(recursive=True), killed]:
        process.kill()  # the ranks have process groups of their own
    killed.wait()
    kill = latest_step(folder / "killed")
    before = losses(folder / "killed")
    if start(AFTER, folder / "killed", ["--resume"]).wait() != 0:
        sys.exit("error: the run did not resume")
    after = losses(folder / "killed")
    first = kill // SAVE_EVERY * SAVE_EVERY + 1
    return [
        {"case": "uninterrupted", "ranks": BEFORE, "losses": losses(folder / "whole")},
        {"case": "killed", "ranks": BEFORE, "killed_after": kill, "losses": before},
        {"case": "resumed", "ranks": AFTER, "first": first, "losses": after[first - 1 :]},
    ]


def start(ranks: int, run: Path, words: list[str]) -> "subprocess.Popen[bytes]":
    """Start `train` on ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    train = ["-m", "tokenfeed.tools.train", "--run-dir", str(run), *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *launch, *train], env=environ, stdout=2)


def losses(run: Path) -> list[float]:
    """Return the training loss of each step."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    return [found[step] for step in sorted(found)]


def latest_step(run: Path) -> int:
    return len(losses(run))


def picture(results: list[dict[str, object]]) -> str:
    """Return the plot of both losses, one on top of the other."""
    whole, killed, resumed = results
    series = []
    for entry in (whole, resumed, killed):
        values: list[float] = entry["losses"]  # type: ignore[assignment]
        begin = int(entry.get("first", 1))  # type: ignore[call-overload]
        series.append(Series("", [float(begin + n) for n in range(len(values))], values))
    plot = Plot("", "", series, from_zero=False)
    names = (
        f"never stopped, {whole['ranks']} ranks",
        f"resumed from step {resumed['first']} on {resumed['ranks']} ranks",
        f"killed with SIGKILL after step {killed['killed_after']}, {killed['ranks']} ranks",
    )
    style = STYLE.read_text(encoding="utf-8").partition("\n@media (max")[0]
    legend = "".join(
        f'<path class="line c{n}" d="M70,{14 + 20 * n}H100"/>'
        f'<text x="108" y="{18 + 20 * n}" fill="var(--ink)">{name}</text>'
        for n, name in enumerate(names)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 340">
<title>Training loss by step of two runs: {"; ".join(names)}</title>
<style>
{style}
.line.c0 {{ stroke-width: 5; opacity: .45; }} .line.c1, .line.c2 {{ stroke-dasharray: none; }}
</style>
<rect width="100%" height="100%" fill="var(--card)"/>
<g transform="translate(0,56)">{plot.drawing()}</g>
{legend}
</svg>
"""


if __name__ == "__main__":
    main()
