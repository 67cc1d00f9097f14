"""A tree of the drafter's drafts and of the text's: of what followed the newest tokens where they stood before.

The drafter knows many paths, and the text one. A token on the text's path is as likely as both of them make it; off
that path the drafter alone is asked. The newest tokens have to be known, so the host does it, where it waits for a
tree's chances anyway.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.tree import DraftTree, Likeliest, LikeliestGrown
from dflash_mlx.drafters.contract import Continuation
from dflash_mlx.tree_steps import SUREST, TreeSteps

# The odds that a token is right which the text gives the chance c and the drafter p, and the likeliest other token o:
# exp(_BOTH) * (c / (1 - c)) ** _BY_TEXT * (p / o) ** _BY_DRAFTER. Fitted to 32 answers of the demo pair.
_BOTH, _BY_TEXT, _BY_DRAFTER = 0.93, 0.67, 0.31
_LEAST = 1e-3


class Draft(NamedTuple):
    """A token that may come next, how likely it is then, and where the drafter stands after it."""

    token: int
    chance: float
    to: int


class Candidates(Protocol):
    """What a drafter drafted. It stands somewhere after each path: at `start` after the anchor."""

    start: int

    def after(self, at: int) -> Sequence[Draft]:
        """What it says may come next, the likeliest first."""

    def past(self, at: int) -> int:
        """Where it stands after a token that it did not say."""


class OfPlaces:
    """The candidates of W places, which are the same whatever comes before: so it stands at a place."""

    start = 0

    def __init__(self, found: Likeliest, scale: float) -> None:
        tokens, chances = np.array(found.ranking.token_ids), _chances(found.ranking.log_probs, scale)
        self._places = [
            [Draft(*both, to) for both in zip(*row, strict=True)]
            for to, row in enumerate(zip(tokens.tolist(), chances.tolist(), strict=True), start=1)
        ]

    def after(self, at: int) -> Sequence[Draft]:
        return self._places[at] if at < len(self._places) else ()

    def past(self, at: int) -> int:
        return at + 1


class OfPaths:
    """The likeliest of the paths that were grown, draft by draft, as they were found: so it stands at a draft."""

    _NOWHERE = -1

    def __init__(self, found: LikeliestGrown, scale: float) -> None:
        grown, chosen = found.grown, np.array(found.found)
        self.start = grown.size
        paths, tokens = np.array(grown.paths)[chosen], np.array(grown.token_ids)[chosen].tolist()
        depths = (paths < grown.size).sum(axis=1)
        parents = np.where(depths > 1, paths[np.arange(len(paths)), depths - 2], grown.size).tolist()
        chances = _chances(grown.log_probs, scale)[chosen].tolist()
        self._after: dict[int, list[Draft]] = defaultdict(list)
        for parent, token, chance, to in zip(parents, tokens, chances, chosen.tolist(), strict=True):
            self._after[parent].append(Draft(token, chance, to))

    def after(self, at: int) -> Sequence[Draft]:
        return self._after.get(at, ())

    def past(self, at: int) -> int:
        return self._NOWHERE


def _chances(log_probs: mx.array, scale: float) -> np.ndarray:
    chances: np.ndarray = np.minimum(np.exp(np.array(log_probs, dtype=np.float64)) * scale, SUREST)
    return chances


class Node(NamedTuple):
    """A draft of the tree: its path's chance, what the drafter alone told of it, its place and its parent's row.

    told: 0 where the text was asked, too.
    """

    path: float
    told: float
    token: int
    place: int
    parent: int


@dataclass(frozen=True)
class Joined:
    """The likeliest drafts of both, the likeliest first; see `tree.Likeliest`. text: the tokens of the text's path."""

    nodes: list[Node]
    text: list[int]
    steps: TreeSteps
    branched = True

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def chances(self) -> np.ndarray:
        """How likely each is, (N,) float32, falling."""
        return np.array([node.path for node in self.nodes], dtype=np.float32)

    def tree(self, size: int) -> DraftTree:
        """The tree of the `size` likeliest of them."""
        nodes = self.nodes[:size]
        visible = np.eye(len(nodes) + 1, dtype=bool)
        for row, node in enumerate(nodes, start=1):
            visible[row] |= visible[node.parent]
        depths = [0, *(node.place + 1 for node in nodes)]
        tokens, told = mx.array([node.token for node in nodes], dtype=mx.uint32), mx.array([n.told for n in nodes])
        return DraftTree(tokens, told, mx.array(depths), mx.array(visible), max(depths), self.steps)


def join(found: Likeliest | LikeliestGrown, text: Continuation, *, scale: float) -> Joined:
    """As many drafts as were `found`: the likeliest by what the drafter drafted and by the text's next tokens.

    scale: multiplies the drafter's probabilities, as when they were found.
    """
    drafted = OfPlaces(found, scale) if isinstance(found, Likeliest) else OfPaths(found, scale)
    nodes: list[Node] = []
    # Waiting: (minus a path's chance, its number, its last draft's siblings from itself on, their place, whether they
    # continue the text's path, their parent's row, and the chance of its path). The likeliest brings its next sibling
    # and its likeliest child in, so that every path waits once.
    waiting: list[tuple[float, int, Sequence[Draft], int, bool, int, float]] = []
    count = 0

    def wait(siblings: Sequence[Draft], place: int, on_text: bool, parent: int, before: float) -> None:
        nonlocal count
        if siblings:
            count += 1
            heapq.heappush(waiting, (-before * siblings[0].chance, count, siblings, place, on_text, parent, before))

    def children(place: int, at: int, on_text: bool, parent: int, path: float) -> None:
        on_text = on_text and place < len(text.tokens)
        drafts = drafted.after(at)
        if on_text:
            drafts = _both(drafts, text.tokens[place], text.chances[place], drafted.past(at))
        wait(drafts, place, on_text, parent, path)

    children(0, drafted.start, True, 0, 1.0)
    while waiting and len(nodes) < found.size:
        negative, _, siblings, place, on_text, parent, before = heapq.heappop(waiting)
        token, chance, to = siblings[0]
        nodes.append(Node(-negative, 0.0 if on_text else chance / scale, token, place, parent))
        wait(siblings[1:], place, on_text, parent, before)
        children(place + 1, to, on_text and token == text.tokens[place], len(nodes), -negative)
    return Joined(nodes, text.tokens, found.steps)


def _both(drafts: Sequence[Draft], token: int, chance: float, past: int) -> list[Draft]:
    """What may come next on the text's path, where the text goes on with `token`; the likeliest first.

    past: where the drafter stands after a token that it did not say.
    """
    if not drafts:
        return [Draft(token, min(chance, SUREST), past)]
    others = [draft for draft in drafts if draft.token != token]
    same = next((draft for draft in drafts if draft.token == token), None)
    # One that the drafter did not say is one of many.
    said = same.chance if same else max(1.0 - sum(draft.chance for draft in drafts), _LEAST) / len(drafts)
    best = max((draft.chance for draft in others), default=0.0)
    odds = exp(_BOTH) * _odds(chance) ** _BY_TEXT * (said / (best + _LEAST)) ** _BY_DRAFTER
    joined = Draft(token, min(odds / (1.0 + odds), SUREST), same.to if same else past)
    left = min((1.0 - joined.chance) / (1.0 - said), 1.0)
    rest = (draft._replace(chance=draft.chance * left) for draft in others)
    return sorted([joined, *rest], key=lambda draft: -draft.chance)


def _odds(chance: float) -> float:
    chance = min(max(chance, _LEAST), 1.0 - _LEAST)
    return chance / (1.0 - chance)
