"""Published suites: the papers' wording, files in several forms, and a service for data sets on loopback."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dflash_mlx.bench.prompts import take
from dflash_mlx.bench.suites import SUITES, hub, load_suite
from dflash_mlx.bench.suites.hub import Address, fetch_rows
from dflash_mlx.errors import DownloadError, UsageError

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "#### 4"},
    "math-500": {"problem": "Find $x$.", "solution": "", "answer": "1", "subject": "Algebra", "level": 1},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "", "entry_point": "f"},
    "mbpp": {"prompt": "Write a function.", "code": "", "test_list": [], "task_id": 2},
    "mt-bench": {"prompt": ["Write a poem.", "Make it shorter."], "category": "writing", "prompt_id": 1},
    "spec-bench": {"question_id": 1, "category": "rag", "turns": ["Who?"], "reference": []},
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "home"))


class Service(ThreadingHTTPServer):
    """Gives `rows` as the Hub does, 100 at the most, and as a file. asked: the queries."""

    rows: list[Any]
    asked: list[dict[str, list[str]]]
    status = 200


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.server.asked.append(query)
        rows = self.server.rows
        if query:
            start, length = int(query["offset"][0]), int(query["length"][0])
            page = [{"row_idx": i, "row": row} for i, row in enumerate(rows[start : start + min(100, length)])]
            body = json.dumps({"rows": page, "num_rows_total": len(rows)})
        else:
            body = "\n".join(json.dumps(row) for row in rows)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), _Handler)
    server.rows, server.asked = [], []
    monkeypatch.setattr(hub, "ROWS_URL", f"http://127.0.0.1:{server.server_port}/rows")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gsm8k", ["How many?" + BOXED]),
        ("math-500", ["Find $x$." + BOXED]),
        (
            "humaneval",
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f(x):\n\n```"
            ],
        ),
        ("mbpp", ["Write a function."]),
        ("mt-bench", ["Write a poem.", "Make it shorter."]),
        ("spec-bench", ["Who?"]),
    ],
)
def test_rows_become_the_papers_prompts(name: str, texts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n\n", encoding="utf-8")
    prompts = load_suite(name, file)
    assert [prompt.text for prompt in prompts] == texts
    assert [prompt.follows for prompt in prompts] == [None, f"{name}-1"][: len(texts)]
    assert prompts[0].name == f"{name}-1"


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join([json.dumps(ROWS["humaneval"])] * 3).encode()))
    assert [prompt.name for prompt in load_suite("humaneval", file)] == ["humaneval-1", "humaneval-2", "humaneval-3"]


def test_all_pages_are_fetched_once(service: Service) -> None:
    service.rows = [{"question": f"{n}\u2028?"} for n in range(230)]
    prompts = load_suite("gsm8k")
    assert len(prompts) == 230
    assert prompts[229].text.startswith("229\u2028?")
    assert [query["offset"] for query in service.asked] == [["0"], ["100"], ["200"]]
    assert service.asked[0]["dataset"] == ["openai/gsm8k"]
    assert (service.asked[0]["config"], service.asked[0]["split"]) == (["main"], ["test"])
    assert load_suite("gsm8k") == prompts
    assert len(service.asked) == 3


@pytest.mark.parametrize("name", list(SUITES))
def test_every_suite_is_fetched(name: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.rows = [ROWS[name]]
    address = SUITES[name].address
    if address.url:
        address = Address(url=hub.ROWS_URL)
    rows = fetch_rows(name, address)
    assert rows == [ROWS[name]]


def test_what_cannot_be_used_is_told(service: Service, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no suite 'humanevel'\. Did you mean humaneval"):
        load_suite("humanevel")
    service.status = 404
    with pytest.raises(DownloadError, match="--suite-file FILE"):
        load_suite("mbpp")
    service.status, service.rows = 200, [{"text": "no such column"}]
    with pytest.raises(UsageError, match="row 1: MBPP has a column 'prompt', missing here"):
        load_suite("mbpp")
    with pytest.raises(UsageError, match="cannot read"):
        load_suite("mbpp", tmp_path / "nowhere")
    (tmp_path / "bad").write_text('{"prompt": "x"}\nno json', encoding="utf-8")
    with pytest.raises(UsageError, match="line 2: expected a JSON object"):
        load_suite("mbpp", tmp_path / "bad")


def test_a_sample_is_fixed_and_brings_second_turns_along(tmp_path: Path) -> None:
    rows = [{"prompt": [f"{n}", f"{n} again"], "category": "ab"[n % 2]} for n in range(40)]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    prompts = load_suite("mt-bench", tmp_path / "rows")
    sample = take(prompts, 6, shuffle=True)
    assert sample == take(prompts, 6, shuffle=True)
    assert [p.follows is None for p in sample] == [True, False] * 6
    assert [p.category for p in sample if p.follows is None].count("a") == 3
    assert [p.name for p in sample if p.follows is None] != [p.name for p in prompts if p.follows is None][:6]
    assert take(prompts, 0) == tuple(prompts)
