"""Structs kept in files."""

import json
from math import inf, nan

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evergrad.messages import DataSpec, EvaluationDone, Partial
from evergrad.messages.documents import decode, encode


class Numbers(msgspec.Struct, frozen=True):
    by_epoch: dict[int, dict[str, float]]
    best: float | None = None


@given(arrays(np.float64, st.sampled_from([(), (0,), (3,), (2, 2)]), elements=st.floats()))
def test_totals_come_back_with_the_same_bits_and_shape(values: np.ndarray) -> None:
    done = EvaluationDone(1, 0, DataSpec(8, "x", 2), {"auc": Partial("sum", values)}, None)
    again = decode(encode(done), EvaluationDone).totals["auc"].values
    assert again.shape == values.shape
    assert np.array_equal(again, values, equal_nan=True)
    assert (np.signbit(again) == np.signbit(values))[~np.isnan(values)].all()


def test_what_json_lacks_is_a_string_in_it() -> None:
    data = encode(Numbers({3: {"a": nan, "b": -inf, "c": 0.1 + 0.2}}, inf))
    assert json.loads(data) == {"by_epoch": {"3": {"a": "nan", "b": "-inf", "c": 0.1 + 0.2}}, "best": "inf"}
    again = decode(data, Numbers)
    assert str(again) == str(Numbers({3: {"a": nan, "b": -inf, "c": 0.1 + 0.2}}, inf))


@pytest.mark.parametrize(
    "values", ["null", '{"shape": [2], "values": [1.0]}', '{"values": [1]}', '{"shape": [], "values": ["x"]}']
)
def test_what_is_no_array_is_refused(values: str) -> None:
    text = f'{{"kind": "sum", "values": {values}}}'
    with pytest.raises(msgspec.ValidationError):
        decode(text.encode(), Partial)
