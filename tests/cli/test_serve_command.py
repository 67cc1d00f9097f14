"""`dflash-mlx serve`: refusals before anything is loaded, and a server that starts, says where, and ends on Ctrl-C."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import quick


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "k", "--no-api-key"], "contradict"),
        (["--host", "no.such.host.invalid", "--no-api-key"], "no address"),
        (["--port", "70000"], "65535"),
        (["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_misuse(run, fake, arguments, words):
    code, out, err = run("serve", "--pair", "demo", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_port_in_use_is_one_line(run, fake):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run("serve", "--pair", "demo", "--port", str(port))
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1 port {port}: address already in use; choose another with --port" in err
    assert not fake.asked


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
@pytest.mark.usefixtures("demo_pair")
def test_it_serves_until_it_is_told_to_stop(number, tmp_path, monkeypatch, demo_home):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    program = [sys.executable, quick.__file__, "dflash_mlx.cli.app"]
    command = [*program, "serve", "--pair", "demo", "--port", "0", "--access-log"]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen([*command, "--api-key", "k"], stderr=out, stdout=out) as process:
        try:
            deadline = time.monotonic() + 120
            while "listening on" not in log.read_text():
                assert time.monotonic() < deadline
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            address = log.read_text().partition("listening on ")[2].split()[0]
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
            url = f"{address}/v1/chat/completions"
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()
    text = log.read_text()
    assert 'POST "/v1/chat/completions" 200' in text
    assert text.endswith("stopped.\n")
    assert "Traceback" not in text
