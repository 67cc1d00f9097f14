"""Log-probabilities of the tokens of an answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the best alternatives as (id, logprob), best first; the token may be among them.

    Of the target's distribution at temperature 1, after the bias, penalties and constraints that apply there and before
    top-p, top-k and min-p, as mlx-lm reports them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
