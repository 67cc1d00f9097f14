"""docs/server.md says what the server does."""

import re
from pathlib import Path

import typer

from dflash_mlx.cli.app import app as command_line
from dflash_mlx.server import chat, messages, tools
from dflash_mlx.server.app import create_app
from dflash_mlx.server.health import metrics_text
from dflash_mlx.server.parameters import MAX_ANSWERS, MAX_STOPS, Defaults
from dflash_mlx.server.run import HEADER_BYTES, HEADER_SECONDS
from dflash_mlx.server.security import Policy
from dflash_mlx.server.service import Limits, Service

OTHERS = {"--add-host", "--model", "--schema", "--tasks"}  # options of clients
DOCUMENT = (Path(__file__).parents[2] / "docs/server.md").read_text(encoding="utf-8")


def test_every_route_is_listed():
    from fakes import FakePair, FakeWorker

    service = Service(pair=FakePair(), worker=FakeWorker(), names=("fake",))  # type: ignore[arg-type]
    for route in create_app(service, Policy()).routes:
        path = route.path.replace("{name:path}", "NAME")
        assert re.search(rf"`(GET|POST) {path}`", DOCUMENT), path
    assert "first_token" in metrics_text(service)
    service.close()


def test_what_has_no_effect_is_listed():
    for name in {*chat.WITHOUT_EFFECT, *messages.WITHOUT_EFFECT, *tools.WITHOUT_EFFECT}:
        assert f"`{name}`" in DOCUMENT, name


def test_options_exist_and_are_described():
    command = typer.main.get_command(command_line).commands["serve"]
    options = {option for parameter in command.params for option in parameter.opts}
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCUMENT):
        assert option in options | OTHERS, option
    own = options - {"--model", "--draft-model", "--block-size", "--dtype", "--help", "-h"}
    assert {option for option in own if option not in DOCUMENT} == set()


def test_figures():
    limits = Limits()
    for words in (
        f"{limits.body_bytes // 2**20} MiB and {limits.body_seconds:.0f} seconds",
        f"{HEADER_BYTES // 1024} KiB and {HEADER_SECONDS:.0f} seconds",
        f"`--timeout` ({limits.answer_seconds:.0f} s)",
        f"up to {MAX_STOPS}; ",
        f"`n` (up to {MAX_ANSWERS} answers)",
        f"`--max-tokens` ({Defaults().max_tokens}",
    ):
        assert words in DOCUMENT, words
