"""Resting from drafting where it does not pay."""

# The time drafting may lose, in plain steps, before it pauses, and the pauses' lengths in tokens.
_MAX_LOSS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512


class Pauses:
    """When drafting has lost more time than it may, rest for a number of tokens; longer each time it fails again.

    The loss is counted in plain steps: what a round took beyond what its tokens would have taken. Gains pay losses
    back, but are not saved up, so a change for the worse is noticed as soon in a long answer as in a short one. A run
    of bad luck is no reason while the last ten or so rounds together were faster than plain decoding.
    """

    def __init__(self) -> None:
        self.resting = 0
        self.notice: str | None = None
        self._length = _FIRST_PAUSE
        self._limit = _MAX_LOSS
        self._loss = 0.0
        self._tokens = self._seconds = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second of recent drafted rounds; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """A drafted round gained `tokens` in `seconds`; a plain step takes `plain` seconds."""
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds
        self._loss = max(0.0, self._loss + seconds / plain - tokens)
        if self._loss > self._limit and self.speed * plain < 1.0:
            self.notice = (
                f"drafting paused for {self._length} tokens: lately it was {self.speed * plain:.2f} times as fast as "
                "plain decoding"
            )
            self.resting = self._length
            self._length = min(4 * self._length, _LONGEST_PAUSE)
            # The next try judges by what it sees then, and has less to lose.
            self._limit = _MAX_LOSS / 2
            self._loss = self._tokens = self._seconds = 0.0
        elif self._tokens > 8.0 and self.speed * plain > 1.2:
            self._length, self._limit = _FIRST_PAUSE, _MAX_LOSS

    def take_rest(self) -> bool:
        """Whether the next round should be a plain one."""
        if self.resting > 0:
            self.resting -= 1
            return True
        return False
