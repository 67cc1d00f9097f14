"""From a method and a drafter's folder to a drafter."""

from pathlib import Path

import mlx.core as mx

from dflash_mlx.drafters import ngram
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.config import parse_draft_config
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.drafters.methods import Method
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.errors import UsageError
from dflash_mlx.hub.folder import read_json


def check(folder: Path | None, method: Method, *, block_size: int | None) -> None:
    """Refuse what cannot be used, before the target is loaded, which may take minutes. Arguments as for `load`.

    Raises CheckpointError and UsageError.
    """
    if folder is not None:
        parse_draft_config(read_json(folder / "config.json"))
    elif method is Method.ngram and block_size is not None and not 2 <= block_size <= ngram.MOST_PLACES + 1:
        raise UsageError(f"block size should be from 2 to {ngram.MOST_PLACES + 1} for n-grams; got {block_size}.")


def load(folder: Path | None, method: Method, *, block_size: int | None, dtype: mx.Dtype) -> Drafter | None:
    """The drafter in a folder, or one that needs no files; None to decode plainly.

    block_size: the largest block of a round, as the drafter has it when None. dtype: that of the target's activations.
    Raises CheckpointError.
    """
    if folder is not None:
        drafter = load_drafter(folder, dtype=dtype)
        return WithNgram(drafter) if method is Method.dflash_ngram else drafter
    if method is Method.ngram:
        return ngram.NgramDrafter(ngram.DEFAULT_PLACES if block_size is None else block_size - 1)
    return None
