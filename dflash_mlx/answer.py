"""One answer as it is made: its conversation's caches, its lane in the decode loop, and the text as it comes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dflash_mlx.decoding.accept import choose_strategy
from dflash_mlx.decoding.constraint import AtLeast, Constraint, Guide
from dflash_mlx.decoding.decode import prefill_chunks
from dflash_mlx.decoding.lane import FinishReason, Lane, Step
from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.detokenizing import new_detokenizer
from dflash_mlx.errors import ContextError, PromptError, UsageError
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams


@dataclass
class GenerationResponse:
    """A piece of an answer (`stream_generate`) or all of it (`generate`), with the running totals.

    token_ids holds every token emitted, a final end-of-sequence token included; text leaves that one out, and a stop
    string too. Speeds are tokens a second: `prompt_tps` over the tokens that were not cached, up to the first new
    token; `generation_tps` over the tokens after the first. Of a round: num_accepted drafts were kept of `width`,
    and at most `depth` could have been (a tree has more drafts than that). round_s: seconds it took, None where that is
    not known; a response comes when the next round is on its way. logprobs: of token_ids, in order; empty unless asked
    for.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    mode: str
    cached_tokens: int = 0
    generation_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    peak_memory_gb: float = 0.0
    finish_reason: FinishReason | None = None
    acceptance: Acceptance | None = None
    num_accepted: int | None = None
    width: int | None = None
    depth: int | None = None
    round_s: float | None = None
    notice: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generation_tokens": self.generation_tokens,
            "prompt_tps": round(self.prompt_tps, 3),
            "generation_tps": round(self.generation_tps, 3),
            "peak_memory_gb": round(self.peak_memory_gb, 3),
            "mode": self.mode,
            "acceptance": self.acceptance.to_json() if self.acceptance else None,
        }


