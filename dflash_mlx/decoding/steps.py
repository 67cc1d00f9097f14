"""The steps of a round, for all lanes of a batch at once: propose, verify, accept.

Everything stays on the device. A row of an array belongs to the lane in the same place; a lane that has left in the
meantime is None, and what is computed for its row is not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.accept import Outcome, for_trees, judge, match
from dflash_mlx.decoding.constraint import Bits, mask_rows
from dflash_mlx.decoding.joined import Joined, join
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.logprobs import TokenLogprob, pack_logprobs, unpack_logprobs
from dflash_mlx.decoding.policies import Choice, Forecast
from dflash_mlx.decoding.tree import DraftTree, Likeliest, LikeliestGrown, likeliest, likeliest_grown
from dflash_mlx.drafters.contract import Continuation, Drafted, DraftState, DraftVocabulary, Nobody, Proposal
from dflash_mlx.drafters.ranking import BRANCHES, Ranking, rank
from dflash_mlx.sampling import LogitsProcessor
from dflash_mlx.tree_steps import PLAIN, TreeSteps, said_of

Lanes = Sequence[Lane | None]


@dataclass
class Chances:
    """How likely the drafter holds its drafts, on the device.

    said: of chains, (B, W), the chance of the likeliest token at each of W places; of a single lane's tree, what
    `tree_steps.said_of` says. likeliest: a tree's drafts. scale: a choice's, which a tree's chances include already.
    """

    said: mx.array
    likeliest: Likeliest | LikeliestGrown | Joined | None = None
    scale: float = 1.0
    # `said`, once the host has read it.
    known: np.ndarray | None = None

    @property
    def branched(self) -> bool:
        """Whether there are several tokens for a place."""
        return self.likeliest is not None and self.likeliest.branched

    def read(self) -> np.ndarray:
        """Wait for the device, and learn the chances at each place: (B, W) float64."""
        return self._numbers.astype(np.float64) if self.likeliest is None else self.forecast().best[None]

    def forecast(self, places: int | None = None) -> Forecast:
        """The same for a policy of the single lane, with a tree's chances; of a chain, of the first `places`."""
        if self.likeliest is None:
            return Forecast.of_chain(self.read()[0, :places], self.scale)
        count = (self.said.size - self.likeliest.size) // 2
        numbers = self._numbers.view(np.float32).astype(np.float64)
        text = self.likeliest.text if isinstance(self.likeliest, Joined) else None
        return Forecast(numbers[:count], numbers[count:-count], self._numbers[-count:].tolist(), text)

    @property
    def _numbers(self) -> np.ndarray:
        if self.known is None:
            self.known = np.array(self.said)
        return self.known

    def joined(self, text: Continuation) -> "Chances":
        """Those of a tree that is made by the text, too. Waits for the device."""
        found = self.likeliest
        if found is None or isinstance(found, Joined):
            return self
        tree, places = join(found, text, scale=self.scale), (self.said.size - found.size) // 2
        best, firsts = self._numbers[:places], self._numbers[-places:]
        known = np.concatenate([best, tree.chances.view(np.uint32), firsts])
        return Chances(mx.array(known), tree, self.scale, known)

    def take(self, rows: Sequence[int]) -> "Chances":
        """Those of some lanes' chains only."""
        return Chances(self.said[mx.array(list(rows))], scale=self.scale)


@dataclass
class Drafts:
    """Drafted chains: the tokens (B, W) after each anchor.

    proposals: of each lane, where tokens are not just the best ones. limits: how many of a lane's drafts are to be
    judged, by row, where that is not all of them. chances: where a policy wants to know them, or a tree is to be made.
    """

    tokens: mx.array
    proposals: list[Proposal] | None = None
    limits: dict[int, int] = field(default_factory=dict)
    chances: Chances | None = None

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def arrays(self) -> list[mx.array]:
        """What the host will read, or may."""
        return [self.tokens, *([self.chances.said] if self.chances is not None else [])]

    def of(self, row: int) -> Proposal | None:
        """One lane's drafts, those that are to be judged."""
        whole = self.proposals[row] if self.proposals else Proposal(self.tokens[row])
        width = self.limits.get(row, self.width)
        return whole.shortened(width) if width else None

    def shortened(self, width: int) -> "Drafts | None":
        """The first `width` drafts of each lane, before any limits are set."""
        if width >= self.width:
            return self
        if width <= 0:
            return None
        proposals = [p.shortened(width) for p in self.proposals] if self.proposals else None
        return Drafts(self.tokens[:, :width], proposals)

    def narrowed(self) -> "Drafts | None":
        """Without the places where no lane has drafts that are to be judged."""
        most = max(self.limits.get(row, self.width) for row in range(self.tokens.shape[0]))
        narrow = self.shortened(most)
        return replace(narrow, limits=self.limits) if narrow is not None else None

    def take(self, rows: Sequence[int]) -> "Drafts":
        """Those of some lanes only, before any limits are set."""
        if len(rows) == self.tokens.shape[0]:
            return self
        index = mx.array(list(rows))
        proposals = [self.proposals[row] for row in rows] if self.proposals else None
        chances = self.chances.take(rows) if self.chances is not None else None
        return Drafts(self.tokens[index], proposals, chances=chances)


