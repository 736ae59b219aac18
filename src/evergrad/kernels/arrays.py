"""The types of the arrays that kernels take, by what they hold, and where arrays lie."""

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
    """Where an array lies in memory."""
    address: int = array.__array_interface__["data"][0]
    return address
