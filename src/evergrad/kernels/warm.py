"""Compile every kernel, or load it from the cache, before a process joins a job: `python -m evergrad.kernels.warm`."""

from importlib import import_module

MODULES = ("hashing", "initial", "index", "merge", "rules", "dense")


def warm() -> None:
    """Compile or load every kernel: each has its one signature and is compiled where it is defined.

    Cost: about 6 s the first time on a machine, a third of a second from numba's cache.
    """
    for module in MODULES:
        import_module(f"evergrad.kernels.{module}")


if __name__ == "__main__":
    warm()
