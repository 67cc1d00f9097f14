"""The options of `dflash-mlx bench`, and what their words mean: sweeps, more contestants, numbers of streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli.options import OUTPUT, DType, ModelChoice
from dflash_mlx.cli.settings import SETTINGS, parse
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from dflash_mlx.bench.run import Setting
    from dflash_mlx.sampling import SamplingParams

_OF_DRAFTING = ("width", "tree")
_OF_ANSWERS = ("context", "temperature", "max-tokens", "top-p", "top-k", "min-p", "seed")
_OF_CONTESTANTS = ("method", "width", "tree", "block-size", "steps", "dtype", "draft-model", "plain")


PROMPTS = "What to measure"
OTHERS = "Who takes part"

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Prompts of your own: a JSON object a line, with "prompt" and "category".',
        rich_help_panel=PROMPTS,
    ),
]
SuiteName = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME",
        help="A published suite: gsm8k, math-500, humaneval, mbpp, mt-bench or spec-bench.",
        rich_help_panel=PROMPTS,
    ),
]
SuiteFile = Annotated[
    Path | None,
    typer.Option(
        "--suite-file",
        metavar="FILE",
        help="The suite's rows as JSON lines (.gz, too), instead of fetching them.",
        rich_help_panel=PROMPTS,
    ),
]
Category = Annotated[
    str | None,
    typer.Option(
        "--category", metavar="NAME", help="Only these kinds of prompts: chat,code for two.", rich_help_panel=PROMPTS
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit",
        metavar="N",
        min=0,
        help="How many prompts: a fixed sample with some of each category. 0: all.",
        rich_help_panel=PROMPTS,
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat", metavar="N", min=1, help="Run everything N times and take medians.", rich_help_panel=PROMPTS
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "--turns",
        metavar="N",
        min=1,
        help="Let this project's contestants go on with a prompt in turns of N tokens, not of whole answers.",
        rich_help_panel=PROMPTS,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=A,B",
        help="Measure each value: width, tree, context (tokens before the prompt), temperature, max-tokens and others.",
        rich_help_panel=PROMPTS,
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency", metavar="N,N", help="Then measure N requests at the same time.", rich_help_panel=PROMPTS
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="NAME=VALUE,...",
        help="One more of this project: method, width, tree, block-size, steps, dtype, draft-model, plain.",
        rich_help_panel=OTHERS,
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="URL",
        help="A server with OpenAI's protocol. A key for it comes from DFLASH_MLX_AGAINST_KEY.",
        rich_help_panel=OTHERS,
    ),
]
AgainstModel = Annotated[
    list[str] | None,
    typer.Option(
        "--against-model",
        metavar="NAME",
        help="Its model, where it lists several or none. For several servers: one for all of them, or one for each.",
        rich_help_panel=OTHERS,
    ),
]
AgainstMlxLm = Annotated[
    bool,
    typer.Option("--against-mlx-lm", help="mlx-lm's own decoding, in this process.", rich_help_panel=OTHERS),
]
AgainstPackage = Annotated[
    list[str] | None,
    typer.Option(
        "--against-package",
        metavar="NAME",
        help="Another package's loop with the same models, where it is installed: dflash or mlx-dspark.",
        rich_help_panel=OTHERS,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write results.json, report.html and report.md there.",
        rich_help_panel=OUTPUT,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way in which this project takes part. choice: the models it needs."""

    name: str
    choice: ModelChoice
    draft: bool = True
    width: int | None = None
    tree: bool = False


