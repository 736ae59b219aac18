"""Storage: files whole or not at all, patience with what passes, one sentence for what does not."""

import errno
import os
import stat
from contextlib import contextmanager

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from saved import NEVER

from evergrad.checkpoint import storage as storage_module
from evergrad.checkpoint.local import LocalFolder
from evergrad.checkpoint.storage import Retry, Storage, absolute_url, is_local, shared_url
from evergrad.errors import CheckpointError, ConfigError, StorageError


class Renaming(LocalFileSystem):
    """Stands for file systems that fsspec reaches and that are no object stores, as HDFS."""

    protocol = "renaming"


fsspec.register_implementation("renaming", Renaming, clobber=True)


@pytest.fixture(params=["folder", "file://", "memory://", "renaming://"])
def url(request, tmp_path):
    scheme = "" if request.param == "folder" else request.param
    return f"{scheme}{tmp_path}/deep/checkpoints"


@pytest.fixture
def storage(url):
    with Storage(url, NEVER) as storage:
        yield storage


def test_what_was_put_is_read(storage):
    storage.put("a/b.bin", [b"one", memoryview(b"two"), bytearray(b"")])
    assert storage.read("a/b.bin") == b"onetwo"
    storage.put("a/b.bin", [b"three"])
    assert storage.read("a/b.bin") == b"three"


def test_a_buffer_is_filled_with_a_file_of_its_size_only(storage):
    storage.put("a", [b"12345"])
    buffer = bytearray(7)
    storage.read_into("a", memoryview(buffer)[1:6])
    assert buffer == b"\x0012345\x00"
    for size in (0, 4, 6):
        with pytest.raises(StorageError, match=rf"a has 5 bytes and should have {size}"):
            storage.read_into("a", memoryview(bytearray(size)))


def test_a_file_is_put_new_only_once(storage):
    assert storage.put_new("a/manifest", b"mine")
    assert not storage.put_new("a/manifest", b"other")
    assert storage.read("a/manifest") == b"mine"


def test_a_put_new_of_which_the_answer_was_lost_has_succeeded_when_tried_again(storage):
    assert storage.put_new("a/manifest", b"mine")
    assert storage.put_new("a/manifest", b"mine")


def test_a_file_written_piece_by_piece_is_there_at_the_end_only(storage):
    with storage.writer("a/b") as file:
        file.write(b"one")
        assert "a/b" not in storage.sizes()
        file.write(memoryview(b"two"))
    assert storage.read("a/b") == b"onetwo"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, CheckpointError])
def test_a_file_whose_writing_was_broken_off_is_not_there_and_the_error_is_the_callers(storage, error):
    storage.put("a/kept", [b"1"])

    def break_off():
        with storage.writer("a/b") as file:
            file.write(b"one")
            raise error

    with pytest.raises(error):
        break_off()
    assert storage.sizes() == {"a/kept": 1}


def test_files_are_listed_by_path_with_their_sizes(storage):
    assert storage.sizes() == {}
    assert storage.folders() == []
    for path in ("top", "checkpoint_1/a", "checkpoint_1/deep/b", "checkpoint_10/c"):
        storage.put(path, [path.encode()])
    assert storage.sizes() == {"top": 3, "checkpoint_1/a": 14, "checkpoint_1/deep/b": 19, "checkpoint_10/c": 15}
    assert storage.sizes("checkpoint_1") == {"checkpoint_1/a": 14, "checkpoint_1/deep/b": 19}
    assert storage.sizes("checkpoint_2") == {}
    assert sorted(storage.folders()) == ["checkpoint_1", "checkpoint_10"]


def test_a_file_is_removed_also_twice_and_a_folder_when_it_is_empty(storage):
    storage.put("checkpoint_1/a", [b"1"])
    storage.put("checkpoint_1/b", [b"1"])
    storage.remove("checkpoint_1/a")
    storage.remove("checkpoint_1/a")
    storage.remove_if_empty("checkpoint_1")
    assert storage.folders() == ["checkpoint_1"]
    storage.remove("checkpoint_1/b")
    storage.remove_if_empty("checkpoint_1")
    storage.remove_if_empty("checkpoint_1")
    assert storage.folders() == []


def test_a_missing_file_is_named_and_known_as_missing(storage):
    for read in (storage.read, lambda path: storage.read_into(path, memoryview(bytearray(1)))):
        with pytest.raises(StorageError, match=r"cannot read .*deep/checkpoints/none: there is no such file") as found:
            read("none")
        assert found.value.is_missing


def test_nothing_but_the_file_is_left_behind(tmp_path):
    storage = Storage(tmp_path, NEVER)
    storage.put("a/b", [b"1"])
    storage.put_new("a/c", b"1")
    storage.put_new("a/c", b"2")
    assert sorted(storage.sizes()) == ["a/b", "a/c"]


def test_files_are_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        Storage(tmp_path, NEVER).put("a", [b"1"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_what_is_put_is_durable_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), done.append("fsync")))
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), done.append("rename")))
    Storage(tmp_path / "new", NEVER).put("a", [b"1"])
    assert done == ["fsync", "fsync", "rename", "fsync"]  # the new folder's name, the file, its name


# -- patience ----------------------------------------------------------------------------------------------------------


class Failing:
    """A backend each of whose calls first raises the errors given."""

    def __init__(self, backend, *errors):
        self._backend, self.errors = backend, list(errors)

    def __getattr__(self, name):
        call = getattr(self._backend, name)

        def failing(*args):
            if self.errors:
                raise self.errors.pop(0)
            return call(*args)

        return failing


def failing(tmp_path, waits, *errors, tries=8):
    return Storage(tmp_path, Retry(tries, 0.5, 4.0), waits.append, Failing(LocalFolder(str(tmp_path)), *errors))


