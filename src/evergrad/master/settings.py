"""How a master was started."""

import msgspec

from evergrad.master.failures import MAX_FAILURES


class Settings(msgspec.Struct, frozen=True):
    """What a master is told on its command line.

    Attributes:
        job: the job's name.
        places: how many pservers there are.
        lease_s: silence after which a member counts as dead.
        url: where checkpoints go, whatever the script says.
        scratch: where they go if the script does not say.
        resume: "auto", "never", or the checkpoint to begin with.
        keeps_record: whether there is a store for the record.
        max_failures: how many attempts at a task may fail.
    """

    job: str
    places: int
    lease_s: float
    url: str | None = None
    scratch: str | None = None
    resume: str = "auto"
    keeps_record: bool = False
    max_failures: int = MAX_FAILURES
