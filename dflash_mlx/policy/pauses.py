"""Resting from drafting where it does not pay."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

# The time drafting may lose, in plain steps, before it pauses, and the pauses' lengths in tokens.
_MAX_LOSS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512
# How much one more round lets the past fade: a memory of about 20 rounds. So few say little.
_FADE, _FEW = 0.95, 5
# Standard errors by which the mean of the rounds may be off: pauses about one time in ten where drafting gains a fifth.
_ERRORS = 1.5
# So many times as many where all rounds since a loss began count, since these were chosen for their loss.
_CHOSEN = 3.0
# So many rounds of which no draft was kept are no chance, however little they lose; half as many after a failure.
_IN_VAIN = 16
# Drafting pays if it is so many times as fast as plain decoding.
_PAYS = 1.2
# The time that drafts may take without being used, in plain steps, before drafting rests, and the rests' lengths.
_MAX_UNUSED = 1.5
_FIRST_REST, _LONGEST_REST = 16, 256
# While drafting pays, so many rounds may be told of together; and more once it is so many times as fast as plain
# decoding in this answer, and in a rest.
_TOGETHER, _FAST, _MORE_TOGETHER = 4, 1.6, 16
# Of a rest so many first and last rounds are told of, to be compared with those before and after it (drift.py).
_ENDS = 32
# Tokens of a rest of which the user is told, once an answer.
_WORTH_SAYING = 64
# Before anything is seen, a round's tokens are taken to vary this much; weighs as much as this many rounds.
_VARIANCE, _VARIANCE_WEIGHT = 1.0, 4.0


@dataclass
class Patience:
    """What an answer leaves to the next one.

    gain: how many times as fast as plain decoding drafting was in the newest rounds, 0 where that is not known. pause:
    tokens of the last pause, 0 if drafting has paid since. Else it has `failed`: then it may lose half as much time
    before it pauses, half as many rounds may be in vain, and chance is less of an excuse. longest: of the pauses since
    it paid; if none is longer, it may lose an eighth. rest: tokens of the next rest from drafts that are not used.
    """

    gain: float = 0.0
    pause: int = 0
    longest: int = 0
    rest: int = _FIRST_REST

    @classmethod
    def worn_out(cls) -> "Patience":
        """As after drafts that failed up to the longest pause."""
        return cls(pause=_LONGEST_PAUSE, longest=_LONGEST_PAUSE)

    @property
    def failed(self) -> bool:
        return self.pause > 0

    @property
    def limit(self) -> float:
        if self.longest >= _LONGEST_PAUSE:
            return _MAX_LOSS / 8
        return _MAX_LOSS / 2 if self.failed else _MAX_LOSS

    @property
    def errors(self) -> float:
        return _ERRORS / 3 if self.failed else _ERRORS

    @property
    def in_vain(self) -> float:
        """So many rounds of which no draft was kept are a failure."""
        return _IN_VAIN / 2 if self.failed else _IN_VAIN

    def warn(self, other: "Patience") -> None:
        """Where this way of drafting failed up to the longest pause, let the drafter's other one begin like that."""
        if self.longest >= _LONGEST_PAUSE:
            other.pause, other.longest = self.pause, self.longest


