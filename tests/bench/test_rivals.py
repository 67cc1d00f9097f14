"""Other packages' loops in a benchmark, with stand-ins for them, and with the real ones where they are installed."""

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.bench.rivals import RIVALS, open_rival
from dflash_mlx.bench.run import time_answer
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams

PROMPT = [{"role": "user", "content": "Name three uses of a brick."}]
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package `dflash` that decodes plainly and says that each round kept two of its drafts."""
    package, loop = ModuleType("dflash"), ModuleType("dflash.model_mlx")

    def load_draft(name: str) -> SimpleNamespace:
        folder = Path(loop.snapshot_download(name, allow_patterns=["*"]))
        config = json.loads((folder / "config.json").read_text())
        weights = mx.load(str(folder / "model.safetensors"))
        return SimpleNamespace(config=SimpleNamespace(block_size=config["block_size"]), raw=config, weights=weights)

    def stream_generate(
        model: Any, draft: Any, tokenizer: Any, prompt: list[int], max_tokens: int, **options: Any
    ) -> Iterator[SimpleNamespace]:
        tokens = list(prompt)
        while (count := len(tokens) - len(prompt)) < max_tokens:
            new: list[int] = []
            for _ in range(min(3 if count else 1, max_tokens - count)):
                new.append(int(mx.argmax(model(mx.array([tokens + new]))[0, -1])))
            tokens += new
            finished = len(tokens) - len(prompt) == max_tokens
            yield SimpleNamespace(
                text=tokenizer.decode(new),
                tokens=new,
                accepted=len(new) if count else None,
                finish_reason="length" if finished else None,
            )

    vars(loop).update(load_draft=load_draft, stream_generate=stream_generate)
    monkeypatch.setitem(sys.modules, "dflash", package)
    monkeypatch.setitem(sys.modules, "dflash.model_mlx", loop)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0")
    return loop


@pytest.mark.model
@pytest.mark.slow
def test_a_rival_gets_the_same_weights_and_its_rounds_are_counted(demo_pair: ModelPair, official: ModuleType) -> None:
    rival = open_rival("dflash", demo_pair)
    assert rival.models.target is not demo_pair.target.model
    raw, weights = rival.models.drafter.raw, rival.models.drafter.weights
    assert "quantization" not in raw
    assert "draft_token_ids" not in raw["dflash_config"]
    assert {x.dtype for x in weights.values()} == {mx.float32}
    plain = generate(demo_pair, PROMPT, PARAMS, draft=False)
    run = time_answer(rival, PROMPT, PARAMS)
    assert (run.token_ids, run.decode_tokens, run.finish_reason) == (plain.token_ids, 11, "length")
    assert run.acceptance is not None
    assert (run.acceptance["rounds"], run.acceptance["accepted"], run.acceptance["tokens"]) == (4, 7, 11)
    assert [r.width for r in run.rounds] == [11, 8, 5, 2]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("package", RIVALS)
def test_the_real_packages_give_the_same_tokens(demo_pair: ModelPair, package: str) -> None:
    if find_spec(RIVALS[package].partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    plain = generate(demo_pair, PROMPT, PARAMS, draft=False)
    run = time_answer(open_rival(package, demo_pair), PROMPT, PARAMS)
    assert run.token_ids[:12] == plain.token_ids
    assert run.acceptance is not None
    assert run.acceptance["tokens"] >= 11


def test_what_cannot_take_part_is_said_in_a_line() -> None:
    pair: Any = SimpleNamespace(folders=(Path("a"), Path("b")), method="dflash+ngram")
    with pytest.raises(UsageError, match="expected one of dflash, mlx-dspark"):
        open_rival("vllm", pair)
    with pytest.raises(UsageError, match="needs a pair with a DFlash drafter"):
        open_rival("dflash", SimpleNamespace(folders=(Path("a"),), method="ngram"))  # type: ignore[arg-type]


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: Any = SimpleNamespace(folders=(Path("a"), Path("b")), method="dflash")
    monkeypatch.setitem(sys.modules, "mlx_dspark", None)
    with pytest.raises(UsageError, match="pip install mlx-dspark"):
        open_rival("mlx-dspark", pair)
