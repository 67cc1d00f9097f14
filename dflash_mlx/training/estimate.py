"""What a run will take, before it starts: memory and disk; and how much of a batch fits the device at once."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.drafters.config import DraftConfig
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import DFlashError
from dflash_mlx.targets.target import Target
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.trees import count_bytes, count_parameters

# Part of the memory that a run may plan with; the rest is for what the estimate does not know.
_USABLE = 0.7
_CHUNK_BYTES = 0.06
_MOST_CHUNK_BYTES = 6e9


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run. `chunk` is how many rows go through the vocabulary head at once."""

    micro_batch: int
    chunk: int
    memory: float
    disk: float
    parameters: int

    def lines(self, memory_bytes: int, out: Path) -> list[str]:
        return [
            f"drafter: {self.parameters / 1e6:.1f}M parameters",
            f"memory: about {self.memory / 1e9:.1f} GB of {memory_bytes / 1e9:.0f} GB "
            f"({self.micro_batch} sequences at a time)",
            f"disk: about {self.disk / 1e9:.2f} GB of {_free(out) / 1e9:.0f} GB free in {out}",
        ]


def estimate(
    target: Target, drafter: DFlashDrafter, options: TrainOptions, *, memory_bytes: int, itemsize: int
) -> Estimate:
    """Plan a run. itemsize: bytes of a compute value. Raises DFlashError where it cannot fit."""
    parameters = count_parameters(drafter.parameters())
    fixed = count_bytes(target.model.parameters())
    # Masters, two moments and gradients in float32, and a copy in the compute dtype.
    fixed += parameters * (16 + itemsize)
    chunk_bytes = min(_MOST_CHUNK_BYTES, _CHUNK_BYTES * memory_bytes)
    # Logits and their gradient, and float32 values of them; to find DFlash 2's candidates they are copied once more.
    row_bytes = target.vocab_size * (8 + (3 if drafter.config.is_dflash2 else 2) * itemsize)
    chunk = max(64, int(chunk_bytes / row_bytes))
    rows = options.micro_batch or options.batch_size
    while True:
        needed = fixed + chunk * row_bytes + _activations(drafter.config, target, options, rows, itemsize)
        if needed <= _USABLE * memory_bytes or rows == 1 or options.micro_batch is not None:
            break
        rows = max(r for r in range(1, rows) if options.batch_size % r == 0)
    if needed > _USABLE * memory_bytes:
        raise DFlashError(
            f"this training needs about {needed / 1e9:.1f} GB of memory and {_USABLE * memory_bytes / 1e9:.1f} GB can "
            "be used here. Lower --anchors, --max-length, --micro-batch, --layers or --block-size, or take a quantized "
            "target."
        )
    disk = parameters * (2 * 12 + 2 * 2) + _data_bytes(target, options)
    free = _free(options.out)
    if disk > free:
        raise DFlashError(
            f"this run writes about {disk / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {options.out}. "
            "Make room, or choose another --out."
        )
    return Estimate(rows, chunk, needed, disk, parameters)


def _activations(config: DraftConfig, target: Target, options: TrainOptions, rows: int, itemsize: int) -> float:
    """Bytes that one micro-batch keeps for its backward pass, roughly."""
    blocks = rows * options.anchors
    block_rows = blocks * config.block_size
    heads = config.num_attention_heads
    scores = 3.0 * block_rows * heads * (options.max_length + config.block_size)
    streams = block_rows * (10.0 * config.hidden_size + 4 * config.intermediate_size + 4 * heads * config.head_dim)
    if config.is_dflash2:
        # Around both sublayers: the kernels before and after it, and what their taps are multiplied with and give.
        streams += block_rows * 2.0 * (4 * config.conv_kernel_size + 4) * config.hidden_size
    context = rows * options.max_length * (config.feature_size + 8.0 * config.num_key_value_heads * config.head_dim)
    through_target = rows * options.max_length * 12.0 * target.hidden_size
    through_target += 2.0 * rows * heads * options.max_length**2
    return itemsize * (config.num_hidden_layers * (scores + streams) + context + through_target)


def _data_bytes(target: Target, options: TrainOptions) -> float:
    """Tokens on disk; where only minutes are given, what the fastest machine known would write."""
    minutes, tokens = options.data_budget
    size = 2 if target.vocab_size <= 65536 else 4
    return size * float(tokens if tokens else (minutes or 0) * 60 * 20_000)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
