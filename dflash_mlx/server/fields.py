"""Reading a request's JSON object field by field: each is checked, and those that nobody read are noted by name."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.server.failures import RequestError

MAX_IGNORED = 32  # names that an answer's header lists


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises RequestError, also for text that no encoding can hold."""
    try:
        value = json.loads(body)
        # Escapes can spell half a surrogate pair, which no tokenizer takes.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flatter JSON object.") from None
    except ValueError as error:
        raise RequestError(f"the body should be a JSON object in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body should be a JSON object; got {_kind(value)}.")
    return value


class Fields:
    """An object of a request. `path` is where it stands in the body, for error messages.

    A field that is null counts as absent. `ignored` names what was sent and changes nothing, for all objects of a
    request together: `done` adds what was never asked for.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", *, ignored: list[str] | None = None) -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()
        self.ignored: list[str] = [] if ignored is None else ignored

    def where(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, expected: str) -> RequestError:
        """An error that says what the field should be."""
        found = _kind(self._values.get(name))
        return RequestError(f"{self.where(name)} should be {expected}; got {found}.", param=self.where(name))

    def any(self, name: str) -> Any:
        """The value as it is."""
        self._known.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.wrong(name, "a string")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.any(name)
        if value is None:
            return default
        if value not in allowed:
            raise self.wrong(name, "one of " + ", ".join(allowed))
        return str(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            above = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise self.wrong(name, f"a number {above}")
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.any(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.any(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self.mapping(name)
        return None if value is None else Fields(value, self.where(name), ignored=self.ignored)

    def objects(self, name: str) -> "list[Fields]":
        """A list of objects; empty when it is absent."""
        found = []
        for i, value in enumerate(self.items(name) or []):
            if not isinstance(value, dict):
                raise RequestError(f"{self.where(name)}[{i}] should be an object; got {_kind(value)}.", param=name)
            found.append(Fields(value, f"{self.where(name)}[{i}]", ignored=self.ignored))
        return found

    def without_effect(self, *names: str) -> None:
        """Fields that may be sent and change nothing here; docs/server.md lists them."""
        self._known.update(names)

    def refuse(self, name: str, reason: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Refuse a field that is set to anything but the harmless values in `unless`; 0.0 is as harmless as 0."""
        value = self.any(name)
        plain = int(value) if isinstance(value, float) and value.is_integer() else value
        if value is not None and not any(plain == harmless and type(plain) is type(harmless) for harmless in unless):
            raise RequestError(f"{self.where(name)} is not supported: {reason}", param=self.where(name))

    def done(self) -> None:
        """Note the fields that nothing has read."""
        for name, value in self._values.items():
            if name not in self._known and value is not None:
                self.ignore(self.where(name))

    def ignore(self, what: str) -> None:
        """Note a part of the request that changes nothing, though its sender may expect that it does."""
        if len(self.ignored) < MAX_IGNORED and what not in self.ignored:
            self.ignored.append(what)


def _kind(value: Any) -> str:
    """A value in an error message: short ones as they are, others by their kind."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return f"a{'n object' if isinstance(value, dict) else ' list'} of {len(value)}"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."
