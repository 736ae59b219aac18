"""`job.json` in a job's log folder: how `evergrad status` and late trainers find a job.

LOG_DIR/latest -> JOB            the newest job
LOG_DIR/JOB/job.json             this file
LOG_DIR/JOB/trainer-0.log ...    one log per process
"""

import os
from pathlib import Path

import msgspec

from evergrad.errors import ConfigError
from evergrad.messages import Address

NAME = "job.json"
LATEST = "latest"


class JobFile(msgspec.Struct, frozen=True):
    """A job as its launcher describes it; `status` is its exit status once it is over."""

    job: str
    master: Address
    launcher_pid: int
    script: str
    args: tuple[str, ...]
    pservers: int
    trainers: int
    seed: int | None = None
    status: int | None = None


def write(folder: Path, job: JobFile) -> None:
    """Write the file as a whole or not at all."""
    new = folder / f".{NAME}.{os.getpid()}"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=2) + b"\n")
    new.replace(folder / NAME)


def make_latest(folder: Path) -> None:
    """Point `latest` in the folder above at this job's folder."""
    new = folder.parent / f".{LATEST}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name, target_is_directory=True)
    new.replace(folder.parent / LATEST)


def read_latest(log_dir: Path) -> JobFile:
    """The newest job of a log folder, if it has not ended.

    Raises:
        ConfigError: there is none, or it is over.
    """
    path = log_dir / LATEST / NAME
    try:
        job = msgspec.json.decode(path.read_bytes(), type=JobFile)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"no job is running: there is no {path}; start one with 'evergrad run', or name its --log-dir"
        ) from None
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    if job.status is not None:
        raise ConfigError(f"no job is running: {job.job} has ended with exit status {job.status}; see {path.parent}")
    return job
