"""Cached answers equal uncached ones, whatever the conversations do; and the cache saves what it can."""

import asyncio
import random

import mlx.core as mx
import pytest
from serving import answer, collect, job, random_tokens, tokens_of, wait_until
from test_generation import make_pair
from tiny import mostly_slow
from tiny_families import family_target, unavailable

from dflash_mlx.answer import Answer
from dflash_mlx.decoding.fork import can_cut, fork, session_bytes
from dflash_mlx.generation import generate, stream_generate
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.prefix_cache import PrefixCache
from dflash_mlx.server.worker import Job, Worker


def session_of(pair, tokens, **options):
    """A session that holds these tokens, made by answering them."""
    session = pair.new_session(**options)
    next(stream_generate(pair, [*tokens, 1], SamplingParams(max_tokens=1), session=session, **options))
    session.rewind(len(tokens))
    return session


def take(cache, pair, owner, prompt, draft=True):
    return cache.take(owner, prompt, lambda: pair.new_session(draft=draft), draft=draft)


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("part", mostly_slow(range(3), 0))
def test_cached_equals_uncached(serve, part, draft):
    """Random conversations, interleaved, edited, cut, sharing system prompts, with eviction: all as computed afresh."""
    rng = random.Random(part)
    pair = make_pair()
    worker = serve(max_active=3, cache_bytes=rng.choice([600_000, 1_500_000, 50_000_000]))
    system = random_tokens(rng, 40)
    conversations = [[*system, *random_tokens(rng, rng.randint(1, 20))] for _ in range(4)] + [random_tokens(rng, 5)]

    def change(tokens, answer):
        """What the client sends next: usually the whole conversation and something new, sometimes an edited one."""
        kind = rng.random()
        if kind < 0.5:
            return tokens + answer + random_tokens(rng, rng.randint(1, 9))
        if kind < 0.7:
            cut = rng.randint(1, len(tokens))
            return tokens[:cut] + random_tokens(rng, rng.randint(0, 5))
        if kind < 0.8:
            return tokens
        return tokens[: len(system)] + random_tokens(rng, rng.randint(1, 30))

    async def turn(prompt):
        max_tokens = rng.randint(1, 12)
        ticket = worker.submit(job(prompt, max_tokens, draft=draft, owner=rng.choice("ab")))
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 0.02)
            ticket.cancel()
        found = tokens_of(await collect(ticket))
        truth = generate(pair, prompt, SamplingParams(max_tokens=max_tokens), draft=False).token_ids
        assert found == truth[: len(found)]
        assert found == truth or ticket.cancelled
        return found

    async def run():
        for _ in range(8):
            answers = await asyncio.gather(*map(turn, conversations))
            for i, found in enumerate(answers):
                conversations[i] = change(conversations[i], found)

    # The truths are computed on this thread; its models are copies of the worker's.
    asyncio.run(run())
    status = worker.status()
    assert status.cache.hits > 5
    assert status.totals.cached_tokens > 100
    assert status.cache.bytes <= status.cache.limit_bytes
    if status.cache.limit_bytes == 600_000:
        assert status.cache.evictions > 0


def test_a_copied_beginning_is_what_feeding_it_gives(pair):
    tokens = random_tokens(random.Random(3), 30)
    session = session_of(pair, tokens)
    for length in (1, 8, 29, 30):
        twin = fork(session, length)
        fresh = session_of(pair, tokens[:length])
        assert twin.tokens == tokens[:length]
        for a, b in zip(
            [*twin.target_cache, *twin.draft_cache], [*fresh.target_cache, *fresh.draft_cache], strict=True
        ):
            assert a.offset == b.offset == length
            assert mx.allclose(a.keys[..., :length, :], b.keys[..., :length, :], atol=1e-5).item()
            assert mx.allclose(a.values[..., :length, :], b.values[..., :length, :], atol=1e-5).item()


def test_the_original_and_its_copy_go_separate_ways(pair):
    """Copies from a session in mid-answer: neither disturbs the other."""
    rng = random.Random(6)
    for _ in range(15):
        prompt = random_tokens(rng, 20)
        session = pair.new_session()
        params = SamplingParams(max_tokens=25)
        width, tree = rng.choice([(0, False), (3, False), (7, False), (7, True), (20, True)])
        stream = stream_generate(pair, prompt, params, session=session, width=width, tree=tree)
        found = [token for _ in range(rng.randint(1, 4)) for token in next(stream).token_ids]
        length = rng.randint(1, len(session.tokens))
        twin = fork(session, length)
        other = [*session.tokens[:length], *random_tokens(rng, 4)]
        answer = generate(pair, other, params, session=twin, width=5)
        assert answer.cached_tokens == length
        found += [token for response in stream for token in response.token_ids]
        assert answer.token_ids == generate(pair, other, params, draft=False).token_ids
        assert found == generate(pair, prompt, params, draft=False).token_ids


