"""Writing in the background: two pieces at a time, all files or the reason why not."""

import threading

import pytest
from saved import NEVER, bits, cut, manifest_of, schema, together, whole

from evergrad.checkpoint.manifest import write_manifest
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.writer import Writer
from evergrad.errors import StorageError

OF = schema()


class Slow:
    """A backend whose puts wait until they are let through."""

    def __init__(self, storage):
        self._backend = storage._backend
        self.gate = threading.Semaphore(0)
        self.most = self.now = 0
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def put(self, path, parts):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.gate.acquire()
        with self._lock:
            self.now -= 1
        self._backend.put(path, parts)


@pytest.fixture
def storage(tmp_path):
    return Storage(f"memory://{tmp_path}", NEVER)


def test_all_pieces_are_written_and_their_files_told_by_path(storage):
    model = whole(OF)
    with Writer(storage, 1, OF, 0) as writer:
        for piece in cut(OF, model, files=5):
            writer.write(piece)
        files = writer.finish()
        assert writer.is_idle
    assert [f.path for f in files] == sorted(f.path for f in files)
    manifest = manifest_of(OF, files)
    write_manifest(storage, manifest)
    assert bits(together(OF, pieces(storage, manifest, 0, 1))) == bits(model)


def test_two_are_written_at_a_time_and_then_there_is_no_room(storage, eventually):
    slow, done = Slow(storage), []
    found = list(cut(OF, whole(OF), files=4))[:4]
    with Writer(Storage(storage.url, NEVER, backend=slow), 1, OF, 0, lambda: done.append(1)) as writer:
        assert writer.has_room
        writer.write(found[0])
        assert writer.has_room
        writer.write(found[1])
        eventually(lambda: slow.now == 2)
        assert not writer.has_room
        assert not writer.is_idle
        slow.gate.release()
        eventually(lambda: writer.has_room and done == [1])
        slow.gate.release(8)
        writer.write(found[2])
        writer.write(found[3])
        assert len(writer.finish()) == 4
    assert slow.most == 2
    assert len(done) == 4


def test_a_piece_that_cannot_be_written_is_told_by_what_comes_next(storage, eventually):
    class Full(Slow):
        def put(self, path, parts):
            raise OSError(28, "No space left on device")

    found = list(cut(OF, whole(OF)))
    with Writer(Storage(storage.url, backend=Full(storage)), 1, OF, 0) as writer:
        writer.write(found[0])
        eventually(lambda: writer.is_idle)
        with pytest.raises(StorageError, match="the storage is full"):
            writer.write(found[1])
        writer.write(found[1])
        with pytest.raises(StorageError, match="the storage is full"):
            writer.finish()
