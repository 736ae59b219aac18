"""What a pserver takes and what it refuses, with the reason."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from evergrad import init_rows
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    GroupGrads,
    GroupKind,
    GroupSpec,
    ParameterSpec,
    Schema,
    TableGrads,
    TableSpec,
    UpdateName,
    UpdateSpec,
)
from evergrad.optim import SGD
from evergrad.placement import slots_owned
from evergrad.pserver.admission import Admission

TABLE = TableSpec("user", 3, SGD().spec(), init_rows.zeros())
WEIGHT = (ParameterSpec("weight", (5,), "float32"), ParameterSpec("bias", (1,), "float32"))
GROUPS = (
    GroupSpec(GroupKind.TRAINED, SGD().spec(), WEIGHT),
    GroupSpec(GroupKind.FROZEN, None, WEIGHT),
    GroupSpec(GroupKind.LOWEST, None, (ParameterSpec("steps", (), "int64"),)),
)
SCHEMA = Schema(0, UpdateSpec(UpdateName.SYNC, 1), (TABLE,), GROUPS)
ADMISSION = Admission(SCHEMA, 0, 1)
ALL = np.arange(100, dtype=np.int64)


def floats(*shape):
    return np.ones(shape, np.float32)


def flags(n):
    return np.ones(n, np.uint8)


def rows(table=0, lr=0.1, keys=ALL[:4], grads=None):
    return TableGrads(table, lr, keys, floats(keys.size, 3) if grads is None else grads)


def span(group=0, lr=0.1, values=None, present=None):
    default = np.zeros(1, np.int64) if group == 2 else floats(6)
    return GroupGrads(
        group,
        lr,
        default if values is None else values,
        flags(1 if group == 2 else 2) if present is None else present,
    )


def reason(*, step=0, samples=3, tables=(), groups=(), admission=ADMISSION):
    return admission.refuse_push(step, samples, tuple(tables), tuple(groups))


def with_one(value):
    grads = floats(4, 3)
    grads[2, 1] = value
    return grads


@pytest.mark.parametrize(
    "push",
    [
        {},
        {"tables": [rows()]},
        {"tables": [rows(keys=ALL[:0])]},
        {"tables": [rows(lr=0.0)]},
        {"groups": [span()]},
        {"groups": [span(2)]},
        {"tables": [rows()], "groups": [span(), span(2)]},
        {"step": INIT_STEP, "groups": [span(0), span(1), span(2)]},
    ],
)
def test_a_sound_push_is_taken(push):
    assert reason(**push) is None


@pytest.mark.parametrize(
    ("push", "says"),
    [
        ({"samples": 0}, "0 samples"),
        ({"samples": -3}, "-3 samples"),
        ({"tables": [rows(1)]}, "table number 1 is unknown"),
        ({"tables": [rows(-1)]}, "table number -1 is unknown"),
        ({"groups": [span(3)]}, "dense group number 3 is unknown"),
        ({"groups": [span(-1)]}, "dense group number -1 is unknown"),
        ({"tables": [rows(), rows()]}, "named twice"),
        ({"groups": [span(), span()]}, "named twice"),
        ({"tables": [rows(grads=floats(3, 3))]}, "'user': gradients of shape (3, 3)"),
        ({"tables": [rows(grads=floats(4, 2))]}, "'user': gradients of shape (4, 2)"),
        ({"tables": [rows(grads=floats(12))]}, "'user': gradients of shape (12,)"),
        ({"tables": [rows(keys=ALL[:4].reshape(2, 2))]}, "'user': keys of shape (2, 2)"),
        ({"tables": [rows(keys=np.array(3))]}, "'user': keys of shape ()"),
        ({"tables": [rows(grads=with_one(math.nan))]}, "'user': NaN or infinity"),
        ({"tables": [rows(grads=with_one(math.inf))]}, "'user': NaN or infinity"),
        ({"tables": [rows(grads=with_one(-math.inf))]}, "'user': NaN or infinity"),
        ({"tables": [rows(lr=math.nan)]}, "'user': learning rate nan"),
        ({"tables": [rows(lr=-0.1)]}, "'user': learning rate -0.1"),
        ({"tables": [rows(lr=math.inf)]}, "'user': learning rate inf"),
        ({"groups": [span(values=floats(7))]}, "send float32 inside a span of 6"),
        ({"groups": [span(values=floats(6, 1))]}, "send float32 inside a span of 6"),
        ({"groups": [replace(span(values=floats(5)), start=2)]}, "send float32 inside a span of 6"),
        ({"groups": [replace(span(values=floats(5)), start=-1)]}, "send float32 inside a span of 6"),
        ({"groups": [span(values=np.zeros(6))]}, "send float32"),
        ({"groups": [span(2, values=floats(1))]}, "send int64"),
        ({"groups": [span(present=flags(1))]}, "flags of shape (1,) for 2 parameters"),
        ({"groups": [span(values=with_one(math.nan).reshape(-1)[:6] * math.nan)]}, "NaN or infinity"),
        ({"groups": [span(lr=math.nan)]}, "learning rate nan"),
        ({"groups": [span(1)]}, "frozen parameters have no gradients"),
        ({"step": INIT_STEP, "tables": [rows()], "groups": [span(0), span(1), span(2)]}, "initial values must be"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_with_the_reason(push, says):
    assert says in reason(**push)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_keys_of_another_pserver_are_refused_and_those_of_its_own_taken(place):
    admission = Admission(SCHEMA, place, 3)
    owned = slots_owned(place, 3)
    mine = np.array([k for k in ALL if slots_of(np.array([k]))[0] in owned])
    assert 0 < mine.size < ALL.size
    assert admission.refuse_keys(0, mine) is None
    assert "another pserver" in admission.refuse_keys(0, ALL)
    assert reason(admission=admission, tables=[rows(keys=mine)]) is None
    assert "another pserver" in reason(admission=admission, tables=[rows(keys=ALL)])


def test_a_span_is_that_of_the_place():
    admission = Admission(SCHEMA, 1, 4)
    assert reason(admission=admission, groups=[span(values=floats(2))]) is None
    assert "inside a span of 2" in reason(admission=admission, groups=[span()])
