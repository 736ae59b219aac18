"""The simulation can fail: with one rule of the protocol switched off it finds what that rule is for."""

import pytest

from .mutations import MUTATIONS
from .world import World

SCHEDULES = 1000


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.breaks)
def test_without_a_rule_a_fault_of_its_kind_is_found(mutation):
    with mutation.switched_off():
        faults = (World(mutation.schedule(seed), mutation.roles).run().faults for seed in range(SCHEDULES))
        found = next((f[0] for f in faults if f), None)
    assert found is not None, f"{SCHEDULES} schedules found nothing wrong"
    assert found.kind in mutation.kinds, found
