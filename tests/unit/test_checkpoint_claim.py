"""One job at a time makes checkpoints at a place."""

import subprocess
import sys
import threading

import pytest
from saved import NEVER

from evergrad.checkpoint.claim import CLAIM, LOCK, LocalClaim, RemoteClaim, claim
from evergrad.checkpoint.storage import Storage
from evergrad.errors import ConfigError, Fenced, StorageError

HOLDER = """
import sys
from evergrad.checkpoint.claim import LocalClaim
held = LocalClaim(sys.argv[1], "first")
held.take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds a folder."""
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "c")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_another_process_holds_is_refused_with_the_name_of_its_job(other_process, tmp_path):
    with pytest.raises(ConfigError, match=r"job first makes its checkpoints in .*; give each job a place of its own"):
        LocalClaim(str(tmp_path / "c"), "second", wait_s=0.0).take()


def test_a_folder_is_free_as_soon_as_its_process_is_gone(other_process, tmp_path):
    mine = LocalClaim(str(tmp_path / "c"), "second", wait_s=60.0)
    killer = threading.Timer(0.2, other_process.kill)
    killer.start()
    mine.take()
    killer.join()
    assert (tmp_path / "c" / LOCK).read_text() == "second"
    mine.renew()
    mine.release()
    mine.release()


def test_of_one_process_the_newer_job_takes_the_place_of_the_older(tmp_path):
    older, newer = LocalClaim(str(tmp_path), "older"), LocalClaim(str(tmp_path), "newer")
    older.take()
    newer.take()
    with pytest.raises(Fenced, match="a newer job of this process"):
        older.renew()
    older.release()
    newer.renew()
    newer.release()
    again = LocalClaim(str(tmp_path), "again", wait_s=0.0)
    again.take()
    again.release()


def test_a_folder_that_cannot_be_is_an_error_of_storage(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot make checkpoints in .*: Not a directory; give another place"):
        LocalClaim(str(tmp_path / "file" / "c"), "job").take()


def test_what_could_not_be_taken_is_taken_when_it_is_renewed(tmp_path):
    (tmp_path / "c").touch()
    mine = LocalClaim(str(tmp_path / "c"), "job")
    with pytest.raises(StorageError):
        mine.take()
    (tmp_path / "c").unlink()
    mine.renew()
    assert (tmp_path / "c" / LOCK).read_text() == "job"
    mine.release()


@pytest.fixture
def place(tmp_path):
    return f"memory://{tmp_path}"


def remote(place, job, sleep=lambda seconds: None):
    return RemoteClaim(Storage(place, NEVER), job, sleep)


def test_where_there_are_no_locks_a_job_that_still_counts_up_is_left_alone(place):
    first = remote(place, "first")
    first.take()
    with pytest.raises(ConfigError, match="job first makes its checkpoints in memory://"):
        remote(place, "second", lambda seconds: first.renew()).take()
    first.renew()


def test_a_job_that_has_not_counted_up_for_long_has_gone_and_is_told_if_it_comes_back(place):
    waits = []
    first, second = remote(place, "first"), remote(place, "second", waits.append)
    first.take()
    second.take()
    assert sum(waits) == 15.0
    second.renew()
    with pytest.raises(Fenced, match="job second makes its checkpoints"):
        first.renew()
    first.release()
    second.renew()


def test_a_job_that_has_ended_and_the_next_master_of_the_same_are_not_waited_for(place):
    waits = []
    first = remote(place, "first")
    first.take()
    remote(place, "first", waits.append).take()
    remote(place, "first").release()
    remote(place, "second", waits.append).take()
    assert waits == []


def test_a_file_that_says_nothing_is_no_claim(place):
    Storage(place, NEVER).put(CLAIM, [b"{"])
    remote(place, "first").take()


def test_the_kind_of_claim_follows_from_the_url(tmp_path, place):
    assert isinstance(claim(str(tmp_path), "job"), LocalClaim)
    assert isinstance(claim(place, "job"), RemoteClaim)
