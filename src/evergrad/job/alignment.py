"""Batches in memory as torch itself would lay them out.

Products of matrices can differ in the last bit with how their operands are aligned, and arrays that come from files or
messages lie anywhere. A copy in torch's own memory lies the same way in every process.
"""

from typing import Any

from torch import Tensor

ALIGNMENT_BYTES = 64


def aligned(batch: Any) -> Any:
    """The batch with its tensors aligned, also those in dicts, lists and tuples; anything else is left as it is."""
    match batch:
        case Tensor():
            is_aligned = batch.device.type != "cpu" or batch.data_ptr() % ALIGNMENT_BYTES == 0
            return batch if is_aligned else batch.clone()
        case dict() if type(batch) is dict:
            return {name: aligned(value) for name, value in batch.items()}
        case list() if type(batch) is list:
            return [aligned(value) for value in batch]
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(aligned(value) for value in batch))
        case tuple() if type(batch) is tuple:
            return tuple(aligned(value) for value in batch)
        case _:
            return batch
