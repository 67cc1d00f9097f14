"""Finished sessions, kept so that a request that begins like an earlier one need not compute that part again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_mlx.decoding.fork import can_cut, can_rewind, fork, session_bytes
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.server.status import CacheStatus

# Fewer tokens in common (a template's opening words) are not worth a copy.
_WORTH_TAKING = 8


@dataclass(eq=False)
class _Entry:
    owner: str
    session: Session
    bytes: int

    @property
    def drafts(self) -> bool:
        return self.session.drafter is not None

    def usable(self, prompt: list[int]) -> int:
        """How many tokens of the prompt this entry saves. The last one is always fed: its logits are needed."""
        shared = min(common_prefix(self.session.tokens, prompt), len(prompt) - 1)
        return shared if can_rewind(self.session, shared) else 0


class PrefixCache:
    """Sessions by longest common prefix, within a byte budget; the least recently used go first.

    Owners never see each other's, nor do answers with and without a drafter share. A session is either here or in use,
    never both. For the worker's thread alone; `status` may be asked from others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._entries: list[_Entry] = []  # least recently used first
        self._hits = self._misses = self._evictions = 0

    def take(
        self,
        owner: str,
        prompt: list[int],
        new: Callable[[], Session],
        *,
        draft: bool,
        active: Iterable[Session] = (),
    ) -> Session:
        """A session that holds as much of the prompt's beginning as is known, or a new one.

        A session that holds more than that is left for its own conversation and copied, if the budget has room for
        both. `active`: the owner's sessions in use, from which beginnings may be copied, too.
        """
        entry = self._best(owner, prompt, draft)
        saved = entry.usable(prompt) if entry else 0
        running = max(active, key=lambda s: _copyable(s, prompt), default=None)
        if running is not None and (copyable := _copyable(running, prompt)) > max(saved, _WORTH_TAKING):
            self._hits += 1
            return fork(running, copyable)
        if entry is None or saved < _WORTH_TAKING:
            self._misses += 1
            return new()
        self._hits += 1
        # Where a cache cannot go back, taking it would leave no way to begin an edited turn there.
        needed = saved < len(entry.session.tokens) or not can_cut(entry.session)
        if needed and self._has_room_for(entry, saved):
            self._touch(entry)
            return fork(entry.session, saved if can_cut(entry.session) else len(entry.session.tokens))
        self._remove(entry)
        return entry.session

    def put(self, owner: str, session: Session) -> None:
        """Keep a session that nobody uses, after settling it. Of a session and beginnings of it, only the longest stays
        where the others can be had from it."""
        session.settle()
        if not session.tokens:
            return
        entry = _Entry(owner, session, session_bytes(session))
        same = [e for e in self._entries if e.owner == owner and e.drafts == entry.drafts]
        for other in same:
            if can_cut(other.session) and _begins(session, other.session):
                self._touch(other)
                return
            if _begins(other.session, session) and (can_cut(session) or other.session.tokens == session.tokens):
                self._remove(other)
        if entry.bytes <= self.limit_bytes:
            self.shrink(self.limit_bytes - entry.bytes)
            self._entries.append(entry)
            self.bytes += entry.bytes

    def known(self, owner: str, prompt: list[int], *, draft: bool) -> int:
        """How many tokens of the prompt `take` would find among the entries."""
        entry = self._best(owner, prompt, draft)
        return entry.usable(prompt) if entry else 0

    def shrink(self, limit_bytes: int) -> None:
        """Let the least recently used go until no more than this is held."""
        while self._entries and self.bytes > limit_bytes:
            self._remove(self._entries[0])
            self._evictions += 1

    def clear(self) -> None:
        """Let everything go."""
        self._entries.clear()
        self.bytes = 0

    def status(self) -> CacheStatus:
        return CacheStatus(
            entries=len(self._entries),
            bytes=self.bytes,
            limit_bytes=self.limit_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _best(self, owner: str, prompt: list[int], draft: bool) -> _Entry | None:
        """The entry that saves most; among equals the shortest, which its own conversation misses least."""
        mine = [e for e in self._entries if e.owner == owner and e.drafts == draft]
        return max(mine, key=lambda e: (e.usable(prompt), -len(e.session.tokens)), default=None)

    def _has_room_for(self, entry: _Entry, length: int) -> bool:
        """Whether a copy of an entry's beginning fits beside everything, by its share of the entry's bytes."""
        return self.bytes + entry.bytes * length // len(entry.session.tokens) <= self.limit_bytes

    def _touch(self, entry: _Entry) -> None:
        """Make it the most recently used."""
        self._entries.remove(entry)
        self._entries.append(entry)

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.bytes -= entry.bytes


def _begins(short: Session, long: Session) -> bool:
    return short.tokens == long.tokens[: len(short.tokens)]


def _copyable(session: Session, prompt: list[int]) -> int:
    """How much of the prompt's beginning can be copied from a session that is in use."""
    return min(common_prefix(session.tokens, prompt), len(prompt) - 1) if can_cut(session) else 0
