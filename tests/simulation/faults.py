"""What can be wrong with a run."""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The promises and rules that a run can break."""

    BITS = "the model is not that of a run without faults"
    COUNT = "a sample or batch did not count once"
    TORN = "pservers differ in what they applied"
    EVALUATION = "an evaluation is not that of one version, added up in order"
    SAVED = "a saved model is not the one of that place in the script"
    CHECKPOINT = "a checkpoint is not whole, or not of one moment"
    ENDLESS = "the job does not end"
    FAILED = "the job failed"
    CRASHED = "an exception ended a process"
    ANSWERS = "one request was answered in two ways"
    UNEXPLAINED = "the job stands still and the status does not say who is waited for"
    AHEAD = "a trainer begins a batch too far ahead of the slowest"
    UNBOUNDED = "a queue is longer than its bound"


class Fault(NamedTuple):
    """Something that is wrong, and the facts."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
