"""Log-probabilities in OpenAI's two shapes."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.scoring import ScoredToken
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.vocabulary import Vocabulary

# What stands for a probability of 0, which JSON has no logarithm for.
LOWEST = -9999.0


def read_top_logprobs(fields: Fields) -> int | None:
    """Chat's `logprobs` and `top_logprobs`: how many alternatives, or None for no log-probabilities."""
    top = fields.whole("top_logprobs", 0, 20)
    if not fields.flag("logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
        return None
    return top or 0


def read_prompt_logprobs(fields: Fields, *, stream: bool) -> int | None:
    """vLLM's `prompt_logprobs`: how many alternatives for each token of the prompt, or None. Raises RequestError."""
    count = fields.whole("prompt_logprobs", 0, 20)
    if count is not None and stream:
        raise RequestError(
            "prompt_logprobs comes with whole answers only; ask without stream.", param="prompt_logprobs"
        )
    return count


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Where the tokens of a text begin, in characters; a token may be a part of a character."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, data: bytes) -> int:
        """Where a token with these bytes begins: at the character that it continues, if there is one."""
        start = self._characters
        self._characters += len(self._decoder.decode(data))
        return start


@dataclass(frozen=True)
class Echo:
    """A prompt to be shown before its answer; the first `added` of its tokens are not in the text."""

    tokens: list[int]
    text: str
    added: int


def prompt_logprobs(entries: Sequence[ScoredToken], count: int, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs` of an answer: for each token of its prompt that token and the `count` likeliest ones.

    Nothing is known of the first token, which follows on nothing.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token)}

    found: list[dict[str, Any] | None] = [None]
    for e in entries:
        here = {str(e.token_id): entry(e.token_id, e.logprob, e.rank)}
        for rank, (token, logprob) in enumerate(e.top[:count], 1):
            here.setdefault(str(token), entry(token, logprob, rank))
        found.append(here)
    return found


def echo_logprobs(
    echo: Echo, entries: Sequence[TokenLogprob], vocabulary: Vocabulary, offsets: Offsets
) -> dict[str, Any]:
    """Of the tokens of an echoed prompt. Nothing is known of the first one, which follows on nothing."""
    first = TokenLogprob(echo.tokens[0], 0.0, ())
    if echo.added:
        found = completion_logprobs([first], vocabulary, Offsets())
        rest = completion_logprobs(entries, vocabulary, offsets)
        found = {name: values + rest[name] for name, values in found.items()}
    else:
        found = completion_logprobs([first, *entries], vocabulary, offsets)
    found["token_logprobs"][0] = None
    return found


def completion_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary, offsets: Offsets) -> dict[str, Any]:
    """The `logprobs` object of a completion's next tokens."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for e in entries:
        found["tokens"].append(vocabulary.text_of(e.token_id))
        found["token_logprobs"].append(_finite(e.logprob))
        top: dict[str, float] = {}
        for token, logprob in e.top:  # the best comes first; parts of characters share one text
            top.setdefault(vocabulary.text_of(token), _finite(logprob))
        found["top_logprobs"].append(top or None)
        found["text_offset"].append(offsets.next(vocabulary.bytes_of(e.token_id)))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
