"""Programs that talk to servers, as their users run them. Each is skipped where it is not installed.

`pip install -e ".[dev,clients]"` installs those in Python, into an environment for this alone, and
`npm install -g @openai/codex @anthropic-ai/claude-code` the other two. docs/server.md has the list.
"""

import json
import os
import shutil
import subprocess
from typing import Literal

import pytest
from fakes import FakePair, FakeTokenizer, FakeWorker, running
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tiny_pair import make_templated_pair

from dflash_mlx.decoding import constraint
from dflash_mlx.server.worker import Worker

pydantic = pytest.importorskip("pydantic")
ASK = [{"role": "user", "content": "Hi"}]


class Town(pydantic.BaseModel):
    """A town."""

    name: Literal["Paris", "Rome"]
    people: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def tiny():
    """A random model: only what the server enforces can make its answers fit."""
    pair = make_templated_pair(BPEStreamingDetokenizer)
    before = constraint._JSON_OPTIONS
    constraint._JSON_OPTIONS = {"whitespace_flexible": False}  # it would never end
    with running(Worker(pair, width=3), pair=pair) as found:
        yield found
    constraint._JSON_OPTIONS = before


@pytest.fixture
def scripted(monkeypatch):
    """A model that calls the first tool it knows, and says so when it has the result."""
    monkeypatch.setattr("fakes.CONTEXT", 1_000_000)
    arguments = {
        "double": {"number": 21},
        "exec_command": {"cmd": "echo from-the-tool"},
        "shell": {"command": ["echo", "from-the-tool"]},
        "Bash": {"command": "echo from-the-tool", "description": "say it"},
    }
    tokenizer = FakeTokenizer(has_tool_calling=True)
    pair = FakePair(tokenizer)
    pair.context_length = 1_000_000

    def script(job):
        asked = tokenizer.rendered[-1]
        results = [message["content"] for message in asked["messages"] if message["role"] == "tool"]
        known = [tool["function"]["name"] for tool in asked["tools"] or ()]
        name = next((name for name in arguments if name in known), None)
        if results or name is None:
            return f"The tool said: {results}"
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments[name]})}</tool_call>"

    with running(FakeWorker(script=script, size=20), pair=pair) as found:
        yield found


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HOME", str(tmp_path))


def chat_model(url):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="fake", base_url=f"{url}/v1", max_tokens=200)


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def test_openai_and_anthropic(tiny):
    client = tiny.openai()
    made = client.chat.completions.parse(model="fake", messages=ASK, response_format=Town)
    assert isinstance(made.choices[0].message.parsed, Town)
    assert isinstance(client.responses.parse(model="fake", input="Hi", text_format=Town).output_parsed, Town)
    messages = tiny.anthropic().messages
    if hasattr(messages, "parse"):  # older ones have no such thing
        made = messages.parse(model="fake", max_tokens=200, messages=ASK, output_format=Town)
        assert isinstance(made.parsed_output, Town)


def test_litellm(tiny):
    litellm = pytest.importorskip("litellm")
    url = {"openai/fake": f"{tiny.url}/v1", "anthropic/fake": tiny.url, "ollama_chat/fake": tiny.url}
    for model, base in url.items():
        asked = {"model": model, "api_base": base, "api_key": "none", "messages": ASK, "max_tokens": 5}
        whole = litellm.completion(**asked).choices[0].message.content
        streamed = litellm.completion(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole
    openai_like = {"model": "openai/fake", "api_base": url["openai/fake"], "api_key": "none", "messages": ASK}
    Town.model_validate_json(litellm.completion(**openai_like, response_format=Town).choices[0].message.content)


def test_instructor(tiny):
    instructor = pytest.importorskip("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(tiny.openai(), mode=mode)
        asked = {"model": "fake", "messages": ASK, "max_tokens": 200, "max_retries": 0}
        assert isinstance(client.chat.completions.create(**asked, response_model=Town), Town)


def test_pydantic_ai(tiny, scripted, monkeypatch):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for model in (OpenAIChatModel, OpenAIResponsesModel):
        made = model("fake", provider=OpenAIProvider(base_url=f"{tiny.url}/v1", api_key="none"))
        for form in (Town, pydantic_ai.NativeOutput(Town)):
            agent = pydantic_ai.Agent(made, output_type=form, model_settings={"parallel_tool_calls": False})
            assert isinstance(agent.run_sync("Hi").output, Town)
        made = model("fake", provider=OpenAIProvider(base_url=f"{scripted.url}/v1", api_key="none"))
        assert "42" in pydantic_ai.Agent(made, tools=[double]).run_sync("Hi").output


def test_langchain(tiny, scripted):
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool

    model = chat_model(tiny.url)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Town, method=method).invoke("Hi"), Town)
    bound = chat_model(scripted.url).bind_tools([tool(double)])
    called = bound.invoke("Hi")
    [call] = called.tool_calls
    result = ToolMessage(str(double(**call["args"])), tool_call_id=call["id"])
    said = "".join(chunk.content for chunk in bound.stream([("user", "Hi"), called, result]))
    assert "42" in said


