"""`dflash-mlx generate`: one prompt, one answer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.default import sampling_defaults, with_default
from dflash_mlx.cli.output import note, summary
from dflash_mlx.cli.prompt import read_prompt, read_text
from dflash_mlx.cli.streaming import answer
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.decoding.constraint import Constraint
    from dflash_mlx.pair import ModelPair

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx generate "Why is the sky blue?" --pair demo

  cat letter.txt | dflash-mlx generate "Summarise in three sentences." --pair demo

  dflash-mlx generate "What is new in the second one?" -f old.txt -f new.txt --pair demo

  dflash-mlx generate "Name a colour" --pair demo --temperature 0.8 --seed 7

  dflash-mlx generate "Why is the sky blue?" --pair demo --compare

  dflash-mlx generate "A person from Paris" --schema person.json --pair demo

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
    method: options.MethodOption = Method.auto,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    steps: options.Steps = 1,
    width: options.Width = None,
    tree: options.Tree = False,
    dtype: options.Precision = options.DType.auto,
    no_kernels: options.NoKernels = False,
    exact: options.Exact = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.ChosenTemperature = None,
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
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema",
            metavar="FILE",
            help="Answer with JSON of this JSON schema, and nothing else.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Answer twice, plainly and with drafting, and compare speed and words.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    plain: options.Plain = False,
    as_json: options.Json = False,
    stats: options.Stats = None,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes; speed and acceptance length go to stderr.

    Without --pair and --model the default pair answers; see dflash-mlx default.
    """
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out; give one of them.")
    no_draft = no_draft or method is Method.plain
    if no_draft and compare:
        raise UsageError("--compare shows what drafting gains, and --no-draft leaves it out; give one of them.")
    options.require_width(width, tree=tree, no_draft=no_draft)
    wanted = read_schema(schema)
    text = read_prompt(prompt, files or ())
    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        method=method,
        no_draft=no_draft,
        block_size=block_size,
        steps=steps,
        dtype=dtype,
        no_kernels=no_kernels,
        exact=exact,
    )
    temperature, system = sampling_defaults(temperature, "" if raw else system)
    opened = with_default(choice).open()
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
    constraint = _constraint(opened, wanted)
    if compare:
        from dflash_mlx.cli.comparison import run_comparison

        run_comparison(opened, question, params, width=width, tree=tree, constraint=constraint, as_json=as_json)
        return
    last, result = answer(
        opened,
        question,
        params,
        draft=not no_draft,
        echo=not as_json,
        width=width,
        tree=tree,
        constraint=constraint,
        markdown=not (plain or raw or constraint is not None),
    )
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    if stats if stats is not None else not as_json:
        for line in summary(last):
            note(line)


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A conversation of one question."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def read_schema(path: Path | None) -> dict[str, Any] | None:
    """A JSON schema from a file, before anything is loaded. Raises UsageError."""
    if path is None:
        return None
    try:
        schema = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); give a file with a JSON schema.") from None
    if not isinstance(schema, dict):
        raise UsageError(f'{path} holds no JSON schema; expected an object such as {{"type": "object"}}.')
    return schema


def _constraint(pair: "ModelPair", schema: dict[str, Any] | None) -> "Constraint | None":
    from dflash_mlx.decoding.constraint import json_constraint

    return None if schema is None else json_constraint(pair, schema)
