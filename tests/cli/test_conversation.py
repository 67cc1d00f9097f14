"""Turns, settings and slash commands of a chat, without a terminal."""

import inspect
import json

import fake_pair
import pytest

from dflash_mlx import generation, loading, pair
from dflash_mlx.cli import chat_commands
from dflash_mlx.cli.conversation import Conversation, StopSwitch
from dflash_mlx.cli.live import LiveText
from dflash_mlx.errors import PromptError, UsageError


@pytest.fixture
def conversation(fake) -> Conversation:
    settings = {"max_tokens": 100, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None}
    return Conversation(fake, draft=True, settings=settings)


def ask(conversation: Conversation, question: str) -> str:
    with LiveText(echo=False, status=False) as live:
        conversation.ask(question, live)
    return live.text


def test_a_turn_continues_the_session_of_the_one_before(conversation, fake):
    ask(conversation, "first")
    ask(conversation, "second")
    one, two = fake.asked
    assert two["session"] is one["session"] is not None
    assert [m["role"] for m in two["prompt"]] == ["user", "assistant", "user"]
    assert two["prompt"][1]["content"] == "one two three four five six "
    assert two["cached"] == len(fake.encode_chat([{"role": "user", "content": "first"}]))


def test_ctrl_c_keeps_what_was_said(conversation, monkeypatch):
    class Pressed(StopSwitch):
        pressed = True

    monkeypatch.setattr("dflash_mlx.cli.conversation.StopSwitch", Pressed)
    assert ask(conversation, "first") == "one two three "
    assert conversation.interrupted
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two three "}


