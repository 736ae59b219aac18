import pytest

from evergrad.errors import ConfigError, Fenced, Unavailable
from evergrad.store.file import RECORD, FileStore


def test_what_was_written_last_is_read_by_the_next_one(tmp_path):
    store = FileStore(tmp_path / "job")
    assert store.read() is None
    store.write(b"one")
    store.write(b"two")
    store.close()
    assert FileStore(tmp_path / "job").read() == b"two"
    assert sorted(p.name for p in (tmp_path / "job").iterdir()) == ["record.json", "record.lock"]


def test_a_second_master_waits_for_the_lock_and_then_is_fenced(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(Fenced, match="another master leads"):
        FileStore(tmp_path, wait_s=0.0)
    store.close()
    FileStore(tmp_path, wait_s=0.0).close()


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep the record"):
        FileStore(tmp_path / "file")


def test_a_record_that_cannot_be_written_or_read_is_a_matter_of_waiting(tmp_path):
    store = FileStore(tmp_path)
    (tmp_path / RECORD).mkdir()
    with pytest.raises(Unavailable, match="cannot write"):
        store.write(b"one")
    with pytest.raises(Unavailable, match="cannot read"):
        store.read()
    store.close()
