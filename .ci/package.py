"""Build dist/*.whl and dist/*.tar.gz. The same commit gives the same bytes.

Every time in both archives is that of the commit. `setuptools` takes it for wheels from
SOURCE_DATE_EPOCH; in the sdist, this program replaces the times of the build.
"""

import gzip
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run `python -m build` with the options of this command, then set the times."""
    told = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    seconds = told.stdout.strip()
    env = os.environ | {"SOURCE_DATE_EPOCH": seconds}
    subprocess.run([sys.executable, "-m", "build", *sys.argv[1:]], cwd=ROOT, env=env, check=True)
    for sdist in (ROOT / "dist").glob("*.tar.gz"):
        set_times(sdist, int(seconds))


def set_times(sdist: Path, seconds: int) -> None:
    """Rewrite an sdist: entries sorted by name, all with one time and without an owner."""
    rewritten = sdist.with_suffix(".new")
    with (
        tarfile.open(sdist) as old,
        open(rewritten, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for entry in sorted(old, key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = seconds, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    rewritten.replace(sdist)


if __name__ == "__main__":
    main()
