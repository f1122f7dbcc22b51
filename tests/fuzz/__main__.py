"""`python -m tests.fuzz --minutes N --parser NAME`: see run.py."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import_module("fuzz.run").main()
