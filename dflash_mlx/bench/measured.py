"""What is found out after the runs: where rounds spend their time, and how near the memory's speed decoding comes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dflash_mlx.bench.analyse import rounds_of
from dflash_mlx.bench.contestants import Local
from dflash_mlx.bench.machine import memory_bandwidth
from dflash_mlx.bench.probe import bytes_a_pass, share_of_bandwidth, split_round
from dflash_mlx.bench.record import Results
from dflash_mlx.runtime import backend


def look_closer(results: Results, contestants: Mapping[str, object]) -> dict[str, Any]:
    """Measure it, for the contestants of this project; some seconds."""
    own = {name: one for name, one in contestants.items() if isinstance(one, Local)}
    bandwidth = memory_bandwidth()
    shares, splits = {}, {}
    for name, one in own.items():
        passes, seconds = _passes(results, name)
        share = share_of_bandwidth(passes * bytes_a_pass(one.pair, draft=one.draft), seconds, bandwidth)
        if share is not None:
            shares[name] = share
        split = split_round(one.pair, rounds_of(results, name)) if one.draft else None
        if split is not None:
            splits[name] = split.to_json()
    return {"bandwidth_gb_s": bandwidth / 1e9, "bandwidth_shares": shares, "splits": splits}


def _passes(results: Results, contestant: str) -> tuple[int, float]:
    """How many passes of the target there were after the first token, and how long they took together."""
    passes, seconds = 0, 0.0
    for run in (run for result in results.prompts for run in result.of(contestant)):
        passes += len(run.rounds) or run.decode_tokens
        seconds += run.decode_s
    return passes, seconds


def machine_facts(cores: int | None, *, machines: int) -> dict[str, Any]:
    """The machine, as a result names it; `machines`: among how many the target is divided, of which it is the first."""
    return {**asdict(backend()), "cpu_count": cores, "machines": machines}
