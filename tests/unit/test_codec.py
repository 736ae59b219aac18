"""Every message comes back as it went; everything else is refused, and nothing else than `Malformed` comes of it."""

import types
from enum import Enum
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.messages import (
    AnyMessage,
    AskStatus,
    Attempt,
    Export,
    Exported,
    ExportPart,
    Generation,
    GroupGrads,
    GroupSpan,
    Heartbeat,
    Member,
    Pull,
    Pulled,
    Push,
    Request,
    TableGrads,
    TableKeys,
)
from evergrad.wire.codec import DTYPES, MAX_HEADER_BYTES, REFUSED, Codec, Malformed, preamble, refusal

JOB = "a job"
KINDS = get_args(AnyMessage)
KEYS = np.array([0, -1, 2**63 - 1, -(2**63)], np.int64)


def sent(message, codec=None):
    codec = codec or Codec(JOB)
    return [bytes(frame) for frame in codec.encode(message)]


def there_and_back(message):
    return Codec(JOB).decode(sent(message))


def example(kind: Any) -> Any:
    """Some value of a type that messages are made of, the fullest there is."""
    if isinstance(kind, NewType):
        return example(kind.__supertype__)
    origin, args = get_origin(kind), get_args(kind)
    if origin is np.ndarray:
        (scalar,) = get_args(args[1])
        return np.arange(6).astype(np.float32 if scalar is Any else scalar).reshape(2, 3)
    if origin in (types.UnionType, Union):
        return example(args[0])
    if origin is Annotated:
        return example(args[0])
    if origin is tuple:
        return (example(args[0]), example(args[0])) if args[-1] is Ellipsis else tuple(example(a) for a in args)
    if origin is dict:
        return {example(args[0]): example(args[1])}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct | tuple):
        return kind(**{name: example(hint) for name, hint in get_type_hints(kind).items() if name[0] != "_"})
    return {int: 2**40, float: 0.1, str: "é", bool: True}[kind]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def push(**changes):
    grads = TableGrads(0, 0.1, KEYS, np.ones((4, 3), np.float32))
    spans = GroupGrads(0, 0.1, np.arange(5, dtype=np.float32), np.ones(2, np.uint8))
    message = Push(Request(1), Generation(1), 0, 0, Attempt(1, 2), 3, (grads,), (spans,))
    return msgspec.structs.replace(message, **changes)


def pull_with(keys: object, *frames: bytes, **changes: object) -> list[bytes]:
    """A pull whose one array is described by `keys`; two keys of table 0 if nothing else is said."""
    tables = {"tables": [0], "shapes": [[2]], "keys": keys} | changes
    header = {
        "type": "Pull", "request": 1, "generation": 1, "version": 0, "evaluating": False, "groups": [],
        "tables": tables,
    }  # fmt: skip
    return [preamble(JOB), msgspec.msgpack.encode(header), *frames]


def refused(frames) -> str:
    codec = Codec(JOB)
    with pytest.raises(Malformed) as caught:
        codec.decode(frames)
    assert same(codec.decode(sent(push())), push()), "the codec is of no use after a refusal"
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_of_every_kind_comes_back_as_it_went(kind):
    message = example(kind)
    assert same(there_and_back(message), message)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 0), (3, 2), (2, 3, 4), ()], ids=str)
def test_an_array_of_every_type_and_shape_comes_back_as_it_went(dtype, shape):
    rng = np.random.default_rng(1)
    array = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)
    message = Exported(Request(1), array, None)
    assert same(there_and_back(message), message)


def test_an_array_that_is_not_contiguous_comes_back_as_it_went():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[::2, 1:], array[:, ::-1]):
        assert same(there_and_back(Exported(Request(1), view, None)).part, view)


def test_what_comes_in_is_read_only_and_shares_the_frame():
    frames = sent(Pulled(Request(1), 0, (np.ones((2, 2), np.float32),), ()))
    rows = Codec(JOB).decode(frames).rows[0]
    assert not rows.flags.writeable
    assert np.shares_memory(rows, np.frombuffer(frames[2], np.float32))


def test_an_array_goes_out_without_a_copy():
    rows = np.ones((2, 2), np.float32)
    frames = Codec(JOB).encode(Pulled(Request(1), 0, (rows,), ()))
    assert np.shares_memory(rows, np.frombuffer(frames[2], np.float32))


def test_the_arrays_of_all_tables_go_out_as_one_without_a_copy_where_they_lie_side_by_side():
    keys, grads = np.arange(7), np.arange(21, dtype=np.float32)
    parts = [(0, 2), (2, 2), (2, 7)]
    tables = tuple(TableGrads(i, 0.1, keys[a:b], grads[3 * a : 3 * b].reshape(-1, 3)) for i, (a, b) in enumerate(parts))
    message = push(tables=tables, groups=())
    frames = Codec(JOB).encode(message)
    assert [len(frame) for frame in frames[2:4]] == [keys.nbytes, grads.nbytes]
    assert np.shares_memory(keys, np.frombuffer(frames[2], np.int64))
    assert np.shares_memory(grads, np.frombuffer(frames[3], np.float32))
    assert same(there_and_back(message), message)


