"""Saving and loading between requests: slices, the thread that writes, the thread that reads."""

import threading
import time

import msgspec
import pytest
from pservers import MASTER, abandon, ask, begun, commit, content, file_of, mark, of_version, push, restore, step, tell

from evergrad.checkpoint.manifest import Manifest, write_manifest
from evergrad.checkpoint.pieces import RowsPiece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Retry, Storage
from evergrad.errors import CheckpointError, ConfigError, StorageError
from evergrad.messages import Member, Obstacle, Place, Progress, Source, Written
from evergrad.placement import slots_owned
from evergrad.pserver.background import Facts, Finished, Loader, Saver, ToWrite
from evergrad.pserver.between import LOOK_S, QUIET_S, SHARE, Between
from evergrad.pserver.pserver import Pserver

NEVER = Retry(tries=1)
DEADLINE_S = 20.0


def until(condition):
    """Wait for something that a thread does; returns what it is."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, "nothing came in time"
        time.sleep(0.001)
    return found


class Clock:
    """A clock that stands still but for what is told."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def between():
    """Work between the requests of pservers; ended after the test."""
    made = []

    def make(pserver, saver=None, **options):
        made.append(Between(pserver, saver or Saver(retry=NEVER), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def held(url, steps=3, places=1, place=0):
    """A pserver at a version, which was told where checkpoints go."""
    pserver = Pserver(Member("p"))
    told = msgspec.structs.replace(restore(place=place, places=places), checkpoints=None if url is None else str(url))
    pserver.handle(MASTER, told)
    for number in range(-1, steps):
        step(pserver, number, place=place, places=places)
    return pserver


def save(work):
    """Work until the master is told that all is written; returns what it is told."""
    sends = until(lambda: work.work(time.monotonic())[0])
    assert [send.to for send in sends] == [MASTER]
    return sends[0].message


def manifest_of(pserver, written, version):
    parts = sorted(written, key=lambda w: w.place)
    return Manifest(
        lineage="job",
        job="test", serial=parts[0].serial, created="2026-01-01T00:00:00+00:00", places=len(parts), generation=1,
        schema=pserver.restored.schema, progress=Progress(version), updates=parts[0].updates,
        files=tuple(file for part in parts for file in part.files),
    )  # fmt: skip


def saved_checkpoint(url, between, places=1, version=3):
    """A checkpoint of this version in a folder."""
    written = []
    for place in range(places):
        pserver = held(url, version, places, place)
        pserver.handle(MASTER, mark(4, version=version))
        written.append(save(between(pserver)))
    with Storage(str(url)) as storage:
        write_manifest(storage, manifest_of(pserver, written, version))
    return written


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_cut_is_written_while_training_goes_on(tmp_path, between):
    pserver = held(tmp_path)
    work = between(pserver)
    step(pserver, 3, serial=4)
    work.work(time.monotonic())
    for number in range(4, 7):
        step(pserver, number)
    written = save(work)
    assert isinstance(written, Written)
    assert written.failure is None
    assert pserver.saving is None
    with Storage(str(tmp_path)) as storage:
        write_manifest(storage, manifest := manifest_of(pserver, [written], 4))
        assert content(pieces(storage, manifest, 0, 1)) == of_version(4)


def test_a_failing_storage_is_told_and_the_next_cut_is_written(tmp_path, between):
    broken = [True]

    def write(storage, serial, schema, place, piece):
        if broken[0]:
            raise StorageError("the disk is full")
        return (file_of(0),)

    pserver = held(tmp_path)
    work = between(pserver, Saver(write, NEVER))
    pserver.handle(MASTER, mark(4, version=3))
    assert save(work).failure == "the disk is full"
    broken[0] = False
    pserver.handle(MASTER, mark(5, version=3))
    assert save(work).failure is None


def test_without_a_place_for_checkpoints_a_cut_fails_with_a_sentence(between):
    pserver = held(None)
    work = between(pserver)
    pserver.handle(MASTER, mark(4, version=3))
    while pserver.saving is not None:
        work.work(time.monotonic())
    (send,) = pserver.resend()
    assert "where checkpoints go" in send.message.failure


def test_an_error_that_nobody_expected_ends_the_process(tmp_path, between):
    def write(*args):
        raise ZeroDivisionError

    pserver = held(tmp_path)
    work = between(pserver, Saver(write))
    pserver.handle(MASTER, mark(4, version=3))
    with pytest.raises(ZeroDivisionError):
        until(lambda: work.work(time.monotonic())[0])


def test_at_most_one_piece_waits_while_one_is_written(tmp_path, between):
    may_write, seen = threading.Semaphore(0), []

    def write(storage, serial, schema, place, piece):
        assert may_write.acquire(timeout=DEADLINE_S)
        seen.append(piece)
        return (file_of(len(seen)),)

    pserver = held(tmp_path)
    work = between(pserver, Saver(write))
    pserver.handle(MASTER, mark(4, version=3))
    until(lambda: work.work(time.monotonic()) and pserver._cutting.part.open_pieces == 2)
    for _ in range(20):
        assert work.work(time.monotonic()) == ([], LOOK_S)
    assert pserver._cutting.part.open_pieces == 2
    may_write.release(100)
    assert save(work).failure is None
    assert len(seen) > 2


def test_what_is_abandoned_is_not_tried_again_and_makes_room_for_the_next(tmp_path, between):
    tries = []

    def write(storage, serial, schema, place, piece):
        def put():
            tries.append(serial)
            if serial == 4:
                raise ConnectionError
            return (file_of(0),)

        return storage._patiently("write", "file", put)

    pserver = held(tmp_path)
    work = between(pserver, Saver(write, Retry(tries=100, first_s=60.0, longest_s=60.0)))
    pserver.handle(MASTER, mark(4, version=3))
    until(lambda: work.work(time.monotonic()) and tries)
    ask(pserver, abandon(4))
    pserver.handle(MASTER, mark(5, version=3))
    assert save(work).serial == 5
    assert tries.count(4) == 1


def test_slices_take_a_small_share_of_the_time_while_trainers_ask_and_all_of_it_when_none_does(tmp_path, between):
    clock, slices = Clock(), []

    class Slow(Pserver):
        def next_piece(self, slice_bytes):
            slices.append(clock.now_s)
            clock.now_s += 0.001

    class AlwaysReady(Saver):
        has_room = True

    pserver = held(tmp_path)
    pserver.__class__ = Slow
    work = between(pserver, AlwaysReady(), clock=clock)
    pserver.handle(MASTER, mark(4, version=3))
    began_s = clock.now_s
    while clock.now_s < began_s + 0.1:
        work.asked(clock.now_s)
        _, wait_s = work.work(clock.now_s)
        assert wait_s > 0
        clock.now_s += min(wait_s, 0.002)
    assert 1 <= len(slices) <= 0.1 / (0.001 / SHARE) + 1
    clock.now_s += QUIET_S + 1
    _, wait_s = work.work(clock.now_s)
    assert wait_s == 0.0


# -- loading -----------------------------------------------------------------------------------------------------------


def load(work):
    """Work until the master is told what came of a load."""
    return save(work)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (3, 1), (2, 5)])
