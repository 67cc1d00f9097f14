"""Several machines that compute one model together: who they are, and how the others repeat what rank 0 does."""

import os


def started_together() -> bool:
    """Whether MLX's launcher has started this process, perhaps with others."""
    return "MLX_RANK" in os.environ
