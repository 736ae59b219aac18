"""The types of the arrays that kernels take, by what they hold."""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Rows = NDArray[np.int64]
"""Numbers of rows of an arena; negative where there is none."""
