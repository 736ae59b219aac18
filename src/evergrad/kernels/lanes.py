"""Sixteen float32 side by side, which a kernel computes with at once: a cache line of them.

numba knows no such type. It makes vector code of a loop over the few numbers of a row only behind checks that arrays do
not overlap, which took as long as the row itself, and cannot read numbers of 16 bits. Here both are said outright.
Arithmetic is + - * / `root` and `fused`, each correctly rounded, so the bits are those of one number after the other.

An array holds what the job's wire has: float32, bfloat16 as uint16 or float16 as int16. Reading is exact; writing
rounds to the nearest, ties to even, as torch and numpy do. With `jit.py` this is all that knows numba.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.typing import templates
from numba.core.typing.templates import AbstractTemplate
from numba.extending import intrinsic
from numpy.typing import NDArray

from evergrad.kernels.jit import Integer, f32, f64, i16, inline, prefetch, reads, u16

Lanes = np.float32
"""Inside kernels: sixteen float32. A plain number that meets them is taken sixteen times."""
Mask = np.bool_
"""Inside kernels: the result of comparing lanes."""
Sums = np.float64
"""Inside kernels: sixteen float64, a sum for each lane."""
Count = int | None
"""How many numbers of a line there are in an array: all (`None`), or so many. Then they are in some of the lanes, in
their order, and zeros are in the others."""
Wired = NDArray[Any]
"""A flat array of numbers as the wire has them."""

WIDTH = 16
WIRE = (f32, u16, i16)
"""The types of numbers on the wire, as kernels see them."""
GRADS = tuple(reads(dtype, 2) for dtype in WIRE)
"""The types of gradients, shape (n, dim)."""

_lane = ir.IntType(32)
_float = ir.VectorType(ir.FloatType(), WIDTH)
_double = ir.VectorType(ir.DoubleType(), WIDTH)
_word = ir.VectorType(_lane, WIDTH)
_half = ir.VectorType(ir.IntType(16), WIDTH)
_flag = ir.VectorType(ir.IntType(1), WIDTH)

_extending: Any = extending
_templates: Any = templates


class _Type(types.Type):
    pass


LANES: Any = _Type("Lanes")
MASK: Any = _Type("Mask")
SUMS: Any = _Type("Sums")


@_extending.register_model(_Type)
def _model(manager: Any, of: Any) -> Any:
    return _extending.models.PrimitiveModel(manager, of, {LANES: _float, MASK: _flag, SUMS: _double}[of])


def _all(builder: Any, vector: Any, value: Any) -> Any:
    """A vector of this one value."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, _lane(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_lane, vector.count), [0] * vector.count))


@_extending.lower_cast(types.Float, LANES)
def _spread(context: Any, builder: Any, of: Any, _: Any, value: Any) -> Any:
    return _all(builder, _float, context.cast(builder, value, of, f32))


def _define(function: Any, result: Any, build: Callable[[Any, Any], Any], operands: int = 2) -> None:
    """Let an operator work on lanes, and on lanes and numbers."""

    @_templates.infer_global(function)
    class _Template(AbstractTemplate):
        def generic(self, arguments: Any, _: Any) -> Any:
            fits = all(a == LANES or isinstance(a, types.Float) for a in arguments)
            is_ours = LANES in arguments and len(arguments) == operands and fits
            return _templates.signature(result, *(LANES,) * operands) if is_ours else None

    @_extending.lower_builtin(function, *(LANES,) * operands)
    def _lower(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return build(builder, arguments)


_define(operator.add, LANES, lambda builder, a: builder.fadd(*a))
_define(operator.sub, LANES, lambda builder, a: builder.fsub(*a))
_define(operator.mul, LANES, lambda builder, a: builder.fmul(*a))
_define(operator.truediv, LANES, lambda builder, a: builder.fdiv(*a))
_define(operator.neg, LANES, lambda builder, a: builder.fneg(*a), operands=1)
_define(operator.lt, MASK, lambda builder, a: builder.fcmp_ordered("<", *a))
_define(operator.gt, MASK, lambda builder, a: builder.fcmp_ordered(">", *a))
_define(operator.ne, MASK, lambda builder, a: builder.fcmp_unordered("!=", *a))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a function of LLVM's own."""
    shape = ir.FunctionType(result, [a.type for a in arguments])
    declare: Any = cgutils.get_or_insert_function
    return builder.call(declare(builder.module, shape, name), arguments)


@intrinsic
def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    of = LANES if LANES in (a, b, c) else f32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments) if of == f32 else _call(builder, "llvm.fma.v16f32", _float, *arguments)

    return of(of, of, of), generate


