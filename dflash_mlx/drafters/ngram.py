"""Drafting from the text itself (prompt lookup): what followed the newest tokens where they stood before.

No model drafts here, so it serves any target. It pays where an answer repeats its prompt or itself: code that is
edited, documents that are quoted, lists. The idea is that of Saxena's "Prompt Lookup Decoding" (2023).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.contract import Continuation, Drafted, Outlook, Writer
from dflash_mlx.targets.target import Target

DEFAULT_PLACES, MOST_PLACES = 15, 63
# Tokens that have to be equal, how many of the places where they stood are compared further, and how far back.
_KEY, _TRIED, _FARTHEST = 2, 8, 32
# How often the next token was the same, too, by the length of what was equal: of 2, of 3, of 4 to 6, ... At first as in
# 27 answers of the demo pair.
_LENGTHS, _RATES = (3, 4, 7, 10, 16), (0.5, 0.69, 0.77, 0.79, 0.89, 0.97)
_PRIOR_WEIGHT, _FADE = 4.0, 0.97
# A draft that is less likely than this is not worth waiting for.
_LEAST = 0.3
_NEVER = -1e30


class Lookup:
    """A growing text, and the place in it where its newest tokens stood before.

    length: how many of the newest tokens are equal there; 0 where there is no such place.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length = 0
        # Of the token after those that are equal.
        self._place = 0
        # Where the token after each run of `_KEY` tokens stands, the newest place last.
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._kept = [rate * _PRIOR_WEIGHT for rate in _RATES]
        self._tried = [_PRIOR_WEIGHT] * len(_RATES)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the text's next tokens. Whether they repeat it tells how likely the next drafts are."""
        for token in tokens:
            follows = self.length > 0 and self.tokens[self._place] == token
            if self.length:
                kind = bisect_right(_LENGTHS, self.length)
                self._kept[kind] = _FADE * self._kept[kind] + follows
                self._tried[kind] = _FADE * self._tried[kind] + 1
            self.tokens.append(token)
            key = tuple(self.tokens[-_KEY:])
            if follows:
                self._place, self.length = self._place + 1, self.length + 1
            else:
                self._find(self._places.get(key, ()))
            self._places.setdefault(key, []).append(len(self.tokens))

    def _find(self, places: Sequence[int]) -> None:
        """The place of those given before which most tokens are equal to the newest ones; the last of several."""
        tokens, self.length = self.tokens, 0
        for place in reversed(places[-_TRIED:]):
            most, length = min(place, _FARTHEST), self.length
            # To be longer than the one found, it has to be equal there, too.
            if most <= length or tokens[place - 1 - length] != tokens[-1 - length]:
                continue
            length = 0
            while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > self.length:
                self._place, self.length = place, length

    def chance(self, further: int = 0) -> float:
        """How likely the text goes on as it did there, once so many more tokens have been equal."""
        kind = bisect_right(_LENGTHS, self.length + further)
        return self._kept[kind] / self._tried[kind] if self.length else 0.0

    def promise(self, places: int) -> float:
        """How many of so many drafts are expected to be kept."""
        total, survival = 0.0, 1.0
        for further in range(places if self.length else 0):
            survival *= self.chance(further)
            total += survival
        return total

    def draft(self, places: int) -> list[int]:
        """What followed there; where that reaches the end of the text, it is what was drafted that follows."""
        found = self.tokens[self._place : self._place + places]
        while len(found) < places:
            found.append(found[self._place + len(found) - len(self.tokens)])
        return found

    def continuation(self, places: int) -> Continuation | None:
        """Drafts, and how likely each is; None where there is no such place."""
        if not self.length:
            return None
        return Continuation(self.draft(places), [self.chance(further) for further in range(places)])


class NgramDrafter:
    """See `contract.Drafter`. always: it drafts something for every round, for measuring."""

    method = "ngram"
    taps: Sequence[int] = ()
    supports_trees = allows_rejection = False
    drafts_on_host = True
    networks: Sequence[Any] = ()

    def __init__(self, places: int = DEFAULT_PLACES, *, always: bool = False) -> None:
        self.places, self.always = places, always

    def misfits(self, target: Target) -> list[str]:
        return []

    def make_cache(self) -> list[Any]:
        return []

    def read(self, target: Target, tokens: mx.array, features: mx.array | None, caches: list[Any]) -> None:
        pass

    def open(self, target: Target, caches: list[Any], length: int) -> "NgramState":
        return NgramState(always=self.always)

    def blank(self, target: Target, rows: int, positions: int) -> "NgramState":
        return NgramState(always=self.always)

    def rehearsal(self) -> "NgramDrafter":
        return NgramDrafter(self.places, always=True)


class NgramState:
    """See `contract.DraftState`. What it remembers belongs to the answers, not to rows: the host knows their texts."""

    vocabulary = None

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._lookups: WeakKeyDictionary[Writer, Lookup] = WeakKeyDictionary()

    def lookup(self, writer: Writer) -> Lookup:
        """An answer's text, with its newest tokens."""
        lookup = self._lookups.get(writer)
        if lookup is None:
            lookup = self._lookups[writer] = Lookup()
        lookup.extend(writer.text_from(len(lookup.tokens)))
        return lookup

    def outlook(self, writers: Sequence[Writer]) -> Outlook:
        drafts = self._always or any(self.lookup(writer).chance() >= _LEAST for writer in writers)
        return Outlook.HOST if drafts else Outlook.NOTHING

    def told(self, writer: Writer) -> float:
        """Nothing: it rests where texts promised what they did not keep."""
        return 0.0

    def continuation(self, writer: Writer, places: int) -> Continuation | None:
        return None

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        tokens = np.zeros((len(writers), places), dtype=np.uint32)
        log_probs = np.full((len(writers), places), 0.0 if self._always else _NEVER, dtype=np.float32)
        for row, writer in enumerate(writers):
            text = self.lookup(writer).continuation(places)
            if text is not None:
                tokens[row], log_probs[row] = text.tokens, np.log(text.chances)
        return Drafted(mx.array(tokens), log_probs=mx.array(log_probs))

    def withdraw(self) -> None:
        pass

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        pass

    def settle(self, at: mx.array) -> None:
        pass

    def layers(self) -> list[Any]:
        return []

    def add(self, count: int) -> None:
        pass

    def take_over(self, other: "NgramState", places: Sequence[int]) -> None:
        self._lookups.update(other._lookups)

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def give_back(self, row: int, length: int, caches: list[Any]) -> None:
        pass
