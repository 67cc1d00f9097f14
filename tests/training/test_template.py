"""The fixed parts of a chat, found in templates of several shapes, put together again to the template's own text."""

import pytest
from mlx_lm.utils import load_tokenizer
from tiny_folder import TEMPLATE, write_tokenizer

from dflash_mlx.errors import UsageError
from dflash_mlx.training.template import chat_frame, encode_text

SYSTEM = "{{ '<|im_start|>system be good<|im_end|>' }}" + TEMPLATE
TRIMMED = TEMPLATE.replace("m['content']", "m['content'] | trim")
# The assistant's end comes with another token in front, and user turns are only text.
PLAIN_USER = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'q. ' + m['content'] + ' a. ' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
THINKS = TEMPLATE[: -len("{% endif %}")] + (
    "{% if enable_thinking is defined and enable_thinking %}{{ 'think ' }}"
    "{% elif enable_thinking is defined %}{{ 'nothink ' }}{% endif %}{% endif %}"
)
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}" + TEMPLATE
UPPER = TEMPLATE.replace("m['content']", "m['content'] | upper")
TWICE = TEMPLATE.replace("m['content']", "m['content'] + m['content']")
TEMPLATES = {"chatml": TEMPLATE, "system": SYSTEM, "trimmed": TRIMMED, "plain user": PLAIN_USER}


def tokenizer_with(folder, template):
    write_tokenizer(folder, template=template)
    return load_tokenizer(folder, eos_token_ids=[2])


def apply(tokenizer, messages, **extra):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
    return encode_text(tokenizer, text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_parts_make_up_the_whole(tmp_path, name):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    frame = chat_frame(tokenizer)
    user, answer, second = (encode_text(tokenizer, text) for text in ("hello", "yes", "more"))
    messages = [{"role": "user", "content": "hello"}]
    assert [*frame.prefix, *user, *frame.answer_opening] == apply(tokenizer, messages)
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    # An answer ends with its end token; what the template puts after it opens the next turn.
    whole = [*frame.prefix, *user, *frame.answer_opening, *answer, 2, *frame.user_opening, *second]
    assert [*whole, *frame.answer_opening] == apply(tokenizer, messages)
    assert frame.eos_ids == {2}
    assert frame.user_end == frame.answer_opening[0]


def test_thinking_changes_the_opening(tmp_path):
    tokenizer = tokenizer_with(tmp_path, THINKS)
    openings = {mode: chat_frame(tokenizer, thinking=mode).answer_opening for mode in ("auto", "on", "off")}
    messages = [{"role": "user", "content": "x"}]
    for mode, extra in (("auto", {}), ("on", {"enable_thinking": True}), ("off", {"enable_thinking": False})):
        whole = apply(tokenizer, messages, **extra)
        assert tuple(whole[-len(openings[mode]) :]) == openings[mode]
    assert openings["on"] != openings["off"]
    # As mlx-lm does it: a model without tokens for thoughts does not think unless it is told to.
    assert openings["auto"] == openings["off"]
    assert chat_frame(tokenizer, thinking="on").thinking
    assert not chat_frame(tokenizer, thinking="off").thinking


def test_a_template_for_one_turn_has_no_second(tmp_path):
    frame = chat_frame(tokenizer_with(tmp_path, ONE_TURN))
    assert frame.user_opening is None
    assert frame.answer_opening


@pytest.mark.parametrize("template", [UPPER, TWICE])
def test_a_template_that_changes_the_text_is_refused(tmp_path, template):
    with pytest.raises(UsageError, match="--conversations"):
        chat_frame(tokenizer_with(tmp_path, template))


def test_a_model_without_template_has_only_a_beginning(tmp_path):
    frame = chat_frame(tokenizer_with(tmp_path, None))
    assert frame.prefix
    assert (frame.answer_opening, frame.user_opening, frame.thinking) == ((), None, False)
