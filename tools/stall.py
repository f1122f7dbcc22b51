"""`tokenfeed stall train.py`: measure where the time of any training script goes.

The script runs in this process, unchanged. Its stdout and its exit code stay its own.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.shell.command_line import WholeNumber, parse_command, text
from tokenfeed.tools.shell.console import run_command
from tokenfeed.trainer.config.values import flag_of

_PROG = "tokenfeed stall"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Measure where the time of any training script goes. The script stays unchanged.

    Several ranks: `torchrun OPTIONS -m tokenfeed stall train.py`. The report is on stderr when the
    script ends. Without a script: `with tokenfeed.watch():` measures a loop in a notebook."""

    script: Annotated[str, text("SCRIPT")]
    """A file, or `-m MODULE`. All words behind it are its own arguments."""
    steps: Annotated[str, text("A:B")] | None = None
    """Measure the steps behind number A, up to number B. Then print the report and remove all
    hooks. Default: all steps but the first 5."""
    out: Annotated[Path, Meta(title="DIR", description="a path")] | None = None
    """Folder for report.json, updated each minute, and report.html. Default: write nothing."""
    fail_above: Annotated[str, text("SHARE")] | None = None
    """Exit with 3 if the script succeeds but its stall is above this share, such as 10%."""
    ideal_loader: WholeNumber = 0
    """Train N steps, then N on batches that are ready, and compare. This run is thrown away: it
    ends the script there, and no checkpoint is written."""


def main() -> None:
    """Run the command `stall`."""
    own, script = _split(sys.argv[1:])
    if not {"-h", "--help"}.isdisjoint(own):
        run_command(lambda: _run(own, script))
    try:
        _run(own, script)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _run(own: list[str], script: list[str]) -> None:
    options = parse_command(Stall, _PROG, [*own, "--", *script[:1]])
    if options.ideal_loader < 0:
        raise ConfigError(f"`--ideal-loader {options.ideal_loader}`: expected a number of steps.")
    if options.ideal_loader and options.steps:
        raise ConfigError("`--ideal-loader`: leave out `--steps`. N is the number of steps.")
    steps, share = _steps(options.steps), _share(options.fail_above)
    from tokenfeed.trainer.watch.launch import check_words, run_watched
    from tokenfeed.trainer.watch.watch import Watch

    check_words(script)
    _check_folder(options.out)
    if options.ideal_loader:
        print(
            f"This run is thrown away: it ends after {2 * options.ideal_loader} measured steps, "
            "and no checkpoint is written.",
            file=sys.stderr,
        )
    out = options.out.absolute() if options.out else None  # the script may change the folder
    sys.exit(
        run_watched(
            script,
            Watch(out=out, steps=steps, ideal_steps=options.ideal_loader, fail_above=share),
        )
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the script with its arguments."""
    valued = {flag_of(name) for name in Stall.__dataclass_fields__}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        if words[at] == "--":
            return words[:at], words[at + 1 :]
        at += 2 if words[at] in valued else 1
    return words[:at], words[at:]


def _check_folder(given: Path | None) -> None:
    """Reject a folder that cannot be written, before the script runs for hours."""
    if given is None:
        return
    path = given.absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`--out {given}`: is not a folder. Expected a folder for the report.")
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(f"`--out {given}`: cannot be written ({error.strerror}).") from None


def _steps(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    first, colon, last = given.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError(f"`--steps {given}`: expected A:B, two numbers of steps with A < B.")
    return int(first), int(last)


def _share(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        share = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"`--fail-above {given}`: expected a share such as 10% or 0.1.")
    return share


if __name__ == "__main__":
    main()
