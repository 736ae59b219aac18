"""What the master's clerk does beside the loop: each errand's result comes, and slow storage holds up nothing else."""

import threading
from types import SimpleNamespace

import pytest
from saved import save, schema, table, whole

from evergrad.checkpoint.storage import Storage
from evergrad.errors import ConfigError, Fenced, StorageError, Unavailable
from evergrad.master import clerk as module
from evergrad.master.clerk import Clerk, look
from evergrad.master.errands import Held, Hold, Look, Prune, Pruned, PutRecord, RecordPut
from evergrad.master.record import Found, Record
from evergrad.messages import Term

RECORD = Record("job", Term(1))


class Store:
    """A record's store that fails so often first."""

    def __init__(self, failures=0):
        self.failures, self.tries, self.written = failures, 0, []

    def write(self, data):
        self.tries += 1
        if self.tries <= self.failures:
            raise Unavailable("cannot write the job's record")
        self.written.append(data)


class Place:
    """A claim whose renewals are counted; it is taken by another job at the `lost`-th."""

    def __init__(self, lost=None):
        self.renewed, self.lost, self.is_released = threading.Semaphore(0), lost, False
        self.count = 0

    def take(self):
        pass

    def renew(self):
        self.count += 1
        self.renewed.release()
        if self.count == self.lost:
            raise Fenced("job b makes its checkpoints here")

    def release(self):
        self.is_released = True


@pytest.fixture
def start():
    clerks = []

    def begin(store=None):
        clerks.append(Clerk(store))
        return clerks[-1]

    yield begin
    for each in clerks:
        each.close()


@pytest.fixture
def place(monkeypatch):
    held = Place()
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    monkeypatch.setattr(module, "claim", lambda url, job: held)
    return held


def results(clerk, count=1):
    found = []
    while len(found) < count:
        found += clerk.results(wait_s=5.0)
        assert found
    return found


def test_a_record_is_written_and_told(start):
    store = Store()
    clerk = start(store)
    clerk.take(PutRecord(7, RECORD))
    assert results(clerk) == [RecordPut(7)]
    assert (len(store.written), clerk.is_busy) == (1, False)


def test_a_record_that_cannot_be_written_is_tried_again_now_and_then_and_the_loop_goes_on(start, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    store = Store(failures=3)
    clerk = start(store)
    clerk.take(PutRecord(1, RECORD))
    assert clerk.is_busy
    assert results(clerk) == [RecordPut(1)]
    assert store.tries == 4


def test_a_removal_that_takes_long_holds_up_nothing_else(start, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(module, "_prune", lambda errand: go.wait(5.0))
    monkeypatch.setattr(module, "look", lambda errand: Found(next_serial=3))
    clerk = start(Store())
    clerk.take(Prune("/c", (1,), 2))
    clerk.take(Look("/c", "auto", None))
    clerk.take(PutRecord(1, RECORD))
    assert {type(r) for r in results(clerk, 2)} == {Found, RecordPut}
    go.set()
    assert results(clerk) == [Pruned()]


def test_a_place_is_held_on_to_while_storage_is_busy_and_let_go_of_at_the_end(start, place, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(module, "look", lambda errand: go.wait(5.0) and Found())
    clerk = start()
    clerk.take(Hold("s3://b/c", "a"))
    clerk.take(Look("s3://b/c", "auto", None))
    assert results(clerk) == [Held()]
    for _ in range(3):
        assert place.renewed.acquire(timeout=5.0)
    go.set()
    assert results(clerk) == [Found()]
    clerk.close()
    assert place.is_released


def test_a_place_that_another_job_has_taken_is_told_once(start, place):
    place.lost = 2
    clerk = start()
    clerk.take(Hold("s3://b/c", "a"))
    assert results(clerk, 2) == [Held(), Held("job b makes its checkpoints here", is_other=True)]
    assert clerk.results(wait_s=0.1) == []


def test_a_place_that_cannot_be_reached_now_is_claimed_later(start, place, monkeypatch):
    def take():
        raise StorageError("s3://b/c cannot be reached")

    monkeypatch.setattr(place, "take", take)
    clerk = start()
    clerk.take(Hold("s3://b/c", "a"))
    assert results(clerk) == [Held("s3://b/c cannot be reached")]
    assert place.renewed.acquire(timeout=5.0)


def test_an_error_that_nobody_expected_comes_out_in_the_loop(start, monkeypatch):
    def look(errand):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "look", look)
    clerk = start()
    clerk.take(Look("/c", "auto", None))
    with pytest.raises(ZeroDivisionError):
        clerk.results(wait_s=5.0)


def test_what_a_master_wants_is_done_and_told_to_it(start):
    store, told, wanted = Store(), [], [[PutRecord(1, RECORD)], [], []]
    master = SimpleNamespace(take_errands=lambda: wanted.pop(0), done=lambda r, now: told.append(r) or ["a send"])
    assert start(store).run(master, 0.0) == ["a send"]
    assert told == [RecordPut(1)]


def test_a_place_that_no_library_reaches_is_a_failure_told_in_a_sentence(start):
    clerk = start()
    clerk.take(Look("ftp://127.0.0.1:1/x", "auto", None))
    (found,) = results(clerk)
    assert found.failure == "ftp://127.0.0.1:1/x cannot be reached: [Errno 111] Connection refused"


@pytest.fixture
def there(tmp_path):
    with Storage(tmp_path) as storage:
        yield storage


OF = schema([table("user")], [])


def found(storage, resume="auto"):
    return look(Look(storage.url, resume, None))


def damage(storage, serial):
    storage.put(f"checkpoint_{serial}/manifest.json", [b"{}"])


def test_what_is_gone_on_with_is_the_newest_good_one_and_those_passed_over_are_named(there):
    for serial in (1, 2, 3):
        save(there, OF, whole(OF), serial=serial)
    damage(there, 3)
    there.put("checkpoint_4/trainer_0/epoch_id", [b"0\n"])
    result = found(there)
    assert (result.source.serial, result.next_serial, result.lineage) == (2, 5, "first")
    assert len(result.damaged) == 1
    assert result.damaged[0].startswith("checkpoint 3: ")


def test_where_all_are_damaged_nothing_begins_anew_by_itself(there):
    save(there, OF, whole(OF), serial=1)
    damage(there, 1)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be used: checkpoint 1: .*; begin anew"):
        found(there)
    assert found(there, "never").source is None


def test_checkpoints_of_another_training_are_not_the_jobs_own(there):
    save(there, OF, whole(OF), serial=1, lineage="another")
    save(there, OF, whole(OF), serial=2)
    save(there, OF, whole(OF), serial=3)
    assert [d.serial for d in found(there).durable] == [2, 3]
