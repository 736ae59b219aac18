"""One pserver's part of a flat group of dense parameters or buffers."""

from collections.abc import Sequence

import numpy as np

from evergrad.checkpoint.pieces import DensePiece
from evergrad.errors import CheckpointError
from evergrad.kernels.merge import add_flat, divide
from evergrad.messages import AnyArray, Flags, Floats, GroupKind, GroupSpec, Segment
from evergrad.pserver.rules import apply_dense

DensePart = tuple[AnyArray, Flags, int]
"""What one task contributes: values of this span, a flag for each parameter of the group, samples."""


class DenseGroup:
    """The elements `span` of a group.

    Invariants:
        1. An element's value depends on the updates of its parameter only, not on the span.
        2. An array once given out by `values` or by `cut` is never changed.
    """

    def __init__(self, spec: GroupSpec, span: range) -> None:
        width = spec.rule.state_width if spec.rule is not None else 0
        initial = spec.rule.initial_state if spec.rule is not None else 0.0
        self._spec, self._span = spec, span
        self._segments = tuple(spec.segments(span))
        self._updates = [0] * len(spec.parameters)
        self._state: Floats = np.full((width, len(span)), initial, np.float32)
        dtype = np.int64 if spec.kind is GroupKind.LOWEST else np.float32
        self._values: AnyArray = np.zeros(len(span), dtype)
        self._is_state_given_out = False

    @property
    def values(self) -> AnyArray:
        """The values now; the array is replaced, not changed, by what comes later."""
        return self._values

    def set(self, values: AnyArray) -> None:
        """Take these values; shape and type are those of `values`."""
        self._values = values.astype(self._values.dtype, copy=True)

    def cut(self, number: int, limit_bytes: int) -> list[DensePiece]:
        """All of it as it is now, as pieces of group `number` of about so many bytes; nothing is copied.

        The next update that changes the state copies it first.
        """
        self._is_state_given_out = True
        values, state, updates = self._values, self._state, tuple(self._updates)
        size = max(limit_bytes // (values.itemsize + 4 * state.shape[0]), 1)
        return [
            DensePiece(number, self._span[at : at + size], values[at : at + size], state[:, at : at + size], updates)
            for at in range(0, values.size, size)
        ]

    def load(self, piece: DensePiece) -> None:
        """Take values and state of these elements, and the counts of updates of their parameters.

        Raises:
            CheckpointError: they do not fit.
        """
        start, stop = piece.span.start - self._span.start, piece.span.stop - self._span.start
        shapes = (piece.values.dtype, piece.values.shape, piece.state.shape, len(piece.updates))
        fitting = (self._values.dtype, (stop - start,), (self._state.shape[0], stop - start), len(self._updates))
        if not 0 <= start <= stop <= self._values.size or shapes != fitting:
            raise CheckpointError(f"a checkpoint has a dense group's elements as {shapes}; {fitting} would fit")
        self._values[start:stop] = piece.values
        self._state[:, start:stop] = piece.state
        for segment in self._segments:
            if segment.start < stop and start < segment.stop:
                self._updates[segment.parameter] = piece.updates[segment.parameter]

    def update(self, parts: Sequence[DensePart], total: int, lr: float) -> None:
        """Apply one step.

        Trained: the rule, with the sum of samples * gradient over the parts that have the parameter (float64, in order)
        divided by `total` and rounded once; a parameter that no part has is left alone, its state and its count of
        updates too. Averaged: the mean over samples, a part without the parameter standing for the old value. Lowest:
        the values of the first part that has the parameter. Frozen: nothing.

        Args:
            parts: in task order.
            total: samples of the whole step.
            lr: the step's learning rate; for trained groups only.
        """
        if self._spec.kind is GroupKind.FROZEN:
            return
        new = self._values.copy()
        if self._is_state_given_out:
            self._state, self._is_state_given_out = self._state.copy(), False
        for segment in self._segments:
            present = [bool(flags[segment.parameter]) for _, flags, _ in parts]
            if any(present):
                self._update_segment(segment, parts, present, total, lr, new)
        self._values = new

    def _update_segment(
        self, segment: Segment, parts: Sequence[DensePart], present: list[bool], total: int, lr: float, new: AnyArray
    ) -> None:
        here = slice(segment.start, segment.stop)
        given = [(values[here], samples) for (values, _, samples), has in zip(parts, present, strict=True) if has]
        match self._spec.kind:
            case GroupKind.TRAINED:
                self._train(segment, _mean(given, segment, total), lr, new[here])
            case GroupKind.AVERAGED:
                all_parts = zip(parts, present, strict=True)
                filled = [((v if has else self._values)[here], samples) for (v, _, samples), has in all_parts]
                unnamed = total - sum(samples for _, samples in filled)  # of tasks that changed nothing of the group
                new[here] = _mean([*filled, (self._values[here], unnamed)], segment, total)
            case GroupKind.LOWEST:
                new[here] = given[0][0]
            case GroupKind.FROZEN:
                pass

    def _train(self, segment: Segment, grads: Floats, lr: float, values: Floats) -> None:
        self._updates[segment.parameter] += 1
        rule = self._spec.rule
        assert rule is not None  # of a trained group
        state = [kind[segment.start : segment.stop] for kind in self._state]
        apply_dense(rule, values, state, grads, lr, self._updates[segment.parameter])


def _mean(parts: Sequence[tuple[AnyArray, int]], segment: Segment, total: int) -> Floats:
    """The sum of samples * values, taken in order in float64, over `total`, rounded once."""
    if len(parts) == 1 and parts[0][1] == total:
        return parts[0][0]
    sums = np.zeros(segment.stop - segment.start)
    for values, samples in parts:
        add_flat(sums, values, samples)
    means = np.empty(sums.size, np.float32)
    divide(sums, total, means)
    return means