PASSING = [ConnectionError("reset"), TimeoutError(), OSError(errno.EIO, "I/O error"), OSError(errno.ESTALE, "stale")]


def test_what_fails_is_tried_again_after_longer_and_longer_waits(tmp_path):
    waits = []
    failing(tmp_path, waits, *PASSING, *PASSING[:2]).put("a", [b"1"])
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize(
    "call", [lambda s: s.read("a"), lambda s: s.sizes(), lambda s: s.folders(), lambda s: s.remove("a"),
             lambda s: s.put_new("b", b""), lambda s: s.remove_if_empty("c")]
)  # fmt: skip
def test_every_call_is_patient(tmp_path, call):
    (tmp_path / "a").write_bytes(b"1")
    waits = []
    call(failing(tmp_path, waits, *PASSING))
    assert len(waits) == len(PASSING)


def test_patience_has_an_end_and_the_last_error_is_told(tmp_path):
    waits = []
    with pytest.raises(StorageError, match=r"cannot write .*/a: I/O error") as found:
        failing(tmp_path, waits, *PASSING, tries=3).put("a", [b"1"])
    assert waits == [0.5, 1.0]
    assert isinstance(found.value.__cause__, OSError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_at_once_as_such(tmp_path, code):
    waits = []
    with pytest.raises(StorageError, match=r"the storage is full .*; make room") as found:
        failing(tmp_path, waits, OSError(code, os.strerror(code))).put("a", [b"1"])
    assert found.value.is_full
    assert waits == []


def test_a_full_object_store_is_known_by_what_it_says(tmp_path):
    with pytest.raises(StorageError, match="the storage is full"):
        failing(tmp_path, [], OSError(errno.EREMOTEIO, "XMinioStorageFull: storage full")).put("a", [b"1"])


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the storage is full"):
        Storage(tmp_path).put("a", [b"1"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; check who may use it"),
        (PermissionError("Forbidden"), "Forbidden; check who may use it, and the keys"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), "Not a directory"),
        (type("NoCredentialsError", (Exception,), {})(), "there are no keys; set AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(tmp_path, error, sentence):
    waits = []
    with pytest.raises(StorageError, match=sentence):
        failing(tmp_path, waits, error).put("a", [b"1"])
    assert waits == []


def test_what_the_sleep_raises_ends_the_trying(tmp_path):
    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    with pytest.raises(Stop):
        Storage(tmp_path, sleep=stop, backend=Failing(LocalFolder(str(tmp_path)), *PASSING)).read("a")


def test_a_file_system_without_links_is_put_new_to_all_the_same(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    storage = Storage(tmp_path, NEVER)
    assert storage.put_new("a", b"1")
    assert not storage.put_new("a", b"2")
    assert storage.sizes() == {"a": 1}


def test_an_error_while_writing_piece_by_piece_is_translated_too(tmp_path):
    class Full:
        def __init__(self, when):
            self._when = when

        def write(self, _):
            if self._when == "write":
                raise OSError(errno.ENOSPC, "No space left on device")

        @contextmanager
        def writer(self, _):
            if self._when == "open":
                raise OSError(errno.ENOSPC, "No space left on device")
            yield self
            if self._when == "close":
                raise OSError(errno.ENOSPC, "No space left on device")

    for when in ("open", "write", "close"):
        storage = Storage(tmp_path, backend=Full(when))
        with pytest.raises(StorageError, match="the storage is full"), storage.writer("a") as file:
            file.write(b"1")


# -- where -------------------------------------------------------------------------------------------------------------


def test_a_url_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_url("checkpoints/") == f"{tmp_path}/checkpoints"
    assert absolute_url(tmp_path / "a" / ".." / "b") == f"{tmp_path}/b"
    assert absolute_url("~/a") == "/home/me/a"
    assert absolute_url("file:///a/b/") == "/a/b"
    assert absolute_url("s3://bucket/folder/") == "s3://bucket/folder"
    assert is_local(absolute_url("a"))
    assert not is_local("s3://bucket")


@pytest.mark.parametrize("url", ["", " ", "a\0b", None, 7, b"path", "s3://", "s3:///", "S3 here://bucket"])
def test_what_is_no_place_is_refused(url):
    with pytest.raises(ConfigError, match="is no place for files; give a folder, or a URL"):
        absolute_url(url)


@pytest.mark.parametrize("url", ["s3:/bucket/folder", "file:/a", "memory:/a"])
def test_a_url_that_lacks_a_slash_is_refused_and_not_taken_for_a_folder(url):
    with pytest.raises(ConfigError, match=f"'{url}' reads like a URL but for a slash; write scheme://..., or ./{url}"):
        absolute_url(url)
    assert absolute_url(f"./{url}") == os.path.join(os.getcwd(), *url.split("/"))


def test_memory_of_one_process_is_no_place_for_several():
    with pytest.raises(ConfigError, match="memory://a is in the memory of one process; give a folder, or a URL"):
        shared_url("memory://a")
    assert shared_url("/a/b") == "/a/b"


def test_a_scheme_that_nothing_here_can_reach_says_what_to_do():
    with pytest.raises(ConfigError, match=r"nonsense://a cannot be used: .*; install what fsspec wants, or give"):
        Storage("nonsense://a")


def test_s3_without_its_library_says_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3; pip install 'evergrad\[s3\]'"):
        Storage("s3://bucket/folder")


def test_a_missing_or_wrong_file_is_said_with_its_sizes():
    assert storage_module.missing({"a": 1, "b": 2}, {"a": 1}) is None
    assert storage_module.missing({"a": 1}, {"a": 1, "b": 2}) == "b is missing"
    assert storage_module.missing({"a": 1}, {"a": 3}) == "a has 1 bytes and should have 3"
