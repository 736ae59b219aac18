"""A save that is ended at any step leaves the checkpoints that were there, and is never taken for one."""

import json
import os

import msgspec
import numpy as np
import pytest
from saved import NEVER, bits, group, replaced, save, schema, table, together, whole

from evergrad.checkpoint.catalogue import choose, entries, good, locate, split
from evergrad.checkpoint.layout import is_ours, serial_of
from evergrad.checkpoint.manifest import Metrics, check, now, read_manifest, write_manifest, write_metrics
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.verify import verify
from evergrad.errors import CheckpointError, ConfigError, StorageError
from evergrad.messages import DataSpec, FileKind, Progress

OF = schema([table("user", 2)], groups=[group(a=(3,))])


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path / "checkpoints", NEVER)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    """Whether it is durable is tested elsewhere; here it takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Killed(BaseException):
    """The process is no more: nothing it would do afterwards is done."""


class Mortal:
    """Ends the process before or after its n-th call to the system; from then on every call ends it."""

    CALLS = ("fsync", "rename", "link", "unlink", "mkdir", "rmdir")

    def __init__(self, monkeypatch, dies_at, is_done=False):
        self.calls, self._dies_at, self._is_done = 0, dies_at, is_done
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name)))

    def _mortal(self, call):
        def mortal(*args, **options):
            self.calls += 1
            if self.calls == self._dies_at and self._is_done:
                call(*args, **options)
            if self.calls >= self._dies_at:
                raise Killed
            return call(*args, **options)

        return mortal


def steps_of(monkeypatch, work):
    with monkeypatch.context() as m:
        mortal = Mortal(m, 10**9)
        work()
    return mortal.calls


def killed_at(monkeypatch, step, is_done, work):
    with monkeypatch.context() as m:
        Mortal(m, step, is_done)
        with pytest.raises(Killed):
            work()


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_save_killed_at_any_step_leaves_the_newest_good_one_and_is_never_offered(tmp_path, monkeypatch, is_done):
    old, new = whole(OF, rows=50, seed=1), whole(OF, rows=50, seed=2)
    storage = Storage(tmp_path / "count", NEVER)
    save(storage, OF, old, serial=1)
    steps = steps_of(monkeypatch, lambda: save(storage, OF, new, serial=2, places=2, files=1))
    assert steps > 30
    seen = set()
    for step in range(1, steps + 1):
        storage = Storage(tmp_path / str(step), NEVER)
        save(storage, OF, old, serial=1)
        killed_at(monkeypatch, step, is_done, lambda s=storage: save(s, OF, new, serial=2, places=2, files=1))
        newest = good(storage, choose(storage, "latest"))
        seen.add(newest.serial)
        assert bits(together(OF, pieces(storage, newest, 0, 1))) == bits({1: old, 2: new}[newest.serial])
        assert [e.serial for e in entries(storage) if e.manifest] == list(range(1, newest.serial + 1))
        # the next save goes well, and what was left behind goes with it
        save(storage, OF, old, serial=3)
        remove_interrupted(storage, before=3)
        assert [e.serial for e in entries(storage)] == [*range(1, newest.serial + 1), 3]
        assert all(is_ours(path.partition("/")[2]) for path in storage.sizes())
    assert seen == {1, 2}


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_removal_killed_at_any_step_leaves_a_whole_checkpoint_or_one_that_is_never_offered(
    tmp_path, monkeypatch, is_done
):
    model = whole(OF, rows=50)

    def prepared(name):
        storage = Storage(tmp_path / name, NEVER)
        save(storage, OF, model, serial=1)
        save(storage, OF, model, serial=2)
        return storage

    storage = prepared("count")
    steps = steps_of(monkeypatch, lambda: remove(storage, 2))
    assert storage.folders() == ["checkpoint_1"]
    for step in range(1, steps + 1):
        storage = prepared(str(step))
        killed_at(monkeypatch, step, is_done, lambda s=storage: remove(s, 2))
        for entry in entries(storage):
            assert (entry.manifest is not None) != entry.is_interrupted
            if entry.manifest:
                verify(storage, entry.serial)
        remove(storage, 2)
        assert storage.folders() == ["checkpoint_1"]


class Refusing:
    """Stands for a storage whose n-th put fails, also where it has done what was asked."""

    def __init__(self, storage, fails_at, is_done):
        self._backend, self._fails_at, self._is_done, self.puts = storage._backend, fails_at, is_done, 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def put(self, path, parts):
        self._fail(lambda: self._backend.put(path, parts))

    def put_new(self, path, data):
        return self._fail(lambda: self._backend.put_new(path, data))

    def _fail(self, work):
        self.puts += 1
        if self.puts != self._fails_at:
            return work()
        if self._is_done:
            work()
        raise ConnectionError("reset by peer")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_put_that_fails_once_is_made_again_and_the_save_completes(tmp_path, is_done):
    model = whole(OF, rows=50)
    for step in range(1, 9):
        storage = Storage(f"memory://{tmp_path}/{step}", NEVER)
        refusing = Refusing(storage, step, is_done)
        save(Storage(storage.url, sleep=lambda _: None, backend=refusing), OF, model)
        assert refusing.puts > step
        assert bits(together(OF, pieces(storage, good(storage, 1), 0, 1))) == bits(model)


def test_a_put_that_goes_on_failing_ends_the_save_with_one_sentence_and_the_old_one_stays(tmp_path):
    storage = Storage(f"memory://{tmp_path}", NEVER)
    save(storage, OF, whole(OF, rows=50), serial=1)
    with pytest.raises(StorageError, match=r"cannot write memory://.*checkpoint_2/.*: reset by peer"):
        save(Storage(storage.url, NEVER, backend=Refusing(storage, 3, False)), OF, whole(OF, rows=50), serial=2)
    assert choose(storage, "latest") == 1


# -- the manifest ------------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_as_it_was_written_nan_and_infinity_too(storage):
    metrics = {0: {"auc": 0.1 + 0.2, "loss": float("inf")}, 3: {"low": float("-inf"), "rate": 1e-300}}
    written = save(storage, OF, whole(OF), metrics=metrics, best=-0.75)
    assert read_manifest(storage, 1) == written
    nan = save(storage, OF, whole(OF), serial=2, metrics={0: {"auc": float("nan")}}, best=float("nan"))
    assert np.isnan(read_manifest(storage, nan.serial).metrics[0]["auc"])


def test_what_is_reported_of_a_checkpoint_later_is_beside_the_manifest_and_read_with_it(storage):
    save(storage, OF, whole(OF), metrics={0: {"auc": 0.5}})
    write_metrics(storage, 1, Metrics({0: {"auc": 0.5}, 1: {"auc": 0.75, "loss": float("inf")}}, -0.75))
    found = good(storage, 1)
    assert (found.metrics[1], found.best) == ({"auc": 0.75, "loss": float("inf")}, -0.75)
    assert read_manifest(storage, 1).best is None
    storage.put("checkpoint_1/metrics.json", [b"{broken"])
    assert good(storage, 1).metrics == {0: {"auc": 0.5}}
    remove(storage, 1)
    assert storage.sizes() == {}


def test_the_manifest_is_plain_json_and_says_where_training_goes_on(storage):
    save(storage, OF, whole(OF), created=now())
    found = json.loads(storage.read("checkpoint_1/manifest.json"))
    assert found["format"] == "evergrad-checkpoint-1"
    assert found["schema"]["tables"][0]["name"] == "user"
    assert storage.read("checkpoint_1/trainer_0/epoch_id") == b"3\n"
    assert storage.read("checkpoint_1/trainer_0/step_id") == b"120\n"


def test_a_second_checkpoint_of_a_serial_is_refused(storage):
    manifest = save(storage, OF, whole(OF))
    write_manifest(storage, manifest)  # again after an answer that was lost
    with pytest.raises(CheckpointError, match="is there already: two jobs write to one place; give each its own"):
        write_manifest(storage, replaced(manifest, job="other"))
    assert read_manifest(storage, 1).job == "films"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"format": "evergrad-checkpoint-1"}', "has changed since it was written; use another checkpoint"),
        (b'{"format": "evergrad-checkpoint-1",\n  "manifest_crc32": "80dcd106"\n}\n', "cannot be read"),
        (b'{"format": "evergrad-checkpoint-9"}', "is of format 'evergrad-checkpoint-9'; this version reads"),
    ],
)
def test_a_manifest_that_is_none_is_refused_and_an_older_checkpoint_taken(storage, data, sentence):
    save(storage, OF, whole(OF), serial=1)
    save(storage, OF, whole(OF), serial=2)
    storage.put("checkpoint_2/manifest.json", [data])
    with pytest.raises(CheckpointError, match=f"checkpoint_2/manifest.json {sentence}"):
        read_manifest(storage, 2)
    assert choose(storage, "latest") == 1
    assert [(e.serial, e.is_interrupted) for e in entries(storage) if e.problem] == [(2, False)]


def test_one_bit_of_a_manifest_that_changed_is_found_wherever_it_is(storage):
    written = save(storage, OF, whole(OF))
    path = "checkpoint_1/manifest.json"
    data = storage.read(path)
    taken = set()
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        storage.put(path, [changed])
        try:
            assert read_manifest(storage, 1) == written
            taken.add(data[at : at + 1])
        except CheckpointError:
            pass
    assert taken <= {b" ", b"\n", b":"}, "of white space behind the checksum, and nothing else"


def test_a_manifest_in_another_folder_is_refused(storage):
    save(storage, OF, whole(OF), serial=1)
    storage.put("checkpoint_7/manifest.json", [storage.read("checkpoint_1/manifest.json")])
    with pytest.raises(CheckpointError, match="it is that of checkpoint 1"):
        read_manifest(storage, 7)


def without(manifest, kind):
    first = next(f for f in manifest.files if f.kind is kind)
    return replaced(manifest, files=tuple(f for f in manifest.files if f is not first)), first


@pytest.mark.parametrize("kind", FileKind)
def test_files_must_cover_everything_once(storage, kind):
    manifest = save(storage, OF, whole(OF), places=2)
    assert check(manifest) is None
    fewer, first = without(manifest, kind)
    assert "are missing" in check(fewer)
    assert "overlap others" in check(replaced(manifest, files=(*manifest.files, first)))
    last = next(f for f in reversed(manifest.files) if f.kind is kind)
    assert "are missing" in check(replaced(manifest, files=tuple(f for f in manifest.files if f is not last)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"path": "../../etc/passwd"}, "'../../etc/passwd' is no file of a checkpoint"),
        ({"path": "/etc/passwd"}, "is no file of a checkpoint"),
        ({"path": "manifest.json"}, "is no file of a checkpoint"),
        ({"table": "other"}, "belongs to no table of the model"),
        ({"slots": None}, "belongs to no table of the model"),
        ({"kind": FileKind.DENSE, "group": 5, "span": (0, 1)}, "belongs to no parameters of the model"),
        ({"slots": (0, 16_385)}, "end at 16384, not 16383"),
        ({"slots": (5, 5)}, "missing"),
    ],
)
def test_a_file_that_cannot_belong_to_a_checkpoint_makes_its_manifest_wrong(storage, change, sentence):
    manifest = save(storage, OF, whole(OF), files=1)
    number = next(n for n, f in enumerate(manifest.files) if f.kind is FileKind.ROWS)
    files = list(manifest.files)
    files[number] = msgspec.structs.replace(files[number], **change)
    assert sentence in check(replaced(manifest, files=tuple(files)))


def test_the_counts_of_updates_must_be_those_of_its_tables(storage):
    manifest = save(storage, OF, whole(OF))
    assert "other tables" in check(replaced(manifest, updates={}))


# -- which one ---------------------------------------------------------------------------------------------------------


def at(epoch, version, is_closed):
    return Progress(version=version, epoch=epoch, data=DataSpec(1, "", 1), is_closed=is_closed)


@pytest.fixture
def several(storage):
    for serial, progress in enumerate(
        [at(-1, 0, False), at(0, 10, True), at(1, 15, False), at(1, 20, True), at(1, 20, True), at(2, 25, False)]
    ):
        save(storage, OF, whole(OF, rows=5), serial=serial, progress=progress)
    return storage


@pytest.mark.parametrize(
    ("name", "serial"),
    [("", 5), ("/latest", 5), ("/checkpoint_0", 0), ("/checkpoint_3/", 3), ("/epoch_0", 1), ("/epoch_1", 4),
     ("/step_0", 0), ("/step_15", 2), ("/step_20", 4)],
)  # fmt: skip
def test_a_checkpoint_is_found_by_serial_epoch_step_or_as_the_latest(several, name, serial):
    assert locate(several.url + name) == (several.url, serial)


def test_a_path_may_be_relative(several, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("checkpoints/checkpoint_2") == (several.url, 2)
    monkeypatch.chdir(several.url)
    assert locate("checkpoint_2") == (several.url, 2)
    assert split("/checkpoint_2") == ("/", "checkpoint_2")
    assert split("s3://bucket/checkpoint_2") == ("s3://bucket", "checkpoint_2")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/checkpoint_9", "there is no checkpoint 9 in .*: it holds checkpoints 0, 1, 2, 3, 4, 5"),
        ("/epoch_2", "there is no good checkpoint of epoch 2 in"),
        ("/step_7", "there is no good checkpoint of step 7 in"),
        ("/elsewhere", "there is no good checkpoint in .*elsewhere: it holds no checkpoints; give the folder"),
    ],
)
def test_one_that_is_not_there_is_refused_with_what_is(several, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        locate(several.url + name)


def test_one_that_is_not_good_is_refused_by_its_serial_and_left_out_otherwise(several):
    several.remove("checkpoint_5/manifest.json")
    with pytest.raises(CheckpointError, match=r"checkpoint 5 of .* cannot be used: the save was interrupted"):
        locate(f"{several.url}/checkpoint_5")
    assert choose(several, "latest") == 4


@pytest.mark.parametrize("name", ["checkpoint_", "checkpoint_01", "checkpoint_-1", "checkpoint_1.5", "Checkpoint_1"])
def test_other_folders_are_no_checkpoints(name):
    assert serial_of(name) is None
