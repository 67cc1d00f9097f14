"""A target and its drafter, loaded, checked and ready to generate."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from dflash_mlx.checks import GUESS_TEXT, check_pair, check_shapes, read_guesses
from dflash_mlx.decoding.engine import can_branch
from dflash_mlx.decoding.policies import GroupPolicy, WidthPolicy
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.tree import wide_sizes
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.loading import check as check_method
from dflash_mlx.drafters.loading import in_steps, load
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.naming import is_drafter
from dflash_mlx.hub.registry import ModelSource, find_pair, pair_called, parse_source
from dflash_mlx.hub.resolve import UnknownTargetError, pair_for_target
from dflash_mlx.kernels.exact.model import make_exact
from dflash_mlx.kernels.few_rows import use_where_faster
from dflash_mlx.policy.costs import load_or_measure
from dflash_mlx.policy.group import FixedGroup, GroupCosts, GroupWidth
from dflash_mlx.policy.group_costs import load_or_measure_group
from dflash_mlx.policy.trees_or_chains import Experience, PairCosts, choose_policy
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.machines import other_machines
from dflash_mlx.targets.target import Target

_NO_DRAFTER = (
    "no drafter is known for {model}, so the text itself is drafted from: what followed the newest words where they "
    "stood before. A drafter made for the model gains more; see: dflash-mlx models."
)
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
        block_size = self.block_size if config.block_size is None else _block_size(drafter, config.block_size)
        return replace(self, drafter=drafter, block_size=block_size)

    def new_session(self, *, draft: bool = True) -> Session:
        """Empty caches for one conversation. Without drafting the drafter's are left out."""
        return Session(self.target, self.drafter if draft else None)

    def new_experience(self) -> Experience:
        """What earlier answers taught, for a new one to begin with; it learns on a copy of its own."""
        return copy.deepcopy(self._experience)

    def learn(self, experience: Experience) -> None:
        """Let the next answers begin with what an answer has learnt, now that it is finished."""
        self._experience = self._experience.merged(experience)

    def width_policy(
        self, width: int | None = None, *, tree: bool = False, experience: Experience | None = None
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
        costs = copy.deepcopy(self.round_costs())
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
                costs, self.block_size - 1, by_confidence=self.drafter.drafts_on_host
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
            self._costs = load_or_measure(
                self.target,
                self.drafter.rehearsal(),
                block_size=self.block_size,
                folders=self.folders,
                dtype=self.dtype,
                report=report,
            )
        return self._costs


def load_pair(
    name: str | None = None,
    *,
    model: str | None = None,
    draft_model: str | None = None,
    method: str = "auto",
    draft: bool = True,
    dtype: str = "auto",
    block_size: int | None = None,
    kernels: bool = True,
    exact: bool = False,
    check: bool = True,
    report: Report | None = None,
) -> ModelPair:
    """Load a known pair by `name`, or a target (`model`) and drafter (`draft_model`) by Hub id or folder.

    method: how to draft, one of `drafters.methods.Method`; "auto" goes by the drafter's files, and without a drafter it
    takes the target's own head for multi-token prediction, else the text itself. draft=False, or the method "plain",
    loads the target alone. dtype: "auto" (float32 on a CPU, the model's own on a GPU), "float32", "bfloat16" or
    "float16". block_size: the largest block of a round, at most the drafter's own. kernels=False computes with MLX's
    own operations alone. exact=True computes each token alike in any pass, which is slower: answers are then the same
    with and without drafts in any precision. check=False skips the checks that run the models. report(message, fraction
    done or None) follows progress. Downloads what is missing.
    Raises UsageError, DownloadError, CheckpointError and PairError.
    """
    started = time.perf_counter()
    report = report or (lambda message, fraction: None)
    choice = _resolve(name, model, draft_model, _method(method) if draft else Method.plain)
    target_folder = ensure_model(choice.target, report=report)
    drafter_folder = ensure_model(choice.drafter, report=report) if choice.drafter else None

    if is_drafter(read_json(target_folder / "config.json")):
        raise CheckpointError(
            f"{target_folder} holds a drafter, and --model takes the model that answers. Give the target to --model."
        )
    chosen = check_method(drafter_folder, choice.method, target_folder=target_folder, block_size=block_size)

    machines = other_machines()
    if machines is not None and exact:
        raise UsageError("--exact needs the whole model on one machine; leave it out, or start without launch.")
    if machines is None:
        report("loading the target", None)
        target, activations = load_target(target_folder, dtype=dtype)
    else:
        report(f"loading the target, divided among {machines.group.size} machines", None)
        target, activations = machines.load_target(choice.target, dtype=dtype)
    tokenizer = _load_tokenizer(target_folder)
    if chosen.takes_folder:
        report("loading the drafter", None)
    drafter = load(
        drafter_folder,
        chosen,
        target=target,
        target_folder=target_folder,
        block_size=block_size,
        dtype=activations,
    )
    if drafter is not None:
        check_shapes(target, drafter)
    by_default = choice.method is Method.auto and chosen is Method.ngram
    warning = _NO_DRAFTER.format(model=choice.label) if by_default else choice.warning
    checks = [make_exact(target, kernels=kernels, report=report)] if exact else []
    # On several machines kernels are left out: they are made for whole layers, and races run the model by itself.
    plainly = exact or machines is not None
    notes = [] if plainly else use_where_faster(target, drafter, kernels=kernels, report=report)
    pair = ModelPair(
        name=choice.label,
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        dtype=activations,
        block_size=_block_size(drafter, block_size),
        exact=exact,
        folders=tuple(f for f in (target_folder, drafter_folder) if f),
        checks=checks,
        warnings=[*([warning] if warning else []), *notes],
    )
    if check and drafter is not None:
        report("checking that target and drafter belong together", None)
        pair.checks += check_pair(target, drafter, dtype=activations)
        guesses = read_guesses(target, drafter, pair.encode_prompt(GUESS_TEXT))
        if guesses is not None:
            (pair.warnings if guesses.are_noise else pair.checks).append(guesses.report)
    target.drain()
    pair.load_seconds = time.perf_counter() - started
    return pair


def _method(name: str) -> Method:
    try:
        return Method(name)
    except ValueError:
        known = ", ".join(method.value for method in Method)
        raise UsageError(f"there is no method {name!r}; choose one of {known}.") from None


@dataclass(frozen=True)
class _Choice:
    """What to load; drafter: None where the method needs none."""

    label: str
    target: ModelSource
    drafter: ModelSource | None
    method: Method
    warning: str | None = None


def _resolve(name: str | None, model: str | None, draft_model: str | None, method: Method) -> _Choice:
    if name is not None and (model is not None or draft_model is not None):
        raise UsageError(
            "name either a pair or a model with its drafter, not both (--pair, or --model and --draft-model)."
        )
    drafts = method is Method.auto or method.has_drafter
    if draft_model is not None and not method.takes_folder and method is not Method.plain:
        raise UsageError(f"--method {method.value} drafts without a drafter; leave --draft-model out.")
    if name is not None:
        spec = find_pair(name)
        return _Choice(spec.name, spec.target, spec.drafter if drafts else None, method)
    if model is None:
        raise UsageError("say what to load: a pair (--pair demo) or a model (--model TARGET --draft-model DRAFTER).")
    target = _target_source(model)
    if draft_model is not None and method.takes_folder:
        return _Choice(model, target, parse_source(draft_model), method)
    if not drafts:
        return _Choice(model, target, None, method)
    try:
        match = pair_for_target(model)
    except UnknownTargetError as error:
        if method is not Method.auto:
            raise UsageError(f"{error} Give one with --draft-model, or run plainly with --no-draft.") from error
        return _Choice(model, target, None, method)
    return _Choice(model, target, match.pair.drafter, method, match.warning)


def _target_source(model: str) -> ModelSource:
    try:
        return parse_source(model)
    except UsageError:
        if pair_called(model) is not None:
            raise UsageError(f"{model} is a pair of target and drafter; load it with --pair {model}.") from None
        raise


def _load_tokenizer(folder: Path) -> TokenizerWrapper:
    try:
        return load_tokenizer(folder, eos_token_ids=_eos_token_ids(folder))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot load the tokenizer in {folder}: {error}") from error


def _eos_token_ids(folder: Path) -> Any:
    from mlx_lm.utils import load_config

    config: Mapping[str, Any] = load_config(folder)
    return config.get("eos_token_id")


def _block_size(drafter: Drafter | None, wanted: int | None) -> int:
    if drafter is None:
        return 1
    trained = drafter.places + 1
    if wanted is None:
        return trained
    if not 2 <= wanted <= trained:
        raise UsageError(f"block size should be from 2 to {trained}, what the drafter was trained for; got {wanted}.")
    return wanted