@dataclass
class Verdict:
    """A launched verification: its outcome is still on the device.

    fed: (B, L) tokens, and features: (B, L, taps * D), of the rows that may be kept, in the order in which they would
    be; logprobs: packed, by lane; path: (D + 1,), which rows these are of a tree.
    """

    outcome: Outcome
    fed: mx.array
    features: mx.array | None
    logprobs: dict[int, mx.array]
    path: mx.array | None = None

    def read_logprobs(self, row: int) -> list[TokenLogprob]:
        return unpack_logprobs(self.logprobs[row]) if row in self.logprobs else []

    @property
    def arrays(self) -> list[mx.array]:
        """What the host will read."""
        return [self.outcome.packed, *self.logprobs.values()]


def propose(lanes: Lanes, state: DraftState, choice: Choice, *, anchors: mx.array, at: mx.array, room: int) -> Drafted:
    """Draft what was chosen after the anchors (B,), which are at the positions `at` (B,)."""
    writers = [Nobody() if lane is None else lane for lane in lanes]
    return state.propose(writers, anchors, at, choice.places, room=room, tree=choice.tree > 0)


def consider(
    lanes: Lanes,
    drafted: Drafted,
    vocabulary: DraftVocabulary | None,
    at: mx.array,
    choice: Choice,
    *,
    steps: TreeSteps = PLAIN,
) -> Chances | None:
    """How likely the drafts are, where the choice is a tree, of a single lane, or waits for their chances.

    The chance that a chain is kept is that of its places' best tokens. steps: how trees are computed.
    """
    if choice.tree:
        [lane] = lanes
        assert lane is not None
        if drafted.grown is not None:
            grown = likeliest_grown(drafted.grown, choice.tree, scale=choice.scale, steps=steps)
            said = said_of(mx.exp(drafted.confidence[0]), grown.chances, drafted.tokens[0])
            return Chances(said, grown, choice.scale)
        if drafted.logits is None:
            # One token a place, so that the tree is a chain.
            assert drafted.log_probs is not None
            ranking = Ranking(drafted.tokens.reshape(-1, 1), drafted.log_probs.reshape(-1, 1))
        else:
            preferences = for_trees(lane.strategy).preferences(drafted.logits[0], at + 1, vocabulary)
            ranking = rank(preferences, BRANCHES, vocabulary.token_ids if vocabulary else None, steps=steps)
        found = likeliest(ranking, choice.tree, scale=choice.scale, steps=steps)
        return Chances(found.said, found, choice.scale)
    return Chances(mx.exp(drafted.confidence), scale=choice.scale) if choice.waits else None


def block_of(anchors: mx.array, drafts: Drafts | DraftTree | None) -> mx.array:
    """What the target is fed: the anchors (B,) and after each its drafts, (B, W + 1)."""
    block = [anchors.astype(mx.uint32)[:, None]]
    if isinstance(drafts, DraftTree):
        block.append(drafts.tokens[None])
    elif drafts is not None:
        block.append(drafts.tokens.astype(mx.uint32))
    return block[0] if len(block) == 1 else mx.concatenate(block, axis=1)


def accept(
    lanes: Lanes,
    drafts: Drafts | DraftTree | None,
    fed: mx.array,
    logits: mx.array,
    features: mx.array | None,
    *,
    at: mx.array,
    histories: dict[int, mx.array],
    bits: dict[int, Bits],
    further: mx.array | None = None,
) -> Verdict:
    """Judge the drafts by the target's logits (B, W + 1, V) for the anchors, at positions `at` (B,), and each draft.

    fed: these tokens, (B, W + 1); histories: the tokens up to a lane's anchor, for its processors; bits: what may come
    at a lane's rows; further: what else the host wants to read with the verdict on a tree (`Outcome.further`).
    """
    if isinstance(drafts, DraftTree):
        [lane] = lanes
        assert lane is not None
        walk = judge(for_trees(lane.strategy), drafts, logits[0], at + 1)
        path, count = walk.path, lane.top_logprobs
        packed = {} if count is None else {0: pack_logprobs(logits[0][path], walk.tokens[0], count)}
        kept = mx.take(features, path, axis=1) if features is not None else None
        return Verdict(Outcome.of_tree(walk, further), mx.take(fed, path, axis=1), kept, packed, path)
    if all(lane is None or lane.is_plain_greedy for lane in lanes):
        return Verdict(match(drafts.tokens if drafts else None, mx.argmax(logits, axis=-1)), fed, features, {})
    outcomes, packed = [], {}
    for row, lane in enumerate(lanes):
        proposal = drafts.of(row) if drafts else None
        rows = logits[row, : proposal.width + 1 if proposal else 1]
        if lane is None:
            outcomes.append(match(proposal.tokens if proposal else None, mx.argmax(rows, axis=-1)))
            continue
        if lane.processors:
            rows = process_rows(rows, proposal, histories[row], lane.processors)
        if row in bits:
            rows = mask_rows(rows, bits[row])
        outcomes.append(lane.strategy.accept(proposal, rows, at[row] + 1))
        if lane.top_logprobs is not None:
            packed[row] = pack_logprobs(rows, outcomes[-1].tokens, lane.top_logprobs)
    return Verdict(Outcome.stack(outcomes, drafts.width if drafts else 0), fed, features, packed)


def process_rows(
    rows: mx.array, proposal: Proposal | None, history: mx.array, processors: list[LogitsProcessor]
) -> mx.array:
    """Apply bias and penalties to each row (W + 1, V) with the tokens that precede it: history, then drafts."""
    processed = []
    for i in range(rows.shape[0]):
        before = mx.concatenate([history, proposal.tokens[:i].astype(history.dtype)]) if proposal and i else history
        row = rows[i : i + 1]
        for processor in processors:
            row = processor(before, row)
        processed.append(row)
    return mx.concatenate(processed)
