"""Checks that a target and a drafter belong together, by running them.

A wrong pair does not crash: it drafts nonsense and is slow, or reads the wrong layers. So shapes are compared first,
and then both models run on a few tokens; anything off is a PairError that says what was expected and what was found.
Weights that know nothing of the target break no rule, so `read_guesses` compares their guesses with chance.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.batch import open_caches
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import propose
from dflash_mlx.drafters.contract import Drafter, DraftVocabulary, Nobody
from dflash_mlx.drafters.row_state import RowState
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.errors import PairError
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.targets.target import Target

_BLOCK = 4
# What the drafter guesses in: plain text, much of which can be guessed.
GUESS_TEXT = (
    "The Earth goes around the Sun once a year, and the Moon goes around the Earth once a month. A week has seven "
    "days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. Water freezes at 0 degrees and boils at "
    "100 degrees. The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is Madrid."
)
_GUESS_TOKENS, _GUESS_START, _GUESS_PLACES = 64, 8, 32
# With fewer places than this nothing can be said.
_FEWEST_PLACES = 16
# What random weights stay below. Of several kinds they gave 0.50 with a standard deviation of 0.06, and were right once
# in one case of thirty; the demo drafter gives 0.93 and is right 18 times.
_FOLLOWS, _BY_LUCK = 0.7, 1


def check_shapes(target: Target, drafter: Drafter) -> None:
    """Compare what the two configs say, without running anything. Raises PairError."""
    problems = drafter.misfits(target)
    if problems:
        raise PairError(
            f"this drafter is not for this target: {'; '.join(problems)}. "
            "Use the drafter made for the target, or run with --no-draft."
        )


def check_pair(target: Target, drafter: Drafter, *, dtype: mx.Dtype) -> list[str]:
    """Run both models on a few tokens. Returns what was found right, a line each; raises PairError otherwise."""
    rng = np.random.default_rng(0)
    prompt = mx.array(rng.integers(0, target.vocab_size, (1, 6)))
    block = mx.array(rng.integers(0, target.vocab_size, (1, _BLOCK)))
    tolerance = TOLERANCE[dtype]
    taps = [_check_taps(target, drafter, prompt, dtype)] if drafter.taps else []
    done = [*taps, _check_head(target, prompt, tolerance)]
    done += _check_blocks(target, drafter, prompt, block, dtype)
    return done


@dataclass(frozen=True)
class Guesses:
    """How a drafter's first guesses fit the target in a short text.

    right: of `places`, where its best token was the target's own. following: how often the target's token at one place
    got a better score there than at another place where the target says something else; 0.5 is chance.
    """

    right: int
    places: int
    following: float

    @property
    def are_noise(self) -> bool:
        """Whether random weights would have done as well.

        A drafter that has learnt little is right now and then, if only with the commonest token, or scores tokens by
        the text; it is not meant here. So both have to be missing.
        """
        return self.right <= _BY_LUCK and self.following < _FOLLOWS

    @property
    def report(self) -> str:
        """What was found, as a check or as a warning."""
        if not self.are_noise:
            return f"the drafter guesses {self.right} of {self.places} tokens of a short text"
        return (
            f"the drafter guessed {self.right} of {self.places} tokens of a short text, and its scores follow the text "
            f"no better than random weights: in {self.following:.0%} of the comparisons, where chance is 50% and at "
            f"least {_FOLLOWS:.0%} was expected. Answers stay right, but drafting will hardly make them faster. Make "
            "sure that this drafter was made for this target and that its file is whole, or run with --no-draft."
        )


def read_guesses(target: Target, drafter: Drafter, text: list[int]) -> Guesses | None:
    """Let the drafter guess the target's next token at places all over a text, in one pass of each model.

    text: token ids; what is too long is left out. None where too little can be judged: the text is short, or the
    target's tokens are mostly some that the drafter may not guess; or the drafter has no weights.
    """
    drafter = drafter.drafter if isinstance(drafter, WithNgram) else drafter
    if not drafter.networks:
        return None
    tokens = text[:_GUESS_TOKENS]
    count = min(_GUESS_PLACES, len(tokens) - _GUESS_START)
    if count < _FEWEST_PLACES:
        return None
    places = np.linspace(_GUESS_START, len(tokens) - 1, count).astype(int)
    logits, features = target.pass_for(drafter.taps)(mx.array([tokens]), target.make_cache())
    wanted = np.array(mx.argmax(logits[0, mx.array(places)], axis=-1))
    said, vocabulary = guesses_at(target, drafter, tokens, features, places)
    guesses = np.array(said.astype(mx.float32))
    ids = np.array(vocabulary.token_ids).tolist() if vocabulary else range(target.vocab_size)
    columns = {token: i for i, token in enumerate(ids)}
    known = [i for i, token in enumerate(wanted.tolist()) if token in columns]
    if len(known) < _FEWEST_PLACES:
        return None
    wanted, guesses = np.array([columns[int(wanted[i])] for i in known]), guesses[known]
    right = int((guesses.argmax(axis=-1) == wanted).sum())
    return Guesses(right, len(known), following(guesses[:, wanted], wanted))


def guesses_at(
    target: Target, drafter: Drafter, tokens: list[int], features: mx.array | None, places: np.ndarray
) -> tuple[mx.array, DraftVocabulary | None]:
    """A drafter's logits (P, n) for the token after each of P places of a text, and what the columns stand for.

    features: the text's, (1, L, taps * D).
    """
    caches, room = drafter.make_cache(), len(tokens) + 2
    drafter.read(target, mx.array([tokens]), features, caches)
    state = drafter.open(target, caches, len(tokens))
    assert isinstance(state, RowState)
    # Every row has the whole text; what comes from its own place on is masked.
    state.rows.repeat(len(places))
    at, anchors = mx.array(places, dtype=mx.int32), mx.array([tokens[place] for place in places])
    drafted = state.propose([Nobody()] * len(places), anchors, at, 1, room=room)
    assert drafted.logits is not None
    return drafted.logits[:, 0], state.vocabulary


def following(scores: np.ndarray, wanted: np.ndarray) -> float:
    """How often a token scores higher at its own place than at one that wants another token; a tie counts half.

    scores: (P, P), at each place (rows) those of the tokens that all places want (columns); wanted: (P,). Random
    weights prefer some tokens everywhere, and score all tokens higher in some places: that comes to 0.5.
    """
    scores = scores.astype(np.float64)
    scores -= scores.mean(axis=1, keepdims=True)
    own = scores.diagonal()
    wins = (own > scores) + 0.5 * (own == scores)
    others = wanted[:, None] != wanted
    counts = others.sum(axis=0)
    shares = (wins * others).sum(axis=0)[counts > 0] / counts[counts > 0]
    return float(shares.mean()) if shares.size else 0.5


def _check_taps(target: Target, drafter: Drafter, prompt: mx.array, dtype: mx.Dtype) -> str:
    """Reading the layers changes neither the model nor its numbers."""
    layer_ids = drafter.taps
    classes = [type(layer) for layer in target.layers]
    names = target.parameter_names()
    plain = target.forward(prompt, target.make_cache())
    logits, features = target.forward_tapped(prompt, target.make_cache(), layer_ids)
    _require_close("a tapped forward", logits, "the plain forward", plain, TOLERANCE[dtype])
    if [type(layer) for layer in target.layers] != classes or target.parameter_names() != names:
        raise PairError(
            "reading the target's layers changed the model itself; this target cannot be used for drafting."
        )
    expected = (1, prompt.shape[1], len(layer_ids) * target.hidden_size)
    if features.shape != expected:
        raise PairError(f"the target's features should have the shape {expected}, found {features.shape}.")
    if not mx.all(mx.isfinite(features)).item():
        raise PairError(f"the target's features are not finite; {_next_step('target', dtype)}.")
    return f"layers {list(layer_ids)} can be read without changing the target"


def _check_head(target: Target, prompt: mx.array, tolerance: float) -> str:
    """The embedding and the head that the drafter shares are the target's real ones."""
    if target.final_norm is None:
        return "vocabulary head taken as it is (the target has no final norm of its own)"
    last = len(target.layers) - 1
    logits, hidden = target.forward_tapped(prompt, target.make_cache(), [last])
    shared = target.head(target.final_norm(hidden))
    # Targets that scale or cap their logits do it after the head; the best token is the same.
    if not mx.array_equal(mx.argmax(shared, axis=-1), mx.argmax(logits, axis=-1)).item():
        _require_close("the shared vocabulary head", shared, "the target's logits", logits, tolerance)
    return "the shared vocabulary head gives the target's own tokens"


