"""Run the official implementations (`dflash` 0.1.0) on the cases and write what they compute to golden.npz.

    pip install dflash==0.1.0 torch==2.8.0 transformers==5.15.0 safetensors     # an environment for PyTorch
    python tests/drafters/make_golden.py torch
    pip install dflash==0.1.0 mlx mlx-lm safetensors                            # and one for MLX
    python tests/drafters/make_golden.py mlx

The file has for each case and implementation "read", the block size and the target's layers as they were read from
config.json; and for each round ("case/torch/0" for the first one) the logits (W, V) of the drafts. Of DFlash 2 also
"path", the greedy drafts (W,), "drawn", drafts at temperature 0.7 (W,), and "probs", the distributions (W, V) they
were drawn from.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from cases import BLOCK, CASES, NOT_IN_MLX, ROUNDS, VOCAB, Config, Inputs, is_second, make_inputs, write_folder

GOLDEN = Path(__file__).with_name("golden.npz")
TEMPERATURE = 0.7
Results = dict[str, np.ndarray]


def run_torch(folder: Path, config: Config, inputs: Inputs) -> Results:
    """The official PyTorch drafter, called as its own `dflash_generate` calls it."""
    import torch
    from dflash import model as official

    torch.manual_seed(0)
    kind = official.DFlash2DraftModel if is_second(config) else official.DFlashDraftModel
    drafter = kind.from_pretrained(str(folder), dtype=torch.float32).eval()
    embedding, head = torch.from_numpy(inputs.embedding), torch.from_numpy(inputs.head)
    target = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=embedding))
    results: Results = {"read": np.array([drafter.block_size, *drafter.target_layer_ids])}
    cache = official._make_cache(drafter.config)
    start = 0
    with torch.inference_mode():
        for i, (rows, anchor) in enumerate(ROUNDS):
            start += rows
            block = torch.tensor([[anchor] + [drafter.mask_token_id] * (BLOCK - 1)])
            scale = float(official._draft_value(drafter.config, "input_embedding_scale", 1.0))
            hidden = drafter(
                target_hidden=torch.from_numpy(inputs.features[i]),
                noise_embedding=official._raw_input_embeddings(target, block, scale),
                position_ids=torch.arange(start - rows, start + BLOCK)[None],
                past_key_values=cache,
                use_cache=True,
            )[:, 1:]
            official._crop_to(cache, start)
            logits = drafter.compute_logits(hidden, lambda x: x @ head.T)
            results[str(i)] = logits[0].numpy()
            if is_second(config):
                propose = lambda t, h=hidden, b=block: drafter.propose(h, b[:, 0], lambda x: x @ head.T, t)  # noqa: E731
                results |= _paths(i, propose(0.0), propose(TEMPERATURE))
    return results


def run_mlx(folder: Path, config: Config, inputs: Inputs) -> Results:
    """The official MLX drafter, called as its own `stream_generate` calls it."""
    import mlx.core as mx
    from dflash import model_mlx as official
    from mlx import nn

    mx.random.seed(0)
    with mock.patch.object(official, "snapshot_download", lambda repo, **_: repo):
        drafter = official.load_draft(str(folder))
    target = SimpleNamespace(
        embed_tokens=nn.Embedding(*inputs.embedding.shape), lm_head=nn.Linear(*inputs.head.shape[::-1], bias=False)
    )
    target.embed_tokens.weight, target.lm_head.weight = mx.array(inputs.embedding), mx.array(inputs.head)
    drafter.bind(target)
    results: Results = {"read": np.array([drafter.config.block_size, *drafter.config.target_layer_ids])}
    cache = drafter.make_cache()
    start = 0
    for i, (rows, anchor) in enumerate(ROUNDS):
        start += rows
        block = mx.array([[anchor] + [drafter.config.mask_token_id] * (BLOCK - 1)])
        hidden = drafter.hidden_states(block, mx.array(inputs.features[i]), cache, 1)
        logits = drafter.compute_logits(hidden)
        results[str(i)] = np.array(logits[0])
        if is_second(config):
            select = lambda t, h=hidden, s=logits, b=block: drafter.candidate_selector.select(h, s, b[:, 0], t)  # noqa: E731
            results |= _paths(i, select(0.0), select(TEMPERATURE))
    return results


def _paths(number: int, greedy: Any, drawn: Any) -> Results:
    """A greedy and a drawn proposal of the official selectors, the distributions spread over the vocabulary."""
    path, candidates, probs = (np.asarray(x)[0] for x in drawn)
    wide = np.zeros((len(path), VOCAB), np.float32)
    np.put_along_axis(wide, candidates.astype(np.int64), probs, axis=-1)
    return {
        f"{number}/path": np.asarray(greedy[0])[0].astype(np.int32),
        f"{number}/drawn": path.astype(np.int32),
        f"{number}/probs": wide,
    }


def main(which: str) -> None:
    run = {"torch": run_torch, "mlx": run_mlx}[which]
    inputs = make_inputs()
    results = dict(np.load(GOLDEN)) if GOLDEN.exists() else {}
    for name, config in CASES.items():
        if which == "mlx" and name in NOT_IN_MLX:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for key, values in run(write_folder(Path(folder), config), config, inputs).items():
                results[f"{name}/{which}/{key}"] = values
    np.savez_compressed(GOLDEN, **results)
    print(f"{GOLDEN}: {len(results)} arrays, {GOLDEN.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
