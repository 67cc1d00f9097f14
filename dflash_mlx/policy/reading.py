"""How long it takes to read prompts, learnt while they are read."""

# By how much one more pass lets the past fade, for prompts that are read whole and for chunks; and as a share of their
# mean, how much sizes must differ before a pass's own part can be told from its tokens'.
_FADE, _SPREAD = 0.9, 0.2
_FADE_OF_CHUNKS, _SPREAD_OF_CHUNKS = 0.8, 0.15
# Chunks of about the same size before a larger one is tried, to see again what the fixed part is; and how much larger.
_SAME, _LARGER = 16, 1.5
# Once some passes are known, one that takes much longer than expected counts as this many times that only: a GPU
# compiles for a new shape.
_KNOWN, _MOST_SURPRISE = 3, 3.0


class _Line:
    """The line that fits passes best (least squares), seconds by tokens; old ones count less and less."""

    def __init__(self, fade: float, spread: float) -> None:
        self._fade, self._spread = fade, spread
        self.count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        sums = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        held = (self.count, self._x, self._y, self._xx, self._xy)
        self.count, self._x, self._y, self._xx, self._xy = (self._fade * a + b for a, b in zip(held, sums, strict=True))

    @property
    def mean(self) -> float:
        """Seconds of a pass."""
        return self._y / self.count

    @property
    def fixed(self) -> float | None:
        """The part that does not depend on the tokens; None while all passes have about the same size."""
        size = self._x / self.count
        spread = self._xx / self.count - size * size
        if spread < (self._spread * size) ** 2:
            return None
        slope = (self._xy / self.count - size * self.mean) / spread
        return self.mean - min(max(slope, 0.0), self.mean / size) * size


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
        self._whole, self._chunks = _Line(_FADE, _SPREAD), _Line(_FADE_OF_CHUNKS, _SPREAD_OF_CHUNKS)
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
        if self._whole.count >= _KNOWN:
            seconds = min(seconds, _MOST_SURPRISE * self.seconds(tokens))
        self._whole.add(tokens, seconds)
        found = self._whole.fixed
        self.fixed = found or 0.0
        self.shared = 0.5 * self._whole.mean if found is None else found

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
