"""The rows of one table in one batch, and what their gradients add up to."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evergrad.kernels.features import Index
from evergrad.messages import Floats, Keys


class Numbered:
    """Different keys, numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.int64)
        self._sorter: NDArray[np.intp] = np.zeros(0, np.intp)

    def add(self, keys: Keys) -> None:
        """Keys that are not here yet."""
        self.keys = np.concatenate([self.keys, keys]) if self.keys.size else keys
        self._sorter = np.zeros(0, np.intp)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of these keys, -1 of those that are not here. Cost: a sort, and a search per key."""
        if self.keys.size == 0:
            return np.full(keys.size, -1)
        if self._sorter.size == 0:
            self._sorter = np.argsort(self.keys, kind="stable")
        at = np.searchsorted(self.keys, keys, sorter=self._sorter)
        number = self._sorter[np.minimum(at, self.keys.size - 1)]
        return np.where(self.keys[number] == keys, number, -1)


class TableRows:
    """The rows of one table in one batch, in the order in which their keys were first met."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._known = Numbered()
        self._rows: list[Floats] = []
        self._tensor: Tensor | None = None
        self._read_anew: Callable[[Keys], Floats] | None = None
        self._used: list[Index] = []
        self._used_first = 0
        self._sums: list[Floats] = []

    @property
    def keys(self) -> Keys:
        """The keys there are rows of."""
        return self._known.keys

    def add(self, keys: Keys, rows: Floats) -> None:
        """Rows of keys that are not here yet, shape (n, dim), which nobody changes any more."""
        self._known.add(keys)
        self._rows.append(np.ascontiguousarray(rows))
        self._tensor = None

    def renew(self, read: Callable[[Keys], Floats]) -> None:
        """The rows have changed; they are read anew if they are used again."""
        self._read_anew = read

    def rows(self) -> Floats:
        """All rows, shape (n, dim)."""
        if self._read_anew is not None:
            self._rows, self._tensor, self._read_anew = [self._read_anew(self.keys)], None, None
        if len(self._rows) != 1:
            self._rows = [np.concatenate([np.empty((0, self.dim), np.float32), *self._rows])]
        return self._rows[0]

    def tensor(self) -> Tensor:
        """All rows, in memory of torch's: how it is aligned can show in the last bit of what is computed."""
        rows = self.rows()
        if self._tensor is None:
            self._tensor = torch.empty(rows.shape, dtype=torch.float32)
            self._tensor.numpy()[:] = rows
        return self._tensor

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of the rows of these keys, -1 where there is none."""
        return self._known.find(keys)

    def use(self, index: Index) -> None:
        """Autograd is given the rows of these numbers; a negative one is none."""
        self._used.append(index)

    def use_first(self, count: int) -> None:
        """Autograd is given the first so many rows."""
        self._used_first = max(self._used_first, count)

    def collect(self, sums: Floats) -> None:
        """A gradient of the rows, or of the first of them, shape (n, dim)."""
        self._sums.append(sums)

    def gradient(self) -> tuple[Keys, Floats] | None:
        """Keys that were used and their gradients; None if no gradient has reached this table."""
        if not self._sums:
            return None
        grads = self._sums[0]
        if len(self._sums) > 1 or grads.shape[0] < self.keys.size:
            grads = np.zeros((self.keys.size, self.dim), np.float32)
            for sums in self._sums:
                grads[: sums.shape[0]] += sums
        if self._used_first == self.keys.size:
            return self.keys, grads
        used = np.zeros(self.keys.size, np.bool_)
        used[: self._used_first] = True
        for index in self._used:
            used[index[index >= 0]] = True
        return (self.keys, grads) if used.all() else (self.keys[used], grads[used])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._sums = []
