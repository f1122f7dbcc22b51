"""Entry point of the `shards` command.

This file imports little, so that the handler for Ctrl-C is installed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.tools.shell.console import run_command, signals_held

if TYPE_CHECKING:
    from tokenfeed.tools.shell.command_line import Subcommand


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

        subcommands = import_subcommands()
    return run_subcommand(
        "shards",
        "Show, check, copy, reduce or export data sets, or explain what training read.",
        subcommands,
        _WITHDRAWN,
    )


def import_subcommands() -> dict[str, type[Subcommand]]:
    """Import the subcommands, and return them by name."""
    from tokenfeed.tools.data_sets.cat import Cat
    from tokenfeed.tools.data_sets.copy import Copy
    from tokenfeed.tools.data_sets.explain import Explain
    from tokenfeed.tools.data_sets.export import Export
    from tokenfeed.tools.data_sets.inspection import Inspect
    from tokenfeed.tools.data_sets.select import Select
    from tokenfeed.tools.data_sets.verify import Verify

    return {
        "inspect": Inspect,
        "verify": Verify,
        "cat": Cat,
        "copy": Copy,
        "select": Select,
        "export": Export,
        "explain": Explain,
    }


if __name__ == "__main__":
    main()
