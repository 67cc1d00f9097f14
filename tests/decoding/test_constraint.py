"""Structured output: the drafted answer is that of plain constrained decoding, and the text fits the schema."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import llguidance
import mlx.core as mx
import numpy as np
import pytest
from json_tokens import SCHEMA, fits_schema, json_pair
from test_generation import make_pair
from tiny import ScriptedDrafter, mostly_slow, tiny_drafter

from dflash_mlx.decoding.constraint import json_constraint, limit, mask_rows
from dflash_mlx.drafters.contract import Proposal
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.generation import generate, stream_generate
from dflash_mlx.sampling import SamplingParams


@pytest.fixture(scope="module")
def pair():
    return json_pair()


def plain_truth(pair, prompt, constraint, max_tokens):
    """Constrained greedy decoding written out: one token at a time, a forward over everything each time."""
    guide = constraint.start()
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        logits = np.array(pair.target.forward(mx.array([prompt + tokens]), pair.target.make_cache())[0, -1])
        bits = guide.allowed([])[1][0]
        allowed = [(int(bits[i // 32]) >> (i % 32)) & 1 for i in range(len(logits))]
        tokens.append(int(np.argmax(np.where(allowed, logits, -np.inf))))
        guide.advance(tokens[-1:])
        if tokens[-1] in pair.eos_ids:
            break
    return tokens


@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_drafted_equals_plain_constrained_decoding(seed):
    """Random, hostile and nearly perfect drafters; every width; JSON objects and a schema."""
    rng = random.Random(seed)
    pair = json_pair(seed=seed)
    for schema in (None, SCHEMA):
        constraint = json_constraint(pair, schema)
        prompt = [rng.randrange(200) for _ in range(5)]
        truth = plain_truth(pair, prompt, constraint, 50)
        script = {len(prompt) + i: token for i, token in enumerate(truth)}
        wrong = frozenset(at for at in script if rng.random() < 0.2)
        config = tiny_drafter(vocab_size=pair.target.vocab_size).config
        scripted = replace(pair, drafter=ScriptedDrafter(config, script, wrong))
        for drafting in (pair, scripted):
            for width in rng.sample(range(8), 2):
                params = SamplingParams(max_tokens=50)
                answer = generate(drafting, prompt, params, width=width, constraint=constraint)
                assert answer.token_ids == truth
        assert width == 0 or answer.acceptance.accepted > 5
        plain = generate(pair, prompt, params, draft=False, constraint=constraint)
        assert plain.token_ids == truth


def test_answers_are_what_the_schema_says(pair):
    """Sampled and greedy answers that end by themselves fit; one that is cut is the beginning of one that would."""
    constraint = json_constraint(pair, SCHEMA)
    ended = 0
    for seed in range(6):
        params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed)
        answer = generate(pair, [seed + 40], params, width=4, constraint=constraint)
        assert answer.token_ids == generate(pair, [seed + 40], params, draft=False, constraint=constraint).token_ids
        if answer.finish_reason == "stop":
            assert fits_schema(answer.text)
            ended += 1
    assert ended >= 3
    objects = json_constraint(pair, None)
    for seed in range(2):
        params = SamplingParams(max_tokens=60, temperature=1.0, top_p=0.9, seed=seed)
        answer = generate(pair, [seed + 40], params, width=4, constraint=objects)
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [True, False])
def test_sampling_keeps_the_constrained_distribution(draft):
    """Without a seed, drafts that are off course are refused as speculative sampling wants it: the first token's

    distribution after a drafted block equals the target's, restricted to what is allowed."""
    pair = json_pair(block_size=4)
    constraint = json_constraint(pair, {"enum": ["ab", "a1", "true", "1", 12, None]})
    prompt = [70, 71]
    counts: dict[str, int] = {}
    runs = 300
    session = pair.new_session(draft=draft)
    for _ in range(runs):
        params = SamplingParams(max_tokens=12, temperature=1.0)
        answer = generate(pair, prompt, params, session=session, width=3, draft=draft, constraint=constraint)
        counts[answer.text] = counts.get(answer.text, 0) + 1
    expected = _exact(pair, prompt, constraint)
    assert abs(sum(expected.values()) - 1) < 1e-3
    assert set(counts) <= set(expected)
    statistic = sum((counts.get(t, 0) - p * runs) ** 2 / (p * runs) for t, p in expected.items() if p * runs >= 5)
    freedom = sum(p * runs >= 5 for p in expected.values())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def _exact(pair, prompt, constraint):
    """Probability of every text that the constraint lets through, by walking all of them."""
    found: dict[str, float] = {}

    def walk(tokens, probability):
        guide = constraint.start()
        guide.advance(tokens)
        if tokens and tokens[-1] in pair.eos_ids:
            text = pair.tokenizer.decode(tokens[:-1])
            found[text] = found.get(text, 0.0) + probability
            return
        if probability < 1e-6:
            return
        logits = pair.target.forward(mx.array([prompt + tokens]), pair.target.make_cache())[0, -1]
        row = np.array(mx.softmax(mask_rows(logits[None], guide.allowed([])[1])[0]))
        for token in np.flatnonzero(row):
            walk([*tokens, int(token)], probability * float(row[token]))

    walk([], 1.0)
    return found


