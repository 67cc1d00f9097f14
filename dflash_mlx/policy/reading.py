"""How long it takes to read prompts, learnt while they are read."""

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

# How many of the newest passes count, of prompts that are read whole and of chunks; and as a share of their mean, how
# much sizes must differ before a pass's own part can be told from its tokens'.
_NEWEST, _SPREAD = 16, 0.2
_NEWEST_CHUNKS, _SPREAD_OF_CHUNKS = 8, 0.15
# Chunks of about the same size before a larger one is tried, to see again what the fixed part is; and how much larger.
_SAME, _LARGER = 16, 1.5
# A token that takes much longer than expected counts as this many times that only: a GPU compiles for a new shape.
_MOST_SURPRISE = 3.0
# How many of the newest turns say what a round takes, how many turns an arrival makes longer, and how many arrivals may
# follow closely before they are looked at.
_NEWEST_TURNS, _TURNS_OF_ARRIVAL, _MOST_TOGETHER = 9, 2, 8


class _Line:
    """The line through the newest passes, seconds by tokens, to which a few that took far longer make no difference.

    Such passes are common: a GPU compiles for a new shape. Its slope is the median of those between any two passes
    (Theil and Sen).
    """

    def __init__(self, newest: int, spread: float) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=newest)
        self._spread = spread

    def add(self, tokens: int, seconds: float) -> None:
        self._passes.append((tokens, seconds))

    @property
    def typical(self) -> float:
        """Seconds of a pass."""
        return median(seconds for _, seconds in self._passes)

    @property
    def fixed(self) -> float | None:
        """The part that does not depend on the tokens; None while all passes have about the same size."""
        size = median(tokens for tokens, _ in self._passes)
        slopes = [
            (seconds - others) / (tokens - other)
            for (tokens, seconds), (other, others) in combinations(self._passes, 2)
            if abs(tokens - other) > self._spread * size
        ]
        if len(slopes) < len(self._passes) / 2:
            return None
        slope = max(median(slopes), 0.0)
        return max(median(seconds - slope * tokens for tokens, seconds in self._passes), 0.0)


class ReadingTimes:
    """Seconds that a pass over some tokens of prompts costs: a `fixed` part, and one `a_token`.

    The fixed part is learnt from prompts that are read whole, from their beginning: by the line that fits them best.
    While those have about the same size, it is taken to be none. A token's part is that of the newest passes, since it
    grows with what stands before it. For the same reason the fixed part of chunks is learnt from the last few only.

    shared: what prompts that are read in one pass have in common, as far as is known: the fixed part; half of a pass
    while all had about the same size, so that some are read together, and the sizes differ.
    """

    def __init__(self) -> None:
        self.fixed, self.a_token, self.shared = 0.0, 0.0, 0.0
        self._whole, self._chunks = _Line(_NEWEST, _SPREAD), _Line(_NEWEST_CHUNKS, _SPREAD_OF_CHUNKS)
        # Of chunks: the last one's tokens, the fixed part, and how many had about the same size.
        self._chunk: int | None = None
        self._fixed_of_chunks: float | None = None
        self._same = 0

    @property
    def known(self) -> bool:
        return self.a_token > 0

    def observe(self, tokens: int, seconds: float, *, whole: bool) -> None:
        """A pass over this many tokens; whole: of prompts of which nothing was known, up to their ends."""
        if whole:
            if self.known:  # the first pass compiles
                self._fit(tokens, seconds)
            self._chunk = None
        else:
            self._fit_chunk(tokens, seconds)
        fixed = self.fixed if whole else self._of_chunks
        pace = max(seconds - fixed, 0.1 * seconds) / tokens
        self.a_token = 0.5 * (self.a_token + min(pace, _MOST_SURPRISE * self.a_token)) if self.known else pace

    def _fit_chunk(self, tokens: int, seconds: float) -> None:
        """Learn the fixed part from the last chunks, if their sizes differ."""
        if self._chunk is not None:
            self._same = self._same + 1 if abs(tokens - self._chunk) <= _SPREAD * self._chunk else 0
        self._chunk = tokens
        self._chunks.add(tokens, seconds)
        found = self._chunks.fixed
        if found is not None:
            known = self._fixed_of_chunks
            self._fixed_of_chunks = found if known is None else 0.5 * (known + found)

    @property
    def _of_chunks(self) -> float:
        return self.fixed if self._fixed_of_chunks is None else self._fixed_of_chunks

    def _fit(self, tokens: int, seconds: float) -> None:
        self._whole.add(tokens, seconds)
        found = self._whole.fixed
        self.fixed = found or 0.0
        self.shared = 0.5 * self._whole.typical if found is None else found

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.a_token * tokens

    def tokens_in(self, seconds: float, *, least: int, most: int) -> int:
        """How many tokens of a long prompt to read in that time.

        Where the fixed part is long, as many as take half as long as it, since fewer would take hardly less time. At
        most twice as many as in the last chunk: what is learnt of small ones need not hold for large ones.
        """
        fixed = self._of_chunks
        wanted = int(max(seconds - fixed, 0.5 * fixed) / self.a_token)
        if self._chunk is not None:
            tries = self._fixed_of_chunks is None or self._same >= _SAME
            wanted = int(_LARGER * self._chunk) if tries else min(wanted, 2 * self._chunk)
        return max(least, min(most, wanted))


@dataclass
class _Arrivals:
    """Passes over the prompts of new answers, one soon after the other, and the turns that they made longer.

    Of each those are two: that of the pass, and the next one, in which the first round of these answers is waited for.
    left: turns that the newest one will still make longer.
    """

    passes: int = 0
    tokens: int = 0
    turns: int = 0
    seconds: float = 0.0
    left: int = 0


class Turns:
    """What a turn of several answers takes, and what new ones add to the turns in which they arrive.

    A turn reads prompts, perhaps, and then makes a round of every answer. What new answers add is told to `times`.
    """

    def __init__(self, times: ReadingTimes) -> None:
        self.times = times
        self._quiet: deque[float] = deque(maxlen=_NEWEST_TURNS)
        self._first = 0.0
        self._arrivals: _Arrivals | None = None

    @property
    def round_seconds(self) -> float:
        """What a round takes; 0 while nothing is known."""
        return median(self._quiet) if self._quiet else self._first

    def arrived(self, tokens: int) -> None:
        """In this turn a pass read so many tokens of prompts, each from its beginning to its end."""
        arrivals = self._arrivals = self._arrivals or _Arrivals()
        arrivals.passes, arrivals.tokens = arrivals.passes + 1, arrivals.tokens + tokens
        arrivals.left = _TURNS_OF_ARRIVAL

    def observe(self, reading: float, rounds: float, *, running: bool) -> None:
        """A turn has ended; running: answers are in progress."""
        arrivals = self._arrivals
        if not running:
            self._arrivals = None
            return
        if arrivals is not None and arrivals.left:
            arrivals.left, arrivals.turns = arrivals.left - 1, arrivals.turns + 1
            arrivals.seconds += reading + rounds
            self._first = self._first or rounds
        else:
            self._quiet.append(rounds)
        if arrivals is not None and self._quiet and (arrivals.left == 0 or arrivals.passes >= _MOST_TOGETHER):
            added = max(arrivals.seconds - arrivals.turns * self.round_seconds, 0.1 * arrivals.seconds)
            self.times.observe(arrivals.tokens // arrivals.passes, added / arrivals.passes, whole=True)
            self._arrivals = None
