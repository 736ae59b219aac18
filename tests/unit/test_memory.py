"""What is left of the memory a pserver may use."""

import pytest

from evergrad.errors import ConfigError
from evergrad.pserver.memory import room_within


def test_the_room_is_what_the_limit_leaves_beside_what_the_process_has() -> None:
    room = room_within(64 << 30)
    before = room()
    held = bytearray(b"x" * (64 << 20))
    assert 0 < room() < before - (48 << 20)
    del held


def test_a_limit_the_process_itself_fills_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"takes nearly all of that; give at least \d+M"):
        room_within(1 << 20)