def test_drafts_off_course_are_cut(pair):
    """Greedy proposals lose what cannot be kept; those with probabilities keep the draft that will be refused."""
    constraint = json_constraint(pair, {"const": {"ab": 12}})
    encode = lambda text: pair.tokenizer.encode(text)  # noqa: E731
    good, bad = encode('{"ab":12}'), encode('{"ab":1}')
    for tokens, count in ((good, len(good)), (bad, len(bad) - 1), (encode("x") + good, 0)):
        array = mx.array(tokens)
        logits = mx.zeros((len(tokens), 4))
        guide = constraint.start()
        cut, bits = limit(guide, Proposal(array), tokens)
        assert (cut.width if cut else 0) == count
        assert bits.shape[0] == count + 1
        cut, bits = limit(guide, Proposal(array, logits), tokens)
        assert cut.width == min(count + 1, len(tokens))
        assert bits.shape[0] == cut.width + 1
        guide.advance(good)
        assert limit(guide, None, [])[0] is None
    only_end = mask_rows(mx.zeros((1, pair.target.vocab_size)), guide.allowed([])[1])
    assert set(np.flatnonzero(np.isfinite(np.array(only_end)[0])).tolist()) == pair.eos_ids


class Course:
    """Lets only 3, 4, 5, ... come; notes what it was asked."""

    def __init__(self):
        self.asked = []

    done = False

    def allowed(self, drafts):
        self.asked.append(drafts)
        count = next((i for i, token in enumerate(drafts) if token != 3 + i), len(drafts))
        return count, np.arange(len(drafts) + 1, dtype=np.uint32)[:, None]


@pytest.mark.parametrize(
    ("tokens", "greedy", "sampled"),
    [([3, 4, 5], 3, 3), ([3, 4, 9], 2, 3), ([3, 9, 5], 1, 2), ([9, 4, 5], 0, 1)],
)
def test_a_proposal_is_cut_where_it_leaves_the_course(tokens, greedy, sampled):
    """What is drawn keeps the first draft that is off course, to be refused; the best token need not be tried."""
    logits = mx.zeros((3, 10))
    for probs, kept in ((None, greedy), (logits, sampled)):
        guide = Course()
        cut, bits = limit(guide, Proposal(mx.array(tokens), probs), [*tokens, 6, 7])
        assert guide.asked == [tokens]
        assert (cut.tokens.tolist() if kept else cut) == (tokens[:kept] or None)
        assert bits.flatten().tolist() == list(range(kept + 1))


def test_without_a_proposal_only_the_next_token_is_asked_for():
    guide = Course()
    cut, bits = limit(guide, None, [3, 4])
    assert guide.asked == [[]]
    assert cut is None
    assert bits.shape == (1, 1)


