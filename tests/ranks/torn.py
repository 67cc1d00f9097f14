"""A rank that ends after an error while a thread of MLX's reports lost connections, a piece of a line at a time."""

import os
import threading
import time
from types import SimpleNamespace

from dflash_mlx.ranks.group import Group


def report() -> None:
    while True:
        for piece in (b"[ring] Socket ", b"5 ", b"was closed by the peer\n"):
            os.write(2, piece)
            time.sleep(0.0001)


group = Group(SimpleNamespace(rank=lambda: 1, size=lambda: 2))  # type: ignore[arg-type]
threading.Thread(target=report, daemon=True).start()
group.fail("no memory")
