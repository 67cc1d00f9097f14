"""Text around the decode loop: stop strings, limits, sessions; drafted answers mean what plain ones mean."""

import json
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from tiny import VOCAB, ScriptedDrafter, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx import answering, loading
from dflash_mlx.answer import Answer
from dflash_mlx.answering import Answering
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.choice import choose_models
from dflash_mlx.decoding.policies import Observation
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import DownloadError, PromptError, UsageError
from dflash_mlx.generation import generate, generate_many, hold_back, stream_generate
from dflash_mlx.hub.registry import ModelSource, find_pair
from dflash_mlx.hub.resolve import TargetFacts
from dflash_mlx.loading import load_pair
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.costs import stored_name
from dflash_mlx.policy.group import GroupCosts
from dflash_mlx.policy.reading import ReadingTimes
from dflash_mlx.policy.stored import store
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts
from dflash_mlx.runtime import backend
from dflash_mlx.sampling import SamplingParams

PROMPTS = [[3, 5], [9], [3, 5, 7, 11, 2], [8] * 12, [1, 2]]


class Letters:
    """A detokenizer: token i is the letter at i, and an odd space."""

    def __init__(self):
        self.text, self.offset, self.tokens = "", 0, []

    def add_token(self, token):
        self.tokens.append(token)
        self.text += letter(token)

    def finalize(self):
        pass

    @property
    def last_segment(self):
        segment, self.offset = self.text[self.offset :], len(self.text)
        return segment


class LetterTokenizer:
    has_chat_template = False
    eos_token_ids = frozenset({0})

    @property
    def detokenizer(self):
        return Letters()

    def encode(self, text):
        return [1 + ord(c) % (VOCAB - 1) for c in text]


def letter(token: int) -> str:
    return chr(ord("A") + token)


def make_pair(drafter=None, target=None):
    target = target or tiny_target("llama")
    return ModelPair(
        name="tiny",
        target=target,
        drafter=drafter or tiny_drafter(),
        tokenizer=LetterTokenizer(),
        dtype=mx.float32,
        block_size=8,
    )


def perfect_pair(prompt):
    target = tiny_target("llama")
    truth = plain_tokens(target, prompt, 80)
    script = {len(prompt) + i: token for i, token in enumerate(truth)}
    return make_pair(ScriptedDrafter(tiny_drafter().config, script), target)


def both(pair, prompt, params, width=5, *, tree=False):
    """The same request drafted and plain; everything but the speeds must agree."""
    drafted = generate(pair, prompt, params, width=width, tree=tree)
    plain = generate(pair, prompt, params, draft=False)
    for field in ("text", "token_ids", "finish_reason", "prompt_tokens", "generation_tokens"):
        assert getattr(drafted, field) == getattr(plain, field), field
    assert (drafted.mode, plain.mode) == ("dflash", "plain")
    assert plain.acceptance is None
    return drafted


def test_limits_and_counts():
    pair, perfect = make_pair(), perfect_pair([3, 5])
    for max_tokens in (1, 2, 3, 6, 7, 8, 20):
        both(pair, [3, 5], SamplingParams(max_tokens=max_tokens), 20, tree=True)
        answer = both(perfect, [3, 5], SamplingParams(max_tokens=max_tokens))
        acceptance = answer.acceptance
        assert answer.generation_tokens == len(answer.token_ids)
        assert acceptance.tokens + acceptance.single_steps == answer.generation_tokens
        if answer.finish_reason == "length":
            assert answer.generation_tokens == max_tokens


def test_a_stop_string_ends_the_answer_exactly_there():
    """Stop strings of one and more tokens, at every offset of a block: text before it, tokens up to its last one."""
    prompt = [3, 5]
    truth = plain_tokens(tiny_target("llama"), prompt, 30, {0})
    text = "".join(letter(token) for token in truth if token)
    pair = perfect_pair(prompt)
    for length in (1, 2, 3):
        for start in range(len(text) - length):
            stop = text[start : start + length]
            answer = both(pair, prompt, SamplingParams(max_tokens=30, stop=(stop,)))
            first = text.index(stop)
            assert answer.text == text[:first]
            assert answer.token_ids == truth[: first + length]
            assert answer.finish_reason == "stop"


