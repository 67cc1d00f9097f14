"""Splitting a model's text into what it says, its reasoning and its tool calls, while it streams."""

from dataclasses import dataclass
from typing import Any

Transitions = dict[str, list[tuple[str, str]]]

CONTENT, REASONING, TOOL = "normal", "reasoning", "tool"  # mlx-lm's names of these states


@dataclass(frozen=True)
class Part:
    """Text of one state. `ended` is the marker that closed it, and empty while it may go on."""

    state: str
    text: str
    ended: str = ""


class Splitter:
    """Text in, parts out; a marker may arrive in pieces.

    White space next to a marker belongs to the marker, not to the text. Text inside a tool call is kept as it is.
    """

    def __init__(self, transitions: Transitions, state: str = CONTENT) -> None:
        self._transitions = transitions
        self.state = state
        self._held = ""
        self._after_marker = state != CONTENT

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while (found := self._next_marker()) is not None:
            at, marker, state = found
            before, self._held = self._held[:at], self._held[at + len(marker) :]
            parts.append(Part(self.state, self._trimmed(before, ends=True), marker))
            self.state, self._after_marker = state, True
        keep = self._may_become_marker()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [*parts, *self._part(shown)]

    def finish(self) -> list[Part]:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return self._part(held)

    def _part(self, text: str) -> list[Part]:
        text = self._trimmed(text, ends=False)
        if text:
            self._after_marker = False
        return [Part(self.state, text)] if text else []

    def _trimmed(self, text: str, *, ends: bool) -> str:
        if self.state == TOOL:
            return text
        if self._after_marker:
            text = text.lstrip()
        return text.rstrip() if ends else text

    def _next_marker(self) -> tuple[int, str, str] | None:
        found = [
            (at, -len(marker), marker, state)
            for marker, state in self._transitions.get(self.state, [])
            if (at := self._held.find(marker)) >= 0
        ]
        if not found:
            return None
        at, _, marker, state = min(found)
        return at, marker, state

    def _may_become_marker(self) -> int:
        """Length of the end that the next text may turn into a marker, with the white space before it."""
        edges = self._transitions.get(self.state, [])
        if not edges:
            return 0
        keep = max((n for m, _ in edges for n in range(1, len(m)) if self._held.endswith(m[:n])), default=0)
        rest = self._held[: len(self._held) - keep]
        return keep + (len(rest) - len(rest.rstrip()) if self.state != TOOL else 0)


def transitions_of(tokenizer: Any, *, tools: bool) -> Transitions:
    """The markers of a tokenizer's model (mlx-lm's TokenizerWrapper): state -> (marker, next state).

    Tool calls are looked for only with `tools`: without, their markup is text like any other.
    """
    edges: Transitions = {}
    if tokenizer.has_thinking:
        edges.setdefault(CONTENT, []).append((tokenizer.think_start, REASONING))
        edges.setdefault(REASONING, []).append((tokenizer.think_end, CONTENT))
    if tools and tokenizer.has_tool_calling:
        edges.setdefault(CONTENT, []).append((tokenizer.tool_call_start, TOOL))
        if tokenizer.has_thinking:
            edges.setdefault(REASONING, []).append((tokenizer.tool_call_start, TOOL))
        if tokenizer.tool_call_end:
            edges.setdefault(TOOL, []).append((tokenizer.tool_call_end, CONTENT))
    # Formats that mlx-lm 0.31 does not have: markup around the answer, and states of a model's own.
    for marker in getattr(tokenizer, "structural_markers", ()):
        edges.setdefault(CONTENT, []).append((marker, CONTENT))
    for state, more in getattr(tokenizer, "response_transitions", {}).items():
        edges.setdefault(state, []).extend((m, s) for m, s in more if tools or s != TOOL)
    return edges


def initial_state(tokenizer: Any, prompt_end: str) -> str:
    """The state in which an answer begins; templates of reasoning models often open the reasoning themselves."""
    own = getattr(tokenizer, "response_initial_state", None)
    if own:
        return str(own)
    opened = tokenizer.has_thinking and prompt_end.rstrip().endswith(tokenizer.think_start)
    return REASONING if opened else CONTENT
