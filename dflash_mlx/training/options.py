"""Everything a training run can be told, checked in one place."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_mlx.drafters.config import DFLASH2_FIELDS
from dflash_mlx.errors import UsageError

Thinking = Literal["auto", "on", "off"]
Optimizer = Literal["adamw", "muon"]
Weights = Literal["dpace", "decay"]
Heads = Literal["dflash", "dflash2"]

# Options that decide what a stage makes. A rerun with other values cannot continue that stage's state; budgets,
# batch sizes of the device and the like are free to change.
_DATA_KEYS = (
    "max_length",
    "max_user_tokens",
    "greedy_share",
    "turns",
    "topics",
    "topics_share",
    "prompts",
    "conversations",
    "thinking",
    "loop_share",
    "seed",
)
_TRAINING_KEYS = (
    "heads",
    *DFLASH2_FIELDS,
    "layers",
    "block_size",
    "taps",
    "sliding_window",
    "mask_token",
    "init_from",
    "learning_rate",
    "batch_size",
    "anchors",
    "small_blocks",
    "optimizer",
    "weights",
    "alpha",
    "gamma",
    "warmup",
    "weight_decay",
    "clip",
    "holdout",
    "seed",
)
_FILES = ("topics", "prompts", "conversations")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `dflash-mlx train`. Times are in minutes of wall clock; lengths are in tokens.

    Exactly one of `model` (a folder or Hub id) and `pair` (a registered pair, whose target is taken). Everything is
    kept below `out`; the same options continue what is there. Raises UsageError for values that cannot be used.
    """

    out: Path
    model: str | None = None
    pair: str | None = None
    dtype: str = "auto"
    seed: int = 0
    stop_after_minutes: float | None = None

    # The data.
    data_minutes: float | None = None
    data_tokens: int | None = None
    data_batch: int | None = None
    max_length: int = 512
    max_user_tokens: int = 128
    greedy_share: float = 0.75
    turns: int = 1
    topics: Path | None = None
    topics_share: float = 0.5
    prompts: Path | None = None
    conversations: Path | None = None
    thinking: Thinking = "auto"
    loop_share: float = 0.1

    # The drafter. `taps` are 0-based target layers; None places `num_taps` of them by the paper's rule. The sizes of
    # DFlash 2's parts are chosen by those of the drafter where they are None (`config.with_dflash2_parts`).
    heads: Heads = "dflash"
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    layers: int = 5
    block_size: int = 16
    taps: tuple[int, ...] | None = None
    num_taps: int = 5
    sliding_window: int | None = None
    mask_token: int | None = None
    init_from: Path | None = None

    # The training. `micro_batch` sequences fit the device at once; None finds out.
    minutes: float | None = None
    steps: int | None = None
    learning_rate: float = 8e-4
    batch_size: int = 48
    micro_batch: int | None = None
    anchors: int = 64
    small_blocks: float = 0.5
    optimizer: Optimizer = "adamw"
    weights: Weights = "dpace"
    alpha: float = 0.5
    gamma: float | None = None
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    holdout: float = 0.02
    checkpoint_seconds: float = 60.0
    eval_seconds: float = 120.0
    eval_conversations: int = 64

    # Measuring and export.
    measure: int = 200
    measure_tokens: int = 256
    quantize: int | None = None
    draft_vocabulary: int | None = None
    license: str | None = None
    push: str | None = None

    def __post_init__(self) -> None:
        for name in ("out", "topics", "prompts", "conversations", "init_from"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value).expanduser())
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(int(tap) for tap in self.taps))
        if (self.model is None) == (self.pair is None):
            raise UsageError("name the target: either --model FOLDER-OR-HUB-ID or --pair NAME.")
        self._check_data()
        self._check_training()

    def _check_data(self) -> None:
        _require(self.max_length >= 32, "max-length", self.max_length, "at least 32 tokens")
        _require(
            4 <= self.max_user_tokens <= self.max_length // 2,
            "max-user-tokens",
            self.max_user_tokens,
            f"from 4 to half of max-length ({self.max_length // 2})",
        )
        _require(0 <= self.greedy_share <= 1, "greedy-share", self.greedy_share, "from 0 to 1")
        _require(0 < self.topics_share <= 1, "topics-share", self.topics_share, "above 0 and at most 1")
        _require(0 <= self.loop_share <= 1, "loop-share", self.loop_share, "from 0 to 1")
        _require(1 <= self.turns <= 16, "turns", self.turns, "from 1 to 16")
        for name in ("data_minutes", "data_tokens", "data_batch"):
            _require_positive(self, name)
        given = [f"--{name}" for name in _FILES if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"give one source of data; got {' and '.join(given)}.")
        for name in _FILES:
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise UsageError(f"--{name}: expected a file, found none at {path}.")
        if self.thinking not in ("auto", "on", "off"):
            raise UsageError(f"thinking should be auto, on or off; got {self.thinking!r}.")
        if self.thinking == "on" and self.turns > 1:
            raise UsageError("--thinking on goes with --turns 1: templates drop earlier thoughts from the context.")

    def _check_training(self) -> None:
        _require(2 <= self.block_size <= 64, "block-size", self.block_size, "from 2 to 64")
        _require(self.layers >= 1, "layers", self.layers, "at least 1")
        _require(self.num_taps >= 1, "number of taps", self.num_taps, "at least 1")
        _require(0 < self.holdout < 1, "holdout", self.holdout, "above 0 and below 1")
        _require(0 <= self.alpha <= 1, "alpha", self.alpha, "from 0 to 1")
        _require(0 <= self.small_blocks <= 1, "small-blocks", self.small_blocks, "from 0 to 1")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "from 0 to below 1")
        _require(self.measure >= 0, "measure", self.measure, "0 (off) or a number of prompts")
        for name in (
            *("minutes", "steps", "learning_rate", "batch_size", "micro_batch", "anchors", "gamma", "clip"),
            *("sliding_window", "stop_after_minutes", "checkpoint_seconds", "eval_seconds", "eval_conversations"),
            *("measure_tokens", "draft_vocabulary", *DFLASH2_FIELDS),
        ):
            _require_positive(self, name)
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise UsageError(f"micro-batch should divide the batch size {self.batch_size}; got {self.micro_batch}.")
        if self.heads not in ("dflash", "dflash2"):
            raise UsageError(f"heads should be dflash or dflash2; got {self.heads!r}.")
        sizes = [f"--{name.replace('_', '-')}" for name in DFLASH2_FIELDS if getattr(self, name) is not None]
        if sizes and self.heads == "dflash":
            raise UsageError(f"{' and '.join(sizes)} can only be chosen with --heads dflash2.")
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer should be adamw or muon; got {self.optimizer!r}.")
        if self.weights not in ("dpace", "decay"):
            raise UsageError(f"weights should be dpace or decay; got {self.weights!r}.")
        if self.quantize is not None and self.quantize not in (2, 3, 4, 5, 6, 8):
            raise UsageError(f"quantize should be 2, 3, 4, 5, 6 or 8 bits; got {self.quantize}.")
        if self.init_from is not None and not (self.init_from / "config.json").is_file():
            raise UsageError(f"--init-from: expected a drafter's folder, found no config.json in {self.init_from}.")
        if self.init_from is not None and self.init_from.resolve() == self.out.resolve():
            raise UsageError("--init-from is --out itself, which the export would overwrite; choose another --out.")

    @property
    def data_budget(self) -> tuple[float | None, int | None]:
        """(minutes, tokens) of data, whichever is reached first; 30 minutes when nothing was said."""
        if self.data_minutes is None and self.data_tokens is None:
            return 30.0, None
        return self.data_minutes, self.data_tokens

    @property
    def training_budget(self) -> tuple[float | None, int | None]:
        """(minutes, steps) of training, whichever is reached first; 60 minutes when nothing was said."""
        if self.minutes is None and self.steps is None:
            return 60.0, None
        return self.minutes, self.steps

    def decay(self, block_size: int) -> float:
        """The paper's gamma of the exponential weights: 7, 5, 4 for blocks of 16, 10, 8."""
        return self.gamma if self.gamma is not None else max(2.0, {8: 4.0, 10: 5.0}.get(block_size, 7.0))

    def data_identity(self) -> dict[str, Any]:
        return self._identity(_DATA_KEYS)

    def training_identity(self) -> dict[str, Any]:
        return self._identity(_TRAINING_KEYS)

    def _identity(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Option values as JSON. Files count by content, so that moving one changes nothing."""
        values = asdict(self)
        return {key: _file_digest(values[key]) if key in _FILES else _plain(values[key]) for key in keys}


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name} should be {expected}; got {value!r}.")


def _require_positive(options: TrainOptions, name: str) -> None:
    value = getattr(options, name)
    _require(value is None or value > 0, name.replace("_", "-"), value, "above 0")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return list(value) if isinstance(value, tuple) else value


def _file_digest(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
