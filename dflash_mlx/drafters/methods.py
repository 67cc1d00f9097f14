"""The ways of drafting by name, as vLLM names them."""

from enum import Enum


class Method(str, Enum):
    """How tokens are drafted. auto: as the drafter says; without one, by the target's own head or from the text."""

    auto = "auto"
    dflash = "dflash"
    eagle3 = "eagle3"
    medusa = "medusa"
    mtp = "mtp"
    draft_model = "draft_model"
    ngram = "ngram"
    dflash_ngram = "dflash+ngram"
    eagle3_ngram = "eagle3+ngram"
    medusa_ngram = "medusa+ngram"
    mtp_ngram = "mtp+ngram"
    draft_model_ngram = "draft_model+ngram"
    plain = "plain"

    @property
    def has_drafter(self) -> bool:
        """Whether it needs the files of a drafter."""
        return self.alone in (Method.dflash, Method.eagle3, Method.medusa, Method.draft_model)

    @property
    def takes_folder(self) -> bool:
        """Whether files may be named for it. A head of the target's own is in the target's folder or in another."""
        return self.has_drafter or self.alone in (Method.auto, Method.mtp)

    @property
    def alone(self) -> "Method":
        """The same without drafting from the text besides."""
        return Method(self.value.removesuffix("+ngram"))
