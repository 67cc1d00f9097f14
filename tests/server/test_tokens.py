"""Texts to token ids and back over HTTP, against the tokenizer itself."""

import httpx
import pytest
from fakes import running
from tiny_pair import make_templated_pair

from dflash_mlx.server.security import Policy
from dflash_mlx.server.worker import Worker

TEXT = "Ünï 🌈 {true}"
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server():
    pair = make_templated_pair()
    with running(Worker(pair, width=3), pair=pair, policy=Policy(keys=("k",))) as found:
        yield found


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": "k"}, timeout=60)


@pytest.mark.parametrize("name", ["content", "prompt"])
def test_there_and_back(server, name):
    pair = server.service.pair
    truth = pair.tokenizer.encode(TEXT, add_special_tokens=False)
    found = post(server, "/tokenize", **{name: TEXT}).json()
    assert (found["tokens"], found["count"], found["token_strs"]) == (truth, len(truth), None)
    assert found["max_model_len"] == pair.context_length
    back = post(server, "/detokenize", tokens=truth).json()
    assert back == {"content": TEXT, "prompt": TEXT}


def test_pieces(server):
    text = "{ true"
    truth = server.service.pair.tokenizer.encode(text, add_special_tokens=False)
    found = post(server, "/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in found] == truth
    assert "".join(piece["piece"] for piece in found) == text
    assert post(server, "/tokenize", prompt=text, return_token_strs=True).json()["token_strs"] == [
        piece["piece"] for piece in found
    ]


def test_conversations(server):
    """As long as the prompt of the same request to the chat."""
    found = post(server, "/tokenize", messages=ASK).json()
    chat = post(server, "/v1/chat/completions", messages=ASK, max_tokens=1).json()
    assert found["count"] == chat["usage"]["prompt_tokens"]
    bare = post(server, "/tokenize", messages=ASK, add_generation_prompt=False).json()
    opening = server.service.pair.tokenizer.encode("<assistant>", add_special_tokens=False)
    assert bare["tokens"] + opening == found["tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 3}),
        ("/tokenize", {"content": "x", "parse_special": False}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_bad_input(server, path, body):
    answer = post(server, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_key_is_needed(server, path):
    assert httpx.post(f"{server.url}{path}", json={}).status_code == 401
