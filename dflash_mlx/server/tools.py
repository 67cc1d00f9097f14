"""Tools: what a request offers, and the calls in an answer, read by mlx-lm's parser for the model."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields

MAX_TOOLS = 256

# What a definition may also say, and what changes nothing here. docs/server.md says so.
WITHOUT_EFFECT = (
    "strict",
    "cache_control",
    "defer_loading",
    "eager_input_streaming",
    "input_examples",
    "allowed_callers",
)


@dataclass(frozen=True)
class ToolCall:
    """A call the model makes; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Offer:
    """The tools of a request in OpenAI's chat form, empty when the model must not use any.

    forced: the answer has to be a call, and of the tool `only` where that is set.
    """

    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    forced: bool = False
    only: str | None = None
    id_prefix: str = "call_"  # of calls to which the model gives no id: OpenAI's form


def function_tool(fields: Fields, *, schema: str = "parameters") -> dict[str, Any]:
    """A function's definition, as chat templates expect it: {"type": "function", "function": {...}}."""
    name = fields.required_text("name")
    if not name or len(name) > 256:
        raise fields.wrong("name", "a string of 1 to 256 characters")
    function: dict[str, Any] = {"name": name, "description": fields.text("description") or ""}
    function["parameters"] = fields.mapping(schema) or {"type": "object", "properties": {}}
    fields.any("type")
    fields.without_effect(*WITHOUT_EFFECT)
    fields.done()
    return {"type": "function", "function": function}


def offer(
    tools: list[dict[str, Any]], choice: str, parallel: bool, tokenizer: Any, *, only: str | None = None
) -> Offer:
    """The tools to use. choice: "auto", "none" or "required"; only: the one to call. Raises RequestError."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools should be at most {MAX_TOOLS}; got {len(tools)}.", param="tools")
    names = [tool["function"]["name"] for tool in tools]
    if only is not None and only not in names:
        raise RequestError(f"tool_choice names {only[:80]!r}, which is not among the tools.", param="tool_choice")
    if choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice should be auto, none, required or a tool; got {choice[:80]}.", param="tool_choice"
        )
    forced = choice == "required" or only is not None
    if forced and not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools; add some.", param="tool_choice")
    if not tools or choice == "none":
        return Offer()
    if not tokenizer.has_tool_calling:
        raise RequestError(
            "this model has no tool calling: its chat template does not know tools. Leave tools out, or serve a "
            "model that has it.",
            param="tools",
        )
    return Offer(tuple(tools), parallel and only is None, forced, only)


def read_choice(fields: Fields) -> tuple[str, str | None]:
    """OpenAI's `tool_choice`: a word and, for a tool by name, that name. Raises RequestError."""
    choice = fields.any("tool_choice")
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    named = fields.object("tool_choice")
    if named is None:
        raise fields.wrong("tool_choice", "auto, none, required or a tool")
    if named.any("type") != "function":
        raise fields.wrong("tool_choice", "auto, none, required or an object of type function")
    name = (named.object("function") or named).required_text("name")
    return "required", name


def parse_calls(text: str, offered: Offer, tokenizer: Any) -> list[ToolCall] | None:
    """The calls in the text between a model's tool markers; None when they cannot be read."""
    try:
        parsed = tokenizer.tool_parser(text, list(offered.tools))
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [_call(call, offered.id_prefix) for call in calls]
    except Exception:
        # The text is the model's own and the parsers are many: any failure only means that this is no call.
        return None


def _call(call: dict[str, Any], id_prefix: str) -> ToolCall:
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id") or f"{id_prefix}{uuid.uuid4().hex[:24]}"), name, arguments)