class Answer:
    """An answer to a prompt (token ids): `open` it, `read` the prompt, `begin` its lane, `add` each of its steps.

    continues: the answer goes on in the prompt's text, so that a space at its beginning is shown.
    on_prompt_read gets the session once its prompt was read, all but the last token, unless nothing was left to read.
    Raises PromptError and UsageError for what cannot be done.
    """

    def __init__(
        self,
        pair: ModelPair,
        prompt: list[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        draft: bool = True,
        width: int | None = None,
        tree: bool = False,
        constraint: Constraint | None = None,
        continues: bool = False,
        on_prompt_read: Callable[[Session], None] | None = None,
    ) -> None:
        self.on_prompt_read = on_prompt_read
        require_possible(pair, params, constraint)
        self.max_tokens = fitting_max_tokens(pair, len(prompt), params.max_tokens)
        if session is None:
            session = pair.new_session(draft=draft)
            session.ends_with_answer = True
        elif draft and pair.drafter is not None and session.drafter is None:
            raise UsageError("this session was made without a drafter; make it with pair.new_session().")
        self.pair, self.prompt, self.params, self.session, self.constraint = pair, prompt, params, session, constraint
        self.drafting = draft and session.drafter is not None
        self.mode = pair.method if self.drafting else "plain"
        self._experience = pair.new_experience()
        self.policy = (
            pair.width_policy(width, tree=tree, experience=self._experience, prompt_tokens=len(prompt))
            if self.drafting
            else FixedWidth(0)
        )
        self.acceptance = Acceptance()
        self.tokens = self.cached_tokens = 0
        self.ends = params.ends(pair.eos_ids)
        self.lane: Lane | None = None
        # Text that may be the beginning of a stop string and is not shown yet.
        self.held = ""
        self.started = time.perf_counter()
        self.first_token_at: float | None = None
        self.detokenizer = new_detokenizer(pair.tokenizer, continues=continues)

    def open(self) -> None:
        """Let the session hold no more than a beginning of the prompt."""
        self.started = time.perf_counter()
        self.session.rewind(min(common_prefix(self.session.tokens, self.prompt), len(self.prompt) - 1))
        self.cached_tokens = len(self.session.tokens)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read; the last one is fed by the first round."""
        return len(self.prompt) - 1 - len(self.session.tokens)

    def read(self, most: int) -> None:
        """Read the next chunk of the prompt, of at most this many tokens."""
        next(prefill_chunks(self.session, self.prompt[:-1], most=most))

    def begin(self) -> Lane:
        """The lane, once the prompt has been read."""
        if self.on_prompt_read is not None and len(self.session.tokens) > self.cached_tokens:
            self.on_prompt_read(self.session)
        self.lane = Lane(
            session=self.session,
            prompt=self.prompt,
            strategy=choose_strategy(self.params),
            policy=self.policy,
            max_tokens=self.max_tokens,
            eos_ids=self.ends,
            processors=self.params.logits_processors(),
            guide=self._guide(),
            top_logprobs=self.params.top_logprobs,
        )
        return self.lane

    def _guide(self) -> Guide | None:
        if self.constraint is not None:
            return self.constraint.start()
        if self.params.min_tokens > 0 and self.ends:
            return AtLeast(self.params.min_tokens, self.ends, self.pair.vocab_size)
        return None

    def finish(self) -> None:
        """Let later answers begin with what this one has learnt.

        Where it has learnt nothing, it would only take back what others have learnt since it began.
        """
        if self.lane is not None and self.lane.taught:
            self.pair.learn(self._experience)

    def add(self, step: Step) -> GenerationResponse:
        """Turn a round's tokens into a response. Tokens after a stop string are dropped."""
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
        finish = step.finish_reason
        taken: list[int] = []
        text = ""
        for token in step.tokens:
            taken.append(token)
            if token not in self.ends and token not in self.pair.eos_ids:
                self.detokenizer.add_token(token)
            last = finish is not None and len(taken) == len(step.tokens)
            if last:
                self.detokenizer.finalize()
            stops = self.params.stop if self.tokens + len(taken) > self.params.min_tokens else ()
            piece, stopped = hold_back(self.held + self.detokenizer.last_segment, stops)
            shown, self.held = piece
            text += shown
            if stopped:
                finish = "stop"
                break
            if last:
                text, self.held = text + self.held, ""
        self.tokens += len(taken)
        num_accepted = min(step.num_accepted, len(taken))
        self.acceptance.record(width=step.width, depth=step.depth, num_accepted=num_accepted, tokens=len(taken))
        return self._response(text, taken, finish, step, num_accepted, now)

    def _response(
        self,
        text: str,
        token_ids: list[int],
        finish: FinishReason | None,
        step: Step,
        num_accepted: int,
        now: float,
    ) -> GenerationResponse:
        assert self.first_token_at is not None
        drafted = step.width > 0
        decoding = now - self.first_token_at
        return GenerationResponse(
            text=text,
            token_ids=token_ids,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            generation_tokens=self.tokens,
            prompt_tps=(len(self.prompt) - self.cached_tokens) / max(self.first_token_at - self.started, 1e-9),
            generation_tps=(self.tokens - 1) / decoding if decoding > 0 else 0.0,
            peak_memory_gb=mx.get_peak_memory() / 1e9,
            mode=self.mode,
            finish_reason=finish,
            acceptance=self.acceptance if self.drafting else None,
            num_accepted=num_accepted if drafted else None,
            width=step.width if drafted else None,
            depth=step.depth if drafted else None,
            round_s=step.seconds,
            notice=self.policy.take_notice(),
            logprobs=step.logprobs[: len(token_ids)],
        )


def require_possible(pair: ModelPair, params: SamplingParams, constraint: Constraint | None) -> None:
    """Raises UsageError for parameters that this model or a constraint cannot follow."""
    size = pair.target.vocab_size
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"{name} should name token ids from 0 to {size - 1}; got {wrong}.")
    if constraint is not None and (params.ignore_eos or params.min_tokens):
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise UsageError(f"{name} and a required format cannot be used together: the format says where the text ends.")


def fitting_max_tokens(pair: ModelPair, prompt_tokens: int, wanted: int) -> int:
    """How many of the `wanted` tokens the context has room for. Raises PromptError when there is room for none."""
    if prompt_tokens == 0:
        raise PromptError("the prompt is empty; give at least one token of text.")
    limit = pair.context_length
    if limit is not None and prompt_tokens >= limit:
        raise ContextError(prompt_tokens, limit)
    return wanted if limit is None else min(wanted, limit - prompt_tokens)


def hold_back(text: str, stop: Sequence[str]) -> tuple[tuple[str, str], bool]:
    """Split text into what can be shown and what may become a stop string: ((shown, held), stopped).

    When a stop string is complete, `shown` ends before its first occurrence, nothing is held and stopped is true.
    """
    if not stop:
        return (text, ""), False
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    if found:
        return (text[: min(found)], ""), True
    keep = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return (text[: len(text) - keep], text[len(text) - keep :]), False
