"""A target and its drafter, loaded, checked and ready to generate."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.decoding.choosing import can_branch
from dflash_mlx.decoding.policies import GroupPolicy, WidthPolicy
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.tree import wide_sizes
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.loading import in_steps
from dflash_mlx.errors import UsageError
from dflash_mlx.policy.costs import load_or_measure, stored_name
from dflash_mlx.policy.group import FixedGroup, GroupCosts, GroupWidth
from dflash_mlx.policy.group_costs import load_or_measure_group
from dflash_mlx.policy.stored import forget
from dflash_mlx.policy.trees_or_chains import Experience, PairCosts, choose_policy
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.target import Target

Report = Callable[[str, float | None], None]


@dataclass
class ModelPair:
    """A loaded target, its tokenizer and, unless it decodes plainly, its drafter.

    `dtype` is that of the target's activations. `block_size` is the largest block of a round: an anchor and up to
    block_size - 1 drafts. exact: answers are the same with and without drafts, in any precision. Use it from one thread
    at a time.
    """

    name: str
    target: Target
    drafter: Drafter | None
    tokenizer: TokenizerWrapper
    dtype: mx.Dtype
    block_size: int
    exact: bool = False
    folders: tuple[Path, ...] = ()
    load_seconds: float = 0.0
    checks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what the user should know about the models
    _costs: PairCosts | None = field(default=None, init=False)
    _costs_forgotten: bool = field(default=False, init=False)  # on disk, where newer ones may be by now
    _group_costs: dict[int, GroupCosts] = field(default_factory=dict, init=False)
    _group_policies: dict[int, GroupWidth] = field(default_factory=dict, init=False)
    _experience: Experience = field(default_factory=Experience, init=False)

    @property
    def method(self) -> str:
        """How it drafts: "dflash", "ngram", ..., or "plain"."""
        return self.drafter.method if self.drafter is not None else "plain"

    @property
    def context_length(self) -> int | None:
        return self.target.context_length

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def eos_ids(self) -> set[int]:
        return set(self.tokenizer.eos_token_ids)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of chat messages through the model's template, up to where its answer begins."""
        if not self.tokenizer.has_chat_template:
            return self.encode_prompt("\n".join(str(message["content"]) for message in messages))
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of text as it is, with what the tokenizer itself adds in front."""
        return list(self.tokenizer.encode(text))

    def with_config(self, config: DFlashConfig) -> "ModelPair":
        """The same models, drafting as `config` says. Raises UsageError for what this drafter cannot do."""
        drafter = in_steps(self.drafter, config)
        block_size = self.block_size if config.block_size is None else block_size_for(drafter, config.block_size)
        return replace(self, drafter=drafter, block_size=block_size)

    def new_session(self, *, draft: bool = True) -> Session:
        """Empty caches for one conversation. Without drafting the drafter's are left out."""
        return Session(self.target, self.drafter if draft else None)

    def new_experience(self) -> Experience:
        """What earlier answers taught, for a new one to begin with; it learns on a copy of its own."""
        return copy.deepcopy(self._experience)

    def learn(self, experience: Experience) -> None:
        """Let the next answers begin with what an answer has learnt, now that it is finished.

        Costs that were measured beside other programs, as its rounds have shown, are measured again at the next start.
        """
        self._experience = self._experience.merged(experience)
        spoilt = experience.costs is not None and experience.costs.too_high
        if spoilt and self.drafter is not None and self._costs is not None and not self._costs_forgotten:
            self._costs_forgotten = True
            forget(stored_name(self.target, self.drafter.rehearsal(), **self._measured_as))

    def expect_failure(self) -> None:
        """Let the first answer try drafting as briefly as after many whose drafts were not kept.

        It tries all the same, and where drafting pays, it goes on.
        """
        self._experience = Experience.of_failure()

    @property
    def _measured_as(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "folders": self.folders, "dtype": self.dtype}

    def width_policy(
        self,
        width: int | None = None,
        *,
        tree: bool = False,
        experience: Experience | None = None,
        prompt_tokens: int = 0,
    ) -> WidthPolicy:
        """A policy for one answer: always `width` drafts, in a chain or a `tree`, or by measured speed when None."""
        if width is not None:
            places = self.block_size - 1
            widest = max(wide_sizes(places)) if tree else places
            if not 0 <= width <= widest:
                raise UsageError(f"width should be from 0 to {widest} for this drafter; got {width}.")
            if tree and not (self.drafter is not None and can_branch(self.target, self.drafter)):
                raise UsageError("this pair's drafts cannot be a tree; leave `tree` out.")
            return FixedWidth(width, places=places if tree else 0)
        # A policy follows what rounds of its own answer take, so the costs are a copy, too.
        costs = self.round_costs().after(prompt_tokens)
        assert self.drafter is not None
        by_confidence = self.drafter.drafts_on_host
        return choose_policy(
            costs, self.block_size - 1, experience or self.new_experience(), by_confidence=by_confidence
        )

    def group_policy(self, width: int | None = None, *, most_lanes: int) -> GroupPolicy:
        """A policy for up to `most_lanes` lanes: always `width` drafts, or by measured speed when None.

        The second is the same each time, so that later answers begin with what earlier ones have taught.
        """
        if width is not None or self.drafter is None or most_lanes < 2 or not self.target.takes_rows():
            return FixedGroup(width or 0)
        if most_lanes not in self._group_policies:
            costs = copy.deepcopy(self.group_costs(most_lanes))
            self._group_policies[most_lanes] = GroupWidth(
                costs,
                self.block_size - 1,
                by_confidence=self.drafter.drafts_on_host,
                any_width=not self.target.replays,
            )
        return self._group_policies[most_lanes]

    def group_costs(self, most_lanes: int, report: Report | None = None) -> GroupCosts:
        """What rounds that lanes share cost on this machine; measured the first time, then remembered on disk."""
        assert self.drafter is not None
        if most_lanes not in self._group_costs:
            self._group_costs[most_lanes] = load_or_measure_group(
                self.target,
                self.drafter.rehearsal(),
                places=self.block_size - 1,
                most_lanes=most_lanes,
                folders=self.folders,
                dtype=self.dtype,
                report=report,
            )
        return self._group_costs[most_lanes]

    def round_costs(self, report: Report | None = None) -> PairCosts:
        """Seconds a round takes by width on this machine; measured the first time, then remembered on disk."""
        assert self.drafter is not None
        if self._costs is None:
            self._costs = load_or_measure(self.target, self.drafter.rehearsal(), report=report, **self._measured_as)
        return self._costs


def block_size_for(drafter: Drafter | None, wanted: int | None) -> int:
    """The largest block of a round: what is wanted, else the drafter's own. Raises UsageError."""
    if drafter is None:
        return 1
    trained = drafter.places + 1
    if wanted is None:
        return trained
    if not 2 <= wanted <= trained:
        raise UsageError(f"block size should be from 2 to {trained}, what the drafter was trained for; got {wanted}.")
    return wanted
