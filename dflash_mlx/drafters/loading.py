"""From a method and a drafter's folder to a drafter."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters import draft_model, eagle3, mtp, ngram
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.config import parse_draft_config
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.dialects import other_kind
from dflash_mlx.drafters.eagle3_checkpoint import is_eagle3, load_eagle3, parse_eagle3_config
from dflash_mlx.drafters.medusa import is_medusa, load_medusa
from dflash_mlx.drafters.methods import Method
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.errors import WRONG_VALUES, CheckpointError, UsageError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.naming import is_drafter
from dflash_mlx.hub.own_head import brings_head
from dflash_mlx.targets.target import Target

# How a DFlash drafter drafts unless the user says it: dflash_ngram was faster than dflash on a CPU and on a GPU.
_AUTO_FOR_DFLASH = Method.dflash_ngram
# The places for which tokens are drafted in a round, and the most that may be asked for. The others have their own.
_PLACES = {
    Method.eagle3: (eagle3.PLACES, eagle3.MOST_PLACES),
    Method.mtp: (mtp.PLACES, mtp.MOST_PLACES),
    Method.draft_model: (draft_model.PLACES, draft_model.MOST_PLACES),
    Method.ngram: (ngram.DEFAULT_PLACES, ngram.MOST_PLACES),
}


def check(folder: Path | None, method: Method, *, target_folder: Path, block_size: int | None) -> Method:
    """Which method a drafter's folder, or none, means for a target, where `method` is what was asked for.

    Refuses what cannot be used, before the target is loaded, which may take minutes. block_size: the largest block of a
    round, None for the drafter's own. Raises CheckpointError and UsageError.
    """
    if folder is not None and method.alone is not Method.mtp:
        raw = read_json(folder / "config.json")
        found = method_of(raw)
        if method is Method.auto:
            method = _AUTO_FOR_DFLASH if found is Method.dflash else found
        elif found is not method.alone:
            raise UsageError(
                f"--method {method.value} was asked for, and the drafter in {folder} is one for {found.value}. Leave "
                "--method out, or name another drafter with --draft-model."
            )
        if found is Method.dflash:
            parse_draft_config(raw)
        elif found is Method.eagle3:
            parse_eagle3_config(raw)
    elif method is Method.auto:
        method = Method.mtp if brings_head(target_folder) else Method.ngram
    most = _PLACES[method.alone][1] if method.alone in _PLACES else None
    if block_size is not None and most is not None and not 2 <= block_size <= most + 1:
        raise UsageError(f"block size should be from 2 to {most + 1} for {method.value}; got {block_size}.")
    return method


def load(
    folder: Path | None,
    method: Method,
    *,
    target: Target,
    target_folder: Path,
    block_size: int | None,
    dtype: mx.Dtype,
) -> Drafter | None:
    """The drafter in a folder, or one that needs no files; None to decode plainly. `method` is what `check` returned.

    dtype: that of the target's activations. Raises CheckpointError and PairError.
    """
    default, _ = _PLACES.get(method.alone, (0, 0))
    places = default if block_size is None else block_size - 1
    drafter: Drafter
    if method is Method.ngram:
        drafter = ngram.NgramDrafter(places)
    elif method.alone is Method.mtp:
        drafter = mtp.load_mtp(folder or target_folder, target, dtype=dtype, places=places)
    elif folder is None:
        return None
    elif method.alone is Method.eagle3:
        drafter = load_eagle3(folder, target, dtype=dtype, places=places)
    elif method.alone is Method.medusa:
        drafter = load_medusa(folder, target, dtype=dtype)
    elif method.alone is Method.draft_model:
        drafter = draft_model.load_draft_model(folder, target, target_folder, dtype=dtype, places=places)
    else:
        drafter = load_drafter(folder, dtype=dtype)
    return drafter if method is method.alone else WithNgram(drafter)


def in_steps(drafter: Drafter | None, drafting: DFlashConfig) -> Drafter | None:
    """The same drafter, which drafts as `drafting` says. Raises UsageError for one that cannot take several steps."""
    if isinstance(drafter, WithNgram):
        inner = in_steps(drafter.drafter, drafting)
        assert inner is not None
        return WithNgram(inner)
    if isinstance(drafter, DFlashDrafter) and not isinstance(drafter, DFlash2Drafter):
        return drafter.drafting_as(drafting)
    if drafting.diffusion_steps == 1:
        return drafter
    found = "a DFlash 2 drafter" if isinstance(drafter, DFlash2Drafter) else drafter.method if drafter else "no drafter"
    raise UsageError(f"several denoising steps are for DFlash drafters; this pair has {found}. Leave --steps out.")


def method_of(raw: dict[str, Any]) -> Method:
    """The method that a folder with this config.json is for. Raises CheckpointError for kinds that are not run."""
    try:
        method = Method.eagle3 if is_eagle3(raw) else Method.medusa if is_medusa(raw) else None
        kind = None if method else other_kind(raw)
    except WRONG_VALUES as error:
        raise CheckpointError(
            f"the drafter's config.json holds a value of another kind than expected: {error}. Fetch the folder again."
        ) from error
    if kind is not None:
        raise CheckpointError(
            f"the drafter is {kind}; this version drafts with DFlash, DFlash 2 and EAGLE-3 drafters, Medusa heads, "
            "small language models, and a target's own head for multi-token prediction. Choose such a drafter for your "
            "target, or run with --no-draft."
        )
    if method is not None:
        return method
    return Method.dflash if is_drafter(raw) or "target_layer_ids" in raw else Method.draft_model
