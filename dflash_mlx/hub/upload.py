"""Folders to repositories of the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.errors import DFlashError


def upload(folder: Path, repo: str, *, files: Sequence[str] | None = None, api: Any = None) -> str:
    """Upload a folder (or only `files` of it) to a repository, created where needed. Returns its address.

    api: what to upload with, the Hub's HfApi unless given. Raises DFlashError.
    """
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(files) if files else None)
    except Exception as error:  # the client passes its HTTP library's own errors on, and that library changes
        raise DFlashError(
            f"could not upload to {repo}: {error}. The model is complete in {folder}; log in with `hf auth login` if "
            "the Hub does not know you, and run the command again."
        ) from error
    return f"https://huggingface.co/{repo}"
