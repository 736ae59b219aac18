"""Files of tensors are safetensors files: what the library reads, and what it writes."""

import json

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load, save
from saved import RULES, table

from evergrad.checkpoint.states import row_parts
from evergrad.checkpoint.tensors import bytes_of, decode, encode
from evergrad.errors import CheckpointError


def tensors():
    random = np.random.default_rng(0)
    return {
        "notes": random.integers(0, 9, (5, 2), np.int32),
        "keys": random.integers(-(2**63), 2**63 - 1, 5, np.int64),
        "empty": np.empty((0, 3), np.float32),
        "name with ä and \"": random.standard_normal((5, 3)).astype(np.float32)[:, ::2],
        "step": np.array(7, np.int64),
    }  # fmt: skip


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)


def test_the_library_reads_what_is_written_here():
    same(load(b"".join(encode(tensors()))), tensors())


def test_what_the_library_writes_is_read_here():
    ours = {name: np.array(array, order="C") for name, array in tensors().items()}
    same(decode(memoryview(save(ours, metadata={"by": "somebody"}))), tensors())


def test_every_array_lies_where_its_type_wants_it():
    parts = encode(tensors())
    starts = np.cumsum([len(part) for part in parts])[:-1]
    assert all(start % 8 == 0 for start in starts[:3])
    assert all(start % 4 == 0 for start in starts)


def test_what_is_contiguous_is_not_copied():
    keys = np.arange(5)
    assert np.shares_memory(np.frombuffer(bytes_of(keys), np.uint8), keys)


def test_what_is_read_cannot_be_written_to():
    found = decode(memoryview(bytearray(b"".join(encode(tensors())))))
    assert not any(array.flags.writeable for array in found.values() if array.size)


def a_file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def tensor(dtype="I64", shape=(1,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (b"\xff" * 8, "too short"),
        ((1000).to_bytes(8, "little") + b"{}", "too short"),
        (a_file(b"[]"), "no safetensors file"),
        (a_file(b"{"), "no safetensors file"),
        (a_file(b"\xff\xff"), "no safetensors file"),
        (a_file({"a": 1}), "no safetensors file"),
        (a_file({"a": {"dtype": "I64", "shape": [1]}}), "no safetensors file"),
        (a_file({"a": tensor("F64")}, bytes(8)), "of the type F64"),
        (a_file({"a": tensor(shape=(2,))}, bytes(8)), "do not fit"),
        (a_file({"a": tensor(shape=(-1,), offsets=(8, 0))}, bytes(8)), "do not fit"),
        (a_file({"a": tensor(offsets=(-8, 0))}, bytes(8)), "do not fit"),
        (a_file({"a": tensor(offsets=(8, 16))}, bytes(8)), "do not fit"),
        (a_file({"a": tensor(shape=(1 << 62, 4))}, bytes(8)), "do not fit"),
        (a_file({"a": tensor()}, bytes(9)), "other bytes"),
        (a_file({}, bytes(1)), "other bytes"),
    ],
)
def test_what_is_no_such_file_is_refused_with_what_is_wrong(data, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        decode(memoryview(data))
    if data and sentence != "of the type F64":  # which the library knows
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_the_parts_of_a_row_are_all_of_it_in_order(rule, dim):
    spec = table(dim=dim, rule=RULES[rule]).rule
    parts = row_parts(spec, dim)
    assert [part.start for part in parts] == [0, *np.cumsum([part.width for part in parts])[:-1]]
    assert sum(part.width for part in parts) == spec.row_width(dim)
    assert len({part.name for part in parts}) == len(parts)
