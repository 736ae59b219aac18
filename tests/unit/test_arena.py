import numpy as np
import pytest

from evergrad.pserver import arena
from evergrad.pserver.arena import Arena


@pytest.mark.parametrize("machine_bytes", [0, 1 << 62, arena._MACHINE_BYTES])
def test_what_an_arena_holds_survives_growth_however_much_address_space_there_is(monkeypatch, machine_bytes):
    monkeypatch.setattr(arena, "_MACHINE_BYTES", machine_bytes)
    floats = Arena(np.float32)
    size = 0
    for more in (1, 100_000, 3_000_000, 5_000_000):
        floats.reserve(size + more)
        assert floats.array.size >= size + more
        assert not floats.array[size : size + more].any()
        floats.array[size : size + more] = np.arange(size, size + more)
        size += more
        assert (floats.array[:size] == np.arange(size, dtype=np.float32)).all()


def test_more_than_the_system_has_is_refused_and_what_there_was_is_kept():
    floats = Arena(np.float32)
    floats.reserve(10)
    floats.array[:10] = 7
    with pytest.raises(MemoryError, match="the system refuses"):
        floats.reserve(1 << 60)
    assert (floats.array[:10] == 7).all()
