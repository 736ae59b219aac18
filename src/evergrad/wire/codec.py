"""Messages to frames and back, with every size checked before anything is used.

    frame 0     preamble: b"EGRD", then 8 bytes made of the protocol and the job's name
    frame 1     the message in MessagePack, each array as (number of its frame, type, shape)
    frame 2..   the arrays' bytes, in the order in which the message names them

Messages with an array for each table are packed first (`packed.py`), so that they have a handful of frames.

A process of another version or job has another preamble, so it is told so before anything of it is decoded. The answer
to it, a refusal, is the one format that never changes: b"EGRD refused" and a sentence in UTF-8.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Union, get_args

import msgspec
import numpy as np

from evergrad.errors import EvergradError
from evergrad.messages import AnyArray, AnyMessage, Message
from evergrad.version import VERSION
from evergrad.wire.packed import on_the_wire, pack, unpack

REFUSED = b"EGRD refused"
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 8
DTYPES = {np.dtype(t).str: np.dtype(t) for t in (np.float32, np.float64, np.int64, np.uint8, np.uint16)}

Frame = bytes | memoryview


class Malformed(EvergradError):
    """Frames that are no message of this job and version; nothing was used of them."""


def preamble(job: str) -> bytes:
    """What every message of this version for this job begins with."""
    return b"EGRD" + hashlib.blake2b(f"{VERSION}\n{job}".encode(), digest_size=8).digest()


def refusal(job: str) -> list[Frame]:
    """The answer to a sender of another job or version."""
    return [REFUSED, f"this is job {job!r} of Evergrad {VERSION}; connect with the same job and version".encode()]


class Codec:
    """Encodes and decodes the messages of one job.

    Cost: arrays are neither copied on the way out (they must be contiguous, and unchanged until sent) nor on the way
    in (what comes out is read-only and shares memory with the frames).
    """

    def __init__(self, job: str) -> None:
        self._preamble = preamble(job)
        self._out: list[AnyArray] = []
        self._in: Sequence[Frame] = ()
        self._taken = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array_out)
        kinds = tuple(on_the_wire(kind) for kind in get_args(AnyMessage))
        self._decoder = msgspec.msgpack.Decoder(Union[kinds], dec_hook=self._array_in)  # noqa: UP007  # made of a list

    def encode(self, message: Message) -> list[Frame]:
        """The frames of a message."""
        self._out = []
        header = self._encoder.encode(pack(message))
        return [self._preamble, header, *(a.data.cast("B") if a.size else b"" for a in self._out)]

    def is_ours(self, frames: Sequence[Frame]) -> bool:
        """Whether the frames begin as those of this job and version do."""
        return bool(frames) and frames[0] == self._preamble

    def decode(self, frames: Sequence[Frame]) -> AnyMessage:
        """The message in these frames.

        Raises:
            Malformed: they are not exactly one message; the text says what is wrong.
        """
        if not self.is_ours(frames) or len(frames) < 2:
            raise Malformed("not a message of this job and version")
        if len(frames[1]) > MAX_HEADER_BYTES:
            raise Malformed(f"a header of {len(frames[1])} bytes; at most {MAX_HEADER_BYTES} are read")
        self._in, self._taken = frames[2:], 0
        try:
            message = unpack(self._decoder.decode(frames[1]))
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise Malformed(str(exc)) from None
        finally:
            left, self._in = len(self._in) - self._taken, ()
        if left:
            raise Malformed(f"{left} frames that no field names")
        return message

    def _array_out(self, value: object) -> tuple[int, str, tuple[int, ...]]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        array = np.ascontiguousarray(value)
        if array.dtype.str not in DTYPES:
            raise TypeError(f"cannot send an array of {array.dtype}")
        self._out.append(array)
        return len(self._out) - 1, array.dtype.str, value.shape

    def _array_in(self, kind: Any, value: Any) -> AnyArray:
        """The array that a field describes; raises ValueError, which msgspec reports with the field's path."""
        try:
            number, dtype_str, shape = value
            dtype = DTYPES[dtype_str]
            shape = tuple(shape)
        except (TypeError, ValueError, KeyError):
            raise ValueError("not the description of an array") from None
        if type(number) is not int or number != self._taken or number >= len(self._in):
            raise ValueError("an array without a frame")
        self._taken += 1
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise ValueError("an array of an impossible shape")
        if not _dtype_allowed(kind, dtype):
            raise ValueError(f"an array of {dtype} where another type belongs")
        size = 1
        for n in shape:
            size *= n
        frame = self._in[number]
        if size * dtype.itemsize != len(frame):
            raise ValueError("an array whose shape does not fit its bytes")
        return np.frombuffer(frame, dtype=dtype).reshape(shape)


@cache
def _dtype_allowed(kind: Any, dtype: np.dtype[Any]) -> bool:
    (wanted,) = get_args(get_args(kind)[1])
    return wanted is Any or np.dtype(wanted) == dtype
