"""The ways of drafting by name, as vLLM names them."""

from enum import Enum


class Method(str, Enum):
    """How tokens are drafted. auto: as the drafter's files say; without a drafter, from the text itself."""

    auto = "auto"
    dflash = "dflash"
    eagle3 = "eagle3"
    medusa = "medusa"
    mtp = "mtp"
    draft_model = "draft_model"
    ngram = "ngram"
    dflash_ngram = "dflash+ngram"
    plain = "plain"

    @property
    def has_drafter(self) -> bool:
        """Whether it needs the files of a drafter."""
        return self in (Method.dflash, Method.dflash_ngram, Method.eagle3, Method.medusa, Method.draft_model)

    @property
    def takes_folder(self) -> bool:
        """Whether files may be named for it. A head of the target's own is in the target's folder or in another."""
        return self.has_drafter or self in (Method.auto, Method.mtp)