WHOLE = np.arange(12, dtype=np.float32)


@pytest.mark.parametrize(
    "arrays",
    [
        [WHOLE[:2], WHOLE[3:5]],
        [WHOLE[2:4], WHOLE[:2]],
        [WHOLE[:4], WHOLE[2:6]],
        [WHOLE[:4], WHOLE[:4]],
        [WHOLE[:8:2], WHOLE[8:]],
        [WHOLE.reshape(3, 4)[:, :2], WHOLE.reshape(3, 4)[:, 2:]],
        [WHOLE, WHOLE],
        [WHOLE.reshape(3, 4).T[:1], WHOLE.reshape(3, 4).T[1:]],
        [np.arange(2.0, dtype="f4"), np.arange(2.0, dtype="f4")],
        [np.frombuffer(b"12345678", np.float32)[:1], np.frombuffer(b"12345678", np.float32)[1:]],
        [WHOLE[:0], WHOLE[:2].reshape(1, 2), WHOLE[5:5], WHOLE[2:6].reshape(2, 2)],
        [WHOLE[:0].reshape(0, 3)],
        [np.array(3.0, np.float32), WHOLE[:1]],
    ],
    ids=range(13),
)
def test_arrays_of_tables_come_back_however_they_lie(arrays):
    message = Pulled(Request(1), 0, tuple(arrays), ())
    assert len(Codec(JOB).encode(message)) == 3
    assert same(there_and_back(message), message)


def test_arrays_of_several_types_are_not_sent_as_one():
    with pytest.raises(TypeError, match="several types"):
        Codec(JOB).encode(Pulled(Request(1), 0, (np.zeros(2, np.float32), np.zeros(2, np.uint16)), ()))


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"shapes": shapes}
            for shapes in ([[1]], [[3]], [[1], [1]], [], [[2], [0]], [[2**40, 2**40]], [[-2]], [[2.0]])
        ),
        *({"shapes": shapes} for shapes in ([2], [[1] * 70 + [2]], None, "ab", [["2"]], [[0, 2**62]])),
        *({"tables": tables} for tables in ([], [0, 1], [0.5], ["a"], None, 0)),
    ],
    ids=repr,
)
def test_tables_that_do_not_fit_their_arrays_are_refused(changes):
    refused(pull_with([0, "<i8", [2]], bytes(16), **changes))


def test_keys_of_tables_in_more_than_one_dimension_are_refused():
    refused(pull_with([0, "<i8", [2, 1]], bytes(16)))


def test_an_array_of_a_type_no_message_has_is_not_sent():
    with pytest.raises(TypeError, match="int32"):
        Codec(JOB).encode(Exported(Request(1), np.zeros(2, np.int32), None))
    with pytest.raises(TypeError, match=">f4"):
        Codec(JOB).encode(Exported(Request(1), np.zeros(2, ">f4"), None))
    with pytest.raises(TypeError, match="object"):
        Codec(JOB).encode(Exported(Request(1), np.array([object()]), None))


def test_frames_of_another_job_are_told_apart():
    frames = sent(AskStatus(Request(1)), Codec("another"))
    assert not Codec(JOB).is_ours(frames)
    assert "this job" in refused(frames)


def test_frames_of_another_version_are_told_apart(monkeypatch):
    frames = sent(AskStatus(Request(1)))
    monkeypatch.setattr("evergrad.wire.codec.VERSION", "0.0.0")
    assert not Codec(JOB).is_ours(frames)


def test_a_refusal_is_its_mark_and_a_sentence_that_names_the_job():
    mark, sentence = refusal(JOB)
    assert mark == REFUSED
    assert JOB in sentence.decode()


@pytest.mark.parametrize("frames", [[], [b""], [preamble(JOB)], [b"EGRD", b"\x80"], [b"\x80", preamble(JOB)]])
def test_too_few_frames_or_no_preamble_are_refused(frames):
    assert "this job and version" in refused(frames)


def test_a_header_too_large_is_refused_before_it_is_read():
    assert str(MAX_HEADER_BYTES) in refused([preamble(JOB), bytes(MAX_HEADER_BYTES + 1)])


