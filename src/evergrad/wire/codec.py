"""Messages to frames and back, with every size checked before anything is used.

    frame 0     preamble: b"EGRD", then 8 bytes made of the protocol and the job's name
    frame 1     the message in MessagePack, each array as (number of its frame, type, shape)
    frame 2..   the arrays' bytes; those of one frame lie in it in the order in which the message names them

Arrays that are parts of one array and lie side by side in it go out as one frame: as a rule the keys or gradients of
all tables of a push, so that a message has a handful of frames however many tables a model has.

A process of another version or job has another preamble, so it is told so before anything of it is decoded. The answer
to it, a refusal, is the one format that never changes: b"EGRD refused" and a sentence in UTF-8.
"""

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any, get_args

import msgspec
import numpy as np

from evergrad.errors import EvergradError
from evergrad.kernels.arrays import address_of
from evergrad.messages import AnyArray, AnyMessage, Message
from evergrad.version import VERSION

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
        self._out = _Out()
        self._in = _In(())
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array_out)
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(
            AnyMessage, dec_hook=self._array_in
        )

    def encode(self, message: Message) -> list[Frame]:
        """The frames of a message."""
        self._out = _Out()
        header = self._encoder.encode(message)
        return [self._preamble, header, *self._out.frames()]

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
        self._in = _In(frames[2:])
        try:
            message = self._decoder.decode(frames[1])
            self._in.check_all_taken()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise Malformed(str(exc)) from None
        finally:
            self._in = _In(())
        return message

    def _array_out(self, value: object) -> tuple[int, str, tuple[int, ...]]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        array = np.ascontiguousarray(value)
        if array.dtype.str not in DTYPES:
            raise TypeError(f"cannot send an array of {array.dtype}")
        return self._out.add(array), array.dtype.str, value.shape

    def _array_in(self, kind: Any, value: Any) -> AnyArray:
        """The array that a field describes; raises ValueError, which msgspec reports with the field's path."""
        try:
            number, dtype_str, shape = value
            dtype = DTYPES[dtype_str]
            shape = tuple(shape)
        except (TypeError, ValueError, KeyError):
            raise ValueError("not the description of an array") from None
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise ValueError("an array of an impossible shape")
        if not _dtype_allowed(kind, dtype):
            raise ValueError(f"an array of {dtype} where another type belongs")
        return self._in.take(number, dtype, prod(shape)).reshape(shape)


class _Out:
    """The frames of arrays on their way out."""

    def __init__(self) -> None:
        self._spans: list[tuple[AnyArray, int, int]] = []
        self._addresses: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def add(self, array: AnyArray) -> int:
        """The number of the frame that a contiguous array is in: of one that ends where it begins, or its own."""
        if array.nbytes == 0 and self._spans:
            return 0
        whole = array.base if isinstance(array.base, np.ndarray) and array.base.flags.c_contiguous else array
        address = address_of(array)
        if id(whole) not in self._addresses:
            self._addresses[id(whole)] = address if whole is array else address_of(whole)
        number = self._ends.pop(address, -1)
        if number < 0 or self._spans[number][0] is not whole:
            number = len(self._spans)
            self._spans.append((whole, address, address))
        self._spans[number] = (whole, self._spans[number][1], address + array.nbytes)
        self._ends[address + array.nbytes] = number
        return number

    def frames(self) -> list[Frame]:
        """All frames."""
        return [self._frame(*span) for span in self._spans]

    def _frame(self, whole: AnyArray, start: int, end: int) -> Frame:
        if start == end:
            return b""
        begin = self._addresses[id(whole)]
        return whole.data.cast("B")[start - begin : end - begin]


class _In:
    """The frames of arrays that have come."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self._taken: list[int] = []

    def take(self, number: object, dtype: np.dtype[Any], size: int) -> AnyArray:
        """The next array of a frame; raises ValueError if there is none like it."""
        if type(number) is not int or not 0 <= number <= len(self._taken) or number >= len(self._frames):
            raise ValueError("an array without a frame")
        if number == len(self._taken):
            self._taken.append(0)
        start = self._taken[number]
        self._taken[number] += size * dtype.itemsize
        if self._taken[number] > len(self._frames[number]):
            raise ValueError("an array whose shape does not fit its bytes")
        return np.frombuffer(self._frames[number], dtype, size, start)

    def check_all_taken(self) -> None:
        """Raise ValidationError where there are bytes or frames more than the message names."""
        if len(self._taken) < len(self._frames):
            raise msgspec.ValidationError(f"{len(self._frames) - len(self._taken)} frames that no field names")
        if any(taken < len(frame) for taken, frame in zip(self._taken, self._frames, strict=True)):
            raise msgspec.ValidationError("an array whose shape does not fit its bytes")


def _dtype_allowed(kind: Any, dtype: np.dtype[Any]) -> bool:
    (wanted,) = get_args(get_args(kind)[1])
    return wanted is Any or np.dtype(wanted) == dtype