fused = cast(Callable[[Any, Any, Any], Lanes], _fused)
"""Inside kernels only: a * b + c of numbers or lanes, rounded once; by the processor, or on one that cannot by the C
library."""


@intrinsic
def _root(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.sqrt.v16f32", _float, *arguments)

    return LANES(LANES), generate


root = cast(Callable[[Lanes], Lanes], _root)
"""Inside kernels only: the square root."""


@intrinsic
def _magnitude(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fabs.v16f32", _float, *arguments)

    return LANES(LANES), generate


magnitude = cast(Callable[[Lanes], Lanes], _magnitude)
"""Inside kernels only: the absolute value."""


@intrinsic
def _power(typing_context: Any, x: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        powers = arguments[0]
        for n in range(WIDTH):
            number = builder.fpext(builder.extract_element(arguments[0], _lane(n)), ir.DoubleType())
            power = _call(builder, "llvm.pow.f64", ir.DoubleType(), number, arguments[1])
            powers = builder.insert_element(powers, builder.fptrunc(power, ir.FloatType()), _lane(n))
        return powers

    return LANES(LANES, types.float64), generate


power = cast(Callable[[Lanes, float], Lanes], _power)
"""Inside kernels only: a power by the machine's own function, in float64: not the same bits on all machines."""


@intrinsic
def _where(typing_context: Any, mask: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return LANES(MASK, LANES, LANES), generate


where = cast(Callable[[Mask, Any, Any], Lanes], _where)
"""Inside kernels only: lane by lane the second where the first is true, else the third."""


@intrinsic
def _is_any(typing_context: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.vector.reduce.or.v16i1", ir.IntType(1), *arguments)

    return types.boolean(MASK), generate


is_any = cast(Callable[[Mask], bool], _is_any)
"""Inside kernels only: whether a mask is true somewhere."""


# -- reading and writing -----------------------------------------------------------------------------------------------


def _read(builder: Any, dtype: Any, line: Any) -> Any:
    """Numbers of the wire's type as float32."""
    if dtype == f32:
        return line
    if dtype == i16:
        return builder.fpext(builder.bitcast(line, ir.VectorType(ir.HalfType(), WIDTH)), _float)
    return builder.bitcast(builder.shl(builder.zext(line, _word), ir.Constant(_word, [16] * WIDTH)), _float)


def _written(builder: Any, dtype: Any, lanes: Any) -> Any:
    """Lanes as numbers of the wire's type, rounded."""
    if dtype == f32:
        return lanes
    if dtype == i16:
        return builder.bitcast(builder.fptrunc(lanes, ir.VectorType(ir.HalfType(), WIDTH)), _half)

    def constant(number: int) -> Any:
        return ir.Constant(_word, [number] * WIDTH)

    word = builder.bitcast(lanes, _word)
    top = builder.lshr(word, constant(16))
    rounding = builder.add(constant(0x7FFF), builder.and_(top, constant(1)))
    rounded = builder.lshr(builder.add(word, rounding), constant(16))
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(builder.select(is_nan, builder.or_(top, constant(0x40)), rounded), _half)


def _address(context: Any, builder: Any, of: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(of)(context, builder, array).data, [at])


_VECTORS = {f32: _float, f64: _double, u16: _half, i16: _half}
"""What a line of an array is read by."""


def _get(builder: Any, dtype: Any, address: Any, count: Any) -> Any:
    """A line of an array wherever it lies, in a network's buffer too; `count` is None for all of it."""
    vector = _VECTORS[dtype]
    if count is None:
        return _piece_at(builder, address, vector)
    line = ir.Constant(vector, None)
    for size, first, at, is_there in _pieces(builder, count):
        before = builder.block
        with builder.if_then(is_there):
            piece = _piece_at(builder, builder.gep(address, [at]), ir.VectorType(vector.element, size))
            spread = [n if n < size else 0 for n in range(WIDTH)]
            piece = builder.shuffle_vector(piece, piece, ir.Constant(_word, spread))
            mixed = [WIDTH + n - first if first <= n < first + size else n for n in range(WIDTH)]
            with_it = builder.shuffle_vector(line, piece, ir.Constant(_word, mixed))
            inside = builder.block
        merged = builder.phi(vector)
        merged.add_incoming(line, before)
        merged.add_incoming(with_it, inside)
        line = merged
    return line


def _put(builder: Any, dtype: Any, address: Any, count: Any, line: Any) -> None:
    if count is None:
        builder.store(line, builder.bitcast(address, line.type.as_pointer()), align=1)
        return
    for size, first, at, is_there in _pieces(builder, count):
        with builder.if_then(is_there):
            lanes = ir.Constant(ir.VectorType(_lane, size), [first + n for n in range(size)])
            piece = builder.shuffle_vector(line, line, lanes)
            builder.store(piece, builder.bitcast(builder.gep(address, [at]), piece.type.as_pointer()), align=1)


def _piece_at(builder: Any, address: Any, vector: Any) -> Any:
    piece = builder.load(builder.bitcast(address, vector.as_pointer()))
    piece.align = 1
    return piece


def _pieces(builder: Any, count: Any) -> Iterator[tuple[int, int, Any, Any]]:
    """What remains of fewer numbers than a line has: 8, 4, 2 and 1 of them, each in lanes of its own.

    For each its size, first lane, place in the array and whether it is there. Reading a whole line and hiding what is
    too much would wait for the cache line behind a row, which nobody has asked for in advance.
    """
    first = 0
    for size in (8, 4, 2, 1):
        bit = builder.and_(count, count.type(size))
        yield (
            size,
            first,
            builder.and_(count, count.type(WIDTH - 2 * size)),
            builder.icmp_signed("!=", bit, bit.type(0)),
        )
        first += size


@intrinsic
def _load(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, array, *arguments[:2])
        line = _get(builder, array.dtype, address, None if count == types.none else arguments[2])
        return _read(builder, array.dtype, line)

    return LANES(array, types.int64, count), generate


load = cast(Callable[[Wired, int, Count], Lanes], _load)
"""Inside kernels only: `count` numbers of a flat array from `at` on."""


@intrinsic
def _store(typing_context: Any, array: Any, at: Any, count: Any, lanes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, array, *arguments[:2])
        line = _written(builder, array.dtype, arguments[3])
        _put(builder, array.dtype, address, None if count == types.none else arguments[2], line)
        return context.get_dummy_value()

    return types.void(array, types.int64, count, LANES), generate


store = cast(Callable[[Wired, int, Count, Lanes], None], _store)
"""Inside kernels only: write them to a flat array from `at` on, where `count` is what it was when they were read."""


@inline
def over(step: Callable[..., None], size: int, arguments: tuple[Any, ...]) -> None:
    """Call `step(at, count, *arguments)` for the lines of `size` numbers, the last with what remains."""
    for at in range(0, size - WIDTH + 1, WIDTH):
        step(at, None, *arguments)
    rest = size % WIDTH
    if rest:
        step(size - rest, rest, *arguments)


@inline
def prefetch_row(arena: NDArray[Any], start: Integer, size: int, stride: int) -> None:
    """Start loading the first `size` numbers of a row of an arena whose rows begin `stride` numbers apart.

    The first lines stand here one by one: a loop over them takes longer to begin than they do.
    """
    prefetch(arena, start)
    if size > WIDTH:
        prefetch(arena, start + WIDTH)
    if size > 2 * WIDTH:
        prefetch(arena, start + 2 * WIDTH)
    if size > 3 * WIDTH:
        prefetch(arena, start + 3 * WIDTH)
    if size > 4 * WIDTH:
        for at in range(4 * WIDTH, size, WIDTH):
            prefetch(arena, start + at)
    if (size | stride) % WIDTH:
        prefetch(arena, start + size - 1)  # a row that begins inside a line ends in one more


# -- sums in float64 ---------------------------------------------------------------------------------------------------


@intrinsic
def _add_products(typing_context: Any, sums: Any, at: Any, count: Any, lanes: Any, factor: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, sums, *arguments[:2])
        how_many = None if count == types.none else arguments[2]
        products = builder.fmul(_all(builder, _double, arguments[4]), builder.fpext(arguments[3], _double))
        total = builder.fadd(_get(builder, f64, address, how_many), products)
        _put(builder, f64, address, how_many, total)
        return context.get_dummy_value()

    return types.void(sums, types.int64, count, LANES, types.float64), generate


add_products = cast(Callable[[NDArray[np.float64], int, Count, Lanes, float], None], _add_products)
"""Inside kernels only: to `count` sums from `at` on add the numbers times a factor, both rounded."""


@intrinsic
def _quotient(typing_context: Any, lanes: Any, factor: Any, divisor: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, factor, divisor = (
            builder.fpext(arguments[0], _double),
            *(_all(builder, _double, a) for a in arguments[1:]),
        )
        total = builder.fadd(ir.Constant(_double, [0.0] * WIDTH), builder.fmul(factor, wide))
        return builder.fptrunc(builder.fdiv(total, divisor), _float)

    return LANES(LANES, types.float64, types.float64), generate


quotient = cast(Callable[[Lanes, float, float], Lanes], _quotient)
"""Inside kernels only: `(0 + factor * lanes) / divisor` in float64, rounded to float32."""


@intrinsic
def _no_sums(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_double, [0.0] * WIDTH)

    return SUMS(), generate


no_sums = cast(Callable[[], Sums], _no_sums)
"""Inside kernels only: sixteen zeros."""


@intrinsic
def _with_squares(typing_context: Any, sums: Any, lanes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.fpext(arguments[1], _double)
        return _call(builder, "llvm.fma.v16f64", _double, wide, wide, arguments[0])  # a square is exact in float64

    return SUMS(SUMS, LANES), generate


with_squares = cast(Callable[[Sums, Lanes], Sums], _with_squares)
"""Inside kernels only: sums with the squares of lanes added."""


@intrinsic
def _total(typing_context: Any, sums: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (sums,), size = arguments, WIDTH
        while size > 1:
            size //= 2
            halves = ([first + n for n in range(size)] for first in (0, size))
            low, high = (
                builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(_lane, size), half)) for half in halves
            )
            sums = builder.fadd(low, high)
        return builder.extract_element(sums, _lane(0))

    return types.float64(SUMS), generate


total = cast(Callable[[Sums], float], _total)
"""Inside kernels only: sixteen sums added up: the second half to the first, and so on."""


# -- a line of an index ------------------------------------------------------------------------------------------------


@intrinsic
def _row_in_line(typing_context: Any, entries: Any, at: Any, key: Any) -> Any:
    word = ir.IntType(64)
    line = ir.VectorType(word, 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, entries, *arguments[:2]), line.as_pointer())
        here = builder.load(pointer, align=8)
        beside = ir.Constant(ir.VectorType(_lane, 8), [1, 1, 3, 3, 5, 5, 7, 7])
        rows = builder.shuffle_vector(here, here, beside)
        is_it = builder.icmp_signed("==", here, _all(builder, line, arguments[2]))
        is_it = builder.and_(is_it, ir.Constant(ir.VectorType(ir.IntType(1), 8), [1, 0] * 4))
        # one more than the row, since the row of an empty entry is -1; a key stands in one entry only
        one, none = ir.Constant(line, [1] * 8), ir.Constant(line, [0] * 8)
        found = builder.select(is_it, builder.add(rows, one), none)
        return builder.sub(_call(builder, "llvm.vector.reduce.or.v8i64", word, found), word(1))

    return types.int64(entries, types.int64, types.int64), generate


row_in_line = cast(Callable[[NDArray[np.int64], Any, Any], np.int64], _row_in_line)
"""Inside kernels only: of four pairs (key, row) from `at` on, the row of this key, or -1; without branches, which would
be foretold wrongly as often as not."""
