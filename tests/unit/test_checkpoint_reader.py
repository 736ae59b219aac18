"""What pservers have written is read again, to the bit, by any number of pservers."""

import tracemalloc
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from saved import NEVER, RULES, bits, cut, group, manifest_of, save, schema, table, together, whole

from evergrad.checkpoint.catalogue import good
from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.checkpoint.reader import dense, overlapping, pieces, rows
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.verify import verify
from evergrad.errors import CheckpointError
from evergrad.messages import FileKind, UpdateName, UpdateSpec
from evergrad.placement import slots_owned, span_owned

COUNTS = (1, 2, 3, 5)


@pytest.fixture
def storage(tmp_path):
    return Storage(f"memory://{tmp_path}", NEVER)


def all_pieces(storage, manifest, places):
    return [piece for place in range(places) for piece in pieces(storage, manifest, place, places)]


@pytest.mark.parametrize("rule", RULES)
def test_rows_and_state_of_every_rule_are_read_as_they_were_written(storage, rule):
    of = schema([table("user", 3, RULES[rule], min_count=2, max_rows=10**6), table("item", 1, RULES[rule])])
    model = whole(of)
    manifest = save(storage, of, model, files=3)
    assert bits(together(of, all_pieces(storage, manifest, 1))) == bits(model)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "rowwise"])
def test_dense_values_and_state_of_every_rule_are_read_as_they_were_written(storage, rule):
    of = schema(groups=[group(rule=RULES[rule], a=(3, 4), b_c=(5,))])
    model = whole(of)
    manifest = save(storage, of, model, places=2)
    assert bits(together(of, all_pieces(storage, manifest, 3))) == bits(model)


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("n", COUNTS)
def test_saved_on_n_it_is_restored_on_m_also_with_fewer_rows_than_pservers(storage, n, m, count):
    of = schema()
    model = whole(of, rows=count, candidates=count // 10)
    save(storage, of, model, serial=4, places=n)
    manifest = good(storage, 4)
    found = all_pieces(storage, manifest, m)
    assert bits(together(of, found)) == bits(model)
    assert verify(storage, 4).rows == {"user": count, "item": count}


def test_a_place_gets_its_slots_and_its_spans_and_no_others(storage):
    of = schema()
    manifest = save(storage, of, whole(of), places=2, files=3)
    found = list(pieces(storage, manifest, 1, 3))
    mine = slots_owned(1, 3)
    for number in range(len(of.tables)):
        slots = [p.slots for p in found if isinstance(p, RowsPiece) and p.table == number]
        assert slots[0].start == mine.start
        assert slots[-1].stop == mine.stop
        assert all(a.stop == b.start for a, b in pairwise(slots))
    assert [p.span for p in found if isinstance(p, DensePiece)] == [span_owned(g.size, 1, 3) for g in of.groups]


def test_the_pieces_are_the_callers_own(storage):
    of = schema()
    manifest = save(storage, of, whole(of), files=4)
    found = []
    for piece in pieces(storage, manifest, 0, 1):
        found.append(piece)
        for array in (f for f in piece if isinstance(f, np.ndarray)):
            assert array.flags.writeable
            array[...] = 1
    assert all((a == 1).all() for piece in found for a in piece if isinstance(a, np.ndarray))


def test_only_files_that_overlap_are_read(storage):
    of = schema()
    manifest = save(storage, of, whole(of), places=5, files=4)
    wanted = overlapping(manifest, 2, 5)
    folder = storage.url + "/checkpoint_1/"
    for info in manifest.files:
        if info not in wanted:
            storage.remove(f"checkpoint_1/{info.path}")
    assert 0 < len(wanted) < len(manifest.files) / 2
    assert len(list(pieces(storage, manifest, 2, 5))) == 2 * 4 + len(of.groups)
    with pytest.raises(CheckpointError, match=f"cannot read {folder}"):
        list(pieces(storage, manifest, 1, 5))


def test_a_reader_that_is_left_early_leaves_nothing_running(storage):
    of = schema()
    manifest = save(storage, of, whole(of), files=8)
    reading = rows(storage, manifest, "user")
    next(reading)
    reading.close()


def test_reading_takes_two_files_and_a_piece_however_many_there_are(storage):
    of = schema([table("user", 64, RULES["adam"])], groups=())
    manifest = save(storage, of, whole(of, rows=20_000, candidates=0), files=16)
    largest = max(f.bytes for f in manifest.files)
    tracemalloc.start()
    for piece in rows(storage, manifest, "user"):
        del piece
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert manifest.bytes > 12 * largest
    assert peak < 7 * largest


def test_state_need_not_be_read(storage):
    of = schema()
    model = whole(of)
    manifest = save(storage, of, model)
    for info in manifest.files:
        if info.kind is FileKind.OPTIMIZER:
            storage.remove(f"checkpoint_1/{info.path}")
    found = dense(storage, manifest, 0, range(3, 9), (FileKind.DENSE,))
    assert found.values.tobytes() == model.groups[0].values[3:9].tobytes()
    assert not found.state.any()


# -- files that are not as they were written ---------------------------------------------------------------------------


def break_file(storage, info, change):
    path = f"checkpoint_1/{info.path}"
    storage.put(path, [change(bytearray(storage.read(path)))])


@pytest.mark.parametrize("kind", FileKind)
@pytest.mark.parametrize("at", [0, 9, 100, -1])
def test_one_bit_that_changed_is_found_and_the_file_named(storage, kind, at):
    of = schema()
    manifest = save(storage, of, whole(of))
    info = next(f for f in manifest.files if f.kind is kind)

    def flip(data):
        data[at] ^= 1
        return data

    break_file(storage, info, flip)
    with pytest.raises(CheckpointError, match=f"{info.path} has changed since it was written; use another checkpoint"):
        verify(storage, 1)


@pytest.mark.parametrize("kind", FileKind)
@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_cut_short_is_found_before_and_while_it_is_read(storage, kind, length):
    of = schema()
    manifest = save(storage, of, whole(of))
    info = next(f for f in manifest.files if f.kind is kind)
    break_file(storage, info, lambda data: data[:length])
    with pytest.raises(CheckpointError, match=rf"{info.path} has \d+ bytes and should have {info.bytes}"):
        good(storage, 1)
    with pytest.raises(CheckpointError, match=rf"{info.path} has \d+ bytes and should have {info.bytes}"):
        list(pieces(storage, manifest, 0, 1))


def test_a_file_that_is_gone_is_found_before_and_while_it_is_read(storage):
    of = schema()
    manifest = save(storage, of, whole(of))
    storage.remove(f"checkpoint_1/{manifest.files[0].path}")
    with pytest.raises(CheckpointError, match=rf"{manifest.files[0].path} is missing"):
        good(storage, 1)
    with pytest.raises(CheckpointError, match="there is no such file"):
        list(pieces(storage, manifest, 0, 1))


def with_rows(storage, of, change):
    """A checkpoint whose one file of rows is written as `change` makes it, checksum and all."""
    model = whole(of)
    found = list(cut(of, model, files=1))
    changed = change(found[0])
    infos = [info for piece in (changed, *found[1:]) for info in write_piece(storage, 1, of, 0, piece)]
    return manifest_of(of, infos)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p._replace(keys=p.keys[::-1].copy()), "not sorted"),
        (lambda p: p._replace(keys=np.repeat(p.keys[:1], p.keys.size)), "one of them twice"),
        (lambda p: p._replace(candidate_notes=p.candidate_notes[1:]), "'candidate_notes' as int32"),
        (lambda p: p._replace(notes=p.notes[:, :1].copy()), "'notes' as int32"),
        (lambda p: p._replace(keys=p.keys.astype(np.int32)), "'keys' as int32"),
    ],
)
def test_a_file_whose_tensors_cannot_be_right_is_refused(storage, change, sentence):
    manifest = with_rows(storage, schema(), change)
    with pytest.raises(CheckpointError, match=f"user.pserver_0.slots_00000-16383.safetensors has.*{sentence}"):
        list(pieces(storage, manifest, 0, 1))


