"""Several machines that compute one model together: who they are, and how the others repeat what rank 0 does."""

import os

# What MLX's launcher, and MPI's, tell the processes that they start.
_STARTED_BY = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def started_together() -> bool:
    """Whether a launcher has started this process, perhaps with others."""
    return any(name in os.environ for name in _STARTED_BY)