def test_a_shared_beginning_is_copied_and_a_continued_one_taken(pair):
    rng = random.Random(1)
    cache = PrefixCache(10_000_000)
    system = random_tokens(rng, 20)
    first = session_of(pair, [*system, *random_tokens(rng, 10)])
    cache.put("me", first)
    copy = take(cache, pair, "me", [*system, 1, 2])
    assert copy is not first
    assert len(copy.tokens) >= 20
    assert take(cache, pair, "me", [*first.tokens, 3]) is first
    assert cache.status().entries == 0
    assert cache.bytes == 0


def test_nothing_is_shared_between_owners_or_modes(pair):
    cache = PrefixCache(10_000_000)
    tokens = random_tokens(random.Random(1), 20)
    cache.put("me", session_of(pair, tokens))
    assert take(cache, pair, "you", [*tokens, 1]).tokens == []
    assert take(cache, pair, "me", [*tokens, 1], draft=False).drafter is None
    assert len(take(cache, pair, "me", [*tokens, 1]).tokens) == 20
    assert (cache.status().hits, cache.status().misses) == (1, 2)


def test_without_room_for_a_copy_the_session_itself_is_taken(pair):
    tokens = random_tokens(random.Random(1), 30)
    session = session_of(pair, tokens)
    cache = PrefixCache(session_bytes(session) + 1000)
    cache.put("me", session)
    assert take(cache, pair, "me", [*tokens[:20], 1]) is session


def test_the_least_recently_used_go_first(pair):
    rng = random.Random(2)
    sessions = [session_of(pair, random_tokens(rng, 15)) for _ in range(4)]
    size = session_bytes(sessions[0])
    cache = PrefixCache(int(3.5 * size))
    for session in sessions[:3]:
        cache.put("me", session)
    used = take(cache, pair, "me", [*sessions[0].tokens, 1])
    cache.put("me", used)
    cache.put("me", sessions[3])
    kept = {i for i, s in enumerate(sessions) if cache.known("me", [*s.tokens, 1], draft=True) == 15}
    assert kept == {0, 2, 3}
    assert cache.bytes == sum(session_bytes(sessions[i]) for i in kept)
    assert cache.status().evictions == 1
    cache.shrink(size)
    assert cache.status().entries == 1
    small = PrefixCache(size - 1)
    small.put("me", sessions[0])
    assert small.status().entries == 0


def test_a_session_takes_the_place_of_its_own_beginnings(pair):
    cache = PrefixCache(10_000_000)
    tokens = random_tokens(random.Random(2), 30)
    cache.put("me", session_of(pair, tokens[:10]))
    cache.put("me", session_of(pair, tokens))
    cache.put("me", session_of(pair, tokens[:20]))
    assert cache.status().entries == 1
    assert cache.known("me", [*tokens, 1], draft=True) == 30


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "mamba2"])
def test_windows_and_recurrences_are_reused_where_they_can_be(family):
    """Targets whose caches cannot be cut anywhere: every answer as computed afresh, and continuing costs no more."""
    if reason := unavailable(family):
        pytest.skip(reason)
    rng = random.Random(9)

    def family_pair(**options):
        # Two models of the same weights: the worker's, and this thread's for the truth.
        return make_pair(target=family_target(family), **options)

    alone, worker = family_pair(), Worker(family_pair(), width=4, cache_bytes=50_000_000)
    worker.start()

    def cached(prompt, draft=True):
        found = answer(worker, job(prompt, 12, draft=draft))
        assert tokens_of(found) == truth(prompt)
        return found[-1].cached_tokens

    def truth(prompt):
        return generate(alone, prompt, SamplingParams(max_tokens=12), draft=False).token_ids

    prompt = random_tokens(rng, 50)
    first = truth(prompt)
    assert cached(prompt) == 0
    assert cached(prompt) == len(prompt) - 1
    assert cached(prompt + first + random_tokens(rng, 5)) == len(prompt) + len(first) - 1
    assert cached(prompt + random_tokens(rng, 6)) >= len(prompt) - 1
    assert cached(prompt, draft=False) == 0
    assert cached(prompt + first[:3], draft=False) >= len(prompt) - 1
    for _ in range(6):
        cut = rng.randint(1, 60)
        cached([*prompt, *first][:cut] + random_tokens(rng, rng.randint(1, 10)), draft=rng.random() < 0.7)
    worker.close()


