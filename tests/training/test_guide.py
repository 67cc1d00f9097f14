"""What docs/training.md shows exists."""

import json
import re
from pathlib import Path

import typer
from tiny import tiny_drafter

from dflash_mlx.cli.app import app
from dflash_mlx.training.export import PUBLIC_FILES, export_drafter

GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def options_of(name):
    return {word for parameter in typer.main.get_command(app).commands[name].params for word in parameter.opts}


def test_options_are_real():
    text = GUIDE
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            program, command, *words = line.split()
            assert program == "dflash-mlx"
            assert {word for word in words if word.startswith("--")} <= options_of(command), line
        text = text.replace(block, "")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert len(named) > 20
    assert named <= options_of("train") | {"--pair"}


def test_files_are_real(tmp_path):
    for name in PUBLIC_FILES:
        assert name in GUIDE
    export_drafter(tiny_drafter(), tmp_path, quantize=None)
    assert {path.name for path in tmp_path.iterdir()} <= set(PUBLIC_FILES)


def test_keys_of_the_report_are_real(tmp_path, target_folder):
    from dflash_mlx.training import TrainOptions, run

    options = TrainOptions(
        model=str(target_folder), out=tmp_path, data_tokens=400, data_batch=16, max_length=40, max_user_tokens=8,
        layers=1, taps=(1, 3), block_size=4, steps=1, batch_size=2, anchors=2, holdout=0.3, measure=1, measure_tokens=4,
    )  # fmt: skip
    run(options, quiet=True)
    facts = json.loads((tmp_path / "train.json").read_text())
    keys = re.findall(r"^\| `([\w.]+)` \|", GUIDE, re.MULTILINE)
    assert len(keys) >= 7
    for key in keys:
        value = facts
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_links_lead_to_headings():
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", GUIDE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= headings
