"""Update rules as a user names them: what is refused, and what crosses the wire."""

import msgspec
import numpy as np
import pytest

import evergrad as eg
from evergrad.errors import ConfigError
from evergrad.messages import UpdateName, UpdateSpec


def test_what_is_not_given_is_off():
    assert eg.Sync().spec() == UpdateSpec(UpdateName.SYNC, 1)
    assert eg.Async().spec() == UpdateSpec(UpdateName.ASYNC, 8)


def test_every_option_crosses_the_wire():
    assert eg.Sync(4, backup_after=1, drop_after=2.5).spec() == UpdateSpec(UpdateName.SYNC, 4, 1, drop_after_s=2.5)
    rule = eg.Async(16, 2.0, max_staleness=0, push_every=4, pull_every=16)
    spec = UpdateSpec(UpdateName.ASYNC, 16, 2.0, max_staleness=0, push_every=4, pull_every=16)
    assert rule.spec() == spec
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=UpdateSpec) == spec


def test_numbers_of_numpy_are_numbers():
    spec = eg.Async(np.int64(4), max_staleness=np.int64(3), push_every=np.int64(2)).spec()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=UpdateSpec).max_staleness == 3


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (eg.Sync(drop_after=0), "Sync: drop_after is 0; give seconds above zero, or None"),
        (eg.Sync(drop_after="1"), "Sync: drop_after is '1'; give seconds above zero"),
        (eg.Sync(backup_after=-1.0), "Sync: backup_after is -1.0; give seconds"),
        (eg.Sync(backup_after=3, drop_after=3), r"drop_after is 3 s and backup_after 3 s, .* give a larger drop_after"),
        (eg.Async(backup_after=True), "Async: backup_after is True; give seconds"),
        (eg.Async(max_staleness=-1), "Async: max_staleness is -1; give a whole number of zero or more"),
        (eg.Async(max_staleness=1.5), "Async: max_staleness is 1.5; give a whole number"),
        (eg.Async(ahead="yes"), "Async: ahead is 'yes'; give True or False"),
        (eg.Async(push_every=0), "Async: push_every is 0; give a whole number of one or more"),
        (eg.Async(pull_every=None), "Async: pull_every is None; give a whole number"),
        (eg.Async(4, push_every=5), r"push_every is 5 and batches_per_task 4, .* or a larger batches_per_task"),
        (eg.Async(4, pull_every=8), r"pull_every is 8 and batches_per_task 4, .* begins with a pull"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_give(rule, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rule.spec()
