"""From names and folders to a pair that is ready to generate."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from dflash_mlx.checked import check_once, examine
from dflash_mlx.checks import check_shapes
from dflash_mlx.choice import Choice, choose_models, method_called
from dflash_mlx.drafters.loading import check as check_method
from dflash_mlx.drafters.loading import load
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.naming import is_drafter
from dflash_mlx.kernels.exact.model import make_exact
from dflash_mlx.kernels.few_rows import use_where_faster
from dflash_mlx.pair import ModelPair, Report, block_size_for
from dflash_mlx.targets.loading import activation_dtype, load_target
from dflash_mlx.targets.machines import other_machines
from dflash_mlx.targets.target import Target, wrap_model

_NO_DRAFTER = (
    "no drafter is known for {model}, so the text itself is drafted from: what followed the newest words where they "
    "stood before. A drafter made for the model gains more; see: dflash-mlx models."
)

_WHOLE_LAYERS = (
    "each machine has whole layers of this model, so they compute one after the other: together they have room for it, "
    "and are no faster than one."
)


def _ignore(message: str, fraction: float | None) -> None:
    """No progress is wanted."""


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
    recheck: bool = False,
    report: Report | None = None,
) -> ModelPair:
    """Load a known pair by `name`, or a target (`model`) and drafter (`draft_model`) by Hub id or folder.

    A pair's target may have another drafter: `name` and `draft_model`. method: how to draft, one of
    `drafters.methods.Method`; "auto" goes by the drafter's files, and without a drafter it takes the target's own head
    for multi-token prediction, else the text itself. draft=False, or the method "plain", loads the target alone. dtype:
    "auto" (float32 on a CPU, the model's own on a GPU), "float32", "bfloat16" or "float16". block_size: the largest
    block of a round, at most the drafter's own. kernels=False computes with MLX's own operations alone. exact=True
    computes each token alike in any pass, which is slower: answers are then the same with and without drafts in any
    precision. check=False skips the checks that run the models; recheck=True runs them even where these files have
    passed before, and measures anew in which ways they compute fastest. report(message, fraction done or None) follows
    progress. Downloads what is missing.
    Raises UsageError, DownloadError, CheckpointError and PairError.
    """
    started = time.perf_counter()
    report = report or _ignore
    choice = choose_models(name, model, draft_model, method_called(method) if draft else Method.plain)
    machines = other_machines()
    if machines is not None and exact:
        raise UsageError(
            "--exact needs each token's numbers added in the same order in every pass, and machines that add theirs "
            "together do not keep to one; leave it out, or run the model on one machine, without launch."
        )
    plan = _plan(choice, block_size=block_size, report=report)
    if machines is None:
        report("loading the target", None)
        target, activations = load_target(plan.target_folder, dtype=dtype)
    else:
        report(f"loading the target, divided among {machines.group.size} machines", None)
        target, activations = machines.load_target(choice.target, dtype=dtype)
    tokenizer = _load_tokenizer(plan.target_folder)
    pair = _complete(
        plan,
        target,
        tokenizer,
        activations,
        block_size=block_size,
        kernels=kernels,
        exact=exact,
        recheck=recheck,
        report=report,
    )
    if check:
        check_once(pair, again=recheck, report=report)
    target.drain()
    pair.load_seconds = time.perf_counter() - started
    return pair


def pair_around(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    *,
    draft_model: str | None = None,
    method: str = "auto",
    kernels: bool = True,
) -> ModelPair:
    """A pair of a model that `mlx_lm.load` has loaded, as it is, and a drafter; arguments as for `load_pair`.

    What the model's files say is read from the folder that the tokenizer came from. Raises what `load_pair` raises.
    """
    folder = Path(tokenizer.name_or_path)
    if not (folder / "config.json").exists():
        raise UsageError(
            f"the tokenizer should come from the model's folder, with its config.json; found {str(folder)!r}. Pass the "
            "two that mlx_lm.load returns."
        )
    started = time.perf_counter()
    plan = _plan(choose_models(None, str(folder), draft_model, method_called(method)), block_size=None, report=_ignore)
    target = wrap_model(model, read_json(folder / "config.json"))
    # What is remembered of the folder need not hold for a model that came otherwise.
    pair = _complete(plan, target, tokenizer, activation_dtype(model), kernels=kernels, remember=False)
    examine(pair, report=_ignore).note(pair)
    pair.load_seconds = time.perf_counter() - started
    return pair


@dataclass(frozen=True)
class _Plan:
    """What is meant, where it is on this disk, and how it drafts."""

    choice: Choice
    target_folder: Path
    drafter_folder: Path | None
    method: Method


def _plan(choice: Choice, *, block_size: int | None, report: Report) -> _Plan:
    """Fetch what is missing, and refuse what cannot be used before anything is loaded."""
    target_folder = ensure_model(choice.target, report=report)
    drafter_folder = ensure_model(choice.drafter, report=report) if choice.drafter else None
    if is_drafter(read_json(target_folder / "config.json")):
        raise CheckpointError(
            f"{target_folder} holds a drafter, and --model takes the model that answers. Give the target to --model."
        )
    method = check_method(drafter_folder, choice.method, target_folder=target_folder, block_size=block_size)
    return _Plan(choice, target_folder, drafter_folder, method)


def _complete(
    plan: _Plan,
    target: Target,
    tokenizer: TokenizerWrapper,
    activations: mx.Dtype,
    *,
    block_size: int | None = None,
    kernels: bool = True,
    exact: bool = False,
    recheck: bool = False,
    remember: bool = True,
    report: Report = _ignore,
) -> ModelPair:
    """Load the drafter for a target, and choose what both compute with. Arguments as for `load_pair`.

    remember: the models are those of their folders, so that what was chosen before holds for them.
    """
    choice = plan.choice
    folders = tuple(folder for folder in (plan.target_folder, plan.drafter_folder) if folder)
    if plan.method.takes_folder:
        report("loading the drafter", None)
    drafter = load(
        plan.drafter_folder,
        plan.method,
        target=target,
        target_folder=plan.target_folder,
        block_size=block_size,
        dtype=activations,
    )
    if drafter is not None:
        check_shapes(target, drafter)
    by_default = choice.method is Method.auto and plan.method is Method.ngram
    warning = _NO_DRAFTER.format(model=choice.label) if by_default else choice.warning
    checks = [make_exact(target, kernels=kernels, report=report)] if exact else []
    # On several machines kernels are left out: they are made for whole layers, and races run the model by itself.
    notes = [_WHOLE_LAYERS] if target.whole_layers is not None else []
    if not exact and target.machines == 1:
        own = folders if remember else ()
        notes = use_where_faster(target, drafter, folders=own, again=recheck, kernels=kernels, report=report)
    return ModelPair(
        name=choice.label,
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        dtype=activations,
        block_size=block_size_for(drafter, block_size),
        exact=exact,
        folders=folders,
        checks=checks,
        warnings=[*([warning] if warning else []), *notes],
    )


def _load_tokenizer(folder: Path) -> TokenizerWrapper:
    try:
        return load_tokenizer(folder, eos_token_ids=_eos_token_ids(folder))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot load the tokenizer in {folder}: {error}") from error


def _eos_token_ids(folder: Path) -> Any:
    from mlx_lm.utils import load_config

    config: Mapping[str, Any] = load_config(folder)
    return config.get("eos_token_id")
