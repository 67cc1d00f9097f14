"""Forced calls, and formats beside tools and reasoning: random models have to write what the grammar wants."""

import json

import openai
import pytest
from fakes import running
from jinja2 import Template
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, qwen3_coder
from tiny_pair import TEMPLATE, make_templated_pair
from transformers import AddedToken

from dflash_mlx.decoding import constraint
from dflash_mlx.server.grammar import answer_grammar
from dflash_mlx.server.tools import Offer
from dflash_mlx.server.worker import Worker

PLACE = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER = {
    "type": "object",
    "properties": {"place": PLACE, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}, "short": {"type": "boolean"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"zone": {"type": "integer", "minimum": -9, "maximum": 9}},
}
SCHEMAS = {"weather": WEATHER, 'ti"me': TIME}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ASK = [{"role": "user", "content": "Hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}


def serving(parser, *, single: bool, thinks: bool = False):
    """A server of a random model whose markers are single tokens, or are spelled."""
    pair = make_templated_pair()
    fast = pair.tokenizer._tokenizer
    if single:
        names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        # The model's vocabulary has five rows that no token belongs to.
        fast.add_tokens([AddedToken(name, special=False) for name in names])
    if thinks:
        fast.chat_template = TEMPLATE + "<think>"
    pair.tokenizer = TokenizerWrapper(
        fast,
        eos_token_ids=pair.tokenizer.eos_token_ids,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )
    if thinks:
        pair.tokenizer._think_start, pair.tokenizer._think_end = "<think>", "</think>"
        pair.tokenizer._think_start_tokens = tuple(fast.encode("<think>", add_special_tokens=False))
        pair.tokenizer._think_end_tokens = tuple(fast.encode("</think>", add_special_tokens=False))
    return running(Worker(pair, width=3), pair=pair)


@pytest.fixture(autouse=True)
def compact_json(monkeypatch):
    """Random models like white space, of which JSON may have much."""
    monkeypatch.setattr(constraint, "_JSON_OPTIONS", {"whitespace_flexible": False})


def bias(server, text, by):
    return {str(token): by for token in server.tokenizer.encode(text, add_special_tokens=False)}


def check_call(name, arguments):
    """By hand: the arguments fit the tool's schema."""
    if name == "weather":
        assert set(arguments) == {"place", "days"}
        assert arguments["place"] in PLACE["enum"]
        assert arguments["days"] in range(1, 10)
    else:
        assert name == 'ti"me'
        assert {"zone"} <= set(arguments) <= {"zone", "short"}
        # What a reference stands for, mlx-lm's parser of tags cannot see: it leaves the number as text.
        assert int(arguments["zone"]) in range(-9, 10)


@pytest.mark.parametrize(("parser", "single"), [(json_tools, True), (json_tools, False), (qwen3_coder, True)])
def test_calls_are_forced(parser, single):
    with serving(parser, single=single) as server:
        client = server.openai()
        ask = {"model": "fake", "messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 1}
        for seed in range(1):
            [call] = (
                client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False, seed=seed)
                .choices[0]
                .message.tool_calls
            )
            check_call(call.function.name, json.loads(call.function.arguments))
        for name in SCHEMAS:
            answer = client.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": name}})
            [call] = answer.choices[0].message.tool_calls
            assert (call.function.name, answer.choices[0].finish_reason) == (name, "tool_calls")
            check_call(name, json.loads(call.function.arguments))


def test_forced_calls_in_the_other_protocols():
    with serving(json_tools, single=True) as server:
        tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            choice["disable_parallel_tool_use"] = True
            options = {"model": "fake", "max_tokens": 200, "messages": ASK, "tools": tools, "tool_choice": choice}
            message = server.anthropic().messages.create(**options)
            [block] = message.content
            assert message.stop_reason == "tool_use"
            check_call(block.name, block.input)
            assert (
                server.anthropic()
                .messages.count_tokens(**{k: v for k, v in options.items() if k != "max_tokens"})
                .input_tokens
            )
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice = {"type": "function", "name": "weather"}
        answer = server.openai().responses.create(model="fake", input="Hi", tools=flat, tool_choice=choice)
        [call] = [item for item in answer.output if item.type == "function_call"]
        check_call(call.name, json.loads(call.arguments))


@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_calls_of_the_tools_that_are_allowed(name):
    with serving(json_tools, single=True) as server:
        client = server.openai()
        ask = {"max_tokens": 200, "temperature": 1, "seed": 3, "parallel_tool_calls": False}
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, tool_choice=choice, **ask)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == name
        check_call(name, json.loads(call.function.arguments))
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        others = [{"type": "function", "name": name}, {"type": "image_generation"}]
        choice = {"type": "allowed_tools", "mode": "required", "tools": others}
        ask["max_output_tokens"] = ask.pop("max_tokens")
        del ask["seed"]
        answer = client.responses.create(model="fake", input="Hi", tools=flat, tool_choice=choice, **ask)
        [call] = [item for item in answer.output if item.type == "function_call"]
        assert call.name == name


def test_a_format_or_a_call():
    """With both, the answer is one of the two; `none` leaves the format, `required` the calls."""
    with serving(json_tools, single=True) as server:
        client = server.openai()
        ask = {"model": "fake", "messages": ASK, "tools": TOOLS, "response_format": FORMAT, "max_tokens": 100}
        ask["parallel_tool_calls"] = False
        for by in (-100, 100):
            ask["logit_bias"] = bias(server, '"', by)
            message = client.chat.completions.create(**ask).choices[0].message
            assert bool(message.tool_calls) == (by < 0)
            if message.tool_calls:
                check_call(message.tool_calls[0].function.name, json.loads(message.tool_calls[0].function.arguments))
            else:
                assert json.loads(message.content) in ("yes", "no")
        none = client.chat.completions.create(**ask, tool_choice="none").choices[0].message
        assert json.loads(none.content) in ("yes", "no")
        assert client.chat.completions.create(**ask, tool_choice="required").choices[0].message.tool_calls


def test_after_reasoning_that_the_template_has_opened():
    with serving(json_tools, single=True, thinks=True) as server:
        assert Template(TEMPLATE + "<think>").render(messages=ASK, add_generation_prompt=True).endswith("<think>")
        # Nothing but the bias would make a random model end its reasoning.
        ask = {
            "model": "fake",
            "messages": ASK,
            "max_tokens": 200,
            "parallel_tool_calls": False,
            "logit_bias": bias(server, "</think>", 8),
        }
        for more in ({"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
            message = client_answer(server, ask | more)
            if more.get("tools"):
                check_call(message.tool_calls[0].function.name, json.loads(message.tool_calls[0].function.arguments))
            else:
                assert json.loads(message.content) in ("yes", "no")


def client_answer(server, ask):
    return server.openai().chat.completions.create(**ask, temperature=1, seed=1).choices[0].message


def test_calls_of_an_unknown_form_are_refused():
    with serving(json_tools, single=True) as server:
        server.tokenizer._tool_parser = test_calls_of_an_unknown_form_are_refused
        with pytest.raises(openai.BadRequestError, match="cannot enforce"):
            client_answer(server, {"model": "fake", "messages": ASK, "tools": TOOLS, "tool_choice": "required"})


def test_reasoning_whose_end_is_spelled():
    """By the grammar alone: no random model would spell the marker."""
    pair = make_templated_pair()
    pair.tokenizer._think_end = "</think>"
    made = answer_grammar(pair.tokenizer, offered=Offer(), wants_json=True, schema={"enum": ["yes"]}, reasoning=True)
    guide = constraint.grammar_constraint(pair, made).start()
    text = pair.tokenizer.encode('so </b> it is</think>\n"yes"', add_special_tokens=False)
    assert guide.allowed(text)[0] == len(text)
    wrong = pair.tokenizer.encode("so</think>no", add_special_tokens=False)
    assert guide.allowed(wrong)[0] == len(wrong) - 2
