"""The sampling parameters that the protocols share, with OpenAI's ranges."""

from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields

MAX_TOKENS = 10_000_000
MAX_STOPS = 16
MAX_STOP_TOKENS = 256
MAX_ANSWERS = 16  # n, times the number of prompts

# Parameters of other servers that would change the answer and that nothing here follows, with the values that change
# nothing. A request that sets one to anything else is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 0),
    "tfs_z": (1, 0),
    "top_a": (0,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "grammar": ("",),
    "lora": ([],),
    "lora_request": (),
    "images": ([],),
}

# Below these, the choice is the likeliest token, as at temperature 0: a temperature cannot be told from 0 in float32,
# and no vocabulary is so large that the likeliest token has less than this share.
_GREEDY_TEMPERATURE = 1e-3
_GREEDY_TOP_P = 1e-6


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What holds where a request says nothing."""

    max_tokens: int = 8192
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def sampling(
    fields: Fields, defaults: Defaults, *, max_tokens: int, vocab_size: int, top_temperature: float = 2.0
) -> SamplingParams:
    """Read what chooses tokens; stop strings and logprobs are the protocols' own. Raises RequestError."""
    for name, harmless in UNSUPPORTED.items():
        fields.refuse(name, "this server cannot do it, and the answer would be another; leave it out.", unless=harmless)
    temperature = fields.number("temperature", 0, top_temperature, defaults.temperature)
    top_p = fields.number("top_p", 0, 1, defaults.top_p)
    if temperature < _GREEDY_TEMPERATURE or top_p < _GREEDY_TOP_P:
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=_or(fields.whole("top_k", 0, 2**31), defaults.top_k),
        min_p=fields.number("min_p", 0, 1, defaults.min_p),
        seed=_seed(fields),
        repetition_penalty=_repetition_penalty(fields),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(fields, vocab_size),
        min_tokens=_min_tokens(fields, max_tokens),
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
    )


def max_tokens_of(fields: Fields, name: str, default: int) -> int | None:
    """A limit on an answer's tokens, None where the request has none; -1 stands for the default."""
    value = fields.any(name)
    if type(value) is int and value == -1:
        return default
    return fields.whole(name, 1, MAX_TOKENS)


def stop_strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A string or a list of them."""
    value = fields.any(name)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise fields.wrong(name, f"a string that is not empty, or a list of at most {MAX_STOPS} of them")
    return tuple(dict.fromkeys(stops))


def answers_wanted(fields: Fields, prompts: int = 1) -> int:
    """`n`. Raises RequestError when it asks for too many answers."""
    n = _or(fields.whole("n", 1, MAX_ANSWERS), 1)
    if n * prompts > MAX_ANSWERS:
        raise RequestError(
            f"a request may ask for {MAX_ANSWERS} answers; this one asks for {n} to each of {prompts} prompts.",
            param="n",
        )
    return n


def wants_draft(fields: Fields) -> bool:
    """The extension {"dflash": {"draft": false}}: decode this request plainly."""
    return _flags_of_dflash(fields, draft=True)["draft"]


def wants_draft_and_rounds(fields: Fields) -> tuple[bool, bool]:
    """The same, and {"dflash": {"rounds": true}}: let the stream say what each round brought."""
    flags = _flags_of_dflash(fields, draft=True, rounds=False)
    return flags["draft"], flags["rounds"]


def _flags_of_dflash(fields: Fields, **defaults: bool) -> dict[str, bool]:
    extension = fields.object("dflash") or Fields({})
    flags = {name: extension.flag(name, default) for name, default in defaults.items()}
    extension.done()
    return flags


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters for answer `index` of a request: with a seed, each answer has its own."""
    return params if params.seed is None else replace(params, seed=(params.seed + index) % 2**32)


def _seed(fields: Fields) -> int | None:
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**32


def _repetition_penalty(fields: Fields) -> float:
    """`repetition_penalty`, or `repeat_penalty` as llama.cpp and Ollama call it."""
    other = fields.number("repeat_penalty", 0.01, 100, 1.0)
    return fields.number("repetition_penalty", 0.01, 100, other)


def _min_tokens(fields: Fields, max_tokens: int) -> int:
    wanted = _or(fields.whole("min_tokens", 0, MAX_TOKENS), 0)
    if wanted > max_tokens:
        raise RequestError(f"min_tokens is {wanted}, more than the {max_tokens} that may come.", param="min_tokens")
    return int(wanted)


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.items("stop_token_ids") or []
    if len(ids) > MAX_STOP_TOKENS or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.wrong("stop_token_ids", f"at most {MAX_STOP_TOKENS} token ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.mapping("logit_bias") or {}).items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias should have token ids from 0 to {vocab_size - 1} as keys; got {key[:40]!r}.",
                param="logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias of {token} should be a number from -100 to 100.", param="logit_bias")
        bias[token] = float(value)
    return bias


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
