"""What went wrong with the Hugging Face Hub, in one line with the next step."""

import errno
from collections.abc import Iterator

from dflash_mlx.hub.registry import ModelSource


def explain(source: ModelSource, error: BaseException) -> str:
    """One line with the next step, from the whole chain of causes: the Hub's client wraps some answers twice."""
    from huggingface_hub import errors

    chain = list(_causes(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    full = [cause for cause in chain if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)]
    if full:
        return (
            f"the disk is full while fetching {source}. Make room (or set HF_HOME to a larger disk) and run it again."
        )
    codes = {getattr(getattr(cause, "response", None), "status_code", None) for cause in chain}
    wanted = f"{source.repo}@{source.revision}" if source.revision else f"{source.repo}"
    page = f"https://huggingface.co/{source.repo}"
    if has(errors.GatedRepoError) or 403 in codes:
        return (
            f"{wanted} is gated: its owner grants access at {page}. Ask there (some owners take days or never answer), "
            "log in with `hf auth login`, and try again."
        )
    if has(errors.RevisionNotFoundError):
        return f"{source.repo} has no revision {source.revision!r}: see {page}/commits, and name one that is there."
    if has(errors.EntryNotFoundError) and not has(errors.LocalEntryNotFoundError):
        return (
            f"{wanted} lacks a file that it should have ({chain[0]}). Look at {page}/tree/main, or take another copy."
        )
    if has(errors.RepositoryNotFoundError) or codes & {401, 404}:
        return f"the Hub has no public model {wanted}: check the spelling at {page}; if it is private, `hf auth login`."
    if 429 in codes:
        return (
            f"the Hub asks to slow down (429) while fetching {wanted}: wait some minutes, or log in: `hf auth login`."
        )
    if has(errors.OfflineModeIsEnabled):
        return f"{wanted} is not in the Hub's cache and HF_HUB_OFFLINE is set: unset it, or give a model folder."
    server = [code for code in codes if isinstance(code, int) and code >= 500]
    if server:
        return f"the Hub has a problem of its own ({server[0]}) while fetching {wanted}: try again later."
    if any("Timeout" in type(cause).__name__ for cause in chain):
        return f"the Hub did not answer in time while fetching {wanted}: check the network, then run it again."
    reason = (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0]
    return f"cannot fetch {wanted} from the Hub: {reason}. Check the network (and HF_ENDPOINT), then try again."


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
