"""The command `report` needs no torch."""

import subprocess
import sys
from pathlib import Path

from support.training import make_config, run


def test_the_command_needs_no_torch(lm_rows: Path, tmp_path: Path) -> None:
    run(make_config(lm_rows, tmp_path / "run", steps=1))
    code = (
        "import sys; sys.argv = ['report', sys.argv[1]]\n"
        "from tokenfeed.tools.report import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