@dataclass
class _Rounds:
    """Sums over drafted rounds: how many, their tokens, squared tokens and seconds. fade: of those before."""

    fade: float = 1.0
    count: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = self.fade * self.count + 1
        self.tokens = self.fade * self.tokens + tokens
        self.squares = self.fade * self.squares + tokens**2
        self.seconds = self.fade * self.seconds + seconds

    @property
    def speed(self) -> float:
        """Tokens a second; 0 before the first round."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def are_slower(self, plain: float, *, errors: float, lanes: int) -> bool:
        """Whether they were slower than plain steps even if chance took so many standard errors of the tokens away."""
        spread = max(self.squares - self.tokens**2 / self.count, 0.0)
        variance = (spread + _VARIANCE_WEIGHT * _VARIANCE / lanes) / (self.count + _VARIANCE_WEIGHT)
        return (self.tokens + errors * sqrt(self.count * variance)) * plain < self.seconds


class Pauses:
    """When drafting has lost more time than it may, rest for a number of tokens; longer each time it fails again.

    The loss is counted in plain steps: what a round took beyond what its tokens would have taken. Gains pay losses
    back, but are not saved up, so a change for the worse is noticed as soon in a long answer as in a short one. A run
    of bad luck is no reason: rounds have to be slower than plain decoding by more than chance, the last 20 or so, which
    tells of a change soon, or all since the loss began, which tells of a loss that is small in each round. Where none
    of many rounds' drafts was kept, no loss is small enough.
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.resting = 0
        self.notice: str | None = None
        # Of the next pause: an answer's first one is shorter than the last one, its others are longer.
        self._length = max(self.patience.pause // 4, _FIRST_PAUSE)
        self._loss = 0.0
        # Time that drafts took since the last ones that were used. After rests, the first try decides.
        self._unused = 0.0 if self.patience.rest == _FIRST_REST else _MAX_UNUSED
        self._said = self._interrupted = False
        self._recent, self._losing = _Rounds(_FADE), _Rounds()

    @property
    def speed(self) -> float:
        """Tokens a second of recent drafted rounds; 0 before the first."""
        return self._recent.speed

    def observe(self, tokens: float, seconds: float, plain: float, *, lanes: int = 1) -> None:
        """A drafted round gained `tokens` in `seconds`; a plain step takes `plain` seconds.

        lanes: of so many the tokens are the mean. It varies less than those of one, so less may be lost, too.
        """
        self._recent.add(tokens, seconds)
        self._loss += seconds / plain - tokens
        if self._loss <= 0:
            self._loss, self._losing = 0.0, _Rounds()
        else:
            self._losing.add(tokens, seconds)
        if self._fails(plain, lanes):
            self._pause(plain)
        elif self._recent.count > _FEW:
            self.patience.gain = self.speed * plain
            if self.patience.gain > _PAYS:
                self._length, self.patience.pause, self.patience.longest = _FIRST_PAUSE, 0, 0

    def _fails(self, plain: float, lanes: int) -> bool:
        patience, losing = self.patience, self._losing
        if losing.count >= patience.in_vain and losing.tokens == losing.count:
            return True
        return self._loss > patience.limit / sqrt(lanes) and (
            self._recent.are_slower(plain, errors=patience.errors, lanes=lanes)
            # Of several answers the recent rounds leave less to chance.
            or (lanes == 1 and losing.are_slower(plain, errors=_CHOSEN * patience.errors, lanes=1))
        )

    @property
    def listens_after(self) -> int:
        """How many rounds may be told of together: one where the next may be that after which drafting should pause."""
        if self.resting > 0:
            inside = _ENDS < self.resting <= self.patience.pause - _ENDS
            return 0 if inside and not self._interrupted else min(self.resting, _MORE_TOGETHER)
        if self.patience.gain > _FAST and self._recent.count > _FEW:
            return _MORE_TOGETHER
        return _TOGETHER if self.patience.gain > _PAYS else 1

    def _pause(self, plain: float) -> None:
        self.patience.gain, self._interrupted = 0.0, False
        self.resting = self.patience.pause = self._length
        self.patience.longest = max(self.patience.longest, self._length)
        self._length = min(4 * self._length, _LONGEST_PAUSE)
        self.notice = (
            f"drafting paused for {self.resting} tokens: lately it was {self.speed * plain:.2f} times as fast as plain "
            "decoding"
        )
        # The next try judges by what it sees then.
        self._loss, self._recent, self._losing = 0.0, _Rounds(_FADE), _Rounds()

    def note_use(self, used: bool, *, cost: float) -> None:
        """Note whether any of a round's drafts were verified, which took `cost` plain steps to make.

        If they were not, again and again, drafting rests, longer each time.
        """
        if used:
            self._unused, self.patience.rest = 0.0, _FIRST_REST
            return
        self._unused += cost
        if self._unused > _MAX_UNUSED:
            self._unused, self.resting = _MAX_UNUSED, max(self.resting, self.patience.rest)
            self.patience.rest = min(2 * self.patience.rest, _LONGEST_REST)
            if self.resting >= _WORTH_SAYING and not self._said:
                self._said = True
                self.notice = (
                    f"drafting paused for {self.resting} tokens: lately no draft was likely to be worth its time"
                )

    def take_rest(self, worth: Callable[[], float] = lambda: 0.0) -> bool:
        """Whether the next round should be a plain one.

        worth: how many times as fast as plain decoding it will be, as far as that can be told before it is drafted.
        """
        if self.resting > 0:
            if worth() < _PAYS:
                self.resting -= 1
                return True
            self._interrupted = True
        return False
