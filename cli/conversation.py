"""A conversation: its messages, its settings, and the caches that carry over from turn to turn."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.kept import Kept, keep, new_path
from dflash_mlx.cli.live import LiveText
from dflash_mlx.cli.output import live_line
from dflash_mlx.cli.streaming import begin
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.generation import GenerationResponse
    from dflash_mlx.pair import ModelPair


class StopSwitch:
    """The first Ctrl-C asks the answer to stop at the next round, where the caches are consistent; a second one breaks
    in at once.
    """

    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def during_prefill(self, done: int, total: int) -> None:
        """A prompt is read in pieces; between two of them it can be given up, too."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def stop_switch() -> Iterator[StopSwitch]:
    """Ctrl-C sets a switch inside this block."""
    switch = StopSwitch()
    before = signal.signal(signal.SIGINT, switch)
    try:
        yield switch
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Totals:
    """Sums over the answers of a conversation."""

    answers: int = 0
    tokens: int = 0
    rounds: int = 0
    round_tokens: float = 0.0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, response: "GenerationResponse") -> None:
        self.answers += 1
        self.tokens += response.generation_tokens
        self.cached_tokens += response.cached_tokens
        self.prompt_tokens += response.prompt_tokens
        acceptance = response.acceptance
        if acceptance is not None:
            self.rounds += acceptance.rounds
            self.round_tokens += acceptance.mean_acceptance_length * acceptance.rounds
            self.drafted += acceptance.drafted
            self.accepted += acceptance.accepted


@dataclass
class Conversation:
    """Messages and the session that has read them. `settings` are arguments of SamplingParams."""

    pair: "ModelPair"
    draft: bool
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    last: "GenerationResponse | None" = None
    interrupted: bool = False
    attached: list[str] = field(default_factory=list)  # files that go with the next question
    thinking: bool | None = None  # whether a model that can reason does it; None: as its template has it
    path: Path | None = None  # where it is kept; None: nowhere

    def __post_init__(self) -> None:
        self.session = self.pair.new_session()

    def keep(self) -> None:
        """Write what there is to the disk, where that is wanted. Raises DFlashError."""
        if self.path is not None:
            keep(self.path, self.pair.name, self.messages)

    def load(self, kept: Kept) -> None:
        """Go on with a conversation from the disk."""
        self.reset()
        self.messages = [dict(message) for message in kept.messages]
        if self.path is not None:
            self.path = kept.path

    def set_system(self, text: str | None) -> None:
        """Set the instructions in front of the conversation; None or "" takes them away."""
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def reset(self) -> None:
        """Forget all turns, keep the instructions."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.attached.clear()
        self.session = self.pair.new_session()
        if self.path is not None:
            self.path = new_path()

    def undo(self) -> str | None:
        """Take the last question and its answer back; returns the question, None where there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            return None
        question = self.messages[last]["content"]
        del self.messages[last:]
        return question

    def ask_again(self, question: str, live: LiveText) -> list[str]:
        """Answer the last question, which is `question`, once more; the old answer stays if no new one comes."""
        before = list(self.messages)
        self.undo()
        try:
            return self.ask(question, live)
        finally:
            if not live.text:
                self.messages = before

    def ask(self, question: str, live: LiveText) -> list[str]:
        """Stream the answer to `question`; returns notices. `interrupted` says whether Ctrl-C ended it.

        What was answered stays in the conversation, also when it was stopped. A question without any answer is
        taken out again, so that turns keep alternating. Raises what `stream_generate` raises.
        """
        from dflash_mlx import SamplingParams, stream_generate

        self.messages.append({"role": "user", "content": question})
        notices: list[str] = []
        self.last, self.interrupted = None, False
        try:
            params = SamplingParams(**self.settings)
            begin(self.pair, live, draft=self.draft)
            with stop_switch() as switch:
                responses = stream_generate(
                    self.pair,
                    self._prompt(),
                    params,
                    session=self.session,
                    draft=self.draft,
                    on_prefill=switch.during_prefill,
                )
                try:
                    for response in responses:
                        live.write(response.text, live_line(response))
                        self.last = response
                        if response.notice:
                            notices.append(response.notice)
                        if switch.pressed and response.finish_reason is None:
                            self.interrupted = True
                            break
                finally:
                    # The decode loop settles its caches when it is closed.
                    responses.close()  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            # Broken in at once: what the caches hold is not known any more.
            self.interrupted = True
            self.session = self.pair.new_session()
        finally:
            if live.text:
                self.messages.append({"role": "assistant", "content": live.text})
            else:
                self.messages.pop()
        if self.last is not None:
            self.totals.add(self.last)
        return notices

    def _prompt(self) -> "list[dict[str, str]] | list[int]":
        """The messages or, where the template is told of reasoning, their tokens. Raises UsageError."""
        if self.thinking is None:
            return self.messages
        tokenizer = self.pair.tokenizer
        if not tokenizer.has_chat_template:
            raise UsageError(
                "this model has no chat template that could turn reasoning on or off; use --thinking auto."
            )
        options = {"add_generation_prompt": True, "enable_thinking": self.thinking}
        return list(tokenizer.apply_chat_template(self.messages, **options))

    def to_json(self) -> str:
        return json.dumps({"pair": self.pair.name, "messages": self.messages}, ensure_ascii=False, indent=2) + "\n"

    def to_markdown(self) -> str:
        parts = [f"# A conversation with {self.pair.name}\n"]
        parts += [f"## {message['role'].capitalize()}\n\n{message['content'].strip()}\n" for message in self.messages]
        return "\n".join(parts)
