"""The subcommands of `shards`: show, check, print, copy, merge, reduce, split and export data sets,
adopt token files, list the records of a training step, and plan stages."""

from tokenfeed.tools.data_sets.adopt import Adopt
from tokenfeed.tools.data_sets.cat import Cat
from tokenfeed.tools.data_sets.copy import Copy
from tokenfeed.tools.data_sets.explain import Explain
from tokenfeed.tools.data_sets.export import Export
from tokenfeed.tools.data_sets.inspection import Inspect
from tokenfeed.tools.data_sets.merge import Merge
from tokenfeed.tools.data_sets.plan_stages import ShowPlan
from tokenfeed.tools.data_sets.select import Select, Split
from tokenfeed.tools.data_sets.verify import Verify
from tokenfeed.tools.shell.command_line import Subcommand, run_subcommand

COMMANDS: dict[str, type[Subcommand]] = {
    "inspect": Inspect,
    "verify": Verify,
    "cat": Cat,
    "copy": Copy,
    "merge": Merge,
    "select": Select,
    "split": Split,
    "export": Export,
    "adopt": Adopt,
    "explain": Explain,
    "plan": ShowPlan,
}


def run_shards() -> int:
    """Run the subcommand of the command line, and return its exit code."""
    return run_subcommand(
        "shards",
        "Show, check, copy, merge, reduce, split, adopt or export data sets, or show what training "
        "reads.",
        COMMANDS,
    )
