"""How long it takes to read prompts, learnt while they are read."""

_FADE = 0.9
# So much must sizes differ, as a share of their mean, before a pass's own part can be told from its tokens'.
_SPREAD = 0.2
# Once some passes are known, one that takes much longer than expected counts as this many times that only: a GPU
# compiles for a new shape.
_KNOWN, _MOST_SURPRISE = 3, 3.0


class ReadingTimes:
    """Seconds of a pass over some tokens of prompts: a `fixed` part, and one `a_token`.

    The fixed part is learnt from prompts that are read whole, from their beginning: by the line that fits them best,
    old ones counting less and less (least squares). While those have about the same size, it is taken to be none. A
    token's part is that of the newest passes, since it grows with what stands before it.
    """

    def __init__(self) -> None:
        self.fixed, self.a_token = 0.0, 0.0
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self._chunk: int | None = None

    @property
    def known(self) -> bool:
        return self.a_token > 0

    def observe(self, tokens: int, seconds: float, *, whole: bool) -> None:
        """A pass over this many tokens; whole: of prompts of which nothing was known, up to their ends."""
        if whole:
            self._fit(tokens, seconds)
        pace = max(seconds - self.fixed, 0.1 * seconds) / tokens
        self.a_token = 0.5 * (self.a_token + min(pace, _MOST_SURPRISE * self.a_token)) if self.known else pace
        self._chunk = None if whole else tokens

    def _fit(self, tokens: int, seconds: float) -> None:
        if self._count >= _KNOWN:
            seconds = min(seconds, _MOST_SURPRISE * self.seconds(tokens))
        sums = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        held = (self._count, self._x, self._y, self._xx, self._xy)
        self._count, self._x, self._y, self._xx, self._xy = (_FADE * a + b for a, b in zip(held, sums, strict=True))
        size, mean = self._x / self._count, self._y / self._count
        spread = self._xx / self._count - size * size
        if spread < (_SPREAD * size) ** 2:
            self.fixed = 0.0
            return
        slope = (self._xy / self._count - size * mean) / spread
        self.fixed = mean - min(max(slope, 0.0), mean / size) * size

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.a_token * tokens

    def tokens_in(self, seconds: float, *, least: int, most: int) -> int:
        """How many tokens can be read in that time; where the fixed part is long, as many as take as long as it.

        At most twice as many as in the last chunk: what is learnt of small ones need not hold for large ones.
        """
        left = max(seconds - self.fixed, self.fixed)
        allowed = most if self._chunk is None else min(most, 2 * self._chunk)
        return max(least, min(allowed, int(left / self.a_token)))
