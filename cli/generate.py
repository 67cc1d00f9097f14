"""`dflash-mlx generate`: one prompt, one answer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.live import LiveText, quiet_keyboard
from dflash_mlx.cli.output import READING, live_line, note, summary
from dflash_mlx.cli.prompt import read_prompt
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.generation import GenerationResponse
    from dflash_mlx.pair import ModelPair
    from dflash_mlx.sampling import SamplingParams

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx generate "Why is the sky blue?" --pair demo

  cat letter.txt | dflash-mlx generate "Summarise in three sentences." --pair demo

  dflash-mlx generate "What is new in the second one?" -f old.txt -f new.txt --pair demo

  dflash-mlx generate "Name a colour" --pair demo --temperature 0.8 --seed 7

  dflash-mlx generate "2+2=" --raw --model ./my-model --draft-model ./my-drafter --json
"""


def generate_command(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask. Piped text follows it; '-', or nothing in a pipe, waits for that."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Attach a text file to the prompt. Can be given several times."
        ),
    ] = None,
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    dtype: options.Precision = options.DType.auto,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Continue the text as it is, without the model's chat template.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = False,
    as_json: options.Json = False,
    stats: options.Stats = None,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes; speed and acceptance go to stderr."""
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out; give one of them.")
    text = read_prompt(prompt, files or ())
    choice = options.ModelChoice(
        pair=pair, model=model, draft_model=draft_model, no_draft=no_draft, block_size=block_size, dtype=dtype
    )
    opened = choice.open()
    from dflash_mlx import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    question = opened.encode_prompt(text) if raw else messages(text, system)
    last, result = answer(opened, question, params, draft=not no_draft, echo=not as_json)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    if stats if stats is not None else not as_json:
        for line in summary(last):
            note(line)


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A conversation of one question."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def answer(
    pair: "ModelPair", prompt: Any, params: "SamplingParams", *, draft: bool, echo: bool
) -> tuple["GenerationResponse", dict[str, Any]]:
    """Stream an answer; returns the last response, and the whole answer as the object that --json prints."""
    from dflash_mlx import stream_generate

    token_ids: list[int] = []
    notices: list[str] = []
    last = None
    with quiet_keyboard(), LiveText(echo=echo) as live:
        live.write("", READING)
        for response in stream_generate(pair, prompt, params, draft=draft):
            token_ids += response.token_ids
            live.write(response.text, live_line(response))
            if response.notice:
                notices.append(response.notice)
            last = response
    if echo and not sys.stdout.isatty() and not live.text.endswith("\n"):
        print(flush=True)
    for notice in notices:
        note(notice, style="yellow")
    assert last is not None
    return last, {**last.to_json(), "text": live.text, "token_ids": token_ids}
