"""What an answer must look like when calls are forced, or when tools or reasoning come with a format: as a grammar.

The grammars are in llguidance's dialect of Lark. A marker that is one token of the model's is asked for as that token,
any other as text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from dflash_mlx.decoding.constraint import json_rule
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.tools import Offer

# Between reasoning and what comes after it, and between calls.
_GAP = r"/[ \n]{0,3}/"
_LINE = "\n"


def answer_grammar(
    tokenizer: Any, *, offered: Offer, wants_json: bool, schema: dict[str, Any] | None, reasoning: bool
) -> str:
    """The grammar of an answer: calls if they are forced, else JSON of `schema`, or calls where tools are offered.

    reasoning: the prompt has opened the model's reasoning, which has to end first. Raises RequestError for a model
    whose calls have a form that is not known here.
    """
    rules: list[str] = []
    kinds: list[str] = []
    if offered.tools:
        kinds.append("calls")
        rules += _calls(tokenizer, offered)
    if wants_json and not offered.forced:
        kinds.append("value")
        rules.append(f"value: {json_rule(schema)}")
    before = ""
    if reasoning:
        before = f"reasoning {_GAP} "
        rules += _reasoning(tokenizer)
    return "\n".join([f"start: {before}({' | '.join(kinds)})", *rules])


def _reasoning(tokenizer: Any) -> list[str]:
    """Any text, and the marker that ends it."""
    end = _token_of(tokenizer, tokenizer.think_end)
    if end is not None:
        return [f"reasoning: REASONING <[{end}]>", r"REASONING: /(.|\n)*/"]
    return [f"reasoning[lazy]: /(.|\\n)*{_in_regex(tokenizer.think_end)}/"]


def _calls(tokenizer: Any, offered: Offer) -> list[str]:
    """One call or, where that is allowed, several: any of the tools, with arguments that fit its schema."""
    form = tokenizer.tool_parser.__module__.rpartition(".")[2]
    write = {"json_tools": _json_call, "qwen3_coder": _tagged_call}.get(form)
    if write is None or not tokenizer.tool_call_end:
        raise RequestError(
            f"this model writes calls in a form ({form}) that this server cannot enforce. Use tool_choice auto without "
            "a response format, and tell the model in a message which tool to call.",
            param="tool_choice",
        )
    tools = [tool["function"] for tool in offered.tools]
    begin, end = (_marker(tokenizer, m) for m in (tokenizer.tool_call_start, tokenizer.tool_call_end))
    several = f" ({_GAP} call)*" if offered.parallel else ""
    rules = [f"calls: call{several}", f'call: {begin} "\\n" ({_any_of("tool", len(tools))}) "\\n" {end}']
    for i, tool in enumerate(tools):
        rules += write(f"tool_{i}", tool)
    return rules


def _json_call(rule: str, tool: dict[str, Any]) -> list[str]:
    """{"name": NAME, "arguments": {...}}, as Qwen3 and those after Hermes have it."""
    begin = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
    return [f'{rule}: {_text(begin)} {rule}_arguments "}}"', f"{rule}_arguments: {json_rule(tool['parameters'])}"]


def _tagged_call(rule: str, tool: dict[str, Any]) -> list[str]:
    """<function=NAME> with a <parameter=NAME> for each argument, as Qwen3-Coder and Qwen3.5 have it."""
    schema = tool["parameters"]
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required, properties = schema.get("required"), schema.get("properties")
    required = required if isinstance(required, list) else []
    parts, rules = [], []
    for i, (name, about) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        part = f"{rule}_{i}"
        parts.append(part if name in required else f"{part}?")
        rules.append(f"{part}: {_text(f'<parameter={name}>{_LINE}')} {part}_value")
        rules += _tagged_value(f"{part}_value", about if isinstance(about, dict) else {}, shared)
    begin = _text(f"<function={tool['name']}>\n")
    return [f'{rule}: {begin} {" ".join(parts)} "</function>"', *rules]


def _tagged_value(rule: str, schema: dict[str, Any], shared: dict[str, Any]) -> list[str]:
    """Texts stand there as they are, everything else as JSON."""
    end = "\n</parameter>\n"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return [f"{rule}: ({' | '.join(map(_text, choices))}) {_text(end)}"]
    if schema.get("type", "string") == "string" and "$ref" not in schema:
        return [f"{rule}[lazy]: /(.|\\n)*{_in_regex(end)}/"]
    return [f"{rule}: {rule}_json {_text(end)}", f"{rule}_json: {json_rule({**schema, **shared})}"]


def _any_of(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(count))


def _marker(tokenizer: Any, marker: str) -> str:
    token = _token_of(tokenizer, marker)
    return _text(marker) if token is None else f"<[{token}]>"


def _token_of(tokenizer: Any, text: str) -> int | None:
    """The token that stands for a marker, None where it takes several."""
    tokens: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens[0] if len(tokens) == 1 else None


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_regex(text: str) -> str:
    """A text within a regular expression of Lark, between slashes."""
    return re.sub(r"[][\\^$.|?*+(){}/]", r"\\\g<0>", text).replace("\n", r"\n")
