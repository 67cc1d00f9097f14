"""The worker: answers are those of `generate`, whatever else is going on; nothing is lost, and nothing is left over."""

import asyncio
import itertools
import math
import random
import threading
import time

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from serving import answer, collect, job, random_prompt, random_tokens, tokens_of, wait_until
from test_generation import make_pair
from tiny import VOCAB
from tiny_families import family_target

from dflash_mlx.answer import Answer
from dflash_mlx.answering import Answering
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.session import Session
from dflash_mlx.errors import PromptError, UsageError
from dflash_mlx.generation import generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.group import GroupCosts
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.worker import (
    Job,
    QueueFullError,
    TooLargeError,
    Worker,
    WorkerClosedError,
)


@pytest.mark.slow
def test_many_at_once_are_each_answered_as_alone(pair, serve):
    """200 tickets, drafted and plain, of several owners: the truth is `generate` for each alone."""
    rng = random.Random(1)
    jobs = [
        job(random_prompt(rng), rng.randint(1, 12), draft=rng.random() < 0.7, owner=rng.choice("abc"))
        for _ in range(200)
    ]
    expected = [generate(pair, j.prompt, j.params, draft=False) for j in jobs]
    worker = serve(max_active=4)

    async def run():
        return await asyncio.gather(*[collect(worker.submit(j)) for j in jobs])

    found = asyncio.run(run())
    assert [tokens_of(responses) for responses in found] == [e.token_ids for e in expected]
    assert ["".join(r.text for r in responses) for responses in found] == [e.text for e in expected]
    assert all(r[-1].finish_reason == e.finish_reason for r, e in zip(found, expected, strict=True))
    status = worker.status()
    assert sum(status.totals.finished.values()) == 200
    assert status.totals.generated_tokens == sum(e.generation_tokens for e in expected)
    assert status.totals.prompt_tokens == sum(len(j.prompt) for j in jobs)
    assert (status.active, status.queued) == (0, 0)
    assert sum(status.totals.accepted_by_position) == status.totals.accepted
    assert sum(status.totals.drafted_by_position) == status.totals.drafted > 0


def test_waiting_jobs_start_in_order_and_owners_take_turns(serve):
    worker = serve(max_active=1)
    started = []

    async def run():
        blocker = worker.submit(job([1], 400, owner="a"))
        await blocker.__anext__()
        tickets = {name: worker.submit(job([2, 3], 2, owner=name[0])) for name in ("a1", "a2", "a3", "b1", "b2")}

        async def watch(name, ticket):
            await collect(ticket)
            started.append((ticket.queued_seconds + ticket.submitted_at, name))

        await asyncio.gather(collect(blocker), *[watch(name, ticket) for name, ticket in tickets.items()])

    asyncio.run(run())
    assert [name for _, name in sorted(started)] == ["a1", "b1", "a2", "b2", "a3"]


def test_a_short_request_is_not_stuck_behind_a_long_one(serve):
    worker = serve(max_active=2)

    async def run():
        long = worker.submit(job([5, 6], 2000))
        await long.__anext__()
        await collect(worker.submit(job([7], 3)))
        assert worker.status().active == 1
        long.cancel()
        return await collect(long)

    assert len(tokens_of(asyncio.run(run()))) < 1990


def test_a_long_prompt_is_read_in_chunks_between_others_rounds(pair, serve, monkeypatch):
    monkeypatch.setattr("dflash_mlx.decoding.decode.PREFILL_STEP", 16)
    worker = serve(max_active=2)
    rng = random.Random(4)
    long, short = [rng.randrange(1, VOCAB) for _ in range(200)], [3, 4]
    expected = generate(pair, long, SamplingParams(max_tokens=3)).token_ids
    order = []

    def watched(kind, method, word):
        def call(self, *args, **kwargs):
            order.append(word)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(kind, method.__name__, call)

    watched(Session, Session.feed, "chunk")
    watched(Engine, Engine.advance, "round")

    async def run():
        first = worker.submit(job(short, 300))
        await first.__anext__()
        second = await collect(worker.submit(job(long, 3)))
        first.cancel()
        await collect(first)
        return second

    found = asyncio.run(run())
    assert tokens_of(found) == expected
    chunks = [i for i, word in enumerate(order) if word == "chunk"]
    assert len(chunks) >= 13
    assert all("round" in order[a:b] for a, b in itertools.pairwise(chunks)), "they take turns"


