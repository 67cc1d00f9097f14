"""Checkpoints on the Hugging Face Hub: weights, configuration and tokenizer files only, never code or pickles."""

from collections.abc import Iterator
from pathlib import Path

from dflash_mlx.errors import CheckpointError, DownloadError
from dflash_mlx.hub.folder import check_folder
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.hub.store import Report

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# The same weights in other layouts, which some repositories carry beside the usual one.
UNWANTED = ["*/*", "consolidated*.safetensors"]


def is_ready(source: ModelSource) -> bool:
    """Whether a complete copy is in the Hub's cache. No network."""
    try:
        return _cached(source) is not None
    except CheckpointError:
        return False


def ensure(source: ModelSource, *, report: Report) -> Path:
    """The folder in the Hub's cache; what is missing there is fetched.

    A copy that is complete is used without asking the Hub, also for a branch that has moved on. Raises DownloadError
    with the next step where the Hub refuses or cannot be reached, CheckpointError where the files are not usable.
    """
    try:
        folder = _cached(source)
    except CheckpointError as error:
        report(f"the copy in the Hub's cache cannot be used; fetching it again ({error})", None)
        folder = None
    if folder is not None:
        return folder
    size = f" ({source.download_mb:,} MB)" if source.download_mb else ""
    report(f"fetching {source.repo}{size} from the Hugging Face Hub", None)
    try:
        fetched = _snapshot(source, local=False)
    except Exception as error:  # the client passes its HTTP library's own errors on, and that library changes
        raise DownloadError(_explain(source, error)) from error
    return check_folder(fetched)


def _cached(source: ModelSource) -> Path | None:
    """The cached copy, checked; None where nothing or only a part of it is there."""
    try:
        folder = _snapshot(source, local=True)
    except (OSError, ValueError):
        return None
    return check_folder(folder)


def _snapshot(source: ModelSource, *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    assert source.repo is not None
    folder = snapshot_download(
        source.repo,
        revision=source.revision,
        allow_patterns=PATTERNS,
        ignore_patterns=UNWANTED,
        local_files_only=local,
    )
    return Path(folder)


def _explain(source: ModelSource, error: BaseException) -> str:
    """One line with the next step, from the whole chain of causes: the Hub's client wraps some answers twice."""
    from huggingface_hub import errors

    chain = list(_causes(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    codes = {getattr(getattr(cause, "response", None), "status_code", None) for cause in chain}
    wanted = f"{source.repo}@{source.revision}" if source.revision else f"{source.repo}"
    page = f"https://huggingface.co/{source.repo}"
    if has(errors.GatedRepoError) or 403 in codes:
        return f"{wanted} is gated: accept its terms at {page}, then log in with `hf auth login`, and try again."
    if has(errors.RevisionNotFoundError):
        return f"{source.repo} has no revision {source.revision!r}: see {page}/commits, and name one that is there."
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
    reason = (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0]
    return f"cannot fetch {wanted} from the Hub: {reason}. Check the network (and HF_ENDPOINT), then try again."


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
