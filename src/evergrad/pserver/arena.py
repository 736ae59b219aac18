"""Arrays that grow without copying, and memory that is given back a little at a time."""

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


class Pages:
    """Private memory of the process that is zero, of which only what is touched is taken.

    Args:
        size_bytes: how much there is.

    Raises:
        MemoryError: the system refuses.
    """

    def __init__(self, size_bytes: int) -> None:
        size = max(size_bytes, 1)
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as exc:
            raise MemoryError(f"the system refuses {size} bytes of memory") from exc
        if size > 2 * _HUGE_PAGE_BYTES:  # not from the beginning: where little is used, little is taken
            _ask_for_huge_pages(self._memory, _HUGE_PAGE_BYTES)
        self._released = 0

    def array(self, dtype: type[Scalar]) -> NDArray[Scalar]:
        """All of it as an array of as many elements as fit."""
        return np.frombuffer(self._memory, dtype, len(self._memory) // np.dtype(dtype).itemsize)

    def release(self, used_bytes: int, limit_bytes: int) -> bool:
        """Give back at most so much of the first `used_bytes`, whose content is lost; returns whether there is more.

        Giving back all at once takes long: some 60 ms for 1 GB where pages are small.
        """
        size = min(limit_bytes, used_bytes - self._released)
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, self._released, size)
            self._released += size
        return size == limit_bytes


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


def _ask_for_huge_pages(memory: Any, start: int = 0) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel built without them
            memory.madvise(advice, start)
