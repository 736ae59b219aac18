"""What rules refuse, and what they keep beside each row."""

import msgspec
import pytest

import evergrad as eg
from evergrad.errors import ConfigError
from evergrad.optim import RuleSpec


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (eg.SGD(momentum=-0.1), "SGD: momentum is -0.1; give a finite number of zero or more"),
        (eg.SGD(dampening=float("nan")), "dampening"),
        (eg.SGD(nesterov=True), "nesterov needs a momentum above zero and no dampening"),
        (eg.SGD(nesterov=True, momentum=0.9, dampening=0.1), "nesterov"),
        (eg.Adagrad(lr_decay=-1), "Adagrad: lr_decay"),
        (eg.RowWiseAdagrad(eps=-1), "RowWiseAdagrad: eps"),
        (eg.Adam(betas=(0.9, 1.0)), r"Adam: betas\[1\] is 1.0"),
        (eg.AdamW(weight_decay=float("inf")), "AdamW: weight_decay"),
        (eg.FTRL(l1=-1), "FTRL: l1"),
        (eg.FTRL(lr_power=0.5), "FTRL: lr_power is 0.5; give a finite number of zero or less"),
        (eg.FTRL(beta=0.0), "all zero"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_what_to_do(rule, says):
    with pytest.raises(ConfigError, match=says):
        rule.spec()


@pytest.mark.parametrize(
    ("rule", "floats"),
    [
        (eg.SGD(), 16),
        (eg.SGD(dampening=0.5), 16),
        (eg.SGD(momentum=0.9), 32),
        (eg.SGD(momentum=0.9, dampening=0.5), 33),
        (eg.Adagrad(), 32),
        (eg.RowWiseAdagrad(), 17),
        (eg.Adam(), 48),
        (eg.AdamW(), 48),
        (eg.FTRL(beta=0, l2=1), 48),
    ],
)
def test_a_row_takes_no_more_than_its_rule_needs(rule, floats):
    assert rule.spec().row_width(16) == floats


def test_a_rule_crosses_the_wire_as_it_is():
    for rule in (eg.SGD(momentum=0.5, nesterov=True), eg.RowWiseAdagrad(), eg.AdamW(), eg.FTRL(lr_power=-0.3)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule.spec()), type=RuleSpec) == rule.spec()
