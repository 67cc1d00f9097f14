"""Models that other programs have already put on this disk: LM Studio's MLX folders, and folders the user names."""

import os
from pathlib import Path

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.folder import check_folder

VARIABLE = "DFLASH_MLX_MODEL_DIRS"  # folders that hold OWNER/NAME or NAME, separated as in PATH
_LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")


def find_local(repo: str) -> Path | None:
    """A complete copy of the Hub model `owner/name` outside the Hub's cache; None where there is none."""
    owner, _, name = repo.partition("/")
    chosen = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    places = [place for folder in chosen for place in (folder / owner / name, folder / name)]
    places += [Path(folder).expanduser() / owner / name for folder in _LM_STUDIO]
    return next((place for place in places if _complete(place)), None)


def _complete(folder: Path) -> bool:
    try:
        check_folder(folder)
    except CheckpointError:  # such as LM Studio's folders of GGUF files
        return False
    return True
