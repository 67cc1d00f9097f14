"""What the states of all drafters do alike that keep something of each answer in a row."""

from collections.abc import Sequence
from typing import Any

from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.contract import Continuation, Outlook, Writer


class RowState:
    """A part of `contract.DraftState`. `rows` are caches like the drafter's own, of any number of answers."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def outlook(self, writers: Sequence[Writer]) -> Outlook:
        return Outlook.DEVICE

    def told(self, writer: Writer) -> float:
        return 0.0

    def continuation(self, writer: Writer, places: int) -> Continuation | None:
        return None

    def withdraw(self) -> None:
        """Nothing of drafts is kept."""

    def absorb(self) -> None:
        """Work off what was kept and waits, so that the caches hold it."""

    def layers(self) -> list[Any]:
        self.absorb()
        return self.rows.layers

    def add(self, count: int) -> None:
        self.rows.add(count)

    def take_over(self, other: "RowState", places: Sequence[int]) -> None:
        self.rows.take_over(other.rows, places)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.keep(rows)

    def give_back(self, row: int, length: int, caches: list[Any]) -> None:
        self.absorb()
        self.rows.give_back(row, length, caches)
