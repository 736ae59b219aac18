"""Rows inside torch: read, or pooled in bags, with backward passes that hand their gradients on.

Torch's own backward passes of `embedding` and `embedding_bag` take three to five times as long on one thread.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from evergrad.kernels.segment import sum_bags

Collect = Callable[[Tensor], None]

_ANCHOR = torch.zeros((), requires_grad=True)
"""Autograd runs a backward pass only for what depends on something that wants a gradient. This never gets one."""


class Found(NamedTuple):
    """Where ids read in a table.

    Args:
        rows: of some different keys, shape (u, dim), on the CPU.
        number: of the shape of the ids, int64: which of `rows` each reads; -1: it is padding and reads zeros.
        is_padded: whether there may be padding.
        collect: takes a gradient of `rows`, of their shape; None where nobody wants it.
    """

    rows: Tensor
    number: Tensor
    is_padded: bool
    collect: Collect | None


class _Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Sequence[Tensor], collect: Callable[..., None]) -> tuple[Tensor, ...]:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.collect(grads)
        return None, None, None


def tracked(values: Sequence[Tensor], collect: Callable[[Sequence[Tensor | None]], None]) -> tuple[Tensor, ...]:
    """The same tensors as autograd sees them: their gradients are given to `collect`, all at once.

    Args:
        values: fresh tensors that nobody else holds.
        collect: takes a gradient for each of `values`, None for one that none has reached.
    """
    result: tuple[Tensor, ...] = _Tracked.apply(_ANCHOR, values, collect)  # type: ignore[no-untyped-call]  # torch gives it no types
    return result


def table_of(found: Found, device: torch.device) -> tuple[Tensor, Tensor, int | None]:
    """A weight and indices as torch's functions take them, seen by autograd, and the index that is padding."""
    rows, number, _, collect = found
    if collect is not None and torch.is_grad_enabled():
        (rows,) = tracked([rows.clone()], lambda grads: None if grads[0] is None else collect(grads[0]))
    return _with_padding(Found(rows.to(device), number.to(device), found.is_padded, None))


def _with_padding(found: Found) -> tuple[Tensor, Tensor, int | None]:
    """As `table_of`: padding, and where there are no rows anything, reads a row of zeros at the end."""
    rows, number, is_padded, _ = found
    if not is_padded and rows.shape[0]:
        return rows, number, None
    zeros = rows.shape[0]
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), number.masked_fill(number < 0, zeros), zeros


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: Found, starts: Tensor, mode: str) -> Tensor:
        ctx.found, ctx.starts, ctx.is_mean = found, starts, mode == "mean"
        return _pooled(found, starts, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        rows, number, _, collect = ctx.found
        arrays = (number.reshape(-1).numpy(), ctx.starts.numpy(), grad.contiguous().numpy())
        collect(torch.from_numpy(sum_bags(*arrays, rows.shape[0], ctx.is_mean)))
        return None, None, None, None


def pool(found: Found, starts: Tensor, mode: str) -> Tensor:
    """Sums or means of rows by bags: shape (bags, dim); no vector per id is made.

    Args:
        found: the rows of all bags, one after the other; padding belongs to no bag.
        starts: int64, shape (bags + 1,): where each bag begins, and the end of the last.
        mode: "sum" or "mean".
    """
    if found.collect is None or not torch.is_grad_enabled():
        return _pooled(found, starts, mode)
    result: Tensor = _Pool.apply(_ANCHOR, found, starts, mode)  # type: ignore[no-untyped-call]  # torch gives it no types
    return result


def _pooled(found: Found, starts: Tensor, mode: str) -> Tensor:
    rows, number, padding = _with_padding(found)
    return F.embedding_bag(number.reshape(-1), rows, starts, mode=mode, include_last_offset=True, padding_idx=padding)
