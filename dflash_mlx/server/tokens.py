"""POST /tokenize and /detokenize: texts to token ids and back, in the forms of llama.cpp and vLLM."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.server.fields import Fields
from dflash_mlx.server.prompts import chat_messages, encode_chat, read_ending, template_variables
from dflash_mlx.server.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a text (`content` or `prompt`) or of `messages` through the chat template. Raises RequestError."""
    fields = await service.read_fields(request)
    service.check_model(fields.text("model"))
    with_pieces, with_strings = fields.flag("with_pieces"), fields.flag("return_token_strs")
    encode = _messages(service, fields) if fields.any("messages") is not None else _text(service, fields)
    fields.refuse("parse_special", "names of special tokens always become these tokens.", unless=(True,))
    fields.done()
    tokens = await service.tokenizing(encode)
    pieces = [service.vocabulary.text_of(token) for token in tokens] if with_pieces or with_strings else []
    found: list[Any] = tokens
    if with_pieces:
        found = [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]
    answer = {"tokens": found, "count": len(tokens), "max_model_len": service.pair.context_length}
    return JSONResponse({**answer, "token_strs": pieces if with_strings else None})


async def detokenize(service: Service, request: Request) -> Response:
    """The text of `tokens`, under both names that clients look for. Raises RequestError."""
    fields = await service.read_fields(request)
    service.check_model(fields.text("model"))
    tokens, size = fields.items("tokens"), service.vocab_size
    if tokens is None or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise fields.wrong("tokens", f"a list of token ids from 0 to {size - 1}")
    fields.done()
    text = await service.tokenizing(lambda: str(service.pair.tokenizer.decode(tokens)))
    return JSONResponse({"content": text, "prompt": text})


def _text(service: Service, fields: Fields) -> Any:
    """What encodes a text: vLLM's `prompt` with the tokens that the tokenizer adds, llama.cpp's `content` without."""
    name = "prompt" if fields.any("prompt") is not None else "content"
    text = fields.required_text(name)
    special = fields.flag("add_special_tokens", name == "prompt")
    special = fields.flag("add_special", special)
    return lambda: list(service.pair.tokenizer.encode(text, add_special_tokens=special))


def _messages(service: Service, fields: Fields) -> Any:
    messages, variables, ending = chat_messages(fields), template_variables(fields), read_ending(fields)
    fields.refuse("add_special_tokens", "the chat template writes these tokens itself.", unless=(False,))
    return lambda: encode_chat(service.pair, messages, (), variables, ending=ending)
