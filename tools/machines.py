"""Options of `pretokenize` that have more than one machine work: which go together."""

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.run.clusters import Runner, check_installed
from tokenfeed.tools.run.records import Part

__all__ = ["check_machines"]


def check_machines(
    *, runner: Runner, part: str | None, finish: bool, given: set[str], is_stdin: bool
) -> None:
    """Refuse what no other machine could do, or what two options say differently.

    Args:
        runner: As `--runner` has it.
        part: As `--part` has it.
        finish: As `--finish` has it.
        given: The names of all options that were given.
        is_stdin: Whether standard input is read.

    Raises:
        ConfigError: Names the options.
    """
    sharing = {"runner": f"--runner {runner}", "part": f"--part {part}", "finish": "--finish"}
    used = [words for name, words in sharing.items() if name in given]
    if not used:
        return
    check_installed(runner)
    if part is not None:
        Part.from_text(part)
    if used[1:]:
        raise ConfigError(f"`{used[0]}` and `{used[1]}`: leave one of them out.")
    if is_stdin:
        raise ConfigError(
            f"`-`: standard input is on this machine only, and `{used[0]}` needs files that all "
            "machines share. Write it to a file there."
        )
    if "workers" in given and not part:
        raise ConfigError(f"`--workers`: has no effect beside `{used[0]}`. Leave it out.")
