"""What begins with a slash in a chat: a name, its argument, a function that answers with a line to show."""

import difflib
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.cli import settings
from dflash_mlx.cli.clipboard import copy
from dflash_mlx.cli.conversation import Conversation
from dflash_mlx.cli.kept import as_list, list_kept
from dflash_mlx.cli.output import picture
from dflash_mlx.cli.prompt import attachment
from dflash_mlx.errors import UsageError, did_you_mean
from dflash_mlx.hub.leftovers import write_atomically


class LeaveChat(Exception):  # noqa: N818  not an error
    """The user said goodbye."""


@dataclass(frozen=True)
class Retry:
    """The last question is to be answered again."""

    question: str


HELP = """\
/help              this list
/file PATH         attach a text file to your next message; /file - takes all of them away
/retry             answer the last message again
/undo              take the last message and its answer back
/draft on|off      draft or decode plainly from now on: the words are the same, the speed is not
/reset             forget the conversation (instructions stay)
/system TEXT       set the instructions; without TEXT, show them; /system - takes them away
/set NAME VALUE    change max-tokens, temperature, top-p, top-k, min-p, seed, draft (on, off) or thinking \
(on, off, auto); alone, show them
/stats             speed and acceptance, last answer and whole conversation
/load              list the conversations that are kept; /load N goes on with one of them
/copy              copy the last answer to the clipboard
/save FILE         save the conversation as Markdown, or as JSON if FILE ends in .json; /save! replaces a file
/exit              leave (Ctrl-D does, too)

A line that ends with \\ goes on with the next one. Text between two \"\"\" can have several lines.
Lines that are pasted together are one message. To send a line that begins with a slash, put a space in front.
The Tab key completes commands. Ctrl-C stops an answer."""

_THINKING = {"auto": None, "on": True, "off": False}
_CHANGEABLE = ("max-tokens", "temperature", "top-p", "top-k", "min-p", "seed")


def run(line: str, conversation: Conversation) -> str | Retry:
    """Carry out a slash command; returns what to tell the user, or to do. Raises DFlashError and LeaveChat."""
    name, _, argument = line.strip().partition(" ")
    command = _COMMANDS.get(name.lower())
    if command is None:
        close = difflib.get_close_matches(name.lower(), _COMMANDS, n=2, cutoff=0.6)
        raise UsageError(f"there is no command {name}.{did_you_mean(close)} /help lists them.")
    return command(conversation, argument.strip())


def completions(line: str) -> list[str]:
    """What a line may become with the Tab key: commands, the names and values they take, and paths of files."""
    name, space, argument = line.partition(" ")
    if not line.startswith("/"):
        return []
    if not space:
        return [f"{command} " for command in _COMMANDS if command.startswith(name)]
    if name in ("/file", "/save", "/save!"):
        found = sorted(glob.glob(glob.escape(os.path.expanduser(argument)) + "*"))
        return [f"{name} {path}{'/' if os.path.isdir(path) else ''}" for path in found]
    known = {"/set": [f"{setting} " for setting in (*_CHANGEABLE, "draft", "thinking")], "/draft": ["on", "off"]}
    return [f"{name} {word}" for word in known.get(name, []) if word.startswith(argument)]


def _help(conversation: Conversation, argument: str) -> str:
    return HELP


def _reset(conversation: Conversation, argument: str) -> str:
    conversation.reset()
    return "Forgotten. A new conversation begins."


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.set_system(None if argument == "-" else argument)
        return "Instructions taken away." if argument == "-" else "Instructions set."
    first = conversation.messages[0] if conversation.messages else {"role": ""}
    return first["content"] if first["role"] == "system" else "There are no instructions."


def _file(conversation: Conversation, argument: str) -> str:
    if argument == "-":
        conversation.attached.clear()
        return "No file is attached any more."
    if not argument:
        count = len(conversation.attached)
        raise UsageError(f"say which: /file PATH. {count} {'file is' if count == 1 else 'files are'} attached now.")
    conversation.attached.append(attachment(Path(argument)))
    return f"{Path(argument).name} goes with your next message."


def _retry(conversation: Conversation, argument: str) -> Retry:
    question = next((m["content"] for m in reversed(conversation.messages) if m["role"] == "user"), None)
    if question is None:
        raise UsageError("there is no message to answer again yet.")
    return Retry(question)


def _undo(conversation: Conversation, argument: str) -> str:
    question = conversation.undo()
    if question is None:
        raise UsageError("there is no message to take back.")
    first = question.strip().splitlines()[0]
    return f"Taken back: {first[:59] + '…' if len(first) > 60 else first}"


def _draft(conversation: Conversation, argument: str) -> str:
    if not argument:
        return f"draft is {'on' if conversation.draft else 'off'}; change it with /draft on or /draft off."
    return _set(conversation, f"draft {argument}")


