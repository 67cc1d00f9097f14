"""The ways of drafting by name, as vLLM names them."""

from enum import Enum


class Method(str, Enum):
    """How tokens are drafted. auto: as the drafter's files say; without a drafter, from the text itself."""

    auto = "auto"
    dflash = "dflash"
    ngram = "ngram"
    dflash_ngram = "dflash+ngram"
    plain = "plain"

    @property
    def has_drafter(self) -> bool:
        """Whether it needs the files of a drafter."""
        return self in (Method.dflash, Method.dflash_ngram)
