"""Sizes of memory as people write them."""

import pytest

from evergrad.errors import ConfigError
from evergrad.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("512M", 512 << 20), ("4G", 4 << 30), ("1.5GB", 3 << 29), ("2gib", 2 << 30), (" 7 k ", 7 << 10)],
)
def test_units_are_powers_of_1024(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "1X", "1 G 2"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example 512M or 4G"):
        parse_bytes(text)