def servers_of(urls: Sequence[str], models: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each server's address and the model that was named for it: one for all servers, one for each, or none.

    Raises UsageError.
    """
    if models and not urls:
        raise UsageError("--against-model names the model of a server; give its address with --against URL.")
    if len(models) not in (0, 1, len(urls)):
        raise UsageError(
            f"--against-model is given {len(models)} times for {len(urls)} servers; name one model for all of them, "
            "or one for each in the same order."
        )
    named = models if len(models) == len(urls) else [models[0] if models else None] * len(urls)
    return list(zip(urls, named, strict=True))


def parse_concurrency(text: str) -> list[int]:
    """ "1,4,16" -> [1, 4, 16]. Raises UsageError."""
    return [_count("concurrency", part) for part in text.split(",")]


def parse_sweeps(texts: Sequence[str]) -> tuple[list[tuple[str, Any]], dict[str, list[Any]]]:
    """ "width=1,3" and its like: (what drafting varies, one after the other; what answers vary, by name).

    Raises UsageError.
    """
    drafting: list[tuple[str, Any]] = []
    answers: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        known = [*_OF_DRAFTING, *_OF_ANSWERS]
        if name not in known or not values:
            raise UsageError(f"--sweep {text}: expected NAME=VALUE,VALUE,... with a name of {', '.join(known)}.")
        parts = values.split(",")
        if name in _OF_DRAFTING:
            drafting += [(name, _count(name, part)) for part in parts]
        elif name == "context":
            answers[name] = [_count(name, part) for part in parts]
        else:
            answers[name] = [parse(name, part) for part in parts]
    return drafting, answers


def settings_of(params: "SamplingParams", sweeps: dict[str, list[Any]]) -> "list[Setting]":
    """Every combination of what answers vary in; one without a name when nothing does."""
    from dflash_mlx.bench.run import Setting

    found = []
    for values in product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        name = " ".join(f"{key}={value:g}" for key, value in chosen.items())
        context = chosen.pop("context", 0)
        changed = replace(params, **{key.replace("-", "_"): value for key, value in chosen.items()})
        if changed.temperature > 0 and changed.seed is None:
            # Without a seed answers could not be compared.
            changed = replace(changed, seed=0)
        found.append(Setting(name, changed, context))
    return found


def variants(
    choice: ModelChoice, *, width: int | None, tree: bool, also: Sequence[str], sweep: Sequence[tuple[str, Any]]
) -> list[Variant]:
    """This project's own contestants: plain decoding first, then drafting, then what was asked for besides.

    A sweep over widths or trees takes the place of drafting as usual, unless that was asked for with a width.
    """
    found = [Variant(name="plain", choice=choice, draft=False)]
    if not choice.no_draft:
        if not sweep or width is not None:
            found.append(Variant(name="drafted", choice=choice, width=width, tree=tree))
        found += [Variant(name=f"{k} {n}", choice=choice, width=n, tree=k == "tree") for k, n in sweep]
    elif sweep:
        raise UsageError("--sweep width and tree are for drafts, which --no-draft leaves out; give one of them.")
    found += [_variant(choice, text) for text in also]
    names = [variant.name for variant in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two contestants are called {twice!r}; ask for each of them once.")
    return found


def _variant(choice: ModelChoice, text: str) -> Variant:
    """ "width=7,dtype=bfloat16" -> what that changes in `choice`. Raises UsageError."""
    changes: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _OF_CONTESTANTS or not (value or name == "plain"):
            from difflib import get_close_matches

            hint = did_you_mean(get_close_matches(name, _OF_CONTESTANTS, n=1))
            raise UsageError(f"--also {text}: expected NAME=VALUE with a name of {', '.join(_OF_CONTESTANTS)}.{hint}")
        if name == "plain":
            own["draft"] = False
        elif name in _OF_DRAFTING:
            own |= {"width": _count(name, value), "tree": name == "tree"}
        elif name == "dtype":
            if value not in [kind.value for kind in DType]:
                raise UsageError(f"--also {text}: dtype should be one of {', '.join(k.value for k in DType)}.")
            changes["dtype"] = DType(value)
        elif name == "method":
            if value not in [method.value for method in Method]:
                raise UsageError(f"--also {text}: method should be one of {', '.join(m.value for m in Method)}.")
            changes["method"] = Method(value)
        elif name in ("block-size", "steps"):
            changes[name.replace("-", "_")] = parse(name, value)
        else:
            changes["draft_model"] = value
    return Variant(name=text, choice=replace(choice, **changes), **own)


def comparable(own: Sequence[Variant], others: Sequence[str], temperature: float) -> list[str]:
    """Whose tokens should be plain decoding's: those of the same precision.

    What others draw at a temperature above 0 follows other random numbers.
    """
    same = [variant.name for variant in own if variant.choice.dtype == own[0].choice.dtype]
    return [*same[1:], *(others if temperature == 0 else [])]


def _count(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"--{name} is {text}; expected {SETTINGS['width'].expected}.")
    return value