def test_prompts_that_arrive_together_are_read_once(serve):
    """Several answers to one prompt: the first reads it, the others copy what it read."""
    worker = serve(max_active=4)
    prompt = random_tokens(random.Random(4), 200)

    async def run():
        return await asyncio.gather(*[collect(worker.submit(job(prompt, 5))) for _ in range(4)])

    found = asyncio.run(run())
    assert sorted(r[-1].cached_tokens for r in found) == [0, 199, 199, 199]
    assert len({tuple(tokens_of(r)) for r in found}) == 1


def test_an_answer_in_progress_is_copied_for_its_owner_only(serve):
    """Somebody else who sends the same prompt reads it afresh, and does not learn that it was sent before."""
    worker = serve(max_active=4)
    prompt = random_tokens(random.Random(4), 120)

    async def cached_for(owner):
        return (await collect(worker.submit(job(prompt, 2, owner=owner))))[-1].cached_tokens

    async def run():
        # An end-of-sequence token is ruled out: the first answer goes on until it is cancelled.
        endless = SamplingParams(max_tokens=5000, logit_bias={0: -1000.0})
        first = worker.submit(Job(prompt=prompt, params=endless, owner="a"))
        await first.__anext__()
        found = [await cached_for("b"), await cached_for("a")]
        assert worker.status().active == 1
        first.cancel()
        await collect(first)
        return found

    assert asyncio.run(run()) == [0, 119]


def test_prompts_of_two_owners_that_arrive_together_are_both_read(serve):
    worker = serve(max_active=4)
    prompt = random_tokens(random.Random(4), 120)

    async def run():
        return await asyncio.gather(*[collect(worker.submit(job(prompt, 5, owner=owner))) for owner in "ab"])

    assert [responses[-1].cached_tokens for responses in asyncio.run(run())] == [0, 0]


def test_what_a_failed_answer_leaves_is_not_used_again(pair, serve, monkeypatch):
    """An error may leave caches half changed. One that ended well is kept, as always."""
    worker = serve()
    add, left = Answer.add, [2]

    def failing(self, step):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is out of memory")
        return add(self, step)

    monkeypatch.setattr(Answer, "add", failing)
    prompt = random_tokens(random.Random(8), 40)
    with pytest.raises(RuntimeError, match="out of memory"):
        answer(worker, job(prompt, 20))
    assert worker.status().cache.entries == 0
    again, once_more = answer(worker, job(prompt, 20)), answer(worker, job(prompt, 20))
    assert (again[-1].cached_tokens, once_more[-1].cached_tokens) == (0, 39)
    assert tokens_of(again) == generate(pair, prompt, SamplingParams(max_tokens=20), draft=False).token_ids


def test_a_session_in_flight_is_settled_before_it_is_kept(pair):
    session = pair.new_session()
    stream = stream_generate(pair, random_tokens(random.Random(5), 12), SamplingParams(max_tokens=30), session=session)
    next(stream)
    cache = PrefixCache(10_000_000)
    cache.put("me", session)
    assert session.away is None
    assert can_cut(session)
    stream.close()


@pytest.mark.long
@pytest.mark.model
def test_a_second_turn_begins_at_once(demo_pair):
    """A prompt of 2,000 tokens: the next turn's first token comes in at most a quarter of the first's time."""
    rng = random.Random(0)
    worker = Worker(demo_pair, width=4)
    worker.start()
    prompt = [rng.randrange(1000, 40_000) for _ in range(2000)]

    async def first_token(tokens):
        ticket = worker.submit(job(tokens, 4))
        found = tokens_of(await collect(ticket))
        return ticket.first_token_seconds, found

    wait_until(lambda: worker.status().ready, seconds=60)
    first, found = asyncio.run(first_token(prompt))
    second, _ = asyncio.run(first_token([*prompt, *found, *random_tokens(rng, 20)]))
    worker.close()
    assert second < first / 4
