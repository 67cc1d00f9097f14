"""Conversations that are kept on this disk: a JSON file each, readable by its user alone."""

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.leftovers import write_atomically
from dflash_mlx.hub.registry import cache_home

Messages = list[dict[str, str]]
_SHOWN = 20


@dataclass(frozen=True)
class Kept:
    """A conversation as it lies on the disk."""

    path: Path
    pair: str
    messages: Messages

    @property
    def title(self) -> str:
        """How it began."""
        first = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        words = " ".join(first.split())
        return words[:59] + "…" if len(words) > 60 else words


def folder() -> Path:
    return cache_home() / "conversations"


def new_path() -> Path:
    """Where a conversation that begins now is kept."""
    return folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"


def keep(path: Path, pair: str, messages: Sequence[dict[str, str]]) -> None:
    """Write a conversation, whole or not at all; without any turn there is nothing to keep. Raises DFlashError."""
    try:
        if not any(message["role"] == "assistant" for message in messages):
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_atomically(path, json.dumps({"pair": pair, "messages": list(messages)}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DFlashError(f"cannot keep the conversation in {path.parent}: {error.strerror}; see --no-save.") from error


def list_kept() -> list[Kept]:
    """Those that can be read, the newest first."""
    found: list[tuple[float, str, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*.json"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.name, path))
    return [kept for _, _, path in sorted(found, reverse=True) if (kept := _read(path)) is not None]


def as_list(kept: Sequence[Kept]) -> str:
    """The newest conversations in lines for people, numbered from 1."""
    lines = [f"{number:>3}  {one.title}" for number, one in enumerate(kept[:_SHOWN], start=1)]
    more = [f"     and {len(kept) - _SHOWN} older ones"] if len(kept) > _SHOWN else []
    return "\n".join([*lines, *more, "/load N goes on with one of them."])


def _read(path: Path) -> Kept | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in value["messages"]]
        return Kept(path, str(value["pair"]), messages)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
