"""A session whose cache lengths stay on the device: the same numbers as with mlx-lm's caches, written in place."""

import mlx.core as mx
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.decoding.session import Session

LAYERS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_draft_and_a_verify_over_device_caches(kind):
    target, drafter = tiny_target("qwen3"), tiny_drafter(**LAYERS[kind])
    prompt = mx.array([[5, 9, 2, 7, 7, 1, 30, 12, 4]])
    block = mx.array([8, 3, 3, 3, 3])
    verified = mx.array([[8, 11, 12]])

    def start():
        session = Session(target, drafter)
        _, features = session.forward(prompt)
        session.tokens = prompt[0].tolist()
        return session, features

    usual, features = start()
    expected = usual.draft(features, block, end=9)
    logits, hidden = usual.forward(verified)

    session, features = start()
    session.draft(features[:, :6], block, end=6)
    session.to_device(mx.array(6))
    found = session.draft(features[:, 6:], block, end=mx.array(9))
    session.to_device(mx.array(9))
    found_logits, found_hidden = session.forward(verified)
    assert mx.allclose(found.logits, expected.logits, atol=1e-4).item()
    assert mx.allclose(found_logits, logits, atol=1e-4).item()
    assert mx.allclose(found_hidden, hidden, atol=1e-4).item()


def test_rows_are_written_in_place():
    """Buffers of a long context are not copied each round."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    session = Session(target, drafter)
    length = 4000
    _, features = session.forward(mx.zeros((1, length), dtype=mx.int32))
    session.tokens = [0] * length
    session.draft(features, mx.array([8, 3, 3]), end=length)
    session.to_device(mx.array(length))
    mx.eval([[layer.keys, layer.values] for caches in session.device for layer in caches.layers])
    del features
    held = sum(layer.keys.nbytes + layer.values.nbytes for caches in session.device for layer in caches.layers)

    def step():
        logits, features = session.forward(mx.array([[8, 11, 12]]))
        mx.eval(logits, features, session.draft(features, mx.array([8, 3, 3]), end=mx.array(length)).logits)

    step()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step()
    scores = 4 * 4 * 3 * 4100 * 4
    assert mx.get_peak_memory() - before < 0.2 * held + 8 * scores
