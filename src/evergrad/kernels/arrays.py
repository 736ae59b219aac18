"""The types of the arrays that kernels take, by what they hold, and where arrays lie."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Rows = NDArray[np.int64]
"""Numbers of rows of an arena; negative where there is none."""


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous array lies in memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # a fifth of the time of numpy's own way, below
    except (TypeError, ValueError):  # it is read-only, or empty
        address: int = array.__array_interface__["data"][0]
        return address
