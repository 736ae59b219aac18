"""Whether two trainers train the same model, and the sentence that says what differs."""

import msgspec
import pytest

from evergrad import init_rows
from evergrad.master.schema import difference
from evergrad.messages import GroupKind, GroupSpec, ParameterSpec, Schema, TableSpec, UpdateName, UpdateSpec, Wire
from evergrad.optim import SGD, Adagrad

replace = msgspec.structs.replace
USER = TableSpec("user", 4, Adagrad().spec(), init_rows.normal())
ITEM = replace(USER, name="item")
WEIGHT = ParameterSpec("head.weight", (2, 3), "float32")
BIAS = ParameterSpec("head.bias", (2,), "float32")
GROUP = GroupSpec(GroupKind.TRAINED, SGD().spec(), (WEIGHT, BIAS))
SCHEMA = Schema(0, UpdateSpec(UpdateName.SYNC, 2), (USER, ITEM), (GROUP,))


def with_table(**changes):
    return replace(SCHEMA, tables=(replace(USER, **changes), ITEM))


def with_group(**changes):
    return replace(SCHEMA, groups=(replace(GROUP, **changes),))


def test_a_model_does_not_differ_from_itself():
    assert difference(SCHEMA, msgspec.msgpack.decode(msgspec.msgpack.encode(SCHEMA), type=Schema)) is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(SCHEMA, seed=1), ["seed", "1", "0"]),
        (replace(SCHEMA, rates=(0.1, None)), ["learning rates are [0.1, None], the job's []"]),
        (replace(SCHEMA, wire=Wire.FLOAT16), ["its wire is float16, the job's float32"]),
        (replace(SCHEMA, update=UpdateSpec(UpdateName.SYNC, 3)), ["update rule"]),
        (replace(SCHEMA, update=UpdateSpec(UpdateName.ASYNC, 2)), ["update rule is async, the job's sync"]),
        (replace(SCHEMA, update=UpdateSpec(UpdateName.SYNC, 2, local_steps=4)), ["sync with local_steps 4", "steps 1"]),
        (replace(SCHEMA, inner=(SGD().spec(),)), ["(inner) rules are sgd(", "the job's none"]),
        (replace(SCHEMA, tables=(USER,)), ["lacks table 'item'"]),
        (replace(SCHEMA, tables=(USER, ITEM, replace(USER, name="shop"))), ["table 'shop' more"]),
        (replace(SCHEMA, tables=(ITEM, USER)), ["tables", "another order"]),
        (with_table(dim=5), ["'user'", "dim 5", "4"]),
        (with_table(rule=SGD().spec()), ["'user'", "rule"]),
        (with_table(rule=Adagrad(eps=1e-3).spec()), ["'user'", "rule", "0.001"]),
        (with_table(initializer=init_rows.zeros()), ["'user'", "initializer"]),
        (with_table(unseen_zero=False), ["'user'", "unseen_zero"]),
        (replace(SCHEMA, groups=()), ["lacks parameter 'head.bias'"]),
        (with_group(parameters=(WEIGHT, BIAS, replace(BIAS, name="x"))), ["parameter 'x' more"]),
        (with_group(parameters=(replace(WEIGHT, shape=(3, 2)), BIAS)), ["'head.weight'", "[3, 2]", "[2, 3]"]),
        (with_group(parameters=(replace(WEIGHT, dtype="float16"), BIAS)), ["'head.weight'", "float16"]),
        (with_group(parameters=(BIAS, WEIGHT)), ["parameters", "another order"]),
        (with_group(rule=Adagrad().spec()), ["head.bias", "rule"]),
        (with_group(kind=GroupKind.FROZEN, rule=None), ["head.bias", "frozen"]),
        (replace(SCHEMA, groups=(replace(GROUP, parameters=(WEIGHT,)), replace(GROUP, parameters=(BIAS,)))), ["order"]),
    ],
)
def test_what_differs_is_named(other, says):
    reason = difference(SCHEMA, other)
    assert reason is not None
    assert [word for word in says if word not in reason] == []
    assert "run the same script" in reason
