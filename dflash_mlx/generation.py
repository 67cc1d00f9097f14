"""From a prompt to text: `generate`, `stream_generate`, and the same for many prompts at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from dflash_mlx.answer import Answer, GenerationResponse, fitting_max_tokens, hold_back
from dflash_mlx.answering import Answering
from dflash_mlx.decoding.constraint import Constraint
from dflash_mlx.decoding.session import Session
from dflash_mlx.errors import UsageError
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams

__all__ = [
    "GenerationResponse",
    "Prompt",
    "encode",
    "fitting_max_tokens",
    "generate",
    "generate_many",
    "hold_back",
    "stream_generate",
    "stream_many",
]

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
# Prompts that are answered at the same time, unless the caller says otherwise.
LANES = 16


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
    return _whole(rounds)


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
    answer = Answer(
        pair,
        encode(pair, prompt),
        params or SamplingParams(),
        session=session,
        draft=draft,
        width=width,
        tree=tree,
        constraint=constraint,
    )
    return (response for _, response in _responses(pair, iter([answer]), 1, on_prefill=on_prefill))


def generate_many(
    pair: ModelPair,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    draft: bool = True,
    width: int | None = None,
    lanes: int = LANES,
) -> list[GenerationResponse]:
    """The whole answers to many prompts, in their order. Arguments as for `stream_many`."""
    answers: list[list[GenerationResponse]] = [[] for _ in prompts]
    for index, response in stream_many(pair, prompts, params, draft=draft, width=width, lanes=lanes):
        answers[index].append(response)
    return [_whole(responses) for responses in answers]


def stream_many(
    pair: ModelPair,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    draft: bool = True,
    width: int | None = None,
    lanes: int = LANES,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Answer many prompts, up to `lanes` of them at the same time; yields (the prompt's index, a round's response).

    Each answer is the one that `stream_generate` gives. params: for all, or one for each prompt. Raises PromptError and
    UsageError before anything is answered.
    """
    each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise UsageError(f"params should be one for all or one for each of {len(prompts)} prompts; got {len(each)}.")
    if lanes < 1:
        raise UsageError(f"lanes should be at least 1; got {lanes}.")
    tokens = [encode(pair, prompt) for prompt in prompts]
    for prompt, wanted in zip(tokens, each, strict=True):
        fitting_max_tokens(pair, len(prompt), wanted.max_tokens)

    answers = (Answer(pair, p, wanted, draft=draft, width=width) for p, wanted in zip(tokens, each, strict=True))
    return _responses(pair, answers, min(lanes, len(prompts)), draft=draft, width=width)


def _responses(
    pair: ModelPair,
    answers: Iterator[Answer],
    lanes: int,
    *,
    draft: bool = True,
    width: int | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Make answers, at most `lanes` at a time; raises the first error."""
    answering = Answering(pair, draft=draft, width=width, most_lanes=lanes)
    numbers: dict[Answer, int] = {}
    with answering:
        while True:
            while answering.count < answering.most_lanes and (answer := next(answers, None)) is not None:
                numbers[answer] = len(numbers)
                answering.add(answer)
            if not answering.count:
                return
            for answer, news in answering.turn():
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, GenerationResponse):
                    yield numbers[answer], news
                elif on_prefill is not None:
                    on_prefill(*news)


def _whole(responses: Sequence[GenerationResponse]) -> GenerationResponse:
    return replace(
        responses[-1],
        text="".join(r.text for r in responses),
        token_ids=[token for r in responses for token in r.token_ids],
        logprobs=[entry for r in responses for entry in r.logprobs],
    )


def encode(pair: ModelPair, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return pair.encode_chat([{"role": "user", "content": prompt}])
    if prompt and isinstance(prompt[0], Mapping):
        return pair.encode_chat([dict(message) for message in cast("Sequence[Mapping[str, object]]", prompt)])
    return list(cast("Sequence[int]", prompt))
