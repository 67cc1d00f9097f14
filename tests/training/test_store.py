"""Conversations on disk: what is kept, what is dropped, and which are held out."""

import zipfile

import numpy as np
import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.training.store import CUT, GREEDY, LOOPED, Conversation, ConversationStore


def conversation(prompt, answer, flags=0):
    tokens = np.array([*prompt, *answer], np.int32)
    return Conversation(tokens, ((len(prompt), len(tokens)),), flags)


def random_conversations(count, *, seed=0, vocab=1000, flags=0):
    rng = np.random.default_rng(seed)
    return [
        conversation(rng.integers(0, vocab, rng.integers(1, 9)), rng.integers(0, vocab, rng.integers(1, 30)), flags)
        for _ in range(count)
    ]


def add(store, batch, *, loop_share=1.0, vocab_size=1000, seconds=1.0):
    return store.add_batch(batch, loop_share=loop_share, seconds=seconds, vocab_size=vocab_size)


@pytest.mark.parametrize("vocab", [1000, 200_000])
def test_what_is_stored_is_read_again(tmp_path, vocab):
    written = random_conversations(20, vocab=vocab)
    several_turns = Conversation(np.arange(30, dtype=np.int32), ((3, 9), (14, 20), (25, 30)), GREEDY | CUT)
    store = ConversationStore(tmp_path)
    add(store, written[:12], vocab_size=vocab, seconds=1.5)
    add(store, [], vocab_size=vocab)
    add(store, [*written[12:], several_turns], vocab_size=vocab)
    read = ConversationStore(tmp_path)
    assert (read.tokens, read.seconds, read.next_batch) == (store.tokens, 3.5, 3)
    for found, expected in zip(read.conversations, [*written, several_turns], strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert (found.spans, found.flags) == (expected.spans, expected.flags)
    assert {path.name for path in tmp_path.iterdir()} == {f"shard-00000{i}.npz" for i in range(3)}


def test_a_known_prompt_or_answer_is_dropped(tmp_path):
    store = ConversationStore(tmp_path)
    first = conversation([1, 2], [3, 4, 5])
    same_prompt, same_answer = conversation([1, 2], [9]), conversation([7], [3, 4, 5])
    assert add(store, [first, first, same_prompt])["duplicate"] == 2
    # After a restart, too.
    store = ConversationStore(tmp_path)
    counts = add(store, [same_answer, same_prompt, conversation([2, 1], [5, 4, 3])])
    assert (counts["stored"], counts["duplicate"], counts["tokens"]) == (1, 2, 5)
    assert len(store.conversations) == 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_at_most_a_share_of_the_conversations_are_loops(tmp_path, share):
    store = ConversationStore(tmp_path)
    rng = np.random.default_rng(1)
    batch = random_conversations(60, seed=2) + random_conversations(60, seed=3, flags=LOOPED)
    batch = [batch[i] for i in rng.permutation(120)]
    dropped = sum(add(store, batch[at : at + 20], loop_share=share)["loop"] for at in range(0, 120, 20))
    assert store.looped == sum(c.looped for c in store.conversations) == 60 - dropped
    assert store.looped <= share * len(store.conversations) + 1
    assert store.looped == {0.0: 0, 1.0: 60}.get(share, store.looped)


def test_a_conversation_stays_on_its_side_when_data_is_added(tmp_path):
    store = ConversationStore(tmp_path)
    everything = random_conversations(2000)
    add(store, everything[:500])
    held_before = {c.prompt_key() for c in store.split(0.1)[1]}
    add(store, everything[500:])
    training, held = store.split(0.1)
    held_after = {c.prompt_key() for c in held}
    early = {c.prompt_key() for c in everything[:500]}
    assert held_after & early == held_before
    assert held_after.isdisjoint(c.prompt_key() for c in training)
    assert len(training) + len(held) == len(store.conversations)
    # 10% of 2000, give or take five standard deviations.
    assert abs(len(held) - 0.1 * len(store.conversations)) < 5 * (2000 * 0.09) ** 0.5
    # A larger share holds out the same ones and more.
    assert held_after <= {c.prompt_key() for c in store.split(0.2)[1]}


def test_a_damaged_shard_is_named(tmp_path):
    store = ConversationStore(tmp_path)
    add(store, random_conversations(5))
    path = tmp_path / "shard-000000.npz"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CheckpointError, match=r"shard-000000\.npz is damaged.*Delete it"):
        ConversationStore(tmp_path)


def test_a_shard_with_a_part_that_is_no_array_is_named(tmp_path):
    """Where the first bytes of a part are damaged, NumPy gives bytes."""
    store = ConversationStore(tmp_path)
    add(store, random_conversations(5))
    path = tmp_path / "shard-000000.npz"
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for damaged in parts:
        with zipfile.ZipFile(path, "w") as archive:
            for name, raw in parts.items():
                archive.writestr(name, b"X" + raw[1:] if name == damaged else raw)
        with pytest.raises(CheckpointError, match=r"shard-000000\.npz is damaged.*Delete it"):
            ConversationStore(tmp_path)


def test_the_next_batch_is_the_first_that_is_missing(tmp_path):
    store = ConversationStore(tmp_path)
    batches = [random_conversations(3, seed=seed) for seed in range(4)]
    for batch in batches:
        add(store, batch)
    for name in ("shard-000001.npz", "shard-000003.npz"):
        (tmp_path / name).unlink()
    store = ConversationStore(tmp_path)
    assert store.next_batch == 1
    add(store, batches[1])
    assert store.next_batch == 3
    add(store, batches[3])
    assert store.next_batch == 4
    found = [c.tokens.tolist() for c in ConversationStore(tmp_path).conversations]
    assert found == [c.tokens.tolist() for batch in batches for c in batch]
