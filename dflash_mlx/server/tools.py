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
class Choice:
    """What `tool_choice` asks for: "auto", "none" or "required", of the tools `names` (None: of all), once or more."""

    mode: str = "auto"
    names: tuple[str, ...] | None = None
    several: bool = True


@dataclass(frozen=True)
class Offer:
    """The tools that the model may call, in OpenAI's chat form; empty when it must not use any.

    forced: the answer has to be a call.
    """

    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    forced: bool = False
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


def offer(tools: list[dict[str, Any]], choice: Choice, parallel: bool, tokenizer: Any) -> Offer:
    """The tools to use; the model is not told of those that it may not call. Raises RequestError."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools should be at most {MAX_TOOLS}; got {len(tools)}.", param="tools")
    if choice.mode not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice should be auto, none, required or a tool; got {choice.mode[:80]}.", param="tool_choice"
        )
    known = [tool["function"]["name"] for tool in tools]
    unknown = next((name for name in choice.names or () if name not in known), None)
    if unknown is not None:
        raise RequestError(f"tool_choice names {unknown[:80]!r}, which is not among the tools.", param="tool_choice")
    if choice.names is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in choice.names]
    forced = choice.mode == "required"
    if forced and not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools; add some.", param="tool_choice")
    if not tools or choice.mode == "none":
        return Offer()
    if not tokenizer.has_tool_calling:
        raise RequestError(
            "this model has no tool calling: its chat template does not know tools. Leave tools out, or serve a "
            "model that has it.",
            param="tools",
        )
    return Offer(tuple(tools), parallel and choice.several, forced)


def read_choice(fields: Fields) -> Choice:
    """OpenAI's `tool_choice`: a word, a tool by name, or a list of those that are allowed. Raises RequestError."""
    choice = fields.any("tool_choice")
    if choice is None or isinstance(choice, str):
        return Choice(choice or "auto")
    named = fields.object("tool_choice")
    if named is None:
        raise fields.wrong("tool_choice", "auto, none, required or a tool")
    kind = named.any("type")
    if kind == "function":
        return Choice("required", (_name(named),), several=False)
    if kind != "allowed_tools":
        raise fields.wrong("tool_choice", "auto, none, required or an object of type function or allowed_tools")
    # Chat has one object more around it than responses has.
    allowed = named.object("allowed_tools") or named
    names = tuple(_name(tool) for tool in allowed.objects("tools") if tool.any("type") == "function")
    return Choice(allowed.choice("mode", ("auto", "required"), "auto"), names)


def _name(tool: Fields) -> str:
    """A tool's name, in chat's form or in that of responses."""
    return (tool.object("function") or tool).required_text("name")


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
