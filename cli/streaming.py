"""One answer on the terminal or in a pipe, as it comes."""

import sys
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.live import LiveText, quiet_keyboard
from dflash_mlx.cli.output import READING, live_line, note

if TYPE_CHECKING:
    from dflash_mlx.cli.side_by_side import Column
    from dflash_mlx.decoding.constraint import Constraint
    from dflash_mlx.generation import GenerationResponse
    from dflash_mlx.pair import ModelPair
    from dflash_mlx.sampling import SamplingParams


def begin(pair: "ModelPair", live: "LiveText | Column", *, draft: bool) -> None:
    """Say what happens before the first word. draft: widths are chosen by measurement, which the first time takes a
    while, so it is done and named here."""
    if draft and pair.drafter is not None:
        pair.round_costs(lambda message, fraction: live.write("", message))
    live.write("", READING)


def answer(
    pair: "ModelPair",
    prompt: Any,
    params: "SamplingParams",
    *,
    draft: bool,
    echo: bool,
    width: int | None = None,
    tree: bool = False,
    constraint: "Constraint | None" = None,
    markdown: bool = False,
    column: "Column | None" = None,
) -> tuple["GenerationResponse", dict[str, Any]]:
    """Stream an answer; returns the last response, and the whole answer as the object that --json prints.

    column: where it is shown, beside another one.
    """
    from dflash_mlx import stream_generate

    token_ids: list[int] = []
    notices: list[str] = []
    last = None
    with quiet_keyboard(), column or LiveText(echo=echo, markdown=markdown) as live:
        begin(pair, live, draft=draft and width is None)
        for response in stream_generate(
            pair, prompt, params, draft=draft, width=width, tree=tree, constraint=constraint
        ):
            token_ids += response.token_ids
            live.write(response.text, live_line(response))
            if response.notice:
                notices.append(response.notice)
            last = response
    if echo and not sys.stdout.isatty() and not live.text.endswith("\n"):
        print(flush=True)
    for notice in notices:
        note(notice, style="yellow")
    assert last is not None
    return last, {**last.to_json(), "text": live.text, "token_ids": token_ids}
