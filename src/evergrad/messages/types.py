"""The ids, arrays and base class that messages are made of."""

from enum import StrEnum
from typing import Any, NamedTuple, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.uint8]
Numbers = NDArray[np.float64]
AnyArray = NDArray[Any]

Member = NewType("Member", str)
"""The incarnation of a process: new at each start, and its identity on the wire."""
Address = NewType("Address", str)
Place = NewType("Place", int)
Term = NewType("Term", int)
Generation = NewType("Generation", int)
Request = NewType("Request", int)

NEWEST = -1
"""As the version of a pull: whatever version the pserver has."""
INIT_STEP = -1
"""The step whose one task hands in the initial dense values; its commit makes version 0."""


class Attempt(NamedTuple):
    """One handing-out of a task; no two masters number alike."""

    term: int
    counter: int


class Role(StrEnum):
    """The three roles, and the process that starts them."""

    MASTER = "master"
    PSERVER = "pserver"
    TRAINER = "trainer"
    LAUNCHER = "launcher"


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of everything sent."""


class Send(NamedTuple):
    """What a role wants sent: `to` is the member that asked, or the address of a process to ask."""

    to: str
    message: Message
