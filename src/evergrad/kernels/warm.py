"""Compile every kernel, or load it from the cache, before a process joins a job: `python -m evergrad.kernels.warm`."""

from importlib import import_module
from pkgutil import iter_modules

from evergrad import kernels


def warm() -> None:
    """Compile or load every kernel: each has its one signature and is compiled where it is defined.

    Cost: about 6 s the first time on a machine, a third of a second from numba's cache.
    """
    for module in iter_modules(kernels.__path__):
        import_module(f"evergrad.kernels.{module.name}")


if __name__ == "__main__":
    warm()
