"""A trainer that is not one yet: `python -m evergrad.job.standby` imports what trainers need and waits to be told more.

One line on its standard input, the arguments of `evergrad trainer` as a JSON list, makes it that trainer. It leaves at
the end of the input, and so when who started it is gone.
"""

import sys
from importlib import import_module

import msgspec

from evergrad.trainer.__main__ import main

IMPORTED = ("evergrad.job", "evergrad.nn", "evergrad.data", "evergrad.metrics")


def wait() -> int:
    """Wait to be told; returns the exit status."""
    for module in IMPORTED:
        import_module(module)
    line = sys.stdin.readline()
    if not line:
        return 0
    sys.argv[1:] = msgspec.json.decode(line, type=list[str])
    return main()


if __name__ == "__main__":
    sys.exit(wait())
