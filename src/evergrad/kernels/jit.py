"""How kernels are compiled: the one place that knows numba.

Every kernel has one signature, so nothing is ever compiled in the middle of a job. Arrays that a kernel only reads are
declared read-only and unaligned (`reads`): both what numpy makes and what lies in a network buffer fit.
Kernels compute with + - * / sqrt and `fused` without fast-math, so each result is correctly rounded, however it is
vectorized.

After a change to a function made by `inline`, delete the compiled files of the modules that call it
(`__pycache__/*.nb?`): numba notices changes of a kernel's own file only.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Integer = int | np.int64 | np.int32
"""Whole numbers inside kernels."""

_compile: Any = njit
_COUNT_NO_REFERENCES = {"_nrt": False}

f32 = types.float32
f64 = types.float64
i32 = types.int32
i64 = types.int64
u8 = types.uint8
u16 = types.uint16
u32 = types.uint32
u64 = types.uint64
flag = types.boolean
void = types.void


def reads(dtype: Any, ndim: int = 1) -> Any:
    """The type of a contiguous array that a kernel only reads."""
    return types.Array(dtype, ndim, "C", readonly=True, aligned=False)


def writes(dtype: Any, ndim: int = 1) -> Any:
    """The type of a contiguous array that a kernel writes."""
    return types.Array(dtype, ndim, "C")


def pair(dtype: Any) -> Any:
    """The type of two results."""
    two: Any = types.UniTuple
    return two(dtype, 2)


def record(named_tuple: type, *fields: Any) -> Any:
    """The type of a named tuple with fields of these types."""
    if len(set(fields)) == 1:
        uniform_type: Any = types.NamedUniTuple
        return uniform_type(fields[0], len(fields), named_tuple)
    tuple_type: Any = types.NamedTuple
    return tuple_type(fields, named_tuple)


def kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    """Compile a function for these types now, or load it from numba's cache.

    Called with arrays of other types or layouts it raises TypeError. The function makes no array, and so no array's
    references are counted: a slice in a loop would else count up and down with atomic operations, each of which waits
    for all loads under way and undoes every prefetch.
    """
    return _compiled(result(*arguments), **_COUNT_NO_REFERENCES)


def making_kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    """As `kernel`, for a function that makes arrays. It should not slice arrays in its inner loops."""
    return _compiled(result(*arguments))


def _compiled(signature: Any, **options: bool) -> Callable[[Function], Function]:
    decorate = _compile(signature, nogil=True, cache=True, error_model="numpy", **options)
    return cast(Callable[[Function], Function], decorate)


def inline(function: Function) -> Function:
    """A piece of kernels, compiled into each that calls it. It makes and returns no array."""
    decorate = _compile(nogil=True, error_model="numpy", forceinline=True, **_COUNT_NO_REFERENCES)
    return cast(Function, decorate(function))


def slicing(function: Function) -> Function:
    """A piece of kernels that returns a slice of an array it is given."""
    decorate = _compile(nogil=True, error_model="numpy", inline="always")
    return cast(Function, decorate(function))


_pack: Any = cgutils.pack_array
_populate: Any = populate_array


def _array_at(dtype: Any) -> Any:
    array_type = types.Array(dtype, 1, "C", aligned=False)

    @intrinsic
    def make(typing_context: Any, address: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, size = arguments
            view = context.make_array(array_type)(context, builder)
            item_bytes = context.get_constant(types.intp, dtype.bitwidth // 8)
            data = builder.inttoptr(address, view.data.type)
            shape, strides = (_pack(builder, [n]) for n in (size, item_bytes))
            _populate(view, data, shape, strides, item_bytes, None)
            return view._getvalue()

        return array_type(types.int64, types.int64), generate

    return make


floats_at = cast(Callable[[Integer, Integer], NDArray[np.float32]], _array_at(f32))
"""Inside kernels only: the array of so many float32 at an address. Nothing is checked: the caller vouches for both."""

int32s_at = cast(Callable[[Integer, Integer], NDArray[np.int32]], _array_at(i32))
"""As `floats_at`, of int32."""

int64s_at = cast(Callable[[Integer, Integer], NDArray[np.int64]], _array_at(i64))
"""As `floats_at`, of int64."""

bytes_at = cast(Callable[[Integer, Integer], NDArray[np.uint8]], _array_at(u8))
"""As `floats_at`, of bytes."""


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        address = builder.bitcast(builder.gep(view.data, [arguments[1]]), byte)
        word = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        declare: Any = cgutils.get_or_insert_function
        # for reading, to be kept in all caches but the first, data
        builder.call(declare(builder.module, shape, "llvm.prefetch.p0"), [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return f32(f32, f32, f32), generate


fused = cast(Callable[[Any, Any, Any], np.float32], _fused)
"""Inside kernels only: a * b + c of float32, rounded once; by the processor, or on one that cannot by the C library."""

prefetch = cast(Callable[[NDArray[Any], Integer], None], _prefetch)
"""Inside kernels only: start loading the cache line of `array[index]` of a 1-D array; any index is safe.

Into the second-level cache: the first has few places for lines on their way, which are then the limit, and it costs
little to get a line from the second (measured in docs/design/0007-prefetch.md).
"""
