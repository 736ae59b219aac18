"""`job.json`, and how a job is found by it."""

from pathlib import Path

import msgspec
import pytest

from evergrad.errors import ConfigError
from evergrad.launch import jobfile
from evergrad.launch.jobfile import JobFile
from evergrad.messages import Address

JOB = JobFile("films", Address("tcp://127.0.0.1:7000"), 1, "/train.py", ("--epochs", "2"), 2, 3, seed=5)


def write(log_dir: Path, job: JobFile) -> None:
    folder = log_dir / job.job
    folder.mkdir(parents=True, exist_ok=True)
    jobfile.write(folder, job)
    jobfile.make_latest(folder)


def test_a_job_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    assert jobfile.read_latest(tmp_path) == JOB


def test_the_newest_job_is_the_latest(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    write(tmp_path, msgspec.structs.replace(JOB, job="books"))
    assert jobfile.read_latest(tmp_path).job == "books"


def test_a_log_folder_that_was_moved_is_still_right(tmp_path: Path) -> None:
    write(tmp_path / "a", JOB)
    (tmp_path / "a").rename(tmp_path / "b")
    assert jobfile.read_latest(tmp_path / "b") == JOB


def test_without_a_job_one_sentence_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job is running"):
        jobfile.read_latest(tmp_path / "nowhere")


def test_a_job_that_has_ended_is_not_running(tmp_path: Path) -> None:
    write(tmp_path, msgspec.structs.replace(JOB, status=1))
    with pytest.raises(ConfigError, match="films has ended with exit status 1"):
        jobfile.read_latest(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    (tmp_path / "films" / "job.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*job\.json"):
        jobfile.read_latest(tmp_path)
