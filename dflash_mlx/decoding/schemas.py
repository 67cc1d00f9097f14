"""JSON schemas as they are enforced: an object has the properties that its schema names, and no others."""

from typing import Any

_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_INSIDE_ONE = ("items", "contains", "additionalProperties")
_INSIDE_LIST = ("anyOf", "oneOf", "prefixItems")
_INSIDE_MAPPING = ("properties", "$defs", "definitions", "patternProperties")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` where it says nothing of them, as other servers read it.

    What fits the closed schema fits the open one. Models that may add properties rarely come to an end. A schema that
    puts objects together from parts is left as it is: closed parts would exclude each other.
    """
    return _closed(schema) if _is_simple(schema) else schema


def _is_simple(part: Any) -> bool:
    if isinstance(part, list):
        return all(map(_is_simple, part))
    if not isinstance(part, dict):
        return True
    combined = "allOf" in part or (isinstance(part.get("properties"), dict) and any(k in part for k in _COMBINED))
    return not combined and all(map(_is_simple, part.values()))


def _closed(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    found = dict(part)
    for name in _INSIDE_ONE:
        if name in found:
            found[name] = _closed(found[name])
    for name in _INSIDE_LIST:
        if isinstance(found.get(name), list):
            found[name] = [_closed(one) for one in found[name]]
    for name in _INSIDE_MAPPING:
        if isinstance(found.get(name), dict):
            found[name] = {key: _closed(value) for key, value in found[name].items()}
    if isinstance(found.get("properties"), dict) and found["properties"] and not any(name in found for name in _OPEN):
        found["additionalProperties"] = False
    return found