def test_text_that_may_become_a_stop_string_is_not_shown_too_early():
    shown = [r.text for r in stream_generate(perfect_pair([3, 5]), [3, 5], SamplingParams(max_tokens=20), width=3)]
    whole = "".join(shown)
    stop = (whole[6:9] + "never", whole[2:4])
    pieces = [r.text for r in stream_generate(perfect_pair([3, 5]), [3, 5], SamplingParams(max_tokens=20, stop=stop))]
    assert whole.startswith("".join(pieces))
    assert stop[1] not in "".join(pieces)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello", ("xyz",), (("hello", ""), False)),
        ("hello x", ("xyz",), (("hello ", "x"), False)),
        ("hello xy", ("xyz", "yes"), (("hello ", "xy"), False)),
        ("hello xyz there", ("there", "xyz"), (("hello ", ""), True)),
        ("aab", ("ab",), (("a", ""), True)),
        ("anything", (), (("anything", ""), False)),
    ],
)
def test_hold_back(text, stop, expected):
    assert hold_back(text, stop) == expected


def test_a_conversation_continues_from_its_session():
    """Later turns answer as a fresh session does, and compute only what is new."""
    rng = random.Random(2)
    pair = make_pair()
    session = pair.new_session()
    prompt = [rng.randrange(1, VOCAB) for _ in range(12)]
    for _ in range(5):
        params = SamplingParams(max_tokens=9)
        answer = generate(pair, prompt, params, session=session, width=4)
        fresh = generate(pair, prompt, params, width=4)
        assert answer.token_ids == fresh.token_ids
        prompt = prompt + answer.token_ids + [rng.randrange(1, VOCAB) for _ in range(3)]
        assert session.tokens == prompt[: len(session.tokens)]
    last = generate(pair, prompt, SamplingParams(max_tokens=2), session=session)
    assert last.cached_tokens >= len(prompt) - 5


def test_a_stopped_stream_leaves_the_session_usable():
    pair = make_pair()
    session = pair.new_session()
    prompt = [7, 8, 9]
    stream = stream_generate(pair, prompt, SamplingParams(max_tokens=40), session=session, width=5)
    taken = [token for _ in range(3) for token in next(stream).token_ids]
    # The stream is neither finished nor closed when the next request comes.
    follow_up = [*prompt, *taken, 11]
    later = stream_generate(pair, follow_up, SamplingParams(max_tokens=12), session=session, width=5)
    answer = next(later).token_ids
    # Nor may its end disturb the answer that is under way.
    stream.close()
    answer += [token for response in later for token in response.token_ids]
    assert answer == generate(pair, follow_up, SamplingParams(max_tokens=12)).token_ids


def test_json_object():
    answer = both(make_pair(), [4, 2], SamplingParams(max_tokens=10))
    found = json.loads(json.dumps(answer.to_json()))
    assert set(found) >= {"text", "token_ids", "finish_reason", "prompt_tokens", "generation_tokens"}
    assert set(found["acceptance"]) >= {"rounds", "drafted", "accepted", "mean_acceptance_length", "acceptance_rate"}


def test_requests_that_cannot_be_met():
    pair = make_pair()
    pair.target.config["max_position_embeddings"] = 16
    with pytest.raises(PromptError, match="context holds 16"):
        generate(pair, list(range(1, 17)))
    assert generate(pair, [1] * 10, SamplingParams(max_tokens=50), width=3).generation_tokens <= 6
    with pytest.raises(PromptError, match="empty"):
        generate(pair, [])
    with pytest.raises(UsageError, match="from 0 to 7"):
        generate(pair, [1], width=8)
    with pytest.raises(UsageError, match="from 0 to 31"):
        generate(pair, [1], width=32, tree=True)
    pair.target._trees = False
    with pytest.raises(UsageError, match="cannot be a tree"):
        generate(pair, [1], width=8, tree=True)
    with pytest.raises(UsageError, match="without a drafter"):
        generate(pair, [1], session=pair.new_session(draft=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "say what to load"),
        ({"name": "demo", "model": "a/b"}, "not both"),
        ({"name": "no-such-pair"}, "no-such-pair"),
        ({"model": "no/such-target-known", "method": "dflash"}, "no drafter is known"),
        ({"name": "demo", "method": "guessing"}, "there is no method 'guessing'; choose one of auto, dflash"),
        ({"model": "a/b", "draft_model": "c/d", "method": "ngram"}, "leave --draft-model out"),
        ({"name": "demo", "method": "ngram", "block_size": 65}, "from 2 to 64 for ngram; got 65"),
    ],
)
def test_load_pair_needs_to_know_what(arguments, message, monkeypatch):
    def offline(source):
        raise DownloadError("no network")

    monkeypatch.setattr("dflash_mlx.hub.resolve._remote_facts", offline)
    with pytest.raises(UsageError, match=message):
        load_pair(**arguments)


