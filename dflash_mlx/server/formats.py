"""The format that a request asks of an answer's text, in the words of OpenAI and of vLLM."""

from typing import Any

from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields, parse_object

# Whether the answer has to be JSON, and by which schema; None stands for any object.
Format = tuple[bool, dict[str, Any] | None]


def read_format(fields: Fields) -> Format:
    """`response_format`, or vLLM's `structured_outputs` and `guided_json`. Raises RequestError."""
    found = {
        "response_format": read_response_format(fields.object("response_format")),
        "structured_outputs": _structured_outputs(fields.object("structured_outputs")),
        "guided_json": _guided_json(fields, "guided_json"),
    }
    asked = {name: form for name, form in found.items() if form[0]}
    if len(asked) > 1:
        raise RequestError(f"a request may ask for one format; this one has {' and '.join(asked)}.", param=[*asked][1])
    return next(iter(asked.values()), (False, None))


def read_response_format(form: Fields | None, *, nested: bool = True) -> Format:
    """Whether the answer has to be JSON, and by which schema. `nested`: the schema stands in its own object."""
    if form is None:
        return False, None
    kind = form.choice("type", ("text", "json_object", "json_schema"), "text")
    schema = None
    if kind == "json_schema":
        holder = form.object("json_schema") if nested else form
        if holder is None or (schema := holder.mapping("schema")) is None:
            raise form.wrong("json_schema", "an object with a schema")
        holder.without_effect("name", "description", "strict")
        holder.done()
    form.done()
    return kind != "text", schema


def _structured_outputs(form: Fields | None) -> Format:
    """vLLM's object, with `json` or `json_object`; its other kinds are refused."""
    if form is None:
        return False, None
    for kind in ("regex", "choice", "grammar", "structural_tag"):
        form.refuse(kind, "this server can enforce JSON only.")
    found = _guided_json(form, "json")
    return found if found[0] else (form.flag("json_object"), None)


def _guided_json(fields: Fields, name: str) -> Format:
    """A JSON schema, as an object or as its text."""
    value = fields.any(name)
    if isinstance(value, str):
        try:
            return True, parse_object(value.encode())
        except RequestError:
            raise fields.wrong(name, "a JSON schema") from None
    schema = fields.mapping(name)
    return schema is not None, schema
