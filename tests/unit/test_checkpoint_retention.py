"""Which checkpoints stay, and that the others go, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved import NEVER, group, save, schema, table, whole

from evergrad.checkpoint.catalogue import entries, good
from evergrad.checkpoint.retention import Held, kept, remove, remove_interrupted
from evergrad.checkpoint.storage import Storage

OF = schema([table("user", 2)], groups=[group(a=(3,))])


def held(*facts):
    """(serial, best) of some."""
    return [Held(serial, best) for serial, best in facts]


PLAIN = held(*((n, None) for n in range(1, 7)))


def test_the_newest_stay():
    assert kept(PLAIN, 3) == {4, 5, 6}
    assert kept(PLAIN[::-1], 1) == {6}
    assert kept(PLAIN, 99) == {1, 2, 3, 4, 5, 6}
    assert kept([], 3) == set()


def test_the_best_stays_and_of_equals_the_newest():
    assert kept(held((1, -0.5), (2, -0.9), (3, -0.7), (4, -0.1), (5, None)), 1) == {2, 5}
    assert kept(held((1, -0.9), (2, -0.9), (3, -0.7), (4, 0.0)), 1) == {2, 4}
    assert kept(held((1, 0.0), (2, 5.0), (3, 5.0)), 1) == {1, 3}


def test_a_score_that_is_no_number_makes_nothing_the_best():
    assert kept(held((1, float("nan")), (2, 3.0), (3, 4.0), (4, float("nan"))), 1) == {2, 4}


@given(
    st.lists(st.builds(Held, st.integers(0, 50), st.none() | st.floats()), unique_by=lambda h: h.serial),
    st.integers(1, 9),
)
def test_whatever_there_is_the_rules_hold(some, keep):
    stay = kept(some, keep)
    serials = {h.serial for h in some}
    assert stay <= serials
    assert set(sorted(serials)[-keep:]) <= stay
    assert len(stay) <= keep + 1
    numbers = [h.best for h in some if h.best is not None and h.best == h.best]
    assert not numbers or any(h.best == min(numbers) for h in some if h.serial in stay)


@pytest.fixture(params=["", "memory://"])
def storage(request, tmp_path):
    storage = Storage(f"{request.param}{tmp_path}/checkpoints", NEVER)
    for serial in (1, 2, 3):
        save(storage, OF, whole(OF, rows=9), serial=serial)
    return storage


def test_a_checkpoint_is_removed_whole_and_the_others_stay(storage):
    remove(storage, 2)
    assert [(e.serial, e.problem) for e in entries(storage)] == [(1, None), (3, None)]
    assert sorted(storage.folders()) == ["checkpoint_1", "checkpoint_3"]
    remove(storage, 2)


FOREIGN = ["notes.txt", "__model__/mine.safetensors", "trainer_0/log", "sub/x", "__lookup_table__/a.safetensors", ".x"]


def test_foreign_files_stay_and_keep_their_folders(storage):
    for name in FOREIGN:
        storage.put(f"checkpoint_2/{name}", [b"precious"])
    storage.put("README", [b"precious"])
    remove(storage, 2)
    assert sorted(storage.sizes("checkpoint_2")) == sorted(f"checkpoint_2/{name}" for name in FOREIGN)
    assert storage.read("README") == b"precious"
    assert remove_interrupted(storage, before=9) == []
    assert sorted(storage.sizes("checkpoint_2")) == sorted(f"checkpoint_2/{name}" for name in FOREIGN)


def test_what_interrupted_saves_left_goes_but_not_the_one_under_way_nor_foreign_folders(storage):
    for serial in (4, 6, 8):
        storage.put(f"checkpoint_{serial}/__model__/dense.pserver_0.group_0.elements_0-2.safetensors", [b"1"])
    storage.put("checkpoint_4/__lookup_table__/.123.0123abcd.part", [b"half"])
    storage.put("checkpoint_5/notes.txt", [b"precious"])
    storage.put("other/__model__/x", [b"precious"])
    assert remove_interrupted(storage, before=8) == [4, 6]
    assert sorted(storage.folders()) == [*(f"checkpoint_{n}" for n in (1, 2, 3, 5, 8)), "other"]
    assert good(storage, 3).serial == 3


def test_a_checkpoint_with_a_manifest_is_never_taken_for_what_a_save_left(storage):
    storage.put("checkpoint_2/manifest.json", [b"broken"])
    assert remove_interrupted(storage, before=9) == []
    assert len(storage.sizes("checkpoint_2")) > 1
