"""Sizes of memory as people write them."""

import re

from evergrad.errors import ConfigError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def show_bytes(size: int) -> str:
    """A size as people read it, as "1.5G"."""
    unit = max((unit for unit, worth in UNITS.items() if size >= worth), key=UNITS.__getitem__, default="")
    return f"{size / UNITS[unit]:.1f}{unit}" if unit else str(size)


def parse_bytes(text: str) -> int:
    """A size such as "512M", "1.5G" or a number of bytes; units are powers of 1024.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no size of memory; write for example 512M or 4G")
    return int(float(match[1]) * UNITS[match[2].upper()])
