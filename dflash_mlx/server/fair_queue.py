"""Who is next: owners take turns, and each owner's jobs keep their order."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within an owner; one of each owner in turn. Not safe for threads by itself."""

    def __init__(self) -> None:
        # The owner at the front is the next to be served.
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def push(self, owner: str, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def peek(self) -> T | None:
        """What `pop` would take."""
        for items in self._waiting.values():
            return items[0]
        return None

    def pop(self) -> T:
        owner, items = next(iter(self._waiting.items()))
        item = items.popleft()
        del self._waiting[owner]
        if items:
            self._waiting[owner] = items
        return item

    def remove(self, owner: str, item: T) -> bool:
        """Take an item out wherever it stands; False if it is not there."""
        items = self._waiting.get(owner, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[owner]
        return True

    def clear(self) -> list[T]:
        """Take everything out."""
        everything = [item for items in self._waiting.values() for item in items]
        self._waiting.clear()
        return everything
