"""The mean of several drafters that were trained from the same weights, as one drafter of 8 bits.

    python scripts/mean_drafters.py OUT LIKE FOLDER [FOLDER ...]

Each FOLDER is a drafter in full precision, as `dflash-mlx train` writes it without `--quantize`. LIKE is a drafter
whose draft vocabulary the new one gets. The demo drafter was made so: its card has the commands.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import dflash_mlx  # noqa: F401  # before mlx, which it sets up

# isort: split

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.hub.folder import read_json
from dflash_mlx.training.config import warm_start
from dflash_mlx.training.export import export_drafter
from dflash_mlx.training.state import write_json


def mean(folders: list[Path], out: Path) -> None:
    """Write the mean of the folders' weights, bfloat16, to `out`, with the config.json of the first."""
    weights = [mx.load(str(folder / "model.safetensors")) for folder in folders]
    total = {name: sum(each[name].astype(mx.float32) for each in weights) for name in weights[0]}
    means = {name: (array / len(weights)).astype(mx.bfloat16) for name, array in total.items()}
    mx.save_safetensors(str(out / "model.safetensors"), means, {"format": "mlx"})
    write_json(out / "config.json", read_json(folders[0] / "config.json"))


def main(out: Path, like: Path, *folders: Path) -> None:
    vocabulary = load_drafter(like, dtype=mx.bfloat16, keep_quantized=False).config.draft_token_ids
    with TemporaryDirectory() as place:
        whole = Path(place)
        mean(list(folders), whole)
        config = read_json(whole / "config.json")
        export_drafter(warm_start(whole), out, config=config, quantize=8, draft_token_ids=vocabulary)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
