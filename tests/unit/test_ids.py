"""Strings as keys."""

import numpy as np
import pytest

from evergrad.errors import DataError
from evergrad.ids import hash_ids


def test_hashes_are_the_same_in_every_release():
    assert hash_ids(["", "a", "Zürich", "a"]).tolist() == [
        -5426141060434712860,
        3405396810240292928,
        636548684707296368,
        3405396810240292928,
    ]


def test_a_string_and_its_utf8_bytes_are_one_id():
    assert np.array_equal(hash_ids(["Zürich", "x"]), hash_ids(["Zürich".encode(), b"x"]))


def test_an_array_keeps_its_shape():
    strings = [["a", "b"], ["c", "a"]]
    for array in (np.array(strings), np.array(strings, dtype=object), np.array(strings, dtype="S1")):
        hashed = hash_ids(array)
        assert hashed.shape == (2, 2)
        assert hashed.dtype == np.int64
        assert np.array_equal(hashed.ravel(), hash_ids(["a", "b", "c", "a"]))


def test_no_strings_make_no_keys():
    assert hash_ids([]).shape == (0,)
    assert hash_ids(np.empty((0, 3), "U4")).shape == (0, 3)


def test_any_text_can_be_hashed():
    assert len(set(hash_ids(["\ud800", "\x00", "", " ", "\U0001f600"]).tolist())) == 5


def test_many_different_strings_do_not_collide():
    hashed = hash_ids([f"user-{i}" for i in range(100_000)])
    assert len(np.unique(hashed)) == 100_000
    assert abs((hashed < 0).mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("abc", "for one string"),
        (b"abc", "for one string"),
        (5, "not int"),
        (["a", None], "None at position 1"),
        (["a", 7], "integers are keys already"),
        (np.array([1, 2]), "1 at position 0"),
        (np.array([1.5, float("nan")]), "is not a string"),
    ],
)
def test_what_is_not_a_list_of_strings_is_refused_with_a_sentence(given, sentence):
    with pytest.raises(DataError, match=sentence):
        hash_ids(given)