def test_what_was_written_on_n_pservers_is_loaded_on_m_and_goes_on_with_the_same_bits(tmp_path, between, n, m):
    saved_checkpoint(tmp_path, between, n)
    found = []
    for place in range(m):
        pserver = Pserver(Member("p"))
        assert ask(pserver, restore(2, 1, place, m, Source(str(tmp_path), 4))) is None
        restored = load(between(pserver))
        assert (restored.version, restored.failure, restored.place) == (3, None, Place(place))
        assert restored.bytes_read > 0
        for number in range(3, 5):
            ask(pserver, push(number, None, 2, place, m), "a")
            ask(pserver, commit(number, generation=2))
        pserver.handle(MASTER, mark(9, version=5, generation=2))
        while pserver.serial is not None:
            piece = pserver.next_piece(1 << 20)
            found += [] if piece is None else [piece]
    assert content(found) == of_version(5)
    slots = [s for p in found if isinstance(p, RowsPiece) and p.table == 0 for s in p.slots]
    assert slots == [s for place in range(m) for s in slots_owned(place, m)]


def test_a_checkpoint_that_is_not_there_is_told(tmp_path, between):
    pserver = Pserver(Member("p"))
    ask(pserver, restore(2, source=Source(str(tmp_path), 4)))
    restored = load(between(pserver))
    assert "checkpoint_4" in restored.failure
    assert pserver.loading is None