@pytest.mark.parametrize("field", ["keys", "candidates"])
def test_keys_of_other_slots_are_refused(storage, field):
    of = schema()
    model = whole(of)
    lower, upper = list(cut(of, model, files=2))[:2]
    wrong = lower._replace(**{field: getattr(upper, field), "rows": upper.rows, "notes": upper.notes})
    if field == "candidates":
        wrong = lower._replace(candidates=upper.candidates, candidate_notes=upper.candidate_notes)
    (info,) = write_piece(storage, 1, of, 0, wrong)
    (other,) = write_piece(storage, 1, of, 0, upper)
    manifest = manifest_of(schema([of.tables[0]], groups=()), [info, other])
    with pytest.raises(CheckpointError, match="has keys outside the slots 0 to 8191"):
        list(pieces(storage, manifest, 0, 1))


def test_a_table_of_another_rule_is_not_read_as_this_one(storage):
    of = schema([table("user", 3, RULES["adagrad"])], groups=())
    manifest = save(storage, of, whole(of))
    other = schema([table("user", 3, RULES["adam"])], groups=())
    with pytest.raises(CheckpointError, match=r"holds candidate_notes, candidates, keys, sum, values, not .*exp_avg"):
        list(pieces(storage, msgspec.structs.replace(manifest, schema=other), 0, 1))


def test_files_that_count_different_updates_of_one_parameter_are_refused(storage):
    of = schema([table()], groups=[group(a=(10,))])
    model = whole(of)
    first, second = (p for p in cut(of, model) if isinstance(p, DensePiece))
    infos = [i for p in cut(of, model) if isinstance(p, RowsPiece) for i in write_piece(storage, 1, of, 0, p)]
    infos += write_piece(storage, 1, of, 0, first) + write_piece(storage, 1, of, 0, second._replace(updates=(8,)))
    with pytest.raises(CheckpointError, match="counts 8 updates of 'a', another file 7"):
        list(pieces(storage, manifest_of(of, infos), 0, 1))


def test_in_async_where_one_pserver_may_have_refused_a_batch_the_most_updates_count(storage):
    of = msgspec.structs.replace(schema([table()], groups=[group(a=(10,))]), update=UpdateSpec(UpdateName.ASYNC, 2))
    model = whole(of)
    first, second = (p for p in cut(of, model) if isinstance(p, DensePiece))
    infos = [i for p in cut(of, model) if isinstance(p, RowsPiece) for i in write_piece(storage, 1, of, 0, p)]
    infos += write_piece(storage, 1, of, 0, first._replace(updates=(8,))) + write_piece(storage, 1, of, 0, second)
    (dense,) = (p for p in pieces(storage, manifest_of(of, infos), 0, 1) if isinstance(p, DensePiece))
    assert dense.updates == (8,)