def test_langchain_anthropic(tiny, scripted):
    langchain_anthropic = pytest.importorskip("langchain_anthropic")
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool

    def model(url):
        return langchain_anthropic.ChatAnthropic(model="fake", base_url=url, max_tokens=200)

    for method in ("json_schema", "function_calling"):
        assert isinstance(model(tiny.url).with_structured_output(Town, method=method).invoke("Hi"), Town)
    bound = model(scripted.url).bind_tools([tool(double)])
    called = bound.invoke("Hi")
    [call] = called.tool_calls
    result = ToolMessage(str(double(**call["args"])), tool_call_id=call["id"])
    assert "42" in bound.invoke([("user", "Hi"), called, result]).text


@pytest.mark.parametrize("protocol", ["responses", "chat"])
def test_openai_agents(tiny, scripted, protocol):
    agents = pytest.importorskip("agents")
    import openai

    form = agents.OpenAIResponsesModel if protocol == "responses" else agents.OpenAIChatCompletionsModel

    def model(url):
        return form(model="fake", openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1"))

    made = agents.Runner.run_sync(agents.Agent(name="a", model=model(tiny.url), output_type=Town), "Hi")
    assert isinstance(made.final_output, Town)
    agent = agents.Agent(name="a", model=model(scripted.url), tools=[agents.function_tool(double)])
    assert "42" in agents.Runner.run_sync(agent, "Hi").final_output


def test_ollama(tiny, scripted):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(tiny.url)
    said = client.chat("fake", ASK, format=Town.model_json_schema()).message.content
    Town.model_validate_json(said)
    asked = {"model": "fake", "messages": ASK, "options": {"num_predict": 5}}
    whole = client.chat(**asked).message.content
    assert "".join(chunk.message.content for chunk in client.chat(**asked, stream=True)) == whole
    assert client.list().models[0].model == "fake"
    [call] = ollama.Client(scripted.url).chat("fake", ASK, tools=[double]).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("double", {"number": 21})


def run(program, *arguments, **variables):
    """What a program says. It finds no settings and no keys of this machine's user."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        [path, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_llm(tiny, tmp_path):
    model = {"model_id": "dflash", "model_name": "fake", "api_base": f"{tiny.url}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    schema = json.dumps(Town.model_json_schema())
    Town.model_validate_json(run("llm", "-m", "dflash", "--schema", schema, "Hi", LLM_USER_PATH=str(tmp_path)))


def test_lm_eval(tiny, tmp_path):
    """A task of multiple choice; the answers' scores are those of test_echo.py."""
    tiny.tokenizer._tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "questions.jsonl").write_text('{"q": "a b", "choices": [" null", " true"], "a": 0}\n' * 3)
    (tmp_path / "task.yaml").write_text(
        f"""{{task: tiny, dataset_path: json, dataset_kwargs: {{data_files: {tmp_path}/questions.jsonl}},
        output_type: multiple_choice, test_split: train, doc_to_text: "{{{{q}}}}", doc_to_target: a,
        doc_to_choice: "{{{{choices}}}}", target_delimiter: "", metric_list: [{{metric: acc}}]}}"""
    )
    model = f"model=fake,base_url={tiny.url}/v1/completions,tokenizer={tmp_path}/tokenizer,max_retries=1"
    options = ("--model", "local-completions", "--model_args", model, "--tasks", "tiny", "--include_path", tmp_path)
    assert "|acc" in run("lm_eval", "run", *options, HF_HUB_OFFLINE="1").replace(" ", "")


def test_codex(scripted, tmp_path):
    """A turn of OpenAI's Codex with its shell; its other tools are left out."""
    provider = f'{{name = "dflash-mlx", base_url = "{scripted.url}/v1", wire_api = "responses"}}'
    settings = f'model = "fake"\nmodel_provider = "dflash"\nmodel_providers.dflash = {provider}\n'
    (tmp_path / "config.toml").write_text(settings)
    options = ("--skip-git-repo-check", "-s", "danger-full-access", "-C", str(tmp_path))
    assert "from-the-tool" in run("codex", "exec", *options, "Run echo", CODEX_HOME=str(tmp_path))


def test_claude_code(scripted, tmp_path):
    """A turn of Claude Code with its shell."""
    variables = {"ANTHROPIC_BASE_URL": scripted.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "fake"}
    variables |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "fake", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    assert "from-the-tool" in run("claude", "-p", "Run echo", "--allowedTools", "Bash", **variables)
