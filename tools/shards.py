"""Entry point of the `shards` command. `data_sets.command` has its subcommands.

This file imports little, so that the handler for Ctrl-C is installed at once.
"""

from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.tools.shell.console import run_command
from tokenfeed.tools.shell.signals import signals_held


def main() -> None:
    """Run the command `shards`."""
    run_command(_command)


def _command() -> int:
    own_process()
    with signals_held():  # extension modules turn an interruption into an ImportError
        from tokenfeed.tools.data_sets.command import run_shards
    return run_shards()


if __name__ == "__main__":
    main()
