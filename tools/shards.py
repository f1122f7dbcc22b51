"""Entry point of the `shards` command.

This file imports little, so that the handler for Ctrl-C is installed at once.
"""

from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.tools.shell.console import run_command, signals_held

_ROOM = "tokenfeed.tools.data_sets"
SUBCOMMANDS = {
    "inspect": f"{_ROOM}.inspection:Inspect",
    "verify": f"{_ROOM}.verify:Verify",
    "cat": f"{_ROOM}.cat:Cat",
    "copy": f"{_ROOM}.copy:Copy",
    "select": f"{_ROOM}.select:Select",
    "export": f"{_ROOM}.export:Export",
    "explain": f"{_ROOM}.explain:Explain",
}
"""The dataclass of each subcommand. A subcommand imports no other one."""
_WITHDRAWN = {
    "adopt": "`pretokenize FILE... OUT --task ids --tokenizer TOKENIZER` copies the tokens.",
    "merge": "`train --shards a/ b/` and ShardLoader(['a/', 'b/']) read several folders as one.",
    "split": "`shards select OUT NEW --where 'origin GLOB'` makes a data set of some input files.",
    "plan": "`train --config FILE --dry-run` prints the stages of a run.",
    "cat --html": "`--targets` marks the targets in the terminal, and `--json` prints them.",
}
"""What to do instead of commands and options that existed before; docs/limits.md lists them."""


def main() -> None:
    """Run the command `shards`."""
    run_command(_command)


def _command() -> int:
    own_process()
    with signals_held():  # extension modules turn an interruption into an ImportError
        from tokenfeed.tools.shell.command_line import run_subcommand
    return run_subcommand(
        "shards",
        "Show, check, copy, reduce or export data sets, or explain what training read.",
        SUBCOMMANDS,
        _WITHDRAWN,
    )


if __name__ == "__main__":
    main()
