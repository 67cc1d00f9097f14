"""Who takes part in a benchmark in this process: plain and drafted decoding, and mlx-lm's own."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from dflash_mlx.answer import fitting_max_tokens
from dflash_mlx.bench.choices import BY_SPEED
from dflash_mlx.bench.load import Arrival
from dflash_mlx.generation import GenerationResponse, Prompt, encode, stream_generate, stream_many
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.wired import wired


@dataclass(frozen=True, kw_only=True)
class Local:
    """This project, with drafts or without. width and tree: as for `stream_generate`."""

    # An answer can be left for a while, and goes on as if nothing had been.
    pauses: ClassVar[bool] = True
    name: str
    pair: ModelPair
    draft: bool = True
    width: int | None = None
    tree: bool = False

    @property
    def words(self) -> str:
        """What it is, for reports."""
        if not self.draft:
            return "dflash-mlx without drafts"
        width = BY_SPEED if self.width is None else f"width {self.width}"
        return f"dflash-mlx, {width}{', trees' if self.tree else ''}"

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        mx.reset_peak_memory()
        return stream_generate(self.pair, prompt, params, draft=self.draft, width=self.width, tree=self.tree)

    def answer_many(self, prompts: Sequence[Prompt], params: SamplingParams, streams: int) -> Iterator[Arrival]:
        responses = stream_many(self.pair, prompts, params, draft=self.draft, width=self.width, lanes=streams)
        for index, response in responses:
            yield Arrival(index, time.perf_counter(), len(response.token_ids), response.finish_reason is not None)


@dataclass(frozen=True, kw_only=True)
class MlxLm:
    """mlx-lm's own plain decoding of the pair's target, in this process."""

    name: str
    pair: ModelPair

    @property
    def words(self) -> str:
        return "mlx-lm's generate_step, the same weights in the same process"

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        tokens, limit = asked(self.pair, prompt, params)
        steps = generate_step(mx.array(tokens), self.pair.target.model, max_tokens=limit, sampler=_sampler(params))
        detokenizer = self.pair.tokenizer.detokenizer
        detokenizer.reset()
        # With the memory wired on Macs, as mlx-lm's own commands have it.
        with wired(self.pair.target.model):
            for number, (token, _) in enumerate(steps, start=1):
                ended = int(token) in self.pair.eos_ids
                if not ended:
                    detokenizer.add_token(int(token))
                finished = ended or number == limit
                if finished:
                    detokenizer.finalize()
                yield GenerationResponse(
                    text=detokenizer.last_segment,
                    token_ids=[int(token)],
                    prompt_tokens=len(tokens),
                    mode="plain",
                    generation_tokens=number,
                    peak_memory_gb=mx.get_peak_memory() / 1e9,
                    finish_reason=("stop" if ended else "length") if finished else None,
                )
                if ended:
                    return

    def answer_many(self, prompts: Sequence[Prompt], params: SamplingParams, streams: int) -> Iterator[Arrival]:
        generator = BatchGenerator(
            self.pair.target.model,
            stop_tokens=[[token] for token in self.pair.eos_ids],
            sampler=_sampler(params),
            completion_batch_size=streams,
            prefill_batch_size=min(8, streams),
        )
        tokens = [encode(self.pair, prompt) for prompt in prompts]
        limits = [fitting_max_tokens(self.pair, len(prompt), params.max_tokens) for prompt in tokens]
        try:
            numbers = {uid: index for index, uid in enumerate(generator.insert(tokens, limits))}
            while responses := generator.next_generated():
                now = time.perf_counter()
                for response in responses:
                    yield Arrival(numbers[response.uid], now, 1, response.finish_reason is not None)
        finally:
            generator.close()


def asked(pair: ModelPair, prompt: Prompt, params: SamplingParams) -> tuple[list[int], int]:
    """The prompt's tokens, and how many may follow, for a loop that is not this project's; MLX is made ready for it."""
    mx.reset_peak_memory()
    if params.seed is not None:
        mx.random.seed(params.seed)
    tokens = encode(pair, prompt)
    return tokens, fitting_max_tokens(pair, len(tokens), params.max_tokens)


def _sampler(params: SamplingParams):  # type: ignore[no-untyped-def]  # mlx-lm's own type
    return make_sampler(temp=params.temperature, top_p=params.top_p, min_p=params.min_p, top_k=params.top_k)
