"""From a prompt to text: chat template, decode loop, detokenizer, stop strings."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import mlx.core as mx

from dflash_mlx.decoding.accept import choose_strategy
from dflash_mlx.decoding.constraint import Constraint
from dflash_mlx.decoding.engine import decode, prefill_chunks
from dflash_mlx.decoding.lane import FinishReason, Step
from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.decoding.policies import WidthPolicy
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.errors import PromptError, UsageError
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.wired import wired

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Mode = Literal["dflash", "plain"]


@dataclass
class GenerationResponse:
    """A piece of an answer (`stream_generate`) or all of it (`generate`), with the running totals.

    token_ids holds every token emitted, a final end-of-sequence token included; text leaves that one out, and a stop
    string too. Speeds are tokens a second: `prompt_tps` over the tokens that were not cached, up to the first new
    token; `generation_tps` over the tokens after the first. Of a round: num_accepted drafts were kept of `width`,
    and at most `depth` could have been (a tree has more drafts than that). logprobs: of token_ids, in order; empty
    unless asked for.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    mode: Mode
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


def generate(
    pair: ModelPair,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    session: Session | None = None,
    draft: bool = True,
    width: int | None = None,
    tree: bool = False,
    constraint: Constraint | None = None,
) -> GenerationResponse:
    """The whole answer at once. Arguments as for `stream_generate`."""
    rounds = list(
        stream_generate(
            pair, prompt, params, session=session, draft=draft, width=width, tree=tree, constraint=constraint
        )
    )
    return replace(
        rounds[-1],
        text="".join(r.text for r in rounds),
        token_ids=[token for r in rounds for token in r.token_ids],
        logprobs=[entry for r in rounds for entry in r.logprobs],
    )


