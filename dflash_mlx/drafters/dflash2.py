"""The DFlash 2 drafter: DFlash with local convolutions in its layers and a selector of paths after its head.

The head's best tokens at each position are each likely, but need not follow one another. The selector scores each
candidate by the one chosen before it, so that the drafts are one path. Format and figures: "Keep Drafting Parallel"
(Inco AI, 2026) and the public checkpoints; a forward equals that of `dflash` 0.1.0.

A new one drafts as a DFlash drafter does: its convolutions pass every row on, and its selector adds nothing.
"""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.config import DraftConfig
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, TreeChooser, Writer
from dflash_mlx.drafters.dflash import DFlashDrafter, DraftLayer
from dflash_mlx.drafters.path import grow_paths, propose_path
from dflash_mlx.sampling import best_columns


class LocalConv(nn.Module):
    """A pair of causal depthwise convolutions along the block, around a sublayer: one before it and one after.

    A channel's kernel is a fixed one plus one that its row's input chooses for the channel's group. Row 0 (the anchor)
    has nothing before it: blocks do not see each other, and nothing is cached.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        # The tap at the row itself is 1.
        self.base_kernel = mx.zeros((2, self.taps, config.hidden_size)).at[:, 0].add(1.0)
        groups = config.hidden_size // config.conv_group_size
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def kernels(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x (blocks, B, D), the sublayer's normed input -> the kernels before and after it, (taps, *x.shape) each."""
        batch, length, _ = x.shape
        by_group = self.kernel_projection(x).reshape(batch, length, 2, self.taps, -1)
        chosen = mx.repeat(by_group, self.group_size, axis=-1).transpose(2, 3, 0, 1, 4)
        before, behind = chosen + self.base_kernel[:, :, None, None].astype(x.dtype)
        return before, behind

    def __call__(self, x: mx.array, kernel: mx.array) -> mx.array:
        """Row i becomes the sum over taps t of kernel[t, :, i] * x[:, i - t]."""
        out = kernel[0] * x
        for t in range(1, min(self.taps, x.shape[1])):
            out = out + kernel[t] * mx.pad(x[:, :-t], [(0, 0), (t, 0), (0, 0)])
        return out


class DraftLayer2(DraftLayer):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.attention_conv = LocalConv(config)
        self.mlp_conv = LocalConv(config)

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        normed = self.input_layernorm(x)
        before, behind = self.attention_conv.kernels(normed)
        h = x + self.attention_conv(attend(self.attention_conv(normed, before)), behind)
        normed = self.post_attention_layernorm(h)
        before, behind = self.mlp_conv.kernels(normed)
        return h + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), behind)


class PathSelector(nn.Module):
    """Scores of the tokens that may follow a chosen one: score(a, b) = logit(b) + <A[a] * W h, B[b]>."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        # Of the three factors one may be 0 and the others still learn; a successor never met keeps a score of 0. Adam
        # changes numbers at a rate that their size does not matter for, so that large codes make scores grow fast.
        self.predecessor_codebook.weight = mx.random.normal(self.predecessor_codebook.weight.shape)
        self.successor_codebook.weight = mx.zeros_like(self.successor_codebook.weight)

    def candidates(self, logits: mx.array) -> mx.array:
        """The columns of the top_k best logits, (W, n) -> (W, top_k), in no order."""
        return best_columns(logits, self.top_k)

    def links(self, hidden: mx.array, candidates: mx.array) -> mx.array:
        """What a predecessor's code is multiplied by to score its successors: (W, top_k, rank), float32.

        hidden: (W, D), final hidden states of the positions; candidates: (W, top_k) token ids.
        """
        successors = self.successor_codebook(candidates).astype(mx.float32)
        return self.hidden_projection(hidden).astype(mx.float32)[:, None] * successors

    def scores(self, unary: mx.array, links: mx.array, previous: mx.array) -> mx.array:
        """Scores (..., top_k) of the positions' candidates after the tokens `previous` (...), in float32.

        unary: (..., top_k), their logits; links: (..., top_k, rank), as `links` gives them. Axes of 1 are repeated.
        """
        codes = self.predecessor_codebook(previous).astype(mx.float32)
        return unary.astype(mx.float32) + (links * codes[..., None, :]).sum(axis=-1)


class DFlash2Drafter(DFlashDrafter):
    """A DFlash 2 drafter: in the decode loop, `candidate_selector` chooses the drafts (`path.py`)."""

    layer_class = DraftLayer2

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.candidate_selector = PathSelector(config)

    def choose(
        self,
        writers: Sequence[Writer],
        logits: mx.array,
        hidden: mx.array,
        *,
        anchors: mx.array,
        position: mx.array,
        vocabulary: DraftVocabulary | None,
        tree: bool,
    ) -> Drafted:
        vocabulary = vocabulary or DraftVocabulary(mx.arange(logits.shape[-1]), self.config.vocab_size)
        if tree:
            [writer] = writers
            return grow_paths(
                self.candidate_selector,
                cast(TreeChooser, writer.strategy),
                hidden=hidden[0],
                logits=logits[0],
                anchor=anchors,
                position=position,
                vocabulary=vocabulary,
            )
        proposals = [
            propose_path(
                self.candidate_selector,
                writer.strategy,
                hidden=hidden[row],
                logits=logits[row],
                anchor=anchors[row : row + 1],
                position=position[row],
                vocabulary=vocabulary,
            )
            for row, writer in enumerate(writers)
        ]
        return Drafted.of_proposals(proposals, logits)
