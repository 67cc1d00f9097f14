"""Fetching a suite's rows once, and keeping them on this disk.

The Hub's service for data sets gives rows as JSON, so that no reader of Parquet files is needed.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from dflash_mlx.errors import DownloadError
from dflash_mlx.hub.leftovers import write_atomically
from dflash_mlx.hub.registry import cache_home

ROWS_URL = "https://datasets-server.huggingface.co/rows"
_PAGE = 100  # rows; the service gives no more at once
_SECONDS = 30.0


@dataclass(frozen=True)
class Address:
    """Where rows are: a data set of the Hub, or a file with JSON lines at a URL."""

    dataset: str = ""
    config: str = ""
    split: str = ""
    url: str = ""

    @property
    def where(self) -> str:
        return self.url or f"{self.dataset} ({self.config}, {self.split})"


def fetch_rows(name: str, address: Address, *, report: Callable[[str], None] | None = None) -> list[Any]:
    """All rows, from this disk where they were fetched before. Raises DownloadError."""
    kept = cache_home() / "suites" / f"{name}.jsonl"
    try:
        return [json.loads(line) for line in kept.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError):
        pass  # Not fetched yet, or damaged.
    if report is not None:
        report(f"fetching {name} from {address.where}")
    rows = _file(address.url) if address.url else _dataset(address)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError:
        pass  # A read-only cache folder only means that it is fetched again next time.
    return rows


def _dataset(address: Address) -> list[Any]:
    rows: list[Any] = []
    while True:
        query = {"dataset": address.dataset, "config": address.config, "split": address.split}
        text = _get(f"{ROWS_URL}?{urlencode({**query, 'offset': len(rows), 'length': _PAGE})}", address.where)
        try:
            answer = json.loads(text)
            page = [entry["row"] for entry in answer["rows"]]
            total = int(answer["num_rows_total"])
        except (ValueError, KeyError, TypeError) as error:
            raise DownloadError(f"{address.where}: the Hub's answer is not what it should be ({error!r}).") from error
        rows += page
        if not page or len(rows) >= total:
            return rows


def _file(url: str) -> list[Any]:
    try:
        return [json.loads(line) for line in _get(url, url).split("\n") if line.strip()]
    except ValueError as error:
        raise DownloadError(f"{url} should hold JSON lines; {error}") from error


def _get(url: str, where: str) -> str:
    headers = {"User-Agent": "dflash-mlx"}
    if token := os.environ.get("HF_TOKEN", "") if url.startswith(ROWS_URL) else "":
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as response:
            return bytes(response.read()).decode("utf-8")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(
            f"cannot fetch {where}: {reason}. Give the file itself, as JSON lines, with --suite-file FILE."
        ) from error
