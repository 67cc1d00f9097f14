"""Which schemas are closed, by hand."""

import pytest

from dflash_mlx.decoding.schemas import closed

A = {"a": {"type": "integer"}}


def test_what_is_not_named_is_left_out():
    inner = {"type": "object", "properties": A}
    schema = {
        "type": "object",
        "properties": {"x": inner, "y": {"type": "array", "items": inner}, "z": {"$ref": "#/$defs/z"}},
        "$defs": {"z": {"anyOf": [inner, {"type": "null"}]}},
    }
    shut = inner | {"additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"x": shut, "y": {"type": "array", "items": shut}, "z": {"$ref": "#/$defs/z"}},
        "$defs": {"z": {"anyOf": [shut, {"type": "null"}]}},
        "additionalProperties": False,
    }
    assert inner == {"type": "object", "properties": A}, "the caller's own stays as it is"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": A, "additionalProperties": True},
        {"properties": A, "patternProperties": {"^x": {}}},
        {"allOf": [{"properties": A}, {"properties": {"b": {}}}]},
        {"properties": A, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"properties": {"type": "string"}, "x": {"allOf": []}}},
        {"enum": [1], "const": {"properties": A}},
    ],
)
def test_what_may_have_more_stays_open(schema):
    assert closed(schema) == schema
