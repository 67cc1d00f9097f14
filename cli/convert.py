"""`dflash-mlx convert`: a drafter from one public layout into the other."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dflash_mlx.cli.output import LoadProgress, note

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx convert ./my-drafter ./for-vllm --to speculators --model Qwen/Qwen3-4B

  dflash-mlx convert ./from-speculators ./drafter --to zlab --model ./Qwen3-8B-4bit
"""


class Layout(str, Enum):
    """How a drafter's files are laid out."""

    zlab = "zlab"
    speculators = "speculators"


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The drafter: a folder or a Hub id.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder for the converted drafter.")],
    to: Annotated[Layout, typer.Option("--to", help="The layout to write.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="TARGET", help="The drafter's target: a folder or a Hub id."),
    ] = None,
) -> None:
    """Convert a drafter between z-lab's layout and that of vLLM's speculators.

    The weights stay exactly the same; names, layer numbers and settings are written as the other layout has them. What
    the other layout cannot say is refused. DST appears when it is complete.
    """
    from dflash_mlx.drafters.convert import convert_drafter
    from dflash_mlx.hub.download import ensure_model
    from dflash_mlx.hub.folder import read_json
    from dflash_mlx.hub.registry import parse_source

    layers: int | None = None
    if model is not None and Path(model).is_dir():
        config = read_json(Path(model) / "config.json")
        layers = (config.get("text_config") or config).get("num_hidden_layers")
    with LoadProgress() as progress:
        folder = ensure_model(parse_source(source), report=progress.report)
        notes = convert_drafter(folder, destination, to=to.value, target=model, target_layers=layers)
    for line in notes:
        note(line)
    print(destination)
