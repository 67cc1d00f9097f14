"""The whole command on a tiny target with something to learn: data, training, measuring, export, and use."""

import json
import math

import mlx.core as mx
import pytest
from mlx_lm.utils import load as mlx_lm_load
from mlx_lm.utils import quantize_model, save_model
from tiny import plain_tokens
from tiny_folder import short_run, write_target

from dflash_mlx.cli.app import main
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.generation import generate
from dflash_mlx.loading import load_pair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.training import TrainOptions, run
from dflash_mlx.training.checkpoint import load_state
from dflash_mlx.training.config import make_drafter
from dflash_mlx.training.evaluate import greedy_only, replay
from dflash_mlx.training.export import export_drafter
from dflash_mlx.training.loading import load
from dflash_mlx.training.measure import load_exported, measure_pair, open_log, summarize
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.trees import flat

pytestmark = pytest.mark.slow
MEASURED = {"measure": 4, "measure_tokens": 24}


@pytest.fixture(scope="module")
def trained(orderly_folder, tmp_path_factory):
    """(options, result) of a finished run."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    options = short_run(orderly_folder, out, steps=120, license="mit", **MEASURED)
    return options, run(options, quiet=True)


def test_the_trained_drafter_beats_its_initial_state_on_held_out_answers(trained, tmp_path):
    options, result = trained
    loaded = load(options, quiet=True)
    training, held = ConversationStore(options.out / "work" / "data").split(options.holdout)
    assert {c.prompt_key() for c in held}.isdisjoint(c.prompt_key() for c in training)
    held = greedy_only(held, 64, options.max_length)
    assert len(held) >= MEASURED["measure"]

    mx.random.seed(options.seed)
    initial = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
    before = replay(loaded.target, initial, held, longest=options.max_length, chunk=64)
    assert result.facts["replay"]["mean_acceptance_length"] > 1.6 * before.mean_acceptance_length

    export_drafter(initial, tmp_path, quantize=None)
    pair = load_exported(loaded.target, loaded.tokenizer, tmp_path, dtype=mx.float32)
    prompts = held[: MEASURED["measure"]]
    log = open_log(tmp_path / "measured.json", tmp_path, prompts, max_tokens=24)
    assert measure_pair(pair, prompts, log, max_tokens=24, deadline=None, progress=Progress("x", quiet=True))
    in_loop = summarize(log.answers, width=5, max_tokens=24)
    assert result.facts["measured"]["prompts"] == in_loop["prompts"] == MEASURED["measure"]
    assert result.facts["measured"]["mean_acceptance_length"] > 1.6 * in_loop["mean_acceptance_length"]


def test_replay_agrees_with_the_decode_loop(trained):
    """Same prompts, same answers: replay must count what the loop does. Their lengths differ a little at the ends."""
    options, result = trained
    loaded = load(options, quiet=True)
    _, held = ConversationStore(options.out / "work" / "data").split(options.holdout)
    held = greedy_only(held, MEASURED["measure"], options.max_length)
    drafter = load_drafter(options.out, dtype=mx.float32)
    replayed = replay(loaded.target, drafter, held, longest=options.max_length, chunk=64)
    measured = result.facts["measured"]["mean_acceptance_length"]
    assert abs(replayed.mean_acceptance_length - measured) < 0.25 * measured


def test_the_export_generates_at_once_and_changes_no_answer(trained, orderly_folder):
    options, _ = trained
    pair = load_pair(model=str(orderly_folder), draft_model=str(options.out))
    assert pair.block_size == options.block_size
    prompt = pair.encode_chat([{"role": "user", "content": "hello 42"}])
    answer = generate(pair, prompt, SamplingParams(max_tokens=40), width=5)
    assert answer.token_ids == plain_tokens(pair.target, prompt, 40, pair.eos_ids)
    assert answer.acceptance.mean_acceptance_length > 1.5


def test_the_command_line_uses_the_export(trained, orderly_folder, capsys, tmp_path, monkeypatch):
    options, _ = trained
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    words = ["generate", "hello", "--model", str(orderly_folder), "--draft-model", str(options.out), "--json"]
    assert main([*words, "--max-tokens", "12"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert main([*words, "--max-tokens", "12", "--no-draft"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == drafted["token_ids"]


def test_what_the_folder_says(trained):
    options, result = trained
    facts = json.loads((options.out / "train.json").read_text())
    assert facts == json.loads(json.dumps(result.facts))
    assert facts["steps"] == options.steps
    assert facts["data"]["tokens"] >= options.data_tokens
    assert facts["recipe"]["taps"] == [1, 3]
    card = (options.out / "README.md").read_text()
    assert "license: mit" in card
    assert f"{facts['measured']['mean_acceptance_length']:.3f}" in card
    assert str(options.out) not in card
    assert (options.out / "curves.svg").read_text().startswith("<svg")


def test_options_of_the_export_need_no_second_training(trained, tmp_path, orderly_folder):
    """The same command with --draft-vocabulary and --quantize exports again from the kept state."""
    options, before = trained
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    again = run(TrainOptions(**values | {"draft_vocabulary": 12, "quantize": 8}), quiet=True)
    assert again.facts["steps"] == before.facts["steps"]
    raw = json.loads((options.out / "config.json").read_text())
    ids = raw["dflash_config"]["draft_token_ids"]
    assert ids == sorted(set(ids))
    assert len(ids) in (12, 13)
    assert 2 in ids  # the end of the sequence
    assert raw["quantization"]["bits"] == 8
    chosen = again.facts["draft_vocabulary"]
    assert chosen["tokens"] == len(ids)
    assert 0 < chosen["covered"] < 1
    assert f"{len(ids)} tokens only" in (options.out / "README.md").read_text()

    pair = load_pair(model=str(orderly_folder), draft_model=str(options.out))
    prompt = pair.encode_chat([{"role": "user", "content": "abc"}])
    answer = generate(pair, prompt, SamplingParams(max_tokens=40), width=5)
    assert answer.token_ids == plain_tokens(pair.target, prompt, 40, pair.eos_ids)

    plain = run(options, quiet=True)
    raw = json.loads((options.out / "config.json").read_text())
    assert "draft_token_ids" not in raw["dflash_config"]
    assert "quantization" not in raw
    assert plain.facts["measured"]["mean_acceptance_length"] == before.facts["measured"]["mean_acceptance_length"]
    assert plain.facts["draft_vocabulary"] is None


def test_a_second_training_starts_from_the_first(trained, orderly_folder, tmp_path):
    """--init-from: before its first step it is as good as the drafter it came from."""
    options, before = trained
    changed = {"out": tmp_path / "second", "init_from": options.out, "steps": 1, "learning_rate": 1e-6}
    values = {name: getattr(options, name) for name in options.__dataclass_fields__} | changed
    after = run(TrainOptions(**values), quiet=True)
    wanted = before.facts["replay"]["mean_acceptance_length"]
    assert after.facts["replay"]["mean_acceptance_length"] == pytest.approx(wanted, rel=0.03)
    assert after.facts["recipe"]["init_from"] == options.out.name
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]


def short(target, out, **changes):
    common = {"data_tokens": 600, "data_batch": 16, "max_length": 40, "max_user_tokens": 8, "layers": 1, "taps": (1, 3)}
    common |= {"block_size": 4, "steps": 3, "batch_size": 4, "anchors": 4, "holdout": 0.2, "measure": 1}
    return TrainOptions(model=str(target), out=out, measure_tokens=8, **common | changes)


def test_a_quantized_target_can_be_trained_for(orderly_folder, tmp_path):
    folder = tmp_path / "quantized"
    model, tokenizer = mlx_lm_load(str(orderly_folder))
    model, config = quantize_model(model, json.loads((orderly_folder / "config.json").read_text()), 32, 8)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    options = short(folder, tmp_path / "out")
    result = run(options, quiet=True)
    assert math.isfinite(result.facts["measured"]["mean_acceptance_length"])
    # Weights that were not learnt would be the initial ones.
    loaded = load(options, quiet=True)
    mx.random.seed(options.seed)
    initial = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
    changed = load_drafter(options.out, dtype=mx.float32).layers[0].mlp.down_proj.weight
    assert mx.abs(changed - initial.layers[0].mlp.down_proj.weight).max().item() > 1e-4


def test_a_target_in_float16_is_trained_for_in_bfloat16(orderly_folder, tmp_path):
    options = short(orderly_folder, tmp_path, dtype="float16")
    assert load(options, quiet=True).compute_dtype == mx.bfloat16
    run(options, quiet=True)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert all(mx.isfinite(x).all().item() for x in weights.values())


def test_a_quantized_drafter_can_be_started_from(trained, orderly_folder, tmp_path):
    options, _ = trained
    export_drafter(load_drafter(options.out, dtype=mx.float32), tmp_path / "a", quantize=8, draft_token_ids=(2, 5))
    result = run(short(orderly_folder, tmp_path / "b", init_from=tmp_path / "a", block_size=6), quiet=True)
    assert result.stage == "done"
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization" not in raw
    assert "draft_token_ids" not in raw["dflash_config"]


def test_a_batch_in_parts_takes_the_same_step(orderly_folder, tmp_path):
    """The first update from accumulated gradients is that of the whole batch, up to the parts' own weight sums."""
    gradients = []
    for part in (4, 2):
        options = short(orderly_folder, tmp_path / str(part), micro_batch=part, weights="decay", steps=1, measure=0)
        run(options, quiet=True)
        state = load_state(options.out / "work" / "state.safetensors")
        # Adam's first moment after one step is the (clipped) gradient, but for a factor.
        gradients.append(flat(state.optimizer)["fc.weight.m"].reshape(-1))
    whole, parts = gradients
    cosine = (whole * parts).sum() / mx.sqrt((whole**2).sum() * (parts**2).sum())
    assert cosine.item() > 0.999