def test_a_question_that_got_no_answer_is_taken_back(conversation, fake):
    ask(conversation, "first")
    before = list(conversation.messages)
    with pytest.raises(PromptError):
        ask(conversation, "x" * 6000)
    assert conversation.messages == before
    ask(conversation, "second")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_breaking_in_leaves_an_empty_session_behind(conversation, fake, monkeypatch):
    def broken_into(*arguments, **options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("dflash_mlx.stream_generate", broken_into)
    old = conversation.session
    ask(conversation, "first")
    assert conversation.interrupted
    assert conversation.session is not old
    assert conversation.messages == []


def test_reset_forgets_the_turns_and_keeps_the_instructions(conversation):
    chat_commands.run("/system Be brief.", conversation)
    ask(conversation, "first")
    old = conversation.session
    chat_commands.run("/reset", conversation)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.session is not old
    assert chat_commands.run("/system", conversation) == "Be brief."
    chat_commands.run("/system -", conversation)
    assert conversation.messages == []


def test_set_changes_the_next_answer(conversation, fake):
    chat_commands.run("/set max-tokens 2", conversation)
    chat_commands.run("/set temperature 0.5", conversation)
    chat_commands.run("/set seed 4", conversation)
    chat_commands.run("/set draft off", conversation)
    assert ask(conversation, "first") == "one two "
    asked = fake.asked[0]
    assert (asked["params"].temperature, asked["params"].seed, asked["draft"]) == (0.5, 4, False)
    chat_commands.run("/set seed none", conversation)
    assert conversation.settings["seed"] is None
    assert "max-tokens 2" in chat_commands.run("/set", conversation)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nonsense", "/help"),
        ("/set nonsense 1", "temperature"),
        ("/set temperature -1", "^temperature is -1; expected a number of at least 0"),
        ("/set temperature", "at least 0"),
        ("/set draft maybe", "on or off"),
        ("/save", "/save FILE"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(conversation, line, words):
    before = dict(conversation.settings)
    with pytest.raises(UsageError, match=words):
        chat_commands.run(line, conversation)
    assert conversation.settings == before


def test_drafting_cannot_be_set_on_without_a_drafter(conversation):
    conversation.pair.drafter = None
    with pytest.raises(UsageError, match="--no-draft"):
        chat_commands.run("/set draft on", conversation)


def test_save_is_whole_and_overwrites_only_when_told(conversation, tmp_path):
    ask(conversation, "first")
    path = tmp_path / "talk.md"
    chat_commands.run(f"/save {path}", conversation)
    assert "## User\n\nfirst\n\n## Assistant\n\none two three four five six\n" in path.read_text()
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        chat_commands.run(f"/save {path}", conversation)
    assert path.read_text() == "precious"
    chat_commands.run(f"/save! {path}", conversation)
    assert "precious" not in path.read_text()
    with pytest.raises(UsageError, match="folder"):
        chat_commands.run(f"/save {tmp_path}", conversation)
    with pytest.raises(UsageError, match="cannot write"):
        chat_commands.run(f"/save {tmp_path}/none/talk.md", conversation)
    assert [p.name for p in tmp_path.iterdir()] == ["talk.md"]


def test_save_as_json(conversation, tmp_path):
    ask(conversation, "Grüße")
    chat_commands.run(f"/save {tmp_path}/talk.json", conversation)
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved == {"pair": "fake", "messages": conversation.messages}


def test_stats_add_up(conversation):
    assert "no answers" in chat_commands.run("/stats", conversation)
    ask(conversation, "first")
    ask(conversation, "second")
    text = chat_commands.run("/stats", conversation)
    assert "2 answers, 12 tokens" in text
    assert "4 rounds, acceptance length 3.00, 50% of drafts kept" in text
    assert "1: 100%  2: 100%  3: 0%  4: 0%" in text


def test_help_names_every_command():
    for name in chat_commands._COMMANDS:
        assert name in chat_commands.HELP


def test_exit(conversation):
    with pytest.raises(chat_commands.LeaveChat):
        chat_commands.run("/exit", conversation)


def test_the_fake_reads_like_the_real_thing():
    # The fake is only worth something as long as its calls look like the real ones.
    def names(function: object) -> list[tuple[str, object]]:
        return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]

    assert names(fake_pair.load_pair) == names(loading.load_pair)
    assert names(fake_pair.stream_generate) == names(generation.stream_generate)
    assert names(fake_pair.FakePair.new_session) == names(pair.ModelPair.new_session)
    response = next(
        fake_pair.stream_generate(fake_pair.FakePair(), [1], __import__("types").SimpleNamespace(max_tokens=9))
    )
    assert set(vars(response)) - {"to_json"} == set(generation.GenerationResponse.__dataclass_fields__)


def test_retry_answers_the_last_question_again(conversation, fake):
    with pytest.raises(UsageError, match="no message"):
        chat_commands.run("/retry", conversation)
    ask(conversation, "first")
    ask(conversation, "second")
    wanted = chat_commands.run("/retry", conversation)
    assert wanted == chat_commands.Retry("second")
    with LiveText(echo=False, status=False) as live:
        conversation.ask_again(wanted.question, live)
    assert fake.asked[-1]["prompt"] == fake.asked[-2]["prompt"]
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_a_retry_without_an_answer_keeps_the_old_one(conversation, monkeypatch):
    ask(conversation, "first")
    before = list(conversation.messages)

    def fails(*arguments, **options):
        raise PromptError("too long")

    monkeypatch.setattr("dflash_mlx.stream_generate", fails)
    with pytest.raises(PromptError), LiveText(echo=False, status=False) as live:
        conversation.ask_again("first", live)
    assert conversation.messages == before


def test_undo_takes_the_last_turn_back_and_leaves_the_instructions(conversation):
    chat_commands.run("/system Be brief.", conversation)
    ask(conversation, "first")
    ask(conversation, "second\nline")
    assert chat_commands.run("/undo", conversation) == "Taken back: second"
    assert [m["content"] for m in conversation.messages[:2]] == ["Be brief.", "first"]
    chat_commands.run("/undo", conversation)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    with pytest.raises(UsageError, match="no message to take back"):
        chat_commands.run("/undo", conversation)


def test_draft_can_be_switched(conversation):
    assert "draft is on" in chat_commands.run("/draft", conversation)
    chat_commands.run("/draft off", conversation)
    assert conversation.draft is False
    with pytest.raises(UsageError, match="on or off"):
        chat_commands.run("/draft perhaps", conversation)


def test_files_wait_for_the_next_message(conversation, tmp_path):
    (tmp_path / "notes.txt").write_text("abc")
    assert "notes.txt goes with your next" in chat_commands.run(f"/file {tmp_path}/notes.txt", conversation)
    assert conversation.attached == ["notes.txt:\n```\nabc\n```"]
    with pytest.raises(UsageError, match="1 file is attached"):
        chat_commands.run("/file", conversation)
    with pytest.raises(UsageError, match="cannot read"):
        chat_commands.run(f"/file {tmp_path}/none.txt", conversation)
    chat_commands.run("/file -", conversation)
    assert conversation.attached == []


def test_a_mistyped_command_is_guessed(conversation):
    with pytest.raises(UsageError, match="Did you mean /retry"):
        chat_commands.run("/rety", conversation)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/re", ["/retry ", "/reset "]),
        ("/set te", ["/set temperature "]),
        ("/draft o", ["/draft on", "/draft off"]),
        ("hello", []),
        ("", []),
        ("/nonsense x", []),
    ],
)
def test_tab_completes_commands(line, found):
    assert chat_commands.completions(line) == found


def test_tab_completes_paths(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    assert chat_commands.completions(f"/file {tmp_path}/not") == [
        f"/file {tmp_path}/notes.txt",
        f"/file {tmp_path}/nothing/",
    ]
