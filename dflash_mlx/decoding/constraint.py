"""Structured output: which tokens an answer may continue with."""

from typing import Protocol


class Constraint(Protocol):
    """What an answer's text must look like."""
