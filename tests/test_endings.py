"""What ends an answer: stop tokens, a least number of tokens, ends that are ignored; by plain decoding written out."""

import mlx.core as mx
import numpy as np
import pytest
from json_tokens import SCHEMA, json_pair
from test_generation import both, letter, make_pair
from tiny import ScriptedDrafter, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.answer import Answer
from dflash_mlx.decoding.constraint import AtLeast, json_constraint
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import generate, generate_many
from dflash_mlx.sampling import SamplingParams

PROMPT = [3, 5]
EOS = 0


def truth(params: SamplingParams, *, bias: dict[int, float] | None = None) -> tuple[list[int], str]:
    """One token at a time, a forward over everything each time; tokens and why they end."""
    target, tokens = tiny_target("llama"), []
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    while len(tokens) < params.max_tokens:
        logits = np.array(target.forward(mx.array([PROMPT + tokens]), target.make_cache())[0, -1], dtype=np.float32)
        for token, more in (bias or {}).items():
            logits[token] += more
        if len(tokens) < params.min_tokens:
            logits[list(ends)] = -np.inf
        tokens.append(int(np.argmax(logits)))
        if tokens[-1] in ends:
            return tokens, "stop"
    return tokens, "length"


def scripted(tokens: list[int]):
    """A pair whose drafter guesses these tokens after the prompt."""
    script = {len(PROMPT) + i: token for i, token in enumerate(tokens)}
    return make_pair(ScriptedDrafter(tiny_drafter().config, script), tiny_target("llama"))


FREE = plain_tokens(tiny_target("llama"), PROMPT, 40, set())
CASES = [
    {"stop_token_ids": (FREE[7],)},
    {"stop_token_ids": (FREE[7],), "min_tokens": 9},
    {"stop_token_ids": tuple(FREE[2:9]), "min_tokens": 12},
    {"stop_token_ids": (FREE[0], FREE[1]), "min_tokens": 1},
    {"min_tokens": 20, "logit_bias": {EOS: 30.0}},
    {"ignore_eos": True, "logit_bias": {EOS: 2.0}},
    {"ignore_eos": True, "stop_token_ids": (FREE[5],), "min_tokens": 3},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("width", mostly_slow([1, 5, 7], 5))
def test_ends_are_those_of_plain_decoding(options, width):
    """With drafts that are right without the ends, drafts that are right with them, and random ones."""
    params = SamplingParams(max_tokens=24, **options)
    tokens, reason = truth(params, bias=options.get("logit_bias"))
    for pair in (make_pair(), scripted(FREE), scripted(tokens)):
        answer = both(pair, PROMPT, params, width)
        assert (answer.token_ids, answer.finish_reason) == (tokens, reason)
        silent = {EOS, *params.stop_token_ids}
        assert answer.text == "".join(letter(token) for token in tokens if token not in silent)
    several = generate_many(make_pair(), [PROMPT, [7, 8, 9], PROMPT], params)
    assert [several[i].token_ids for i in (0, 2)] == [tokens, tokens]


@pytest.mark.parametrize("options", CASES)
def test_sampled_ends(options):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=11, **options)
    answer = both(make_pair(), PROMPT, params)
    ends = params.ends({EOS})
    assert not ends & set(answer.token_ids[: params.min_tokens])
    assert not ends & set(answer.token_ids[:-1])


def test_stop_strings_count_only_after_the_least_number_of_tokens():
    text = "".join(map(letter, FREE))
    stop = text[2:4]
    later = text.find(stop, 10)
    params = SamplingParams(max_tokens=24, min_tokens=10, stop=(stop,), ignore_eos=True)
    answer = both(scripted(FREE), PROMPT, params)
    shown = text[: later if 0 <= later <= 22 else 24].replace(letter(EOS), "")
    assert answer.text == shown


def test_a_guide_of_a_least_number():
    """By hand: two tokens are missing, 3 and 40 would be ends."""
    guide = AtLeast(2, {3, 40, 99}, 50)
    count, bits = guide.allowed([1, 2, 3])
    assert count == 3, "the third may be an end"
    allowed = [[bool(row[t // 32] >> np.uint32(t % 32) & 1) for t in (1, 3, 40)] for row in bits]
    assert allowed == [[True, False, False], [True, False, False], [True, True, True], [True, True, True]]
    assert guide.allowed([1, 40, 2])[0] == 1
    assert not guide.done
    guide.advance([1, 2])
    assert guide.allowed([40])[0] == 1
    assert guide.done


def test_a_guide_is_dropped_once_it_is_done():
    """Rounds after the least number of tokens need not wait for the host."""
    pair = make_pair()
    answer = Answer(pair, PROMPT, SamplingParams(max_tokens=9, min_tokens=3, ignore_eos=True, stop_token_ids=(EOS,)))
    answer.open()
    while answer.unread:
        answer.read(8)
    lane = answer.begin()
    engine = Engine(pair.target, pair.drafter)
    engine.join(lane)
    guided = []
    while engine.lanes:
        engine.advance()
        guided.append((lane.max_tokens - lane.remaining < 3, lane.guide is not None))
    assert len(guided) > 1
    assert all(missing == held for missing, held in guided[:-1])


@pytest.mark.parametrize("options", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_a_format_says_itself_where_it_ends(options):
    pair = json_pair()
    with pytest.raises(UsageError, match="format"):
        generate(pair, [1, 2], SamplingParams(**options), constraint=json_constraint(pair, SCHEMA))


@pytest.mark.parametrize("options", [{"min_tokens": 9, "max_tokens": 8}, {"min_tokens": -1}])
def test_numbers_that_cannot_be(options):
    with pytest.raises(UsageError, match="min_tokens"):
        SamplingParams(**options)


def test_stop_tokens_of_the_vocabulary_only():
    with pytest.raises(UsageError, match="stop_token_ids"):
        generate(make_pair(), PROMPT, SamplingParams(stop_token_ids=(100_000,)))
