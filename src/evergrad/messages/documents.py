"""Structs kept in files: JSON, in which every float64 keeps its bits."""

from math import isfinite
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")


def encode(document: msgspec.Struct) -> bytes:
    """A struct as JSON. What JSON lacks, nan and the infinities, are strings in it; arrays have their shape beside."""
    return msgspec.json.encode(_finite(msgspec.to_builtins(document, str_keys=True, enc_hook=_to_list)))


def decode(data: bytes, kind: type[T]) -> T:
    """The struct in this JSON.

    Raises:
        msgspec.MsgspecError: there is none in it.
    """
    return msgspec.json.decode(data, type=kind, strict=False, dec_hook=_to_array)


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"shape": value.shape, "values": value.reshape(-1).tolist()}
    raise NotImplementedError


def _to_array(kind: type, value: Any) -> Any:
    try:
        return np.array([float(v) for v in value["values"]], np.float64).reshape(value["shape"])
    except (KeyError, TypeError, ValueError) as exc:
        raise msgspec.ValidationError(f"no array: {exc}") from exc


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if isfinite(value) else str(value)
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
