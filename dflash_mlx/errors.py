"""The errors this project raises on purpose.

Each message says what was expected, what was found and what to do next. The command line prints it as one
line and exits with `exit_code`; every other exception is a bug of ours.
"""

from collections.abc import Sequence


class DFlashError(Exception):
    """Something the user or the caller can put right."""

    exit_code = 1


class UsageError(DFlashError):
    """An argument or option that cannot be used as given."""

    exit_code = 2


class DownloadError(DFlashError):
    """A model that could not be fetched, or arrived damaged."""


class CheckpointError(DFlashError):
    """A model folder or file that is incomplete, damaged or of a kind that is not supported."""


class PairError(DFlashError):
    """A target and a drafter that do not belong together."""


class GroupError(DFlashError):
    """Several machines that cannot, or can no longer, work together."""


class PromptError(DFlashError):
    """A prompt that is empty or does not fit the model's context."""


class ContextError(PromptError):
    """A prompt of `tokens` tokens, for a model whose context holds `limit`."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens and this model's context holds {limit}; "
            "shorten the prompt so that room is left for an answer."
        )
        self.tokens, self.limit = tokens, limit


def did_you_mean(similar: Sequence[str]) -> str:
    """A part of a message that offers similar names, with a space in front; empty where there are none."""
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


# What a value of the wrong kind or size in a checkpoint's config.json leads to, where it is used.
WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
