"""Ids that are strings: a stable 64-bit hash makes keys of them."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergrad.errors import DataError


def hash_ids(strings: Iterable[str | bytes] | NDArray[Any]) -> NDArray[np.int64]:
    """Hash strings to keys, the same on every machine, in every process and in every release.

    A `str` counts as its UTF-8 bytes, so `"a"` and `b"a"` are one id. Two of n different strings collide with a chance
    of about n * n / 2**65: one in 37 million for a million strings.

    Args:
        strings: a list or other iterable of `str` or `bytes`, or an array (or pandas column) of them of any shape.

    Returns:
        int64, of the shape of the array, or (n,) for a list.

    Raises:
        DataError: an element is not a string, or one bare string was given.
    Cost: about a microsecond a string.

    *Source*: BLAKE2b (RFC 7693) with an 8-byte digest, read as a little-endian signed integer.
    """
    if isinstance(strings, str | bytes):
        raise DataError(f"hash_ids wants a list or an array of strings; for one string write hash_ids([{strings!r}])")
    if hasattr(strings, "__array__"):
        array = np.asarray(strings)
        return _hashed(array.ravel().tolist()).reshape(array.shape)
    if not isinstance(strings, Iterable):
        raise DataError(f"hash_ids wants a list or an array of strings, not {type(strings).__name__}")
    return _hashed(list(strings))


def _hashed(strings: list[Any]) -> NDArray[np.int64]:
    digests = b"".join([blake2b(_bytes(s, i), digest_size=8).digest() for i, s in enumerate(strings)])
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def _bytes(string: Any, position: int) -> bytes:
    if isinstance(string, str):
        return string.encode("utf-8", "surrogatepass")
    if isinstance(string, bytes):
        return string
    what = f"{string!r} at position {position} ({type(string).__name__})"
    raise DataError(f"hash_ids: {what} is not a string; integers are keys already, missing values need a string")