def test_a_file_that_has_changed_is_told(tmp_path, between):
    (written,) = saved_checkpoint(tmp_path, between)
    path = tmp_path / "checkpoint_4" / written.files[-1].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pserver = Pserver(Member("p"))
    ask(pserver, restore(2, source=Source(str(tmp_path), 4)))
    restored = load(between(pserver))
    assert "has changed" in restored.failure
    assert restored.obstacle is Obstacle.DAMAGED


@pytest.mark.parametrize(
    ("error", "obstacle"),
    [
        (StorageError("cannot read it: connection refused"), Obstacle.AWAY),
        (StorageError("there is no such file", is_missing=True), Obstacle.DAMAGED),
        (ConfigError("pserver 0 is at its memory limit"), Obstacle.HERE),
        (MemoryError("no memory"), Obstacle.HERE),
    ],
)
def test_what_keeps_a_checkpoint_from_being_loaded_is_told(tmp_path, between, error, obstacle):
    saved_checkpoint(tmp_path, between)

    class Failing(Pserver):
        def load(self, piece):
            raise error

    pserver = Failing(Member("p"))
    ask(pserver, restore(2, source=Source(str(tmp_path), 4)))
    restored = load(between(pserver))
    assert (restored.failure, restored.obstacle) == (str(error), obstacle)


def test_storage_that_cannot_be_read_is_told_as_away(tmp_path):
    """As where the system refuses to open a folder."""
    (tmp_path / "checkpoint_4").mkdir()
    (tmp_path / "checkpoint_4" / "manifest.json").mkdir()
    pserver = Pserver(Member("p"))
    ask(pserver, restore(2, source=Source(str(tmp_path), 4)))
    loader = Loader(pserver.loading, NEVER)
    try:
        item = until(loader.take)
    finally:
        loader.close()
    assert item.obstacle is Obstacle.AWAY


def test_a_piece_that_does_not_fit_is_told(tmp_path, between):
    saved_checkpoint(tmp_path, between)

    class Small(Pserver):
        def load(self, piece):
            raise CheckpointError("it does not fit")

    pserver = Small(Member("p"))
    ask(pserver, restore(2, source=Source(str(tmp_path), 4)))
    assert load(between(pserver)).failure == "it does not fit"


def test_a_later_generation_ends_the_reading_of_an_earlier_one(tmp_path, between):
    saved_checkpoint(tmp_path, between)
    pserver = Pserver(Member("p"))
    work = between(pserver)
    ask(pserver, restore(2, source=Source(str(tmp_path / "nowhere"), 4)))
    work.work(time.monotonic())
    first = work._loader
    ask(pserver, restore(3, source=Source(str(tmp_path), 4)))
    restored = load(work)
    assert (restored.generation, restored.failure) == (3, None)
    assert work._loader is not first
    first.join()
    assert not first._thread.is_alive()


def test_a_loader_reads_no_further_than_a_piece_ahead_and_ends_when_told(tmp_path, between):
    saved_checkpoint(tmp_path, between)
    told = restore(2, source=Source(str(tmp_path), 4))
    loader = Loader(told)
    assert isinstance(until(loader.take), Facts)
    until(lambda: loader._read.full())
    loader.close()
    loader.join()
    assert not loader._thread.is_alive()
    loader = Loader(told)
    items = []
    while not items or not isinstance(items[-1], Finished):
        items.append(until(loader.take))
    loader.close()
    loader.join()
    assert isinstance(items[0], Facts)
    assert content(items[1:-1]) == of_version(3)


def test_a_saver_that_was_never_used_and_one_that_writes_both_end():
    Saver().close()
    saver = Saver(lambda *args: (file_of(0),))
    pserver = begun()
    tell(pserver, mark(4))
    saver.wanted = 4
    piece = None
    while piece is None:
        piece = pserver.next_piece(1 << 20)
    saver.put(ToWrite("/nowhere", 4, restore().schema, Place(0), piece))
    assert until(saver.results)[0].files == (file_of(0),)
    saver.close()
    assert not saver._thread.is_alive()