def test_a_base_model_with_sliding_windows_gets_a_drafter(tmp_path):
    """No chat template: text that goes on from its first token. Conversations are five windows long."""
    folder = write_target(tmp_path / "gemma", family="gemma3", template=None)
    options = TrainOptions(
        model=str(folder),
        out=tmp_path / "drafter",
        data_tokens=600,
        data_batch=16,
        max_length=40,
        max_user_tokens=6,
        loop_share=1.0,
        layers=1,
        block_size=4,
        num_taps=2,
        steps=3,
        batch_size=4,
        anchors=4,
        holdout=0.3,
        draft_vocabulary=40,
        measure=2,
        measure_tokens=24,
    )
    result = run(options, quiet=True)
    assert result.stage == "done"
    bos, user = 1, options.max_user_tokens
    for conversation in ConversationStore(options.out / "work" / "data").conversations:
        assert conversation.tokens[0] == bos
        assert conversation.spans[0][0] == 1 + user
    pair = load_pair(model=str(folder), draft_model=str(options.out), dtype="float32")
    prompt = [bos, 20, 21, 22]
    answer = generate(pair, prompt, SamplingParams(max_tokens=40), width=3)
    assert answer.acceptance.rounds > 0
    assert answer.token_ids == plain_tokens(pair.target, prompt, 40, set(pair.tokenizer.eos_token_ids))
