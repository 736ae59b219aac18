"""Reading and pooling rows inside torch, with backward passes that sum the gradients of equal rows in a kernel.

Torch's own backward passes of `embedding` and `embedding_bag` take three to five times as long on one thread.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from evergrad.kernels.segment import sum_bags, sum_rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: Tensor) -> Tensor:
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(row)
        return torch.embedding(weight, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        flat = grad.reshape(row.numel(), grad.shape[-1]).contiguous()
        return torch.from_numpy(sum_rows(row.reshape(-1).numpy(), flat.numpy(), ctx.rows)), None


def gather(weight: Tensor, row: Tensor) -> Tensor:
    """Rows of `weight` (u, dim), numbered by `row` (int64, any shape): shape (*row.shape, dim).

    The gradient of a row is the sum over its uses, in order of position in float64, rounded once.
    """
    if weight.device.type != "cpu" or not weight.requires_grad:
        return torch.embedding(weight, row)
    result: Tensor = _Gather.apply(weight, row)  # type: ignore[no-untyped-call]  # torch gives it no types
    return result


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: Tensor, starts: Tensor, mode: str, padding: int | None) -> Tensor:
        ctx.rows, ctx.is_mean, ctx.padding = weight.shape[0], mode == "mean", -1 if padding is None else padding
        ctx.save_for_backward(row, starts)
        return F.embedding_bag(row, weight, starts, mode=mode, include_last_offset=True, padding_idx=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        row, starts = (saved.numpy() for saved in ctx.saved_tensors)
        sums = sum_bags(row, starts, grad.contiguous().numpy(), ctx.rows, ctx.is_mean, ctx.padding)
        return torch.from_numpy(sums), None, None, None, None


def pool(weight: Tensor, row: Tensor, starts: Tensor, mode: str, padding: int | None) -> Tensor:
    """Sums or means of rows of `weight` (u, dim) by bags: shape (bags, dim); no vector per id is made.

    Args:
        weight: the rows.
        row: int64, shape (n,): the rows of all bags, one after the other.
        starts: int64, shape (bags + 1,): where each bag begins, and the end of the last.
        mode: "sum" or "mean".
        padding: a row that belongs to no bag, wherever it stands.
    """
    if weight.device.type != "cpu" or not weight.requires_grad:
        return F.embedding_bag(row, weight, starts, mode=mode, include_last_offset=True, padding_idx=padding)
    result: Tensor = _Pool.apply(weight, row, starts, mode, padding)  # type: ignore[no-untyped-call]  # torch gives it no types
    return result
