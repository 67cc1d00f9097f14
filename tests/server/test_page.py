"""The page at /: who gets it, its headers, its files, and that nothing in them reaches outside. No browser."""

import re
import socket
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fakes import running

from dflash_mlx.server.security import Policy
from dflash_mlx.server.web_page import FOLDER, files

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

KEY = {"Authorization": "Bearer right"}
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
# The policy, written out: what it must at least forbid is decided here, not in the code.
FORBIDDEN = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
OWN_ONLY = {"script-src": "'self'", "style-src": "'self'", "connect-src": "'self'", "img-src": "'self' data:"}


@pytest.fixture(scope="module")
def server():
    with running(policy=Policy(keys=("right",))) as found:
        yield found


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url) as found:
        yield found


def test_browsers_get_the_page_and_others_a_line(client):
    """The page for everybody, the line for those who have the key."""
    page = client.get("/", headers=HTML)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert client.get("/", headers=headers).status_code == 401
        plain = client.get("/", headers=headers | KEY)
        assert (plain.status_code, plain.text) == (200, "dflash-mlx is running\n")
        assert plain.headers["content-type"].startswith("text/plain")
        assert plain.headers["vary"] == page.headers["vary"] == "Accept"


@pytest.mark.parametrize("headers", [{}, HTML])
def test_head_has_no_body(client, headers):
    asked, whole = (client.request(method, "/", headers=headers | KEY) for method in ("HEAD", "GET"))
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == whole.headers["content-length"]


def test_the_page_needs_no_key_and_everything_it_asks_for_does(client):
    for name in files():
        assert client.get(f"/page/{name}").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 401
    assert client.post("/page/main.js").status_code == 405


def test_a_name_that_was_made_up_for_this_machine_gets_no_page(client):
    for path in ("/", "/page/main.js"):
        assert client.get(path, headers={**HTML, "Host": "evil.example"}).status_code == 403
        assert client.get(path, headers={**HTML, "Origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/%2e%2e/app.py", "/page/../app.py", "/page/.."])
def test_only_the_pages_own_files_are_there(server, path):
    """Asked byte for byte: clients tidy such paths up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(65536).split()[1] == b"404"


def test_every_file_has_the_strict_headers(client):
    for path in ["/", *(f"/page/{name}" for name in files())]:
        headers = client.get(path, headers=HTML).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy == FORBIDDEN | OWN_ONLY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_is_sent_again_only_when_it_has_changed(client):
    first = client.get("/page/main.js")
    again = client.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).content == first.content
    assert first.headers["cache-control"] == "no-cache"


class _Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_all_that_the_files_name_is_there_and_served_as_what_it_is(client):
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    parser = _Elements()
    parser.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    named = {value for _, a in parser.found for key, value in a.items() if key in ("src", "href") and value[0] != "#"}
    for script in SCRIPTS:
        source = (FOLDER / script).read_text(encoding="utf-8")
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', source)}
    assert len(named) > 10
    for path in named:
        answer = client.get(f"/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])
    assert {path.removeprefix("page/") for path in named} | {"index.html"} == set(files())


def test_nothing_in_the_page_is_inline():
    parser = _Elements()
    parser.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    for tag, attributes in parser.found:
        assert tag != "style"
        assert tag != "script" or attributes["src"]
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


@pytest.mark.parametrize("name", sorted(files()))
def test_no_file_names_an_address_outside(name):
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//[\w-]+\.[a-z]+|@import|url\(", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_turns_text_into_html_or_code(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", text)


def test_the_wheel_has_every_file():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    patterns = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for path in FOLDER.iterdir():
        assert path.name in files(), f"{path.name} is in the folder of the page and not served"
        assert any(fnmatch(f"page/{path.name}", pattern) for pattern in patterns["dflash_mlx.server"])