def test_a_mask_leaves_the_logits_of_what_may_come():
    """A vocabulary of two words and a part, each word's ends among what may come."""
    allowed = [{0, 31, 32, 69}, set(), set(range(70))]
    bits = np.zeros((3, 3), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    logits = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    found = np.array(mask_rows(mx.array(logits), bits))
    for row, tokens in enumerate(allowed):
        for token in range(70):
            assert found[row, token] == (logits[row, token] if token in tokens else -np.inf)


def test_a_way_back_is_left_to_what_was_only_asked(pair):
    """Asking what may come changes nothing, however far the drafts went."""
    guide = json_constraint(pair, {"const": {"ab": 12}}).start()
    good = pair.tokenizer.encode('{"ab":12}')
    assert len(good) > 3
    first = guide.allowed(good)
    assert first[0] == len(good)
    assert first[1].shape == (len(good) + 1, -(-pair.vocab_size // 32))
    again = guide.allowed(good)
    assert again[0] == first[0]
    assert (again[1] == first[1]).all()
    guide.advance(good[:1])
    assert (guide.allowed(good[1:])[1] == first[1][1:]).all()
    guide.advance([*good[1:], *pair.eos_ids])
    guide.advance([65, 66])  # after the end nothing matters any more


def test_drafts_behind_the_end_are_ignored(pair):
    """A drafter that goes on after the value is complete: the end-of-sequence token ends the answer."""
    constraint = json_constraint(pair, {"const": 12})
    truth = plain_truth(pair, [65], constraint, 10)
    assert truth[-1] in pair.eos_ids
    script = {1 + i: token for i, token in enumerate([*truth, *[66] * 20])}
    config = tiny_drafter(vocab_size=pair.target.vocab_size).config
    scripted = replace(pair, drafter=ScriptedDrafter(config, script))
    answer = generate(scripted, [65], SamplingParams(max_tokens=20), width=7, constraint=constraint)
    assert (answer.token_ids, answer.finish_reason, answer.text) == (truth, "stop", "12")


def test_one_constraint_serves_several_answers_at_once(pair):
    constraint = json_constraint(pair, SCHEMA)
    params = SamplingParams(max_tokens=40)
    prompts = [[65], [80, 81], [90]]
    streams = [stream_generate(pair, prompt, params, width=3, constraint=constraint) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    running = list(zip(streams, found, strict=True))
    while running:
        for entry in list(running):
            response = next(entry[0], None)
            if response is None:
                running.remove(entry)
            else:
                entry[1].extend(response.token_ids)
    assert found == [plain_truth(pair, prompt, constraint, 40) for prompt in prompts]


def test_constraint_with_penalties_and_bias(pair):
    """The mask comes last: nothing that bias or penalties lift can break the format."""
    quote = pair.tokenizer.encode("x")[0]
    params = SamplingParams(max_tokens=50, logit_bias={quote: 100.0}, repetition_penalty=1.5, presence_penalty=1.0)
    constraint = json_constraint(pair, SCHEMA)
    answer = generate(pair, [65], params, width=4, constraint=constraint)
    assert answer.token_ids == generate(pair, [65], params, draft=False, constraint=constraint).token_ids
    assert answer.text.startswith("{")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "no-such-type"}, "schema cannot be used"),
        ({"type": "string", "pattern": "(a"}, "schema cannot be used"),
        ({"$ref": "https://example.com/elsewhere.json"}, "schema cannot be used"),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": 5}, "schema cannot be used"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused(pair, schema, message):
    with pytest.raises(UsageError, match=message) as refusal:
        json_constraint(pair, schema)
    assert "\n" not in str(refusal.value)


def test_a_warning_of_the_grammar_library_is_no_refusal(pair, monkeypatch):
    """It begins what is only a warning with WARNING."""

    library = SimpleNamespace(
        grammar_from_json_schema=llguidance.LLMatcher.grammar_from_json_schema,
        validate_grammar=lambda *_: "WARNING: this grammar is slow",
    )
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", library)
        constraint = json_constraint(pair, {"const": 12})
        library.validate_grammar = lambda *_: "this grammar is wrong: WARNING"
        with pytest.raises(UsageError, match="this grammar is wrong"):
            json_constraint(pair, {"const": 12})
    right, wrong = pair.tokenizer.encode("12"), pair.tokenizer.encode("3")
    assert constraint.start().allowed(right + wrong)[0] == len(right)


def test_a_schema_that_is_no_json_is_refused_with_its_reason(pair):
    with pytest.raises(UsageError, match="schema cannot be used: Object of type set is not JSON serializable"):
        json_constraint(pair, {"const": {1, 2}})


def test_without_a_schema_it_is_an_object_of_any_kind(pair):
    """No other value; and no model loses its way in whitespace, of which 32 characters may follow one another."""
    guide = json_constraint(pair, None).start()
    first = mask_rows(mx.zeros((1, pair.vocab_size)), guide.allowed([])[1])
    starts = {pair.tokenizer.decode([int(token)]) for token in np.flatnonzero(np.isfinite(np.array(first)[0]))}
    assert {text.lstrip()[:1] for text in starts} - {""} == {"{"}
    guide.advance(pair.tokenizer.encode("{"))
    assert guide.allowed(pair.tokenizer.encode(" ") * 50)[0] == 32


def test_an_answer_ends_with_any_of_the_pairs_own_tokens_for_it():
    """Also where the tokenizer names another one."""
    tokenizer = json_pair().tokenizer
    ends = {tokenizer.encode(text)[0] for text in ("\x01", "\x02")}
    own = SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer.get_vocab()) + 5, eos_ids=ends)
    guide = json_constraint(own, {"const": 12}).start()
    guide.advance(tokenizer.encode("12"))
    only_end = mask_rows(mx.zeros((1, own.vocab_size)), guide.allowed([])[1])
    assert set(np.flatnonzero(np.isfinite(np.array(only_end)[0])).tolist()) == own.eos_ids


def test_a_tokenizer_of_another_kind_is_refused():
    with pytest.raises(UsageError, match="fast tokenizer"):
        json_constraint(make_pair(), None)


def test_a_token_that_breaks_the_format_is_an_error(pair):
    guide = json_constraint(pair, None).start()
    with pytest.raises(DFlashError, match="cannot be followed"):
        guide.advance(pair.tokenizer.encode("x"))


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_pair_writes_json(demo_pair):
    constraint = json_constraint(demo_pair, SCHEMA)
    prompt = demo_pair.encode_chat([{"role": "user", "content": "Describe a person as JSON."}])
    params = SamplingParams(max_tokens=60)
    answer = generate(demo_pair, prompt, params, width=5, constraint=constraint)
    assert answer.token_ids == generate(demo_pair, prompt, params, draft=False, constraint=constraint).token_ids
    assert answer.finish_reason == "stop"
    assert fits_schema(answer.text)
    assert answer.acceptance.accepted > 0
