"""A job whose answer is being made."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dflash_mlx.answer import Answer
from dflash_mlx.decoding.fork import can_cut, fork
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.pair import ModelPair
from dflash_mlx.scoring import ScoredToken, score
from dflash_mlx.server.memory import Need
from dflash_mlx.server.prefix_cache import PrefixCache
from dflash_mlx.server.ticket import Job, Ticket
from dflash_mlx.targets.target import Target

# A prompt that another answer is just reading is waited for if that saves this many tokens.
_WORTH_WAITING = 64


@dataclass(eq=False, kw_only=True)
class Running:
    """A job that has a place, and its answer from when that begins. drafts: whether it is drafted."""

    ticket: Ticket
    drafts: bool
    need: Need
    started_at: float
    answer: Answer | None = None
    scoring: Iterator[list[ScoredToken]] | None = None  # of its prompt, which comes before the answer
    newest_at: float = 0.0  # when its newest tokens came

    @property
    def job(self) -> Job:
        return self.ticket.job

    @property
    def session(self) -> Session | None:
        return self.answer.session if self.answer is not None else None

    @property
    def reading(self) -> bool:
        """Whether its prompt is being read."""
        return self.answer is not None and self.answer.lane is None

    def score(self, target: Target) -> bool:
        """Score a chunk of the prompt where that was asked for; false when there is nothing to score."""
        if self.job.prompt_logprobs is not None and self.scoring is None:
            self.scoring = score(target, self.job.prompt, top=self.job.prompt_logprobs)
        found = next(self.scoring, None) if self.scoring is not None else None
        self.ticket.prompt_logprobs += found or []
        return found is not None

    def relatives(self, others: Iterable["Running"]) -> list["Running"]:
        """Other answers in progress whose caches this one may use."""
        return [
            other
            for other in others
            if other is not self
            and other.answer is not None
            and other.job.owner == self.job.owner
            and other.drafts == self.drafts
        ]

    def should_wait(self, cache: PrefixCache, others: Iterable["Running"]) -> bool:
        """Whether much of this prompt is just being read for another answer, and can be copied when that is done."""
        prompt = self.job.prompt
        known = cache.known(self.job.owner, prompt, draft=self.drafts)
        return any(
            other.reading
            and other.session is not None
            and can_cut(other.session)
            and min(common_prefix(other.job.prompt, prompt), len(prompt) - 1)
            > _WORTH_WAITING + max(known, common_prefix(other.session.tokens, prompt))
            for other in self.relatives(others)
        )

    def begin(self, pair: ModelPair, cache: PrefixCache, others: Iterable["Running"], *, width: int | None) -> Answer:
        """Make the answer, with the session that saves most of reading the prompt. Raises UsageError."""
        job = self.job

        def keep_snapshot(session: Session) -> None:
            """Caches that cannot go back are copied where the prompt ends: a changed answer can start there."""
            if not can_cut(session):
                cache.put(job.owner, fork(session, len(session.tokens)))

        session = cache.take(
            job.owner,
            job.prompt,
            lambda: pair.new_session(draft=self.drafts),
            draft=self.drafts,
            active=[other.session for other in self.relatives(others) if other.session is not None],
        )
        self.answer = Answer(
            pair,
            job.prompt,
            job.params,
            session=session,
            draft=self.drafts,
            width=width,
            constraint=job.constraint,
            continues=job.continues,
            on_prompt_read=keep_snapshot,
        )
        return self.answer
