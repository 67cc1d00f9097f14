"""Conversations that are kept, copied and gone on with; what is remembered for them."""

import base64
import stat
import sys

import pytest
from test_chat_command import Person
from test_conversation import ask, conversation  # noqa: F401  a fixture

from dflash_mlx.cli import chat_commands, clipboard, kept
from dflash_mlx.cli.kept import keep, list_kept, new_path
from dflash_mlx.errors import DFlashError, UsageError

TURN = [{"role": "user", "content": "Why  is\nthe sky blue? " * 5}, {"role": "assistant", "content": "So."}]


def test_what_is_kept(home):
    path = new_path()
    keep(path, "fake", TURN)
    [found] = list_kept()
    assert (found.path, found.pair, found.messages) == (path, "fake", TURN)
    assert found.title.startswith("Why is the sky blue?")
    assert len(found.title) <= 60
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    keep(path, "fake", TURN[:1])
    assert list_kept() == [], "a question alone is no conversation"
    for text in ("", "{", "[]", '{"pair": 1}', '{"pair": "x", "messages": [1]}'):
        path.write_text(text)
        assert list_kept() == []
    path.unlink()
    path.mkdir()
    with pytest.raises(DFlashError, match="no-save"):
        keep(path, "fake", TURN)


def test_a_chat_is_kept_and_gone_on_with(home):
    first = Person("chat", "--pair", "fake", "--system", "Be brief.")
    first.wait_for("> ")
    first.type("hello\n")
    first.wait_for("20.0 tok/s")
    first.wait_for("> ")
    first.type("\x04")
    assert first.process.wait(60) == 0
    [found] = list_kept()
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
    second = Person("chat", "--pair", "fake", "--continue")
    assert "going on with: hello" in second.wait_for("> ").replace("\r", "")
    second.type("more\n")
    second.wait_for("20.0 tok/s")
    second.wait_for("> ")
    second.type("/reset\n")
    second.wait_for("> ")
    second.type("other\n")
    second.wait_for("20.0 tok/s")
    second.wait_for("> ")
    second.type("/load\n")
    listed = second.wait_for("goes on")
    assert listed.index("other") < listed.index("hello")
    second.wait_for("> ")
    second.type("\x04")
    second.process.wait(60)
    assert sorted(len(one.messages) for one in list_kept()) == [3, 5]


def test_no_save(home):
    person = Person("chat", "--pair", "fake", "--no-save")
    person.wait_for("> ")
    person.type("hello\n")
    person.wait_for("20.0 tok/s")
    person.wait_for("> ")
    person.type("\x04")
    person.process.wait(60)
    assert not kept.folder().exists()


def test_nothing_to_go_on_with(run, fake):
    code, _, err = run("chat", "--pair", "demo", "--continue")
    assert (code, "no conversation is kept yet" in err) == (2, True)


def test_load(conversation):  # noqa: F811
    keep(new_path(), "fake", TURN)
    assert "Why is the sky" in chat_commands.run("/load", conversation)
    assert "1 turn" in chat_commands.run("/load 1", conversation)
    assert conversation.messages == TURN
    for wrong in ("2", "0", "x"):
        with pytest.raises(UsageError, match="from 1 to 1"):
            chat_commands.run(f"/load {wrong}", conversation)


def test_copy_by_a_program(conversation, monkeypatch, tmp_path):  # noqa: F811
    program = tmp_path / "pbcopy"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UsageError, match="no answer"):
        chat_commands.run("/copy", conversation)
    ask(conversation, "first")
    assert "pbcopy" in chat_commands.run("/copy", conversation)
    assert (tmp_path / "copied").read_text() == "one two three four five six"


def test_copy_by_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(clipboard, "_PROGRAMS", ())
    with pytest.raises(DFlashError, match="/save"):
        clipboard.copy("x")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    clipboard.copy("é")
    sent = capsys.readouterr().err
    assert sent == f"\x1b]52;c;{base64.b64encode('é'.encode()).decode()}\x07"
    with pytest.raises(DFlashError):
        clipboard.copy("x" * 80_000)


def test_defaults_for_temperature_and_instructions(run, fake, home):
    assert run("default", "--temperature", "0.5", "--system", "Be brief.")[0] == 0
    assert run("default")[1].splitlines()[1:] == ["temperature: 0.5", "system: Be brief."]
    assert run("generate", "hi", "--pair", "demo")[0] == 0
    assert fake.asked[-1]["params"].temperature == 0.5
    assert [message["content"] for message in fake.asked[-1]["prompt"]] == ["Be brief.", "hi"]
    run("generate", "hi", "--pair", "demo", "--temperature", "0", "--system", "Other.")
    assert fake.asked[-1]["params"].temperature == 0
    assert fake.asked[-1]["prompt"][0]["content"] == "Other."
    run("generate", "hi", "--pair", "demo", "--raw")
    assert fake.asked[-1]["prompt"] == [ord(c) for c in "hi"]
    run("default", "--system", "")
    assert "system" not in run("default")[1]
    assert run("default", "--temperature", "-1")[0] == 2
    assert run("default", "--clear", "--temperature", "1")[0] == 2
    run("default", "--clear")
    assert not (home / "settings.json").exists()


def test_thinking(conversation, fake, monkeypatch):  # noqa: F811
    class Tokenizer:
        has_chat_template = True

        def apply_chat_template(self, messages, *, add_generation_prompt, enable_thinking):
            assert add_generation_prompt
            return [int(enable_thinking), *fake.encode_chat(messages)]

    monkeypatch.setattr(fake, "tokenizer", Tokenizer(), raising=False)
    for word, first in (("on", 1), ("off", 0)):
        assert chat_commands.run(f"/set thinking {word}", conversation) == f"thinking is {word} from now on."
        ask(conversation, "hi")
        assert fake.asked[-1]["prompt"][0] == first
    chat_commands.run("/set thinking auto", conversation)
    ask(conversation, "hi")
    assert isinstance(fake.asked[-1]["prompt"][0], dict)
    with pytest.raises(UsageError, match="on, off or auto"):
        chat_commands.run("/set thinking maybe", conversation)
    Tokenizer.has_chat_template = False
    chat_commands.run("/set thinking on", conversation)
    with pytest.raises(UsageError, match="no chat template"):
        ask(conversation, "hi")
