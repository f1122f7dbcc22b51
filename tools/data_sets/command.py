"""The subcommands of `shards`: show, check, print, copy, merge, reduce and export data sets, adopt
token files, list the records of a training step, and plan stages."""

from dataclasses import dataclass

from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.data_sets.adopt import Adopt
from tokenfeed.tools.data_sets.cat import Cat, DataSet
from tokenfeed.tools.data_sets.copy import Copy
from tokenfeed.tools.data_sets.explain import Explain
from tokenfeed.tools.data_sets.export import Export
from tokenfeed.tools.data_sets.inspection import Inspect
from tokenfeed.tools.data_sets.merge import Merge
from tokenfeed.tools.data_sets.plan import ShowPlan
from tokenfeed.tools.data_sets.select import Select
from tokenfeed.tools.data_sets.verify import find_problems
from tokenfeed.tools.shell.command_line import run_subcommand
from tokenfeed.tools.shell.console import print_json

__all__ = [
    "Adopt",
    "Cat",
    "Copy",
    "Explain",
    "Export",
    "Inspect",
    "Merge",
    "Select",
    "ShowPlan",
    "Verify",
    "run_shards",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Check every checksum, every record batch and the counts of records. Exit with 1 if anything
    is wrong."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Check the data set, and print every problem."""
        store = open_store(self.out)
        try:
            manifest = Manifest.read(store)
        except ManifestError as error:
            if not self.json:
                raise
            print_json({"ok": False, "problems": [str(error)]})
            return 1
        problems = list(find_problems(store, manifest))
        num_shards = sum(len(split.shards) for split in manifest.splits.values())
        num_batches = sum(split.batches for split in manifest.splits.values())
        if self.json:
            print_json({"ok": not problems, "problems": problems})
        elif problems:
            print("\n".join(problems))
            print(f"{store.name}: damaged, problems found: {len(problems):,}")
        else:
            print(f"{store.name}: good, shards: {num_shards:,}, record batches: {num_batches:,}")
        return 1 if problems else 0


def run_shards() -> int:
    """Run the subcommand of the command line, and return its exit code."""
    return run_subcommand(
        "shards",
        "Show, check, print, copy, merge, reduce or export data sets, or show what training reads.",
        {
            "inspect": Inspect,
            "verify": Verify,
            "cat": Cat,
            "copy": Copy,
            "merge": Merge,
            "select": Select,
            "export": Export,
            "adopt": Adopt,
            "explain": Explain,
            "plan": ShowPlan,
        },
    )
