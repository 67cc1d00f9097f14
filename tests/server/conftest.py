"""A tiny pair, and workers that are closed when the test ends."""

import pytest
from serving import wait_until
from test_generation import make_pair

from dflash_mlx.server.worker import Worker


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture
def serve(pair):
    """serve(**options) starts a worker."""
    workers = []

    def start(**options):
        worker = Worker(pair, **{"width": 4, "max_queue": 500} | options)
        workers.append(worker)
        worker.start()
        wait_until(lambda: worker.status().ready)
        return worker

    yield start
    for worker in workers:
        worker.close(timeout=0.0)
