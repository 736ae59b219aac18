"""Arrays that grow without copying."""

import mmap
import os
import sys
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

_HUGE_PAGE_BYTES = 2 << 20
_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class Arena(Generic[Scalar]):
    """One flat array over private memory of the process; what is new in it is zero.

    Address space is taken ahead of need and costs no memory until it is touched: at first as much as the machine has
    memory, so that growing does nothing at all. Where the system does not give that much, more of it is taken later by
    moving page tables (`mremap`), not bytes.
    """

    def __init__(self, dtype: type[Scalar]) -> None:
        self._dtype: np.dtype[Scalar] = np.dtype(dtype)
        self._memory: mmap.mmap | None = None
        self.array: NDArray[Scalar] = np.empty(0, dtype)
        """The elements. Nobody keeps a view of it across `reserve`."""

    def reserve(self, count: int) -> None:
        """Make `array` at least `count` elements long. It may become another object; what it held is kept.

        Raises:
            MemoryError: the system refuses.
        """
        needed = count * self._dtype.itemsize
        sizes = [size for size in (_MACHINE_BYTES, 2 * self.array.nbytes) if size > needed]
        while count > self.array.size and sizes:
            with suppress(MemoryError):
                self._resize(sizes.pop(0))
        if count > self.array.size:
            self._resize(needed)

    def _resize(self, size: int) -> None:
        size = -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.array = np.empty(0, self._dtype)
        try:
            self._memory = _mapped(size) if self._memory is None else _grown(self._memory, size)
        except OSError as exc:
            raise MemoryError(f"the system refuses {size} bytes of memory for a table") from exc
        finally:
            if self._memory is not None:
                self.array = np.frombuffer(self._memory, self._dtype)


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    _ask_for_huge_pages(memory)
    return memory


def _grown(memory: mmap.mmap, size: int) -> mmap.mmap:
    try:
        memory.resize(size)
        grown = memory
    except SystemError:  # a platform without mremap
        grown = _mapped(size)
        grown[: len(memory)] = memory[:]
    _ask_for_huge_pages(grown)
    return grown


def _ask_for_huge_pages(memory: Any) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel built without them
            memory.madvise(advice)