@pytest.mark.parametrize("comes", [True, False])
def test_requests_on_their_way_are_waited_for_and_read_in_one_pass(pair, serve, monkeypatch, comes):
    """But not for ever: `comes` is whether the second one does."""
    monkeypatch.setattr("dflash_mlx.server.worker._GATHERING", 60.0 if comes else 0.2)
    passes = []
    reading = Batch.reading.__func__
    monkeypatch.setattr(
        Batch,
        "reading",
        classmethod(lambda cls, t, d, prompts: passes.append(len(prompts)) or reading(cls, t, d, prompts)),
    )
    worker = serve(max_active=4)
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    expected = [generate(pair, prompt, job(prompt, 6).params).token_ids for prompt in prompts]

    async def run():
        worker.expect(2)
        first = worker.submit(job(prompts[0], 6))
        worker.expect(-1)
        if not comes:
            return [await collect(first)]
        wait_until(lambda: worker.status().active == 1)
        await asyncio.sleep(0.05)
        assert first.first_token_seconds is None
        assert not passes
        second = worker.submit(job(prompts[1], 6))
        worker.expect(-1)
        return [await collect(first), await collect(second)]

    found = asyncio.run(run())
    assert [tokens_of(responses) for responses in found] == expected[: len(found)]
    assert passes == ([2] if comes else [])


def test_nobody_waits_for_requests_while_answers_are_made(serve, monkeypatch):
    monkeypatch.setattr("dflash_mlx.server.worker._GATHERING", 60.0)
    worker = serve(max_active=4)

    async def run():
        first = worker.submit(job([3, 4], 300))
        await first.__anext__()
        worker.expect(1)
        second = await collect(worker.submit(job([5, 6], 3)))
        first.cancel()
        await collect(first)
        return second

    assert len(tokens_of(asyncio.run(run()))) == 3


def test_cancelling_frees_the_slot_within_a_round(serve, monkeypatch):
    worker = serve(max_active=1, cache_bytes=0)
    rounds_after = []

    async def run():
        for _ in range(5):
            ticket = worker.submit(job([9, 8, 7], 5000))
            for _ in range(3):
                await ticket.__anext__()
            ticket.cancel()
            ticket.cancel()
            before = worker.status().totals.rounds
            await collect(worker.submit(job([4], 1)))
            rounds_after.append(worker.status().totals.rounds - before - 1)
            await collect(ticket)
            await ticket.aclose()

    asyncio.run(run())
    assert max(rounds_after) <= 1
    assert worker.status().totals.finished["cancelled"] == 5


def test_cancelling_during_the_prompt(serve, monkeypatch):
    monkeypatch.setattr("dflash_mlx.decoding.decode.PREFILL_STEP", 4)
    worker = serve(max_active=1)
    ticket = worker.submit(job([1 + i % 40 for i in range(8000)], 5))
    wait_until(lambda: worker.status().active == 1)
    ticket.cancel()
    wait_until(lambda: worker.status().active == 0)
    assert asyncio.run(collect(ticket)) == []
    assert worker.status().totals.finished == {"cancelled": 1}
    assert worker.status().totals.generated_tokens == 0


