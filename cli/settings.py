"""What the sampling options may be, said once: for the command line's options and for chat's /set."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """A value the user may choose: its type, the range in words, and the test for it."""

    kind: type
    expected: str
    allows: Callable[[Any], bool]


SETTINGS = {
    "stop": Setting(str, "text that is not empty", bool),
    "max-tokens": Setting(int, "a whole number of at least 1", lambda n: n >= 1),
    "temperature": Setting(float, "a number of at least 0", lambda x: 0 <= x < math.inf),
    "top-p": Setting(float, "a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "top-k": Setting(int, "0 (off) or a positive whole number", lambda n: n >= 0),
    "min-p": Setting(float, "a number from 0 to 1", lambda x: 0 <= x <= 1),
    "seed": Setting(int, "a whole number from 0 to 4294967295", lambda n: 0 <= n < 2**32),
    "width": Setting(int, "a whole number of at least 1", lambda n: n >= 1),
    "steps": Setting(int, "a whole number of at least 1", lambda n: n >= 1),
    "block-size": Setting(int, "a whole number from 2 to what the drafter was trained for", lambda n: n >= 2),
}


def parse(name: str, text: str, *, called: str | None = None) -> Any:
    """The value that `text` gives to a setting. Raises UsageError, which says what was expected.

    called: what the user called the setting, if not by its option.
    """
    setting = SETTINGS[name]
    try:
        value = setting.kind(text)
    except ValueError:
        value = None
    if value is None or not setting.allows(value):
        raise UsageError(f"{called or f'--{name}'} is {text}; expected {setting.expected}.")
    return value


def parser(name: str) -> Callable[[str], Any]:
    """A Typer parser for the option of that name."""
    return lambda text: parse(name, text)
