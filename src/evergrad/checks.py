"""What is asked of a user's arguments, with the sentence for those that do not do."""

from operator import index

from evergrad.errors import ConfigError


def whole_number(what: str, value: object, least: int) -> int:
    """A whole number of at least `least`, numpy's included; `what` names it in the message.

    Raises:
        ConfigError: it is none.
    """
    try:
        number = index(value)  # type: ignore[arg-type]  # index() checks it
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        counts = {0: "zero", 1: "one"}
        raise ConfigError(f"{what} is {value!r}; give a whole number of {counts.get(least, least)} or more")
    return number