def _set(conversation: Conversation, argument: str) -> str:
    if not argument:
        values = {name: conversation.settings[name.replace("-", "_")] for name in _CHANGEABLE}
        lines = [f"{name} {'none' if value is None else value}" for name, value in values.items()]
        thinking = {None: "auto", True: "on", False: "off"}[conversation.thinking]
        return "\n".join([*lines, f"draft {'on' if conversation.draft else 'off'}", f"thinking {thinking}"])
    name, _, text = argument.partition(" ")
    name, text = name.lower().lstrip("-").replace("_", "-"), text.strip()
    if name == "draft":
        if text not in ("on", "off"):
            raise UsageError(f"draft is {text!r}; expected on or off.")
        if text == "on" and conversation.pair.drafter is None:
            raise UsageError("no drafter is loaded; start chat without --no-draft.")
        conversation.draft = text == "on"
    elif name == "thinking":
        if text not in _THINKING:
            raise UsageError(f"thinking is {text!r}; expected on, off or auto.")
        conversation.thinking = _THINKING[text]
    elif name not in _CHANGEABLE:
        raise UsageError(f"there is no setting {name!r}; there are {', '.join(_CHANGEABLE)}, draft and thinking.")
    else:
        none = name == "seed" and text in ("none", "off")
        conversation.settings[name.replace("-", "_")] = None if none else settings.parse(name, text, called=name)
    return f"{name} is {text} from now on."


def _stats(conversation: Conversation, argument: str) -> str:
    totals = conversation.totals
    if not totals.answers:
        return "There are no answers yet."
    lines = [f"conversation: {totals.answers} {'answer' if totals.answers == 1 else 'answers'}, {totals.tokens} tokens"]
    lines[0] += f"; {totals.cached_tokens} of {totals.prompt_tokens} prompt tokens were already in memory"
    if totals.rounds:
        mean, rate = totals.round_tokens / totals.rounds, totals.accepted / max(totals.drafted, 1)
        lines.append(f"drafting: {totals.rounds} rounds, acceptance length {mean:.2f}, {rate:.0%} of drafts kept")
    last = conversation.last
    if last is not None:
        lines.append(f"last answer: {last.generation_tokens} tokens at {last.generation_tps:.1f} tok/s")
        if last.acceptance is not None and last.acceptance.rounds:
            rates = "  ".join(f"{i}: {rate:.0%}" for i, rate in enumerate(last.acceptance.per_position, start=1))
            lines.append(f"drafts kept by place in the block: {rates}")
            lines.append(f"last rounds: {picture(last.acceptance.recent, count=64)}")
    return "\n".join(lines)


def _save(conversation: Conversation, argument: str, *, replace: bool = False) -> str:
    if not argument:
        raise UsageError("say where: /save FILE.")
    path = Path(argument).expanduser()
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file's name.")
    if os.path.lexists(path) and not replace:
        raise UsageError(f"{path} exists already; take another name, or replace it with /save! {argument}.")
    text = conversation.to_json() if path.suffix.lower() == ".json" else conversation.to_markdown()
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error
    return f"Saved to {path}."


def _replace(conversation: Conversation, argument: str) -> str:
    return _save(conversation, argument, replace=True)


def _load(conversation: Conversation, argument: str) -> str:
    found = list_kept()
    if not found:
        raise UsageError("no conversation is kept yet.")
    if not argument:
        return as_list(found)
    if not argument.isdecimal() or not 1 <= int(argument) <= len(found):
        raise UsageError(f"/load takes a number from 1 to {len(found)}; got {argument[:40]!r}.")
    chosen = found[int(argument) - 1]
    conversation.load(chosen)
    turns = sum(message["role"] == "user" for message in chosen.messages)
    return f"Going on with: {chosen.title} ({turns} {'turn' if turns == 1 else 'turns'})"


def _copy(conversation: Conversation, argument: str) -> str:
    answer = next((m["content"] for m in reversed(conversation.messages) if m["role"] == "assistant"), None)
    if answer is None:
        raise UsageError("there is no answer to copy yet.")
    return f"Copied by {copy(answer.strip())}."


def _exit(conversation: Conversation, argument: str) -> str:
    raise LeaveChat


_COMMANDS: dict[str, Callable[[Conversation, str], str | Retry]] = {
    "/help": _help,
    "/file": _file,
    "/retry": _retry,
    "/undo": _undo,
    "/draft": _draft,
    "/reset": _reset,
    "/system": _system,
    "/set": _set,
    "/stats": _stats,
    "/load": _load,
    "/copy": _copy,
    "/save": _save,
    "/save!": _replace,
    "/exit": _exit,
}