@pytest.mark.parametrize("frame", [1, 2, 3, 4, 5])
def test_a_truncated_frame_is_refused(frame):
    frames = sent(push())
    for length in {0, 1, len(frames[frame]) // 2, len(frames[frame]) - 1}:
        refused([*frames[:frame], frames[frame][:length], *frames[frame + 1 :]])


def test_a_frame_too_many_or_too_few_is_refused():
    frames = sent(push())
    assert "no field names" in refused([*frames, b""])
    assert "without a frame" in refused(frames[:-1])


def test_frames_in_another_order_are_refused():
    frames = sent(push())
    refused([*frames[:2], frames[3], frames[2], *frames[4:]])


@pytest.mark.parametrize(
    "described",
    [
        *([0, "<i8", shape] for shape in ([3], [1], [-2], [-1, -2], [2.0], [True, 2], [2**48], [2**62, 2**62])),
        *([0, "<i8", shape] for shape in ([2, *[1] * 8], "ab", {"2": 1}, None)),
        *([0, dtype, [2]] for dtype in ("<f4", "<f8", "|u1", "|O", ">i8", "<M8[s]", "int64", ["<i8"], None, 7)),
        *([number, "<i8", [2]] for number in (1, -1, 0.0, False, "0", None)),
        *([0, "<i8"], [0, "<i8", [2], 1], [], None, 5, "abc", b"abc", {"a": 1}, 1.5),
    ],
    ids=repr,
)
def test_an_array_wrongly_described_is_refused(described):
    refused(pull_with(described, bytes(16)))


def test_the_description_the_others_are_changed_from_is_taken():
    assert Codec(JOB).decode(pull_with([0, "<i8", [2]], bytes(16))).tables[0].keys.tolist() == [0, 0]


def test_two_arrays_cannot_have_one_frame():
    frames = sent(push())
    header = msgspec.msgpack.decode(frames[1])
    header["tables"]["grads"][0] = 0
    refused([frames[0], msgspec.msgpack.encode(header), *frames[2:]])


def test_a_refusal_says_which_field_is_wrong():
    assert "$.tables.keys" in refused(pull_with([0, "<f4", [4]], bytes(16)))


@pytest.mark.parametrize("change", [{"type": "Nothing"}, {"request": "1"}, {"request": None}, {"request": 1.5}])
def test_a_field_of_another_type_is_refused(change):
    header = {"type": "AskStatus", "request": 1} | change
    refused([preamble(JOB), msgspec.msgpack.encode(header)])


def test_a_missing_field_is_refused():
    refused([preamble(JOB), msgspec.msgpack.encode({"type": "AskStatus"})])


@pytest.mark.parametrize("change", [{"samples": -1}, {"batch_size": 0}, {"batch_size": -1}, {"samples": 1.5}], ids=str)
def test_data_of_an_impossible_size_is_refused(change):
    data = {"samples": 0, "fingerprint": "data", "batch_size": 1}
    want = {"type": "WantBatch", "epoch": 0, "data": data | change}
    header = {"type": "Ask", "request": 1, "member": "a", "done": None, "want": want}
    refused([preamble(JOB), msgspec.msgpack.encode(header)])
    header["want"] = want | {"data": data}
    Codec(JOB).decode([preamble(JOB), msgspec.msgpack.encode(header)])


def test_a_table_without_columns_and_a_step_without_batches_are_refused():
    (agree,) = (example(kind) for kind in KINDS if kind.__name__ == "Agree")
    for part, field in (("tables", "dim"), ("update", "batches")):
        header = msgspec.msgpack.decode(sent(agree)[1])
        changed = header["schema"][part]
        (changed[0] if part == "tables" else changed)[field] = 0
        assert f".{field}" in refused([preamble(JOB), msgspec.msgpack.encode(header)])


def test_a_nan_is_no_step():
    header = msgspec.msgpack.decode(sent(push())[1]) | {"step": float("nan")}
    refused([preamble(JOB), msgspec.msgpack.encode(header), *sent(push())[2:]])


@pytest.mark.parametrize("depth", [1_000, 1_000_000])
def test_things_nested_without_end_are_refused(depth):
    nested = b"\x91" * depth + b"\x01"
    refused([preamble(JOB), b"\x83\xa4type\xa9AskStatus\xa7request\x01\xa1x" + b"\x91" * 1_000_000 + b"\x01"])
    header = pull_with(0)[1]
    refused([preamble(JOB), header[: header.rindex(b"keys") + 4] + nested])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_frames_are_refused(frames):
    codec = Codec(JOB)
    with pytest.raises(Malformed):
        codec.decode(frames)
    with pytest.raises(Malformed):
        codec.decode([preamble(JOB), *frames])


SOUND = [sent(push()), sent(Heartbeat(Request(1), Member("m"), 0.5)),
         sent(Pull(Request(1), Generation(1), 0, True, (TableKeys(0, KEYS),), (GroupSpan(1, 2, 3),))),
         sent(Export(Request(1), Generation(1), 0, 0, ExportPart.KEYS, 0, 10))]  # fmt: skip


@settings(max_examples=500)
@given(st.data())
def test_a_message_with_some_bytes_changed_is_a_message_or_refused(data):
    frames = list(data.draw(st.sampled_from(SOUND)))
    for _ in range(data.draw(st.integers(1, 4))):
        number = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[number])
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        frames[number] = bytes(frame)
    codec = Codec(JOB)
    try:
        message = codec.decode(frames)
    except Malformed:
        return
    assert isinstance(message, KINDS)
    assert same(codec.decode(sent(message, codec)), message)
