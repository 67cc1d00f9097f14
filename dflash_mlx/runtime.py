"""Facts about this machine: the backend MLX runs on, its memory, and the fast BLAS on Linux."""


def load_fast_blas() -> str | None:
    return None
