"""One question to a running job, for those who have not started it."""

import time

from evergrad.errors import ConfigError, Fenced
from evergrad.launch.link import MasterLink
from evergrad.messages import Status
from evergrad.wire.transport import Network, new_member

PATIENCE_S = 3.0
TURN_S = 0.1


def ask_status(job: str, master: str, within_s: float = PATIENCE_S) -> Status:
    """How a job goes.

    Raises:
        ConfigError: no master of this job answers at this address.
    """
    link = MasterLink(Network(job, new_member("status")), master)
    deadline = time.monotonic() + within_s
    try:
        while link.status is None and (now := time.monotonic()) < deadline:
            link.turn(now, TURN_S)
    except Fenced as exc:
        raise ConfigError(f"no job {job} is running at {master}: another one is there ({exc})") from exc
    finally:
        link.close()
    if link.status is None:
        raise ConfigError(f"no job is running: nobody answers for {job} at {master}")
    return link.status