def test_a_client_that_leaves_before_its_turn(serve):
    worker = serve(max_active=1)

    async def run():
        blocker = worker.submit(job([1], 300))
        await blocker.__anext__()
        gone, stays = worker.submit(job([2], 5)), worker.submit(job([3], 5))
        waiting = asyncio.ensure_future(gone.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        gone.cancel()
        assert worker.status().queued == 1
        blocker.cancel()
        assert len(tokens_of(await collect(stays))) > 0
        assert await collect(gone) == []
        await collect(blocker)

    asyncio.run(run())


def test_a_client_whose_event_loop_is_gone_harms_nobody(serve):
    worker = serve(max_active=1)

    async def leave():
        waiting = asyncio.ensure_future(worker.submit(job([1], 200)).__anext__())
        await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(leave())
    assert answer(worker, job([2], 3))[-1].finish_reason is not None


def test_cancelling_from_other_threads_at_any_moment(serve):
    """Tickets cancelled at random moments from other threads: all end, the worker goes on, nothing stays behind."""
    worker = serve(max_active=3)
    rng = random.Random(7)
    tickets = [worker.submit(job(random_prompt(rng), 30)) for _ in range(60)]
    victims = rng.sample(tickets, 40)

    def cancel(some):
        for ticket in some:
            time.sleep(rng.random() * 0.01)
            ticket.cancel()

    threads = [threading.Thread(target=cancel, args=(victims[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    found = [asyncio.run(collect(ticket)) for ticket in tickets]
    for thread in threads:
        thread.join()
    for ticket, responses in zip(tickets, found, strict=True):
        assert ticket in victims or responses[-1].finish_reason is not None
    wait_until(lambda: worker.status().active == 0)
    assert sum(worker.status().totals.finished.values()) == 60


def test_an_error_in_a_job_ends_that_job_only(pair, serve, monkeypatch):
    worker = serve()
    add = Answer.add

    def failing(self, step):
        if self.prompt[0] == 13 and self.tokens:
            raise RuntimeError("the device is out of memory")
        return add(self, step)

    monkeypatch.setattr(Answer, "add", failing)

    async def run():
        bad, good = worker.submit(job([13, 1], 20)), worker.submit(job([12, 1], 20))
        with pytest.raises(RuntimeError, match="out of memory"):
            await collect(bad)
        assert await collect(bad) == []
        return await collect(good)

    found = asyncio.run(run())
    assert tokens_of(found) == generate(pair, [12, 1], SamplingParams(max_tokens=20)).token_ids
    assert worker.status().totals.finished["error"] == 1
    assert worker.status().ready


def test_a_full_queue_is_refused_and_says_when_to_come_back(serve):
    worker = serve(max_active=1, max_queue=2)

    async def run():
        tickets = [worker.submit(job([1 + i], 300)) for i in range(3)]
        with pytest.raises(QueueFullError) as refusal:
            worker.submit(job([1]))
        assert 1 <= refusal.value.retry_after <= 60
        for ticket in tickets:
            ticket.cancel()
        await asyncio.gather(*map(collect, tickets))
        assert tokens_of(await collect(worker.submit(job([1], 3))))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("active", "queue", "seconds"),
    [
        (4, 0, 1),  # less than a second is one
        (2, 10, 3),  # 12 wait for 2 places, each of which an answer of a second frees: half of that
        (2, 11, 4),
        (1, 200, 60),  # nobody is told to wait longer than a minute
    ],
)
def test_how_long_to_stay_away_from_a_full_queue(pair, active, queue, seconds):
    """An answer is taken to last a second as long as none has been made."""
    worker = Worker(pair, max_active=active, max_queue=queue)
    for _ in range(active + queue):
        worker.submit(job([1]))
    with pytest.raises(QueueFullError) as refusal:
        worker.submit(job([1]))
    assert refusal.value.retry_after == seconds
    worker.close()


def test_what_waits_for_the_first_time_makes_no_progress_since_then(pair):
    worker = Worker(pair)
    time.sleep(0.05)
    assert worker.status().seconds_since_progress == 0.0
    before = time.perf_counter()
    worker.submit(job([1]))
    time.sleep(0.02)
    worker.submit(job([2]))
    assert 0.02 <= worker.status().seconds_since_progress <= time.perf_counter() - before
    worker.close()
    assert worker.status().seconds_since_progress == 0.0


def test_times_between_tokens_are_those_after_the_first_round(serve):
    worker = serve()
    began = time.perf_counter()
    found = [answer(worker, job([first, 2], 12)) for first in (3, 4)]
    spent = time.perf_counter() - began
    worker.close()
    between = worker.status().totals.between_tokens
    assert between.count == sum(len(responses) - 1 for responses in found) > 2
    assert 0 < between.total < spent


def test_quick_answers_shorten_the_time_to_stay_away(serve):
    """The newest answer counts for a fifth: after eight, 0.8^8 is left of the first guess, a second."""
    worker = serve(max_active=1, max_queue=8)
    longest = 0.0
    for i in range(8):
        began = time.perf_counter()
        answer(worker, job([1 + i], 2))
        longest = max(longest, time.perf_counter() - began)

    async def run():
        endless = SamplingParams(max_tokens=5000, logit_bias={0: -1000.0})
        blocker = worker.submit(Job(prompt=[1], params=endless))
        await blocker.__anext__()
        waiting = [worker.submit(job([1])) for _ in range(8)]
        with pytest.raises(QueueFullError) as refusal:
            worker.submit(job([1]))
        for ticket in [blocker, *waiting]:
            ticket.cancel()
        return refusal.value.retry_after

    assert asyncio.run(run()) <= math.ceil((0.8**8 + longest) * 8 / 2)


def never(*_, **__):
    raise AssertionError("measured")


def limit_of(pair, **options):
    """How many answers a worker makes at a time."""
    worker = Worker(pair, **options)
    worker.start()
    wait_until(lambda: worker.status().ready or worker.status().error)
    worker.close()
    assert worker.status().error is None
    return worker.max_active


def test_how_many_at_a_time(monkeypatch):
    """As many as are wished, else as the measured costs say; of a target that makes its answers one by one, four."""
    pair = make_pair()
    pair._group_costs = {32: GroupCosts({2: 1.0, 4: 1.1, 8: 1.2, 16: 2.4, 32: 4.8}, {2: {4: 1.1, 64: 1.2}}, {4: 0.1})}
    monkeypatch.setattr(ModelPair, "round_costs", lambda pair, report: report("measuring", None))
    said = []
    assert limit_of(pair, report=lambda message, _: said.append(message)) == 8
    assert said == ["measuring", "ready to answer"]
    monkeypatch.setattr(ModelPair, "group_costs", never)
    assert limit_of(pair, width=4) == 32
    assert limit_of(pair, width=4, max_active=7) == 7
    assert limit_of(make_pair(target=family_target("recurrent_gemma")), width=4) == 4


def test_a_worker_that_never_drafts_measures_nothing_of_it(pair, monkeypatch):
    monkeypatch.setattr(ModelPair, "round_costs", never)
    monkeypatch.setattr(ModelPair, "group_costs", never)
    assert limit_of(pair, draft=False) == 32


def test_models_that_are_not_computed_yet_are_before_the_worker_begins(pair, serve):
    """What one thread has put off no other thread can compute."""
    lazy = make_pair()
    for model in (lazy.target.model, lazy.drafter):
        model.update(tree_map(lambda array: array + 0, model.parameters()))
    worker = Worker(lazy, width=4)
    worker.start()
    found = tokens_of(answer(worker, job([5, 6], 8)))
    worker.close()
    assert found == generate(pair, [5, 6], SamplingParams(max_tokens=8), draft=False).token_ids


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_bug_in_the_worker_nobody_waits(serve, monkeypatch):
    worker = serve(max_active=1)

    async def run():
        tickets = [worker.submit(job([1], 5000)), worker.submit(job([2], 5000))]
        await tickets[0].__anext__()

        def broken(_):
            raise KeyError("a bug")

        monkeypatch.setattr(Answering, "turn", broken)
        for ticket in tickets:
            with pytest.raises(WorkerClosedError, match=r"has failed \(KeyError: 'a bug'\)"):
                await collect(ticket)

    asyncio.run(run())
    status = worker.status()
    assert (status.ready, status.error, status.active, status.queued) == (False, "KeyError: 'a bug'", 0, 0)
    with pytest.raises(WorkerClosedError, match="has failed"):
        worker.submit(job([1]))


def test_requests_that_cannot_be_met_are_refused_at_once(serve):
    worker = serve(memory_bytes=mx.get_active_memory() + 3_000_000)
    with pytest.raises(PromptError, match="empty"):
        worker.submit(job([]))
    with pytest.raises(PromptError, match="context holds 8192"):
        worker.submit(job([1] * 8192))
    with pytest.raises(PromptError, match=f"from 0 to {VOCAB - 1}"):
        worker.submit(job([1, VOCAB]))
    with pytest.raises(UsageError, match=f"logit_bias .* from 0 to {VOCAB - 1}; got {VOCAB}"):
        worker.submit(Job(prompt=[1], params=SamplingParams(logit_bias={VOCAB: 1.0})))
    with pytest.raises(TooLargeError, match=r"needs \d+\.\d+ GB"):
        worker.submit(job([1] * 8000))
    assert len(tokens_of(answer(worker, job([1] * 20, 5)))) > 0


def test_caches_give_way_and_large_answers_wait_for_each_other(serve):
    worker = serve(max_active=4, memory_bytes=mx.get_active_memory() + 6_000_000)
    rng = random.Random(2)
    for _ in range(20):
        answer(worker, job(random_tokens(rng, 20), 2))
    held = worker.status().cache.bytes
    large = [job([i], 6000) for i in (1, 2, 3)]

    async def run():
        tickets = [worker.submit(j) for j in large]
        for i, ticket in enumerate(tickets):
            await ticket.__anext__()
            status = worker.status()
            # Each takes more than half of the room: the others wait, and what was kept is gone.
            assert (status.active, status.queued) == (1, 2 - i)
            assert status.cache.bytes < held
            ticket.cancel()
            await collect(ticket)

    asyncio.run(run())
    assert worker.status().cache.evictions > 0
    assert worker.status().totals.finished["cancelled"] == 3


def test_closing_finishes_what_it_can_and_cancels_the_rest(serve):
    worker = serve(max_active=2)

    async def run(close_after, max_tokens):
        tickets = [worker.submit(job([1 + i], max_tokens)) for i in range(4)]
        await tickets[0].__anext__()
        await asyncio.get_running_loop().run_in_executor(None, worker.close, close_after)
        ended = []
        for ticket in tickets:
            try:
                ended.append((await collect(ticket))[-1].finish_reason)
            except WorkerClosedError:
                ended.append("closed")
        return ended

    ended = asyncio.run(run(0.0, 8000))
    assert ended == ["closed"] * 4
    assert worker.status().error is None
    with pytest.raises(WorkerClosedError):
        worker.submit(job([1]))
    worker.close()
    worker = serve(max_active=2)
    ended = asyncio.run(run(20.0, 30))
    assert ended[0] in ("length", "stop")
    assert ended[3] == "closed"


def test_jobs_may_come_before_the_worker_is_ready(pair):
    worker = Worker(pair, width=4)
    ticket = worker.submit(job([5, 5], 4))
    assert not worker.status().ready
    worker.start()
    assert tokens_of(asyncio.run(collect(ticket))) == generate(pair, [5, 5], SamplingParams(max_tokens=4)).token_ids
    assert ticket.queued_seconds <= ticket.first_token_seconds
    worker.close()


@pytest.mark.long
def test_memory_stays_flat_over_2000_requests(serve):
    worker = serve(max_active=4, cache_bytes=2_000_000)
    rng = random.Random(5)

    async def run(count):
        limit = asyncio.Semaphore(50)

        async def one():
            async with limit:
                ticket = worker.submit(job(random_prompt(rng), rng.randint(1, 6), owner=rng.choice("abcd")))
                if rng.random() < 0.1:
                    ticket.cancel()
                await collect(ticket)

        await asyncio.gather(*[one() for _ in range(count)])

    asyncio.run(run(400))
    levels = []
    for _ in range(4):
        asyncio.run(run(400))
        levels.append(mx.get_active_memory())
    status = worker.status()
    assert sum(status.totals.finished.values()) == 2000
    assert status.cache.bytes <= 2_000_000
    assert max(levels) - min(levels) < 1_000_000
