"""Growing a tree of drafts place by place, for drafters that have to read a token to say what comes after it.

At each place the likeliest paths so far are read and continued, each by its likeliest tokens (EAGLE-2, arXiv
2406.16858, section 4.1, as in EAGLE-3). Which paths these are is found on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.drafters.ranking import Ranking


@dataclass
class Grown:
    """All M drafts that were considered for W places, on the device, place by place.

    token_ids: (M,); log_probs: (M,), of each after those before it on its path. paths: (M, W), which drafts its path
    goes through, the draft itself last; M where the path is shorter. best: (W,), where the likeliest path to each place
    ends.
    """

    token_ids: mx.array
    log_probs: mx.array
    paths: mx.array
    best: mx.array

    @property
    def size(self) -> int:
        return int(self.token_ids.shape[0])


# Reads K tokens (K,), each after one of the K before, `parents` (K,), or after the anchor the first time, and ranks
# what comes after each, (K, K). visible: (K, S), which of the S tokens read so far each one continues, itself included.
Follow = Callable[[mx.array, mx.array, mx.array], Ranking]


def grow(first: Ranking, follow: Follow, places: int) -> Grown:
    """The drafts for so many places, by what the drafter says after the anchor, (1, K), and after each K drafts."""
    count = first.token_ids.shape[1]
    token_ids, log_probs, sums = [first.token_ids[0]], [first.log_probs[0]], first.log_probs[0]
    paths, best = [mx.arange(count)[:, None]], [mx.argmax(sums, keepdims=True)]
    # Of the paths that are read next: their last tokens, which of those before they continue, the drafts on them, and
    # when these were read.
    tokens, parents, read = token_ids[0], mx.zeros((count,), dtype=mx.int32), paths[0]
    beam = paths[0]
    for place in range(1, places):
        visible = (read[:, :, None] == mx.arange(place * count)).any(axis=1)
        ranking = follow(tokens, parents, visible)
        start = count + (place - 1) * count**2
        token_ids.append(ranking.token_ids.flatten())
        log_probs.append(ranking.log_probs.flatten())
        paths.append(mx.concatenate([mx.repeat(beam, count, axis=0), start + mx.arange(count**2)[:, None]], axis=1))
        sums = (sums[:, None] + ranking.log_probs).flatten()
        best.append(start + mx.argmax(sums, keepdims=True))
        chosen = mx.argpartition(-sums, count - 1)[:count]
        tokens, sums, beam, parents = token_ids[-1][chosen], sums[chosen], paths[-1][chosen], chosen // count
        read = mx.concatenate([read[parents], place * count + mx.arange(count)[:, None]], axis=1)
    size = sum(ids.shape[0] for ids in token_ids)
    whole = [mx.pad(path, [(0, 0), (0, places - path.shape[1])], constant_values=size) for path in paths]
    return Grown(*(mx.concatenate(parts) for parts in (token_ids, log_probs, whole, best)))
