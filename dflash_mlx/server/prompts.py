"""From a conversation to token ids: checked messages through the model's chat template."""

import contextlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_mlx.pair import ModelPair
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields

# What a request may not hand to apply_chat_template as a variable of the template: it would change how the prompt is
# made, or bring a template of the client's own.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
ANSWER, CONTINUED, BARE = "answer", "continued", "bare"  # ends of a prompt
_ROLES = ("system", "developer", "user", "assistant", "tool")


def template_variables(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`, `enable_thinking` and `reasoning_effort`, which chat templates may look at.

    Raises RequestError.
    """
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    for name in variables:
        if name in _RESERVED or name.startswith("_"):
            raise RequestError(
                f"chat_template_kwargs may not set {name[:80]}: only variables of the chat template, such as "
                "enable_thinking.",
                param="chat_template_kwargs",
            )
    found = effort_variables(fields.text("reasoning_effort"))
    if fields.any("enable_thinking") is not None:
        found["enable_thinking"] = fields.flag("enable_thinking")
    return {**found, **variables}


def read_ending(fields: Fields) -> str:
    """Where the prompt ends: "answer", "continued" (in the last message) or "bare". Raises RequestError.

    Of `add_generation_prompt` and `continue_final_message`, as vLLM and transformers have them.
    """
    continued = fields.flag("continue_final_message")
    added = fields.flag("add_generation_prompt", not continued)
    if continued and added:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true: the answer continues the last "
            "message or begins a new one.",
            param="continue_final_message",
        )
    messages = fields.any("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if continued and not (isinstance(last, dict) and last.get("role") == "assistant" and last.get("content")):
        raise RequestError(
            "continue_final_message needs a last message of the assistant, with text to continue.",
            param="continue_final_message",
        )
    return CONTINUED if continued else ANSWER if added else BARE


def effort_variables(effort: str | None) -> dict[str, Any]:
    """The template's variables for a reasoning effort; "none" turns reasoning off where a template can."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def text_of(fields: Fields, name: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A message's content: a string, or a list of text parts. Raises RequestError for images and the like."""
    value = fields.any(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong(name, "a string or a list of text parts")
    texts = []
    for part in fields.objects(name):
        kind = part.required_text("type")
        if kind not in kinds:
            raise RequestError(
                f"{part.where('type')} {kind[:40]} is not supported: this server reads text only.",
                param=part.where("type"),
            )
        texts.append(part.required_text("refusal" if kind == "refusal" else "text"))
        part.without_effect("cache_control", "annotations", "logprobs")
        part.done()
    return "".join(texts)


def chat_messages(fields: Fields) -> list[dict[str, Any]]:
    """OpenAI's chat messages as templates expect them. Raises RequestError."""
    found = fields.objects("messages")
    if not found:
        raise fields.wrong("messages", "a list of at least one message")
    return [_message(one) for one in found]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.required_text("role")
    if role not in _ROLES:
        raise fields.wrong("role", "one of " + ", ".join(_ROLES))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if fields.any("content") is None and role == "assistant":
        message["content"] = ""
    else:
        message["content"] = text_of(fields, "content", ("text", "refusal") if role == "assistant" else ("text",))
    fields.without_effect("refusal", "annotations", "audio", "dflash")
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    if role == "assistant":
        reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := [_earlier_call(call) for call in fields.objects("tool_calls")]:
            message["tool_calls"] = calls
    fields.any("reasoning")
    fields.done()
    return message


def _earlier_call(fields: Fields) -> dict[str, Any]:
    fields.choice("type", ("function",), "function")
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "an object")
    call = earlier_call(fields.required_text("id"), function.required_text("name"), function.any("arguments"))
    fields.without_effect("index")
    for part in (function, fields):
        part.done()
    return call


def earlier_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier answer. Templates want the arguments as an object, the protocol sends them as text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise RequestError(f"the arguments of the call {name[:80]} should be JSON.", param="messages") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def encode_chat(
    pair: ModelPair,
    messages: list[dict[str, Any]],
    tools: tuple[dict[str, Any], ...],
    variables: Mapping[str, Any],
    *,
    ending: str = ANSWER,
) -> list[int]:
    """Token ids up to where the answer begins; CONTINUED: it goes on where the last message stops; BARE: the
    template does not open an answer.

    Raises RequestError when the template refuses.
    """
    if not pair.tokenizer.has_chat_template:
        if variables or ending == CONTINUED:
            raise RequestError("this model has no chat template; leave out chat_template_kwargs and begun answers.")
        return pair.encode_chat(messages)
    flags: dict[str, Any] = (
        {"continue_final_message": True} if ending == CONTINUED else {"add_generation_prompt": ending == ANSWER}
    )

    def encoded(conversation: list[dict[str, Any]]) -> list[int]:
        return list(pair.tokenizer.apply_chat_template(conversation, tools=list(tools) or None, **flags, **variables))

    try:
        return encoded(messages)
    except Exception as error:
        # Clients such as Codex and Claude Code send instructions in several messages, which some templates refuse.
        if (joined := _joined(messages)) != messages:
            with contextlib.suppress(Exception):
                return encoded(joined)
        # Templates are programs of the model's makers, and whatever they raise is about this conversation.
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"the model's chat template refuses this conversation: {reason}", param="messages"
        ) from error


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with all instructions in one message at its beginning, and a user's messages in a row as one."""
    instructions = [message["content"] for message in messages if message["role"] == "system"]
    joined = [{"role": "system", "content": "\n\n".join(instructions)}] if instructions else []
    for message in messages:
        if message["role"] == "user" and joined and joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        elif message["role"] != "system":
            joined.append(message)
    return joined


def prompt_end(pair: ModelPair, tokens: list[int]) -> str:
    """The prompt's last few words, markers included."""
    return str(pair.tokenizer.decode(tokens[-16:]))