def test_a_pair_may_have_another_drafter(tmp_path):
    spec, folder = find_pair("demo"), ModelSource(kind="folder", path=str(tmp_path.resolve()))
    for method in (Method.auto, Method.eagle3, Method.mtp):
        found = choose_models("demo", None, str(tmp_path), method)
        assert (found.target, found.drafter, found.method) == (spec.target, folder, method)
    assert choose_models("demo", None, None, Method.auto).drafter == spec.drafter
    with pytest.raises(UsageError, match="leave --draft-model out"):
        choose_models("demo", None, str(tmp_path), Method.ngram)


def test_without_a_known_drafter_the_text_itself_is_drafted_from(monkeypatch, tmp_path):
    target, taken = tiny_target("llama"), []
    monkeypatch.setattr("dflash_mlx.hub.resolve._remote_facts", lambda source: TargetFacts(source.repo))
    monkeypatch.setattr(loading, "ensure_model", lambda source, report: taken.append(source.repo) or tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(loading, "load_target", lambda folder, dtype: (target, mx.float32))
    monkeypatch.setattr(loading, "_load_tokenizer", lambda folder: make_pair().tokenizer)
    loaded = load_pair(model="no/such-target-known", check=False)
    assert taken == ["no/such-target-known"]
    assert (loaded.method, loaded.block_size) == ("ngram", 16)
    assert "no drafter is known for no/such-target-known" in loaded.warnings[0]
    assert load_pair(model="no/such-target-known", method="ngram", block_size=4, check=False).warnings == []
    plain = load_pair(model="no/such-target-known", method="plain", check=False)
    assert (plain.method, plain.drafter) == ("plain", None)


def test_answers_side_by_side_learn_apart():
    """What an answer has learnt is its own until it ends; then the next ones begin with it."""
    pair = make_pair()
    pair._costs = PairCosts(RoundCosts({0: 1.0, 1: 1.02, 7: 1.05}, {1: 0.01, 7: 0.01}, steep=False))

    def observe(policy, num_accepted):
        policy.observe(Observation(7, 7, num_accepted))

    def speeds(policy):
        return [policy.estimate.expected_tokens(7)[width] for width in (1, 7)]

    experience = pair.new_experience()
    running = pair.width_policy(experience=experience)
    for _ in range(60):
        observe(running, 7)
    known = speeds(running)
    for _ in range(3):
        other = pair.width_policy()
        observe(other, 0)
    assert speeds(running) == known
    assert speeds(pair.width_policy()) != known
    before = speeds(pair.width_policy())
    pair.learn(experience)
    assert speeds(pair.width_policy())[1] > before[1]


@pytest.mark.parametrize("options", [{"width": 3}, {"draft": False}])
def test_an_answer_that_learns_nothing_leaves_what_others_have_learnt_since_it_began(options):
    pair = make_pair()
    pair._costs = PairCosts(RoundCosts({0: 1.0, 1: 1.02, 7: 1.05}, {1: 0.01, 7: 0.01}, steep=False))
    begun = stream_generate(pair, PROMPTS[0], SamplingParams(max_tokens=40), **options)
    next(begun)
    nothing = pair._experience
    generate(pair, PROMPTS[1], SamplingParams(max_tokens=40))
    learnt = pair._experience
    assert learnt is not nothing
    assert list(begun)[-1].finish_reason is not None
    assert pair._experience is learnt


@pytest.mark.parametrize(("share", "forgotten"), [(1.0, False), (0.95, False), (0.6, True)])
def test_costs_that_were_measured_beside_other_programs_are_forgotten(share, forgotten, tmp_path, monkeypatch):
    """share: of the measured time that rounds take."""
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    pair = make_pair()
    pair._costs = PairCosts(RoundCosts({0: 1.0, 1: 1.1, 7: 1.3}, {1: 0.1, 7: 0.1}, steep=False))
    name = stored_name(pair.target, pair.drafter, block_size=8, folders=(), dtype=mx.float32)
    store(name, {})
    experience = pair.new_experience()
    policy = pair.width_policy(experience=experience)
    for _ in range(60):
        policy.observe(Observation(3, 3, 1, seconds=share * pair._costs.chains.round(3)))
    pair.learn(experience)
    assert (tmp_path / f"{name}.json").exists() != forgotten
    # What another process has measured since then stays.
    store(name, {})
    pair.learn(experience)
    assert (tmp_path / f"{name}.json").exists()


@pytest.mark.parametrize("options", [{}, {"width": 3}, {"draft": False}])
@pytest.mark.parametrize("lanes", [1, 3, 9])
def test_many_answers_are_those_made_one_by_one(options, lanes):
    pair = make_pair()
    pair._costs = PairCosts(RoundCosts({0: 1.0, 1: 1.02, 7: 1.05}, {1: 0.01, 7: 0.01}, steep=False))
    costs = GroupCosts({2: 1.0, 8: 1.0}, {2: {4: 1.1, 64: 1.2}}, {4: 0.1, 64: 0.1})
    pair._group_costs = dict.fromkeys((3, 5), costs)
    params = [SamplingParams(max_tokens=5 + i, temperature=0.9 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    found = generate_many(pair, PROMPTS, params, lanes=lanes, **options)
    for answer, prompt, wanted in zip(found, PROMPTS, params, strict=True):
        alone = generate(pair, prompt, wanted, draft=False)
        for field in ("text", "token_ids", "finish_reason", "prompt_tokens", "generation_tokens"):
            assert getattr(answer, field) == getattr(alone, field), field


def test_many_answers_begin_with_what_earlier_ones_have_taught():
    pair = make_pair()
    pair._group_costs = {2: GroupCosts({2: 1.0}, {2: {4: 1.1, 64: 1.2}}, {4: 0.1})}
    policy = pair.group_policy(most_lanes=2)
    before = policy.estimate.expected_tokens(7)[7]
    generate_many(pair, PROMPTS, SamplingParams(max_tokens=40), lanes=2)
    assert pair.group_policy(most_lanes=2) is policy
    # A random drafter is never right.
    assert policy.estimate.expected_tokens(7)[7] < before


@pytest.mark.parametrize("fixed", [0.0, 1e6])
def test_prompts_wait_for_others_where_each_pass_over_prompts_is_dear(fixed, monkeypatch):
    """Some rounds at most, and only while every place is taken."""
    pair = make_pair()
    monkeypatch.setattr(ReadingTimes, "observe", lambda self, tokens, seconds, *, whole: setattr(self, "shared", fixed))
    monkeypatch.setattr(ReadingTimes, "tokens_in", lambda self, seconds, *, least, most: most)
    passes, read_together, read = [], Answering._read_together, Answering._read_chunk
    monkeypatch.setattr(
        Answering, "_read_together", lambda self, answers: passes.append(len(answers)) or read_together(self, answers)
    )
    monkeypatch.setattr(Answering, "_read_chunk", lambda self, *rest: passes.append(1) or read(self, *rest))
    prompts = [[3 + i % 20, 5, 7 + i % 11, 9] for i in range(24)]
    params = [SamplingParams(max_tokens=20 + i % 7) for i in range(len(prompts))]
    found = generate_many(pair, prompts, params, lanes=6, draft=False)
    assert sum(passes) == len(prompts)
    if fixed:
        # The six that end after 20 to 25 rounds leave in fewer than eight rounds, and so on.
        assert len(passes) <= 6
    else:
        assert len(passes) > 12
    for answer, prompt, wanted in zip(found, prompts, params, strict=True):
        assert answer.token_ids == generate(pair, prompt, wanted, draft=False).token_ids


@pytest.mark.parametrize(
    ("kind", "replays", "at_once"), [("cuda", True, True), ("cuda", False, False), ("metal", True, False)]
)
def test_prompts_are_read_at_once_where_the_gpu_waits_for_the_computer(kind, replays, at_once, monkeypatch):
    """However long a token of a prompt is taken to be: one pass then costs what launching it costs."""
    pair = make_pair()
    monkeypatch.setattr(answering, "backend", lambda: replace(backend(), kind=kind))
    monkeypatch.setattr(ReadingTimes, "known", True)
    monkeypatch.setattr(ReadingTimes, "tokens_in", lambda self, seconds, *, least, most: least)
    pair.target.set_replays(replays)
    prompt = [3 + i % 20 for i in range(101)]
    with Answering(pair, draft=False, most_lanes=2) as making:
        making.add(Answer(pair, [3, 4, 5], SamplingParams(max_tokens=90), draft=False))
        making.turn()
        making.add(Answer(pair, prompt, SamplingParams(max_tokens=20), draft=False))
        making.turn()
        assert (not making._reading) == at_once
        found = []
        while making.count:
            for answer, news in making.turn():
                found += news.token_ids if answer.prompt == prompt and not isinstance(news, tuple) else []
    assert found == plain_tokens(pair.target, prompt, 20, {0})


@pytest.mark.parametrize(
    ("running", "waiting", "rounds"),
    [(0, 3, 3.0), (1, 0, 1.0), (1, 1, 1.0), (4, 1, 1.0), (4, 3, 1.5), (2, 14, 7.5), (1, 15, 8.0)],
)
def test_more_is_read_between_rounds_where_many_wait_to_begin(running, waiting, rounds):
    answering = Answering(make_pair(), draft=False, most_lanes=16)
    answering._turns.observe(0.0, 0.1, running=True)
    answering._lanes = dict.fromkeys(range(running))
    answering._reading.extend([None] * waiting)
    assert answering._reading_seconds == pytest.approx(0.1 * rounds)


@pytest.mark.parametrize(("fixed", "passes"), [(0.0, [[40], [10]]), (29.0, [[40], [10]]), (31.0, [[40, 10]])])
def test_prompts_of_different_lengths_share_a_pass_where_two_would_take_longer(fixed, passes, monkeypatch):
    """Filled up to 40 tokens, the short one makes the pass 30 tokens longer."""
    pair, read = make_pair(), []
    monkeypatch.setattr(Answering, "_read_together", lambda self, answers: read.append(answers))
    monkeypatch.setattr(Answering, "_read_chunk", lambda self, answer, chunk: read.append([answer]))
    with Answering(pair, draft=False, most_lanes=4) as answering:
        answering._times.fixed, answering._times.a_token = fixed, 1.0
        for count in (40, 10):
            answering.add(Answer(pair, [5] * (count + 1), SamplingParams(max_tokens=9), draft=False))
        answering._read()
    assert [[answer.unread for answer in answers] for answers in read] == passes


def test_a_prompt_does_not_wait_while_places_are_free(monkeypatch):
    pair = make_pair()
    monkeypatch.setattr(ReadingTimes, "observe", lambda self, tokens, seconds, *, whole: setattr(self, "shared", 1e6))
    with Answering(pair, most_lanes=3) as answering:
        for prompt in ([3, 4, 5], [6, 7, 8]):
            answering.add(Answer(pair, prompt, SamplingParams(max_tokens=9)))
            answering.turn()
            assert not answering._reading


def test_short_answers_do_not_share_their_rounds_with_much_longer_ones():
    """All rows of a batch are as long as the longest: reading that must cost less than reading the weights again."""
    pair = make_pair()
    target = pair.target
    layers, heads = target.config["num_hidden_layers"], target.config["num_key_value_heads"]
    assert target.position_bytes == 2 * 4 * layers * heads * target.head_dim
    most = int(0.5 * target.weight_bytes) // target.position_bytes
    with Answering(pair, draft=False, most_lanes=4) as answering:
        texts = {}

        def start(length):
            answer = Answer(pair, [3 + i % 20 for i in range(length)], SamplingParams(max_tokens=60), draft=False)
            answering.add(answer)
            texts[answer] = []

        def turn():
            for answer, news in answering.turn():
                if not isinstance(news, tuple):
                    texts[answer] += news.token_ids

        start(10)
        turn()
        start(most // 2)
        while answering._reading:
            turn()
        assert [len(engine.lanes) for engine in answering._engines] == [2]
        start(10 + 2 * most)
        while answering._reading:
            turn()
        assert [len(engine.lanes) for engine in answering._engines] == [2, 1]
        start(2 * most)
        while answering.count:
            turn()
            assert len(answering._engines) <= 2
    for answer, tokens in texts.items():
        assert tokens == plain_tokens(target, answer.prompt, 60, {0})


def test_nothing_is_copied_for_a_session_that_ends_with_its_answer(monkeypatch):
    pair = make_pair()
    given = []
    give_back = BatchCaches.give_back
    monkeypatch.setattr(
        BatchCaches, "give_back", lambda self, row, *rest: given.append(row) or give_back(self, row, *rest)
    )
    generate_many(pair, PROMPTS, SamplingParams(max_tokens=9), lanes=3, width=3)
    assert given == []
    session = pair.new_session()
    generate(pair, PROMPTS[0], SamplingParams(max_tokens=9), session=session, width=3)
    assert given == [0]
    assert len(session.tokens) >= len(PROMPTS[0])


@pytest.mark.parametrize(
    ("params", "lanes", "message"),
    [([SamplingParams()], 2, "one for each of 5 prompts; got 1"), (None, 0, "at least 1; got 0")],
)
def test_many_answers_that_cannot_be_made_are_refused(params, lanes, message):
    with pytest.raises(UsageError, match=message):
        generate_many(make_pair(), PROMPTS, params, lanes=lanes)
    with pytest.raises(PromptError, match="is empty"):
        generate_many(make_pair(), [[3], []])
