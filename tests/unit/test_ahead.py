"""A task's batches read in another thread while the script computes."""

import threading

import numpy as np
import pytest

import evergrad as eg
from evergrad.job.ahead import Ahead, Onward, Reader
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.messages import Schema


@pytest.fixture
def reader():
    reader = Reader()
    yield reader
    reader.close()


class Reads:
    """Reads numbers, and notes which in which thread; raises at those in `bad`."""

    def __init__(self, bad=()):
        self.bad, self.threads = bad, {}

    def __call__(self, number):
        self.threads[number] = threading.current_thread()
        if number in self.bad:
            raise OSError(f"number {number}")
        return 10 * number


def test_all_batches_are_read_in_the_readers_thread_so_that_no_two_are_at_once(reader):
    read, here = Reads(), threading.current_thread()
    ahead = Ahead(read, 4, reader)
    assert ahead.take(0) == 0
    ahead.start(1)
    assert [ahead.take(1), ahead.take(2)] == [10, 20]
    ahead.start(3)
    assert ahead.take(3) == 30
    assert len(set(read.threads.values()) - {here}) == 1
    assert here not in read.threads.values()


def test_a_batch_taken_waits_for_one_of_another_task_that_is_being_read(reader):
    begun, go_on, at_once = threading.Event(), threading.Event(), []

    def slow(number):
        begun.set()
        go_on.wait()
        at_once.append("slow")
        return number

    other = Ahead(slow, 2, reader)
    other.start(0)
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    assert Ahead(lambda number: at_once.append("taken"), 1, reader).take(0) is None
    assert at_once == ["slow", "taken"]


def test_batches_are_counted_on_into_the_task_that_follows(reader):
    alone, onward = (Onward(Ahead(Reads(), 2, reader), following) for following in (None, Ahead(Reads(), 3, None)))
    assert [alone.has(n) for n in range(4)] == [True, True, False, False]
    assert [onward.has(n) for n in (1, 2)] == [True, True]
    onward.start(3)
    assert [onward.take(n) for n in (0, 1, 2, 3)] == [0, 10, 0, 10]


def test_nothing_is_read_beyond_the_last_batch_or_without_a_reader(reader):
    for with_reader, count in ((reader, 1), (None, 9)):
        read = Reads()
        ahead = Ahead(read, count, with_reader)
        ahead.start(1)
        assert ahead.take(0) == 0
        reader.close()
        assert list(read.threads) == [0]


def test_what_reading_ahead_raised_is_raised_where_the_batch_is_taken(reader):
    ahead = Ahead(Reads(bad=[1]), 3, reader)
    ahead.start(1)
    assert ahead.take(0) == 0
    with pytest.raises(OSError, match="number 1"):
        ahead.take(1)
    ahead.start(2)
    assert ahead.take(2) == 20


def test_a_closed_reader_has_no_thread_and_what_nobody_took_is_let_go(reader):
    ahead = Ahead(Reads(bad=[1]), 3, reader)
    ahead.start(1)
    reader.close()
    assert not any(thread.name.startswith("evergrad-reader") for thread in threading.enumerate())


class Watched(eg.data.Columns):
    """Columns that note which thread reads them."""

    def __init__(self, columns):
        super().__init__(columns)
        self.threads = []

    def fetch(self, ids):
        self.threads.append(threading.current_thread().name)
        return super().fetch(ids)


class Drawing(Watched):
    """A dataset that says nothing of threads, and draws random numbers."""

    reads_anywhere = False

    def fetch(self, ids):
        return super().fetch(ids) | {"drawn": np.random.random(ids.size)}


def batches_of(data, is_ahead=True):
    job = Job(embedded_session(), Schema(0, eg.Async(4).spec(), (), ()), True, is_ahead)
    model = eg.Embedding("t", 2)
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=1.0))
    seen = []
    for _ in job.epochs(2):
        for batch in job.batches(data, 5):
            optimizer.zero_grad()
            seen.append({name: np.asarray(value).copy() for name, value in batch.items()})
            model(batch["t"]).sum().backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize("is_ahead", [True, False])
def test_batches_read_ahead_are_the_same_as_those_read_in_turn(is_ahead):
    """What is trained differs: with `ahead` rows are pulled before the present batch is applied."""
    columns = {"t": np.arange(43), "x": np.arange(43) * 0.5}
    data = Watched(columns)
    seen, in_turn = batches_of(data, is_ahead), batches_of(eg.data.Columns(columns), is_ahead=False)
    assert len(seen) == len(in_turn) == 18
    for batch, other in zip(seen, in_turn, strict=True):
        assert all((batch[name] == other[name]).all() for name in columns)
    assert any(name.startswith("evergrad-reader") for name in data.threads) == is_ahead


def test_a_dataset_that_may_draw_random_numbers_is_read_in_the_scripts_thread_with_its_seed():
    columns = {"t": np.arange(43)}
    data = [Drawing(columns), Drawing(columns)]
    first, second = (batches_of(d) for d in data)
    assert {name for d in data for name in d.threads} == {threading.current_thread().name}
    assert all((a["drawn"] == b["drawn"]).all() for a, b in zip(first, second, strict=True))
