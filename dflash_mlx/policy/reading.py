"""How long it takes to read prompts, learnt while they are read."""

_FADE = 0.9
# So much must sizes differ, as a share of their mean, before a pass's own part can be told from its tokens'.
_SPREAD = 0.2
# Chunks of about the same size before a larger one is tried, to see again what the fixed part is; and how much larger.
_SAME, _LARGER = 16, 1.5
# Once some passes are known, one that takes much longer than expected counts as this many times that only: a GPU
# compiles for a new shape.
_KNOWN, _MOST_SURPRISE = 3, 3.0


class ReadingTimes:
    """Seconds that a pass over some tokens of prompts costs: a `fixed` part, and one `a_token`.

    The fixed part is learnt from prompts that are read whole, from their beginning: by the line that fits them best,
    old ones counting less and less (least squares). While those have about the same size, it is taken to be none. A
    token's part is that of the newest passes, since it grows with what stands before it. For the same reason the fixed
    part of chunks is learnt from two of different sizes that followed each other.

    shared: what prompts that are read in one pass have in common, as far as is known: the fixed part; half of a pass
    while all had about the same size, so that some are read together, and the sizes differ.
    """

    def __init__(self) -> None:
        self.fixed, self.a_token, self.shared = 0.0, 0.0, 0.0
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        # Of chunks: the last one's tokens and seconds, the fixed part, and how many had about the same size.
        self._chunk: tuple[int, float] | None = None
        self._fixed_of_chunks: float | None = None
        self._same = 0

    @property
    def known(self) -> bool:
        return self.a_token > 0

    def observe(self, tokens: int, seconds: float, *, whole: bool) -> None:
        """A pass over this many tokens; whole: of prompts of which nothing was known, up to their ends."""
        if whole:
            self._fit(tokens, seconds)
            self._chunk = None
        else:
            self._compare(tokens, seconds)
        fixed = self.fixed if whole else self._of_chunks
        pace = max(seconds - fixed, 0.1 * seconds) / tokens
        self.a_token = 0.5 * (self.a_token + min(pace, _MOST_SURPRISE * self.a_token)) if self.known else pace

    def _compare(self, tokens: int, seconds: float) -> None:
        """Learn the fixed part from a chunk and the one before it, if their sizes differ."""
        if self._chunk is not None:
            before, took = self._chunk
            if abs(tokens - before) <= _SPREAD * before:
                self._same += 1
            else:
                slope = (seconds - took) / (tokens - before)
                found = seconds - tokens * min(max(slope, 0.0), seconds / tokens, took / before)
                known = self._fixed_of_chunks
                self._fixed_of_chunks = found if known is None else 0.5 * (known + found)
                self._same = 0
        self._chunk = tokens, seconds

    @property
    def _of_chunks(self) -> float:
        return self.fixed if self._fixed_of_chunks is None else self._fixed_of_chunks

    def _fit(self, tokens: int, seconds: float) -> None:
        if self._count >= _KNOWN:
            seconds = min(seconds, _MOST_SURPRISE * self.seconds(tokens))
        sums = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        held = (self._count, self._x, self._y, self._xx, self._xy)
        self._count, self._x, self._y, self._xx, self._xy = (_FADE * a + b for a, b in zip(held, sums, strict=True))
        size, mean = self._x / self._count, self._y / self._count
        spread = self._xx / self._count - size * size
        if spread < (_SPREAD * size) ** 2:
            self.fixed, self.shared = 0.0, 0.5 * mean
            return
        slope = (self._xy / self._count - size * mean) / spread
        self.fixed = self.shared = mean - min(max(slope, 0.0), mean / size) * size

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
            last, _ = self._chunk
            tries = self._fixed_of_chunks is None or self._same >= _SAME
            wanted = int(_LARGER * last) if tries else min(wanted, 2 * last)
        return max(least, min(most, wanted))
