"""How long it takes to read prompts, learnt while they are read."""

_FADE = 0.9
# So much must sizes differ, as a share of their mean, before a pass's own part can be told from its tokens'.
_SPREAD = 0.2
# Once some passes are known, one that takes much longer than expected counts as so many times that only: a GPU compiles
# for a new shape.
_KNOWN, _MOST_SURPRISE = 3, 3.0


class ReadingTimes:
    """Seconds of a pass over some tokens of prompts: a `fixed` part, and one `a_token`.

    The line through the passes so far that fits best, old ones counting less and less (least squares). While all
    passes have about the same size, the fixed part is taken to be none.
    """

    def __init__(self) -> None:
        self.fixed, self.a_token = 0.0, 0.0
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    def observe(self, tokens: int, seconds: float) -> None:
        if self._count >= _KNOWN:
            seconds = min(seconds, _MOST_SURPRISE * self.seconds(tokens))
        sums = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        held = (self._count, self._x, self._y, self._xx, self._xy)
        self._count, self._x, self._y, self._xx, self._xy = (_FADE * a + b for a, b in zip(held, sums, strict=True))
        size, mean = self._x / self._count, self._y / self._count
        spread = self._xx / self._count - size * size
        if spread < (_SPREAD * size) ** 2:
            self.fixed, self.a_token = 0.0, mean / size
            return
        slope = (self._xy / self._count - size * mean) / spread
        self.a_token = min(max(slope, 0.0), mean / size)
        self.fixed = mean - self.a_token * size

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.a_token * tokens

    def tokens_in(self, seconds: float, *, least: int, most: int) -> int:
        """How many tokens can be read in that time; where the fixed part is long, as many as take as long as it."""
        left = max(seconds - self.fixed, self.fixed)
        return most if left >= self.a_token * most else max(least, int(left / self.a_token))
