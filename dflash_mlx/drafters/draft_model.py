"""A small language model as drafter: it writes on as the target might (arXiv 2211.17192, section 2).

It is a model of mlx-lm of its own and shares nothing with the target but the tokens, so both must have the same
tokenizer.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.trimming import leaves
from dflash_mlx.drafters.contract import DraftVocabulary
from dflash_mlx.drafters.stepwise import StepwiseDrafter
from dflash_mlx.errors import CheckpointError, PairError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.target import Target

# More drafts cost a pass each, and few answers keep as many.
PLACES, MOST_PLACES = 4, 15


class DraftModel(StepwiseDrafter):
    """See `StepwiseDrafter`. What is said of a position are the model's logits."""

    method = "draft_model"

    def __init__(self, model: Target, *, places: int = PLACES) -> None:
        """places: the most tokens drafted for a round. Raises CheckpointError for a model that cannot draft here."""
        super().__init__(model.model, places=places)
        self.model = model
        kinds = sorted({type(leaf).__name__ for leaf in leaves(model.make_cache()) if type(leaf) is not KVCache})
        if kinds:
            raise CheckpointError(
                f"a draft model should have full attention in all layers; found layers with the caches "
                f"{', '.join(kinds)}. Choose another model for --draft-model, or run with --no-draft."
            )
        if not model.takes_rows():
            raise CheckpointError(
                "this draft model does not compute several answers in one batch as it computes each alone. Choose "
                "another model for --draft-model, or run with --no-draft."
            )

    def misfits(self, target: Target) -> list[str]:
        """None: that the tokens are the same is seen in the tokenizers' files (`check_tokens`)."""
        return []

    def vocabulary(self, target: Target) -> DraftVocabulary | None:
        own, size = self.model.vocab_size, target.vocab_size
        return DraftVocabulary(mx.arange(own), size) if own < size else None

    def make_layer_caches(self) -> list[Any]:
        return self.model.make_cache()

    def feed(self, target: Target, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        # The larger vocabulary is padded; nobody writes what comes after the smaller one's end.
        return self.model.forward(mx.minimum(tokens, self.model.vocab_size - 1), caches)

    def logits(self, target: Target, hidden: mx.array) -> mx.array:
        return hidden[..., : target.vocab_size]


def load_draft_model(
    folder: Path, target: Target, target_folder: Path, *, dtype: mx.Dtype, places: int = PLACES
) -> DraftModel:
    """Load a model folder as a drafter for a target, to compute in its `dtype`. Raises CheckpointError, PairError."""
    model, _ = load_target(folder, dtype=str(dtype).rpartition(".")[2])
    check_tokens(folder, model.vocab_size, target_folder, target.vocab_size)
    return DraftModel(model, places=places)


def check_tokens(folder: Path, size: int, target_folder: Path, target_size: int) -> None:
    """Compare the tokens of a draft model and of its target, in vocabularies of these sizes. Raises PairError.

    Only added tokens may differ, and padding at the end. Without both `tokenizer.json` the sizes have to be the same.
    """
    own, wanted = tokens_of(folder), tokens_of(target_folder)
    if own is None or wanted is None:
        if size == target_size:
            return
        found = f"a vocabulary of {size} and one of {target_size}, and a folder without tokenizer.json to compare them"
    elif own == wanted:
        return
    else:
        same = len(own.items() & wanted.items())
        found = f"{len(own)} and {len(wanted)} tokens, of which {same} are the same"
    raise PairError(
        f"a draft model should have the target's tokenizer; found {found}. Choose a smaller model of the target's own "
        "family for --draft-model, or run with --no-draft."
    )


def tokens_of(folder: Path) -> dict[str, int] | None:
    """The ids of a folder's tokens, without added ones; None where there is no `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    model = read_json(path).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return vocab
    if isinstance(vocab, list):  # Unigram: tokens with their scores
        return {str(token): i for i, (token, *_) in enumerate(vocab)}
    raise CheckpointError(f"{path} should have the tokens in model.vocab, and has none. Fetch the folder again.")