def stream_generate(
    pair: ModelPair,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    session: Session | None = None,
    draft: bool = True,
    width: int | None = None,
    tree: bool = False,
    constraint: Constraint | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Answer a prompt, a response for each round.

    prompt: a string (one user message, through the chat template), chat messages, or token ids taken as they are.
    session: a conversation's caches (`pair.new_session()`); what it shares with the prompt is not computed again.
    draft=False decodes plainly. width: drafts verified in each round; None chooses by measured speed, trees of drafts
    included. tree: the `width` drafts are a tree, which may be wider than the drafter's block.
    constraint: what the text must look like. on_prefill(done, total) is called after each chunk of the prompt; it may
    raise to cancel. Stop whenever you like: the session stays usable. Raises PromptError and UsageError.
    """
    steps = generate_steps(
        pair,
        encode(pair, prompt),
        params or SamplingParams(),
        session=session,
        draft=draft,
        width=width,
        tree=tree,
        constraint=constraint,
        on_prefill=on_prefill,
    )
    return _only_responses(steps)


def _only_responses(steps: Generator[GenerationResponse | None, None, None]) -> Iterator[GenerationResponse]:
    with closing(steps):
        for step in steps:
            if step is not None:
                yield step


def generate_steps(
    pair: ModelPair,
    tokens: list[int],
    params: SamplingParams,
    *,
    session: Session | None = None,
    draft: bool = True,
    width: int | None = None,
    tree: bool = False,
    constraint: Constraint | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generator[GenerationResponse | None, None, None]:
    """`stream_generate` for those who do several answers in turn: also yields, as None, after each prefill chunk."""
    max_tokens = fitting_max_tokens(pair, len(tokens), params.max_tokens)
    if session is None:
        session = pair.new_session(draft=draft)
    elif draft and pair.drafter is not None and session.drafter is None:
        raise UsageError("this session was made without a drafter; make it with pair.new_session().")
    drafting = draft and session.drafter is not None
    policy = pair.width_policy(width, tree=tree) if drafting else FixedWidth(0)
    mode: Mode = "dflash" if drafting else "plain"
    return _respond(pair, session, tokens, params, max_tokens, policy, mode, constraint, on_prefill)


def encode(pair: ModelPair, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return pair.encode_chat([{"role": "user", "content": prompt}])
    if prompt and isinstance(prompt[0], Mapping):
        return pair.encode_chat([dict(message) for message in cast("Sequence[Mapping[str, Any]]", prompt)])
    return list(cast("Sequence[int]", prompt))


def fitting_max_tokens(pair: ModelPair, prompt_tokens: int, wanted: int) -> int:
    """How many of the `wanted` tokens the context has room for. Raises PromptError when there is room for none."""
    if prompt_tokens == 0:
        raise PromptError("the prompt is empty; give at least one token of text.")
    limit = pair.context_length
    if limit is not None and prompt_tokens >= limit:
        raise PromptError(
            f"the prompt has {prompt_tokens} tokens and this model's context holds {limit}; "
            "shorten the prompt so that room is left for an answer."
        )
    return wanted if limit is None else min(wanted, limit - prompt_tokens)


def _respond(
    pair: ModelPair,
    session: Session,
    prompt: list[int],
    params: SamplingParams,
    max_tokens: int,
    policy: WidthPolicy,
    mode: Mode,
    constraint: Constraint | None,
    on_prefill: Callable[[int, int], None] | None,
) -> Generator[GenerationResponse | None, None, None]:
    session.rewind(min(common_prefix(session.tokens, prompt), len(prompt) - 1))
    cached = len(session.tokens)
    answer = _Answer(pair, prompt_tokens=len(prompt), cached_tokens=cached, stop=params.stop, mode=mode)
    with wired(pair.target.model):
        for done, total in prefill_chunks(session, prompt[:-1]):
            if on_prefill is not None:
                on_prefill(done, total)
            yield None
        steps = decode(
            session,
            prompt,
            strategy=choose_strategy(params),
            policy=policy,
            max_tokens=max_tokens,
            eos_ids=pair.eos_ids,
            processors=params.logits_processors(),
            guide=constraint.start() if constraint is not None else None,
            top_logprobs=params.top_logprobs,
        )
        with closing(steps):
            for step in steps:
                response = answer.add(step, policy.take_notice())
                yield response
                if response.finish_reason is not None:
                    return


@dataclass
class _Answer:
    """The text and the totals of an answer as its rounds come in."""

    pair: ModelPair
    prompt_tokens: int
    cached_tokens: int
    stop: tuple[str, ...]
    mode: Mode
    tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    # Text that may be the beginning of a stop string and is not shown yet.
    held: str = ""
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.detokenizer = self.pair.tokenizer.detokenizer

    def add(self, step: Step, notice: str | None) -> GenerationResponse:
        """Turn a round's tokens into a response. Tokens behind a stop string are dropped."""
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
        finish = step.finish_reason
        taken: list[int] = []
        text = ""
        for token in step.tokens:
            taken.append(token)
            if token not in self.pair.eos_ids:
                self.detokenizer.add_token(token)
            last = finish is not None and len(taken) == len(step.tokens)
            if last:
                self.detokenizer.finalize()
            piece, stopped = hold_back(self.held + self.detokenizer.last_segment, self.stop)
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
        return self._response(text, taken, finish, step, num_accepted, notice, now)

    def _response(
        self,
        text: str,
        token_ids: list[int],
        finish: FinishReason | None,
        step: Step,
        num_accepted: int,
        notice: str | None,
        now: float,
    ) -> GenerationResponse:
        assert self.first_token_at is not None
        drafted = step.width > 0
        decoding = now - self.first_token_at
        return GenerationResponse(
            text=text,
            token_ids=token_ids,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.tokens,
            prompt_tps=(self.prompt_tokens - self.cached_tokens) / max(self.first_token_at - self.started, 1e-9),
            generation_tps=(self.tokens - 1) / decoding if decoding > 0 else 0.0,
            peak_memory_gb=mx.get_peak_memory() / 1e9,
            mode=self.mode,
            finish_reason=finish,
            acceptance=self.acceptance if self.mode == "dflash" else None,
            num_accepted=num_accepted if drafted else None,
            width=step.width if drafted else None,
            depth=step.depth if drafted else None,
            notice=notice,
            logprobs=step.logprobs[: len(token_ids)],
        )


def hold_back(text: str, stop: Sequence[str]) -> tuple[tuple[str, str], bool]:
    """Split text into what can be shown and what may become a stop string: ((shown, held), stopped).

    When a stop string is complete, `shown` ends before its first occurrence, nothing is held and stopped is true.
    """
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    if found:
        return (text[: min(found)], ""), True
    keep = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return (text[: len(text) - keep], text[len(text) - keep :]), False
