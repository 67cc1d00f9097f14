"""What rounds cost, measured in as little time as can be: seconds for each of hundreds of tiny pairs add up.

As a program it does so and runs a module, which it takes with its arguments as `python -m` does.
"""

import runpy
import sys
from collections.abc import Callable
from typing import Any

from dflash_mlx.policy import costs, group_costs, timing


def measure_quickly(change: Callable[[Any, str, Any], None]) -> None:
    """change: sets an attribute, as `setattr` does."""
    change(timing, "_SECONDS_A_WIDTH", 0.01)
    change(timing, "_SECONDS_A_WAITING_KIND", 0.01)
    change(costs, "_SECONDS_TO_SPEND", 0.5)
    change(costs, "_AGREEING", 1)
    change(group_costs, "_SECONDS_A_TURN", 0.01)
    change(group_costs, "_SLOW", 0.0)
    change(group_costs, "_SECONDS_TO_SPEND", 0.5)


if __name__ == "__main__":
    measure_quickly(setattr)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
