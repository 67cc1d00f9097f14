"""The options that several commands share, and what they become: a loaded pair, sampling parameters."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.cli.live import quiet_keyboard
from dflash_mlx.cli.output import LoadProgress, note
from dflash_mlx.cli.settings import parser
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import DFlashError, UsageError

if TYPE_CHECKING:
    from dflash_mlx.pair import ModelPair

# What errors of pairs advise, for commands that can do without a drafter.
_PLAIN_HINT = re.compile(r",? or run (plainly )?with --no-draft")
MODELS = "Which models"
SAMPLING = "How to answer"
OUTPUT = "What to print"


class DType(str, Enum):
    """The precision to compute in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def complete_pair(incomplete: str) -> list[str]:
    """Names for shell completion."""
    from dflash_mlx.hub.registry import list_pairs

    names = [name for pair in list_pairs() for name in (pair.name, *pair.aliases)]
    return [name for name in names if name.startswith(incomplete)]


Pair = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="NAME",
        help="A known pair of model and drafter, such as demo. See: dflash-mlx models.",
        autocompletion=complete_pair,
        rich_help_panel=MODELS,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="TARGET", help="The model that answers: a folder or a Hub id.", rich_help_panel=MODELS
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="DRAFTER",
        help="The drafter that was made for that model: a folder or a Hub id. With --pair, instead of the pair's own.",
        rich_help_panel=MODELS,
    ),
]
NoDraft = Annotated[
    bool,
    typer.Option("--no-draft", help="Decode plainly, one token at a time, to compare.", rich_help_panel=MODELS),
]
MethodOption = Annotated[
    Method,
    typer.Option(
        "--method",
        help="How to draft. dflash, eagle3, medusa: by a drafter made for the model. mtp: by its own head. "
        "draft_model: by a small model with its tokenizer. ngram: from the text itself, which pays where answers "
        "repeat their prompt. ...+ngram: the likelier of both in each round. plain: not at all. auto: as the "
        "drafter's files say, dflash+ngram for DFlash; where there is none, mtp or ngram.",
        rich_help_panel=MODELS,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="N",
        help="Largest block to guess at once, the known token included. (default: what the drafter was trained for)",
        parser=parser("block-size"),
        rich_help_panel=MODELS,
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        metavar="N",
        help="Draft each block in N denoising steps: the surest guesses first, the others around them. DFlash only.",
        parser=parser("steps"),
        rich_help_panel=MODELS,
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        help="Verify N drafts in each round. (default: as many as are fastest, by measurement)",
        parser=parser("width"),
        rich_help_panel=MODELS,
    ),
]
Tree = Annotated[
    bool,
    typer.Option("--tree", help="With --width: the drafts are a tree, not a chain.", rich_help_panel=MODELS),
]
Precision = Annotated[
    DType,
    typer.Option(
        "--dtype",
        help="Precision to compute in. auto: float32 on a CPU, the model's own on a GPU.",
        rich_help_panel=MODELS,
    ),
]
NoKernels = Annotated[
    bool,
    typer.Option(
        "--no-kernels",
        help="Compute with MLX's own operations alone, even where a kernel of dflash-mlx was measured to be faster.",
        rich_help_panel=MODELS,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Compute each token the same way in every pass. Drafting then changes no token in any precision. It is "
        "slower.",
        rich_help_panel=MODELS,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Stop after this many tokens.",
        parser=parser("max-tokens"),
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="X",
        help="0 always takes the likeliest token; 0.7 to 1 varies the wording.",
        parser=parser("temperature"),
        rich_help_panel=SAMPLING,
    ),
]
ChosenTemperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="X",
        help="0 always takes the likeliest token; 0.7 to 1 varies the wording. (default: 0, or your default)",
        parser=parser("temperature"),
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="X",
        help="Draw only from the likeliest tokens that make up this share. 1 is off.",
        parser=parser("top-p"),
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="N",
        help="Draw only from the N likeliest tokens. 0 is off.",
        parser=parser("top-k"),
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="X",
        help="Drop tokens less likely than this share of the likeliest one. 0 is off.",
        parser=parser("min-p"),
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Makes a run at a temperature above 0 repeatable.",
        parser=parser("seed"),
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End the answer before this text. Can be given several times.",
        parser=parser("stop"),
        rich_help_panel=SAMPLING,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="Instructions that come before the conversation.", rich_help_panel=SAMPLING
    ),
]
Plain = Annotated[
    bool,
    typer.Option("--plain", help="Show answers as they are written, Markdown included.", rich_help_panel=OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=OUTPUT)]
Stats = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="Show speed and acceptance length after the answer, on stderr. (default: on; off with --json)",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]


class Thinking(str, Enum):
    """Whether a model that can reason does it. auto: as its chat template has it."""

    auto = "auto"
    on = "on"
    off = "off"


ThinkingOption = Annotated[
    Thinking,
    typer.Option("--thinking", help="Whether a model that can reason does it.", rich_help_panel=SAMPLING),
]


def require_width(width: int | None, *, tree: bool, no_draft: bool) -> None:
    """Refuse widths and trees that would change nothing. Raises UsageError."""
    if no_draft and (width is not None or tree):
        raise UsageError("--width and --tree are for drafts, which --no-draft leaves out; give one of them.")
    if tree and width is None:
        raise UsageError("--tree needs --width N; without both, chains or trees are chosen by measured speed.")


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the user said about the models. can_be_plain: the command has --no-draft. recheck: see `load_pair`."""

    pair: str | None = None
    model: str | None = None
    draft_model: str | None = None
    method: Method = Method.auto
    no_draft: bool = False
    block_size: int | None = None
    steps: int = 1
    dtype: DType = DType.auto
    can_be_plain: bool = True
    no_kernels: bool = False
    exact: bool = False
    recheck: bool = False

    def open(self) -> "ModelPair":
        """Load it, with progress on stderr. Raises what `load_pair` raises."""
        with quiet_keyboard(), LoadProgress() as progress:
            # The import takes a second or two; the user should see why.
            progress.report("starting MLX", None)
            from dflash_mlx import load_pair

            try:
                pair = load_pair(
                    self.pair,
                    model=self.model,
                    draft_model=self.draft_model,
                    method=self.method.value,
                    draft=not self.no_draft,
                    dtype=self.dtype.value,
                    block_size=self.block_size,
                    kernels=not self.no_kernels,
                    exact=self.exact,
                    recheck=self.recheck,
                    report=progress.report,
                )
                if self.steps > 1:
                    from dflash_mlx import DFlashConfig

                    pair = pair.with_config(DFlashConfig(diffusion_steps=self.steps))
            except DFlashError as error:
                if not self.can_be_plain:
                    error.args = (_PLAIN_HINT.sub("", str(error)), *error.args[1:])
                raise
        for warning in pair.warnings:
            note(warning, style="yellow")
        return pair