def _check_blocks(target: Target, drafter: Drafter, prompt: mx.array, block: mx.array, dtype: mx.Dtype) -> list[str]:
    """A block gives what token by token gives, a trimmed cache forgets, and drafts are finite."""
    session = Session(target, drafter)
    session.feed(np.array(prompt[0]).tolist())
    length = prompt.shape[1]
    caches, at, model = open_caches(session), mx.array([length]), target.pass_for(())
    together, _ = caches.feed(model, block, at=at, room=length + _BLOCK)
    mx.eval(together)
    caches.commit(_BLOCK, [1])
    alone = [together[:, :1]]
    for i in range(1, _BLOCK):
        logits, _ = caches.feed(model, block[:, i : i + 1], at=at + i, room=length + _BLOCK)
        caches.commit(1, [1])
        mx.eval(logits)
        alone.append(logits)
    stepwise = mx.concatenate(alone, axis=1)
    _require_close(
        "a block forward, trimmed and continued token by token,",
        stepwise,
        "the block forward",
        together,
        TOLERANCE[dtype],
    )

    state = drafter.open(target, session.draft_cache, length)
    places = min(_BLOCK - 1, drafter.places)
    drafted = propose([None], state, Choice(places), anchors=block[:, 0], at=at, room=length + _BLOCK)
    if drafted.logits is not None and not mx.all(mx.isfinite(drafted.logits)).item():
        raise PairError(f"the drafter's logits are not finite; {_next_step('drafter', dtype)}.")
    return ["a block forward equals token by token, and rejected tokens leave the cache", "drafts are finite"]


def _next_step(model: str, dtype: mx.Dtype) -> str:
    """What may help where numbers are not finite: in float32 they do not overflow, so the file is to blame."""
    if dtype == mx.float32:
        return f"its weights are probably damaged, so fetch the {model} again"
    return "try --dtype float32, and if that does not help, fetch the model again"


def _require_close(name: str, found: mx.array, reference: str, expected: mx.array, tolerance: float) -> None:
    difference = relative_difference(found, expected)
    if not difference <= tolerance:
        raise PairError(
            f"{name} should give the same logits as {reference}; they differ by {difference:.3g} of their spread "
            f"(at most {tolerance:g} is rounding). This target cannot be used for drafting with this version of mlx-lm."
        )
