"""`dflash-mlx chat`: a conversation on the terminal, or turns from a pipe."""

import sys
from typing import Annotated

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.conversation import Conversation
from dflash_mlx.cli.default import sampling_defaults, with_default
from dflash_mlx.cli.kept import list_kept, new_path
from dflash_mlx.cli.line_input import LineInput
from dflash_mlx.cli.live import LiveText, quiet_keyboard
from dflash_mlx.cli.output import marked, note, summary
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import DFlashError, UsageError

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx chat

  dflash-mlx chat --continue

  dflash-mlx chat --pair demo --system "Answer in one sentence." --temperature 0.7

  printf 'Name a colour.\\nAnother one.\\n' | dflash-mlx chat --pair demo
"""


def chat_command(
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.MethodOption = Method.auto,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    dtype: options.Precision = options.DType.auto,
    no_kernels: options.NoKernels = False,
    exact: options.Exact = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.ChosenTemperature = None,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    thinking: options.ThinkingOption = options.Thinking.auto,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Go on with the newest conversation.", rich_help_panel=options.OUTPUT)
    ] = False,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Keep nothing of this conversation.", rich_help_panel=options.OUTPUT)
    ] = False,
    plain: options.Plain = False,
    stats: options.Stats = None,
) -> None:
    """Talk with a model. It remembers the conversation and reads only what is new in each turn.

    While an answer streams, a line below it shows the speed, the acceptance length (tokens gained by a round), the
    share of drafts that were kept, and the last rounds as bars. Ctrl-C stops an answer; /help lists the commands.
    On a terminal Markdown is shown with styles (--plain: as written), and conversations are kept on this disk,
    readable by you alone (--no-save: not at all); --continue goes on with the newest one.
    Without --pair and --model the default pair answers; see dflash-mlx default.
    """
    from dflash_mlx.hub.registry import cache_home

    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        method=method,
        no_draft=no_draft,
        block_size=block_size,
        dtype=dtype,
        no_kernels=no_kernels,
        exact=exact,
    )
    newest = list_kept()[:1]
    if go_on and not newest:
        raise UsageError("no conversation is kept yet; start one without --continue.")
    instructions = "" if go_on and system is None else system  # one that goes on has its own
    temperature, instructions = sampling_defaults(temperature, instructions)
    loaded = with_default(choice).open()
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    lines = LineInput(cache_home() / "chat-history.jsonl", complete_command)
    conversation = Conversation(
        loaded,
        draft=not no_draft,
        settings=sampling,
        thinking={"auto": None, "on": True, "off": False}[thinking.value],
        path=new_path() if lines.interactive and not no_save else None,
    )
    if go_on:
        conversation.load(newest[0])
        note(f"going on with: {newest[0].title}")
    if instructions or not go_on:
        conversation.set_system(instructions)
    if lines.interactive:
        drafting = (
            "plain decoding" if loaded.drafter is None else f"drafting up to {loaded.block_size - 1} tokens at once"
        )
        note(f"{loaded.name}, {drafting}. /help lists the commands, Ctrl-D leaves.")
    talk(conversation, lines, stats=stats is not False, markdown=not plain)


def complete_command(line: str) -> list[str]:
    """For the Tab key."""
    from dflash_mlx.cli import chat_commands

    return chat_commands.completions(line)


def talk(conversation: Conversation, lines: LineInput, *, stats: bool, markdown: bool = False) -> None:
    """Turn after turn until the input ends. Slash commands' words and all statistics go to stderr."""
    # Typer has no need for chat commands unless one chats.
    from dflash_mlx.cli import chat_commands

    pressed = False  # Ctrl-C was the last thing that happened.
    while True:
        try:
            turn = lines.read()
        except KeyboardInterrupt:
            note("")
            if pressed:
                return
            pressed = True
            note("Ctrl-C once more leaves; so does Ctrl-D.")
            continue
        if turn is None:
            if lines.interactive:
                note("")
            return
        pressed = False
        if not turn.strip():
            continue
        try:
            if turn.startswith("/"):
                said = chat_commands.run(turn, conversation)
                if isinstance(said, str):
                    note(said, style="cyan")
                    if turn.startswith("/undo"):
                        conversation.keep()
                    continue
                take_turn(conversation, said.question, stats=stats, again=True, markdown=markdown)
            else:
                question, before = "\n\n".join((turn.strip(), *conversation.attached)), len(conversation.messages)
                take_turn(conversation, question, stats=stats, markdown=markdown)
                if len(conversation.messages) > before:  # else the question was taken back, and its files wait
                    conversation.attached.clear()
            pressed = conversation.interrupted
            conversation.keep()
        except chat_commands.LeaveChat:
            return
        except DFlashError as error:
            # A turn that cannot be answered does not end the conversation, unless nobody is there to rephrase it.
            if not lines.interactive:
                raise
            print(marked("error:", str(error), "red", sys.stderr), file=sys.stderr, flush=True)


def take_turn(
    conversation: Conversation, question: str, *, stats: bool, again: bool = False, markdown: bool = False
) -> None:
    """Answer one question on the terminal, or the last one again."""
    with quiet_keyboard(), LiveText(markdown=markdown) as live:
        notices = (conversation.ask_again if again else conversation.ask)(question, live)
    if not sys.stdout.isatty() and not live.text.endswith("\n"):
        print(flush=True)
    for notice in notices:
        note(notice, style="yellow")
    if conversation.interrupted:
        kept = "what was said stays in the conversation" if live.text else "the question was taken back"
        kept = "the answer from before stays" if again and not live.text else kept
        note(f"stopped; {kept}.", style="yellow")
    if stats and conversation.last is not None:
        for line in summary(conversation.last):
            note(line)
