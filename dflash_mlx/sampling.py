"""What the caller may ask of sampling, and logits -> filtered float32 scores."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from dflash_mlx.errors import UsageError

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Temperature 0 is greedy. At a temperature above 0 the filters act as in mlx-lm: top-p, then min-p, then
    top-k on the probabilities at temperature 1, then the temperature. With a `seed` the answer is repeatable,
    and the same with and without a drafter. Penalties look at the last 20 tokens, as in mlx-lm. top_logprobs: how
    many alternatives to report with each token's log-probability; None reports none at all.

    stop_token_ids end an answer as an end-of-sequence token does. ignore_eos: an end-of-sequence token is a token like
    any other, which the text leaves out. min_tokens: nothing that ends an answer may come before; stop strings are
    looked for in the text after that.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "a whole number of at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "a number of at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or a positive whole number")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0 (1 is off)")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        if self.top_logprobs is not None:
            _require(0 <= self.top_logprobs <= 20, "top_logprobs", self.top_logprobs, "from 0 to 20")
        wanted = f"from 0 to max_tokens ({self.max_tokens})"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, wanted)
        if self.seed is not None:
            _require(0 <= self.seed < 2**32, "seed", self.seed, "a whole number from 0 to 4294967295")

    def ends(self, eos_ids: Set[int]) -> set[int]:
        """The tokens that end an answer, of a model with these end-of-sequence tokens."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}

    def logits_processors(self) -> list[LogitsProcessor]:
        """mlx-lm's processors for the bias and the penalties: (tokens so far, logits (1, V)) -> logits."""
        return make_logits_processors(
            logit_bias=dict(self.logit_bias) or None,
            repetition_penalty=self.repetition_penalty if self.repetition_penalty != 1.0 else None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name} should be {expected}; got {value!r}.")


def sampling_scores(logits: mx.array, params: SamplingParams) -> mx.array:
    """Filtered scores in float32: softmax of a row is the distribution to sample from.

    logits: (..., V) in any dtype. Tokens that a filter removes get -inf.
    """
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    if params.top_p < 1.0:
        scores = apply_top_p(scores, params.top_p)
    if params.min_p > 0.0:
        scores = apply_min_p(scores, params.min_p)
    if 0 < params.top_k < scores.shape[-1]:
        scores = apply_top_k(scores, params.top_k)
    return scores * (1.0 / params.temperature)


def best_columns(logits: mx.array, count: int, *, chunk: int = 256) -> mx.array:
    """The columns of the `count` largest values of each row of finite ones, (W, n) -> (W, count), in no order.

    MLX's argpartition sorts whole rows on a GPU, and takes 80 ms for 7 rows of 250,000 on a CPU. The largest values lie
    in the chunks with the largest maxima, so only those are looked through: 8 ms.
    """
    rows, width = logits.shape
    if width > 2 * count * chunk:
        padded = mx.pad(logits, [(0, 0), (0, -width % chunk)], constant_values=mx.array(-mx.inf, dtype=logits.dtype))
        chunks = padded.reshape(rows, -1, chunk)
        best = best_columns(chunks.max(axis=-1), count)
        few = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(rows, -1)
        found = best_columns(few, count)
        return mx.take_along_axis(best, found // chunk, axis=1) * chunk + found % chunk
    return mx.argpartition(logits, -count, axis=-1)[:, -count:]
