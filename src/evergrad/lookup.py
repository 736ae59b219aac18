"""Reading rows inside torch, with a backward pass that sums the gradients of equal rows in a kernel."""

from typing import Any

import torch
from torch import Tensor

from evergrad.kernels.segment import sum_rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: Tensor) -> Tensor:
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(row)
        return torch.embedding(weight, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        flat = grad.reshape(row.numel(), -1).contiguous()
        return torch.from_numpy(sum_rows(row.reshape(-1).numpy(), flat.numpy(), ctx.rows)), None


def gather(weight: Tensor, row: Tensor) -> Tensor:
    """Rows of `weight` (u, dim), numbered by `row` (int64, any shape): shape (*row.shape, dim).

    The gradient of a row is the sum over its uses, in order of position in float64, rounded once.
    """
    if weight.device.type != "cpu" or not weight.requires_grad:
        return torch.embedding(weight, row)
    result: Tensor = _Gather.apply(weight, row)  # type: ignore[no-untyped-call]  # torch gives it no types
    return result
