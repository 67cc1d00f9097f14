"""`dflash-mlx quantize`: a target or a drafter in another precision."""

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.live import quiet_keyboard
from dflash_mlx.cli.models_table import size_words
from dflash_mlx.cli.output import LoadProgress, note
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.hub.quantize import Scheme
    from dflash_mlx.hub.registry import ModelSource, PairSpec

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx quantize Qwen/Qwen3-4B --bits 4 --out ./Qwen3-4B-4bit

  dflash-mlx quantize demo --bits 8 --out ./demo-8bit --report

  dflash-mlx quantize qwen3-4b --part drafter --bits 4 --out ./drafter-4bit

  dflash-mlx quantize ./my-model --recipe mixed_3_6 --out ./my-model-small --push me/my-model-small
"""


class Part(str, Enum):
    """Which model of a pair."""

    target = "target"
    drafter = "drafter"


def quantize_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PAIR",
            help="A folder, a Hub id, or a known pair (with --part).",
            autocompletion=options.complete_pair,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new folder. It must not be there yet.")],
    part: Annotated[Part, typer.Option("--part", help="Which model of a pair.")] = Part.target,
    bits: Annotated[
        int | None, typer.Option("--bits", metavar="N", help="Bits a weight: 2, 3, 4, 5, 6 or 8. (default: 4)")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", help="Weights that share a scale: 32, 64 or 128. (default: 64)"),
    ] = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="How: affine, mxfp4, mxfp8 or nvfp4.")] = "affine",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="NAME", help="More bits for some layers: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6."
        ),
    ] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Expand a quantized model instead.")] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also run it before and after: perplexity, and how many drafts are kept."),
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload the result to this Hub repository.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Make a smaller copy of a model: a target or a drafter, with a model card.

    The folder appears when it is complete, or not at all. A drafter's precision never changes answers; a target's does.
    """
    from dflash_mlx.hub.quantize import choose_scheme

    scheme = choose_scheme(bits=bits, group_size=group_size, mode=mode, recipe=recipe, dequantize=dequantize)
    source, spec = _source(what, part)
    with quiet_keyboard(), LoadProgress() as progress:
        facts = _quantize(what, source, spec, out, scheme, report=report, progress=progress)
        if push:
            from dflash_mlx.hub.upload import upload

            progress.report(f"uploading to {push}", None)
            facts["address"] = upload(out, push)
    if not dequantize and facts["size_mb_after"] >= facts["size_mb_before"]:
        note("the copy is not smaller than the model: that was stored with as few bits already.", style="yellow")
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print(facts)


def _source(what: str, part: Part) -> "tuple[ModelSource, PairSpec | None]":
    """The model to convert, and the pair that it belongs to, where that is known without asking anyone."""
    from dflash_mlx.hub.registry import find_pair, list_pairs, parse_source
    from dflash_mlx.hub.resolve import local_facts, match_target

    if "/" not in what and not Path(what).is_dir():
        try:
            spec = find_pair(what)
        except UsageError as error:
            raise UsageError(f"there is no folder {what!r} here, and {error}") from None
        return (spec.drafter if part is Part.drafter else spec.target), spec
    source = parse_source(what)
    if part is Part.drafter:
        raise UsageError(f"--part is for pairs; {what} is one model, whichever kind it is.")
    try:
        match = match_target(local_facts(source), list_pairs())
    except UsageError:  # a drafter itself, or one of several targets of the same build
        match = None
    return source, match.pair if match else None


def _quantize(
    what: str,
    source: "ModelSource",
    spec: "PairSpec | None",
    out: Path,
    scheme: "Scheme",
    *,
    report: bool,
    progress: LoadProgress,
) -> dict[str, Any]:
    progress.report("starting MLX", None)
    from dflash_mlx.hub.download import ensure_model
    from dflash_mlx.hub.folder import read_json
    from dflash_mlx.hub.memory import folder_bytes
    from dflash_mlx.hub.naming import is_drafter
    from dflash_mlx.hub.new_folder import write_new_folder
    from dflash_mlx.hub.quantize import bits_per_weight, model_card, quantize_folder

    before = ensure_model(source, report=progress.report)
    drafter = is_drafter(read_json(before / "config.json"))
    facts: dict[str, Any] = {"source": str(source), "out": str(out), "scheme": str(scheme), "part": "target"}
    if drafter:
        facts["part"] = "drafter"

    def sizes(when: str, folder: Path) -> None:
        bits = bits_per_weight(folder)
        facts[f"size_mb_{when}"] = round(folder_bytes(folder) / 1e6)
        facts[f"bits_per_weight_{when}"] = None if bits is None else round(bits, 3)

    def build(work: Path) -> None:
        progress.report(f"converting {source}", None)
        quantize_folder(before, work, scheme)
        sizes("before", before)
        sizes("after", work)
        if report:
            for when, folder in (("before", before), ("after", work)):
                facts.update(_measure(folder, spec, drafter, when, progress))
        card = {key: value for key, value in facts.items() if key not in ("out", "part")}
        base = source.repo or (spec.base if spec and not drafter else None)
        license_name = source.license or (spec.license if spec else None)
        text = model_card(out.name, scheme, card, base=base, license_name=license_name)
        (work / "README.md").write_text(text, encoding="utf-8")

    write_new_folder(out, build)
    return facts


def _measure(folder: Path, spec: "PairSpec | None", drafter: bool, when: str, progress: LoadProgress) -> dict[str, Any]:
    """Perplexity of a target, and how many drafts are kept, with the other model of the pair as it is."""
    from dflash_mlx.bench.quality import acceptance, perplexity
    from dflash_mlx.hub.download import ensure_model
    from dflash_mlx.loading import load_pair

    if drafter and spec is None:
        note(
            "how many drafts are kept can be measured for a drafter of a known pair: name the pair, with --part drafter"
        )
        return {}
    other = None
    if spec is not None:
        other = ensure_model(spec.target if drafter else spec.drafter, report=progress.report)
    target, draft = (other, folder) if drafter else (folder, other)
    pair = load_pair(model=str(target), draft_model=str(draft) if draft else None, draft=draft is not None)
    found: dict[str, Any] = {}
    if not drafter:
        progress.report(f"perplexity {when}", None)
        found[f"perplexity_{when}"] = round(perplexity(pair)[0], 3)
    if draft is not None:
        kept = acceptance(pair, progress=lambda done, of: progress.report(f"counting kept drafts {when}", done / of))
        found[f"acceptance_length_{when}"] = round(kept.mean_acceptance_length, 3)
        found[f"drafts_kept_{when}"] = round(kept.acceptance_rate, 4)
    return found


_ROWS = {
    "size_mb": ("size", size_words),
    "bits_per_weight": ("bits a weight", lambda x: f"{x:.2f}"),
    "perplexity": ("perplexity", lambda x: f"{x:.2f}"),
    "acceptance_length": ("acceptance length", lambda x: f"{x:.2f}"),
    "drafts_kept": ("drafts kept", lambda x: f"{x:.1%}"),
}


def _print(facts: dict[str, Any]) -> None:
    print(f"{facts['out']}: {facts['source']}, {facts['scheme']}")
    for key, (label, words) in _ROWS.items():
        before, after = facts.get(f"{key}_before"), facts.get(f"{key}_after")
        if before is not None and after is not None:
            print(f"  {label + ':':<19}{words(before)} -> {words(after)}")
    if "address" in facts:
        print(f"  uploaded to {facts['address']}")
