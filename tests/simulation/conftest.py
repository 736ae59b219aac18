"""What all simulations need of the machine."""

from collections.abc import Iterator

import pytest

from .machine import huge_pages


@pytest.fixture(autouse=True)
def _small_pages() -> Iterator[None]:
    huge_pages(False)
    yield
    huge_pages(True)
