"""The Hub's answers in plain words, and that a complete cached copy needs no network."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import errors

from dflash_mlx.errors import CheckpointError, DownloadError
from dflash_mlx.hub.download import ensure_model, is_ready
from dflash_mlx.hub.registry import ModelSource

SOURCE = ModelSource(kind="hub", repo="owner/name", revision="v1")


class Response:
    """As much of an HTTP answer as the errors look at."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers: dict[str, str] = {}
        self.request = None


def failure(kind: type[BaseException], status_code: int) -> BaseException:
    error = kind.__new__(kind)
    error.response = Response(status_code)  # type: ignore[attr-defined]
    return error


class Hub:
    """Stands in for snapshot_download: remembers the calls, answers with a folder or an error."""

    def __init__(self, *, cached: Any, remote: Any) -> None:
        self.answers = {True: cached, False: remote}
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo, **options})
        answer = self.answers[options["local_files_only"]]
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)


def install(monkeypatch: pytest.MonkeyPatch, *, cached: Any = None, remote: Any = None) -> Hub:
    hub = Hub(cached=cached or errors.LocalEntryNotFoundError("not here"), remote=remote)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.ones((3, 4))})
    return folder


def test_a_cached_copy_is_used_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, cached=checkpoint(tmp_path / "m"))
    assert is_ready(SOURCE)
    assert ensure_model(SOURCE) == tmp_path / "m"
    assert all(call["local_files_only"] for call in hub.calls)


def test_a_missing_copy_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, remote=checkpoint(tmp_path / "m"))
    assert not is_ready(SOURCE)
    assert ensure_model(SOURCE) == tmp_path / "m"
    call = hub.calls[-1]
    assert (call["repo"], call["revision"], call["local_files_only"]) == ("owner/name", "v1", False)
    files = ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"]
    unwanted = ["modeling.py", "pytorch_model.bin", "model.pt", "original/consolidated.safetensors", "onnx/config.json"]
    wanted = list(
        huggingface_hub.utils.filter_repo_objects(
            files + unwanted, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
        )
    )
    assert wanted == files


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = checkpoint(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    install(monkeypatch, cached=damaged, remote=checkpoint(tmp_path / "whole"))
    messages: list[str] = []
    assert ensure_model(SOURCE, report=lambda text, done: messages.append(text)) == tmp_path / "whole"
    assert "cannot be used" in messages[0]


def test_a_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    install(monkeypatch, remote=folder)
    with pytest.raises(CheckpointError, match="no weights"):
        ensure_model(SOURCE)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (failure(errors.GatedRepoError, 403), "accept its terms at https://huggingface.co/owner/name"),
        (failure(errors.HfHubHTTPError, 403), "accept its terms"),
        (failure(errors.RepositoryNotFoundError, 404), "no public model owner/name"),
        (failure(errors.RepositoryNotFoundError, 401), "no public model owner/name"),
        (failure(errors.RevisionNotFoundError, 404), "no revision 'v1'"),
        (failure(errors.HfHubHTTPError, 429), "slow down"),
        (failure(errors.HfHubHTTPError, 503), r"problem of its own \(503\)"),
        (
            caused(errors.LocalEntryNotFoundError("x"), failure(errors.HfHubHTTPError, 429)),
            "slow down",
        ),
        (caused(errors.LocalEntryNotFoundError("x"), errors.OfflineModeIsEnabled("offline")), "HF_HUB_OFFLINE"),
        (caused(errors.LocalEntryNotFoundError("x"), ConnectionError("refused\nmore")), "refused. Check the network"),
        (TimeoutError(), "TimeoutError. Check the network"),
        (RuntimeError("proxy says no"), "proxy says no. Check the network"),
    ],
)
def test_every_failure_has_a_next_step(monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str) -> None:
    install(monkeypatch, remote=error)
    with pytest.raises(DownloadError, match=reason) as caught:
        ensure_model(SOURCE)
    assert "\n" not in str(caught.value)
