"""The automatic choice beside fixed ones, with rounds that take as long as others of their kind."""

import pytest
from bench.fake import a_run, some_results

from dflash_mlx.bench.analyse import analyse, verdict
from dflash_mlx.bench.choices import BY_SPEED, judged
from dflash_mlx.bench.record import Results, Round, Run


def runs_of(contestant: str, *rounds: tuple[float, int, int, int]) -> Run:
    """rounds: (ms, width, depth, tokens)."""
    found = [
        Round(ms=ms, width=width, depth=depth, kept=gained - 1, tokens=gained) for ms, width, depth, gained in rounds
    ]
    return a_run(contestant, tokens=11, decode_s=1.0, rounds=found)


def measured(main: str = BY_SPEED) -> Results:
    """Chains of 3 usually take 10 ms, trees of 7 20 ms, and plain steps 8 ms. Single rounds took far longer."""
    results = some_results(
        {
            "code-1": [
                a_run("plain", tokens=11, decode_s=1.0),
                runs_of("drafted", (90.0, 7, 3, 4), (20.0, 7, 3, 4)),  # 8 tokens in 40 ms
                runs_of("width=3", (10.0, 3, 3, 2), (10.0, 3, 3, 2)),  # 4 in 20
                runs_of("tree=7", (20.0, 7, 3, 4), (20.0, 7, 3, 3)),  # 7 in 40
            ],
            "chat-1": [
                a_run("plain", tokens=11, decode_s=1.0),
                runs_of("drafted", (20.0, 7, 3, 1), (10.0, 3, 3, 1), (8.0, 0, 0, 1)),  # 3 in 38
                runs_of("width=3", (95.0, 3, 3, 1), (10.0, 3, 3, 2)),  # 3 in 20
                runs_of("tree=7", (20.0, 7, 3, 1), (99.0, 7, 3, 2)),  # 3 in 40
            ],
        }
    )
    results.contestants = {name: name for name in ("plain", "drafted", "width=3", "tree=7")}
    results.contestants["drafted"] = f"dflash-mlx, {main}"
    return results


def test_rounds_count_as_long_as_their_kind_usually_takes() -> None:
    results = measured()
    found = judged(results, results.prompts)
    assert found is not None
    # 11 tokens in 78 ms; chains 7 in 40, trees 10 in 80.
    assert (found.best, found.fixed) == ("width=3", 2)
    assert found.share == pytest.approx((11 / 78) / (7 / 40))
    assert found.highest == pytest.approx((8 / 40) / (4 / 20))
    assert found.lowest == pytest.approx((3 / 38) / (3 / 20))


def test_the_verdict_says_it_last() -> None:
    results = measured()
    assert verdict(results, analyse(results))[-1] == (
        "If rounds of the same kind took equally long, the automatic choice would be 0.81 times as fast as width=3, "
        "the best of 2 fixed ones (0.53 to 1.00 of the best with the same answer to a prompt)."
    )


def test_of_single_prompts_only_the_same_answers_are_compared():
    """In a lower precision another number of rows may round to another text, which may be easier to draft."""
    results = measured()
    code = results.prompts[0]
    code.of("width=3")[0].token_ids[-1] += 1
    found = judged(results, results.prompts)
    assert found is not None
    # With trees of 7: 8 tokens in 40 ms to 7 in 40.
    assert (found.lowest, found.highest) == (pytest.approx((3 / 38) / (3 / 20)), pytest.approx(8 / 7))
    for name in ("width=3", "tree=7"):
        for result in results.prompts:
            result.of(name)[0].token_ids[0] += 1
    found = judged(results, results.prompts)
    assert found is not None
    assert (found.lowest, found.highest) == (None, None)
    assert verdict(results, analyse(results))[-1].endswith("as width=3, the best of 2 fixed ones.")


def test_without_a_choice_or_something_to_compare_it_with_nothing_is_said() -> None:
    fixed = measured("width 7")
    assert judged(fixed, fixed.prompts) is None
    alone = measured()
    for name in ("width=3", "tree=7"):
        del alone.contestants[name]
    assert judged(alone, alone.prompts) is None
    # Another drafter's rounds are another matter.
    alone.contestants["width=3,draft-model=other"] = "dflash-mlx, width 3"
    assert judged(alone, alone.prompts) is None
    unmeasured = measured()
    for result in unmeasured.prompts:
        for run in result.runs:
            run.rounds.clear()
    assert judged(unmeasured, unmeasured.prompts) is None
