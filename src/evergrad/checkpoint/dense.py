"""Files of a dense group's elements: their tensors, and the span that is put together of several such files."""

from collections.abc import Mapping

import numpy as np

from evergrad.checkpoint.pieces import DensePiece
from evergrad.checkpoint.states import STEP, element_states
from evergrad.checkpoint.tensors import Tensors, check
from evergrad.errors import CheckpointError
from evergrad.messages import AnyArray, FileInfo, FileKind, Floats, GroupKind, GroupSpec


def dense_tensors(spec: GroupSpec, piece: DensePiece) -> Mapping[FileKind, Tensors]:
    """What the files hold of these elements: each parameter's, flat, by its name; and their state if trained."""
    segments = [(spec.parameters[n].name, n, slice(start, stop)) for n, start, stop in spec.segments(piece.span)]
    values: Tensors = {name: piece.values[here] for name, _, here in segments}
    if spec.kind is not GroupKind.TRAINED:
        return {FileKind.DENSE: values}
    states = _states(spec)
    state: Tensors = {f"{name}.{STEP}": np.array(piece.updates[n], np.int64) for name, n, _ in segments}
    for name, _, here in segments:
        state |= {f"{name}.{kind}": row[here] for kind, row in zip(states, piece.state, strict=True)}
    return {FileKind.DENSE: values, FileKind.OPTIMIZER: state}


class Span:
    """Elements of a group, filled by the files that hold some of them.

    Args:
        number: the group's in the schema.
        spec: the group.
        span: which elements.
        is_exact: whether all elements of a parameter were updated equally often; else the most counts, since in
            `async` one pserver may have refused what others have applied.
    """

    def __init__(self, number: int, spec: GroupSpec, span: range, *, is_exact: bool = True) -> None:
        self._number, self._spec, self._span, self._is_exact = number, spec, span, is_exact
        self._dtype = np.int64 if spec.kind is GroupKind.LOWEST else np.float32
        self._values: AnyArray = np.zeros(len(span), self._dtype)
        self._state: Floats = np.zeros((len(_states(spec)), len(span)), np.float32)
        self._updates: dict[int, int] = {}

    def take(self, info: FileInfo, tensors: Tensors) -> None:
        """Copy what a file holds of these elements.

        Raises:
            CheckpointError: the tensors are not those of such a file; the sentence goes on from its name.
        """
        assert info.span is not None  # of a file of elements: `manifest.check`
        held = range(*info.span)
        is_state = info.kind is FileKind.OPTIMIZER
        check(tensors, self._shapes(held, is_state))
        for number, start, stop in self._spec.segments(held):
            begin, end = max(held.start + start, self._span.start), min(held.start + stop, self._span.stop)
            if begin < end:
                source = slice(begin - held.start - start, end - held.start - start)
                target = slice(begin - self._span.start, end - self._span.start)
                copy = self._take_state if is_state else self._take_values
                copy(number, tensors, source, target)

    def piece(self) -> DensePiece:
        """All that was taken."""
        updates = tuple(self._updates.get(n, 0) for n in range(len(self._spec.parameters)))
        return DensePiece(self._number, self._span, self._values, self._state, updates)

    def _take_values(self, number: int, tensors: Tensors, source: slice, target: slice) -> None:
        self._values[target] = tensors[self._spec.parameters[number].name][source]

    def _take_state(self, number: int, tensors: Tensors, source: slice, target: slice) -> None:
        name = self._spec.parameters[number].name
        for row, kind in zip(self._state, _states(self._spec), strict=True):
            row[target] = tensors[f"{name}.{kind}"][source]
        step = int(tensors[f"{name}.{STEP}"])
        known = self._updates.setdefault(number, step)
        if self._is_exact and known != step:
            raise CheckpointError(f"counts {step} updates of {name!r}, another file {known}")
        self._updates[number] = max(known, step)

    def _shapes(self, held: range, is_state: bool) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        shapes: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {}
        for number, start, stop in self._spec.segments(held):
            name = self._spec.parameters[number].name
            if not is_state:
                shapes[name] = (self._dtype, (stop - start,))
                continue
            shapes[f"{name}.{STEP}"] = (np.int64, ())
            shapes |= {f"{name}.{kind}": (np.float32, (stop - start,)) for kind in _states(self._spec)}
        return shapes


def _states(spec: GroupSpec) -> tuple[str, ...]:
    return element_states(spec.rule) if spec.rule is not None else ()
