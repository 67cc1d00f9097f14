"""Structured output: only tokens that keep the text on course may come, with drafting still on.

Before a block is verified, its drafts are walked through a matcher on the host. That gives the tokens allowed at each
of the block's rows, and cuts the drafts at the first one that is not; so the answer is that of plain decoding under
the same constraint. The matcher is llguidance (https://github.com/guidance-ai/llguidance).
"""

import json
import threading
from collections.abc import Set
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.decoding.schemas import closed
from dflash_mlx.drafters.contract import Proposal
from dflash_mlx.errors import DFlashError, UsageError

# For a token at each row: one bit a token of the vocabulary, (rows, words) of 32.
Bits = npt.NDArray[np.uint32]
_WORD = 32
# Models that lose their way in whitespace would never end; people and models indent by less.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}


class Guide(Protocol):
    """One answer's way through a constraint."""

    def advance(self, tokens: list[int]) -> None:
        """These tokens came."""

    def allowed(self, drafts: list[int]) -> tuple[int, Bits]:
        """How many of the drafts may come, one after another, and what may come at their rows and the one after."""

    @property
    def done(self) -> bool:
        """Whether anything may come from now on, so that the guide is needed no longer."""


class Constraint(Protocol):
    """What the text of an answer must look like. May serve any number of answers, also at the same time."""

    def start(self) -> Guide:
        """For a new answer, of which nothing is there yet."""


def limit(guide: Guide, proposal: Proposal | None, drafts: list[int]) -> tuple[Proposal | None, Bits]:
    """Cut a proposal, whose tokens are `drafts`, where it leaves the course; what may come at each row, (W + 1, words).

    Speculative sampling draws the token in a refused draft's place from a distribution that depends on the draft, so
    there the first one that is off course stays, to be refused.
    """
    width = proposal.width if proposal else 0
    count, bits = guide.allowed(drafts[:width])
    if proposal is None:
        return None, bits
    keep = count if proposal.probs is None else min(count + 1, width)
    return proposal.shortened(keep) if keep else None, bits[: keep + 1]


def mask_rows(rows: mx.array, bits: Bits) -> mx.array:
    """Logits (R, V) with -inf where a token may not come."""
    words = mx.array(bits)
    spread = (words[:, :, None] >> mx.arange(_WORD, dtype=mx.uint32)) & 1
    allowed = spread.reshape(words.shape[0], -1)[:, : rows.shape[1]]
    return mx.where(allowed.astype(mx.bool_), rows, -mx.inf)


class Speaks(Protocol):
    """What a constraint needs of a pair: which tokens there are."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> set[int]: ...


class _GrammarConstraint:
    """A grammar of llguidance's."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self._tokenizer, self._grammar = tokenizer, grammar

    def start(self) -> Guide:
        from llguidance import LLMatcher

        return _GrammarGuide(LLMatcher(self._tokenizer, self._grammar), self._tokenizer.vocab_size)


class _GrammarGuide:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // _WORD)
        self._require_sound()

    def advance(self, tokens: list[int]) -> None:
        for token in tokens:
            # Once nothing but the end can come, the matcher wants to hear of nothing more.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._require_sound()

    def allowed(self, drafts: list[int]) -> tuple[int, Bits]:
        bits = np.full((len(drafts) + 1, self._words), 0xFFFFFFFF, dtype=np.uint32)
        count = 0
        self._fill(bits[0])
        for draft in drafts:
            if not _has(bits[count], draft) or self._matcher.try_consume_tokens([draft]) == 0:
                break
            count += 1
            self._fill(bits[count])
        self._matcher.rollback(count)
        self._require_sound()
        return count, bits

    @property
    def done(self) -> bool:
        return False

    def _fill(self, row: npt.NDArray[np.uint32]) -> None:
        row[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._words]

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise DFlashError(
                f"the required format cannot be followed any further ({_first_line(self._matcher.get_error())}); "
                "use a simpler schema."
            )


def _has(row: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(int(row[token // _WORD]) >> (token % _WORD) & 1)


class AtLeast:
    """A guide that holds the end back until an answer has `tokens` tokens; `ends` are the tokens that would end it."""

    def __init__(self, tokens: int, ends: Set[int], vocab_size: int) -> None:
        self._missing = tokens
        self._ends = frozenset(end for end in ends if 0 <= end < vocab_size)
        self._words = -(-vocab_size // _WORD)

    def advance(self, tokens: list[int]) -> None:
        self._missing -= len(tokens)

    @property
    def done(self) -> bool:
        return self._missing <= 0

    def allowed(self, drafts: list[int]) -> tuple[int, Bits]:
        bits = np.full((len(drafts) + 1, self._words), 0xFFFFFFFF, dtype=np.uint32)
        held = max(0, self._missing)
        for end in self._ends:
            bits[:held, end // _WORD] &= np.uint32(~(1 << end % _WORD) & 0xFFFFFFFF)
        early = (i for i, draft in enumerate(drafts[:held]) if draft in self._ends)
        return next(early, len(drafts)), bits


def json_constraint(pair: Speaks, schema: dict[str, Any] | None) -> Constraint:
    """Text that is a JSON value of this schema; of None, any JSON object. UsageError for what llguidance cannot do.

    The first constraint of a pair takes about a second, as its tokenizer is read.
    """
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(_any_object(schema)), overrides=_JSON_OPTIONS)
    except (ValueError, TypeError) as error:
        raise UsageError(f"the JSON schema cannot be used: {_first_line(str(error))}.") from error
    return _constraint(pair, grammar)


def grammar_constraint(pair: Speaks, lark: str) -> Constraint:
    """Text of a grammar in llguidance's dialect of Lark, JSON by `json_rule`. UsageError as of `json_constraint`."""
    from llguidance import LLMatcher

    return _constraint(pair, LLMatcher.grammar_from_lark(lark))


def json_rule(schema: dict[str, Any] | None) -> str:
    """A JSON value of this schema, or any object, in the text of a grammar for `grammar_constraint`."""
    return "%json " + json.dumps({**_any_object(schema), "x-guidance": _JSON_OPTIONS})


def _any_object(schema: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "object"} if schema is None else closed(schema)


def _constraint(pair: Speaks, grammar: str) -> Constraint:
    from llguidance import LLMatcher

    tokenizer = _tokenizer_of(pair)
    problem = LLMatcher.validate_grammar(grammar, tokenizer)
    if problem and not problem.startswith("WARNING"):
        raise UsageError(f"the JSON schema cannot be used: {_first_line(problem)}; simplify it.")
    return _GrammarConstraint(tokenizer, grammar)


_tokenizers: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_tokenizers_lock = threading.Lock()


def _tokenizer_of(pair: Speaks) -> Any:
    """llguidance's form of a pair's tokenizer, made once."""
    from llguidance.hf import from_tokenizer

    with _tokenizers_lock:
        if pair.tokenizer not in _tokenizers:
            fast: Any = getattr(pair.tokenizer, "_tokenizer", pair.tokenizer)
            try:
                made = from_tokenizer(fast, n_vocab=pair.vocab_size, eos_token=sorted(pair.eos_ids))
            except (ValueError, AttributeError) as error:
                raise UsageError(
                    f"structured output needs a fast tokenizer, and this model's is of another kind: {error}."
                ) from error
            _tokenizers[pair.tokenizer] = made
        return _tokenizers[pair.tokenizer]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")
