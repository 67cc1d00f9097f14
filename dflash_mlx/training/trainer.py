"""Stage 2: the training itself, from a state that survives a kill at any moment."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.targets.target import Target
from dflash_mlx.training.batches import Batch, Blocks, Place, Prefetch, training_batches
from dflash_mlx.training.checkpoint import TrainState, budget_share, save_state, weights
from dflash_mlx.training.evaluate import Replay, replay
from dflash_mlx.training.forward import draft_hidden, target_features
from dflash_mlx.training.loss import candidate_losses, labels_of, weighted_loss
from dflash_mlx.training.optimizers import learning_rate, make_optimizer
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.selector import SHARE, previous_tokens, selector_losses
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.trees import Tree

# Steps that may be on their way at once; then the host waits for the oldest one's loss.
_IN_FLIGHT = 3
_LOG_EVERY = 50
_HISTORY_POINTS = 400


@dataclass
class Trainer:
    """Trains a drafter's weights on conversations. `run` until the budget or a deadline ends."""

    target: Target
    drafter: DFlashDrafter
    options: TrainOptions
    state: TrainState
    state_path: Path
    compute_dtype: mx.Dtype
    micro_batch: int
    chunk: int

    def __post_init__(self) -> None:
        self._gradients, self._apply = make_step(
            self.target,
            self.drafter,
            self.options,
            compute_dtype=self.compute_dtype,
            chunk=self.chunk,
            feature_sizes=self.state.feature_sizes,
        )

    def run(
        self,
        training: list[Conversation],
        held_out: list[Conversation],
        *,
        deadline: float | None,
        progress: Progress,
    ) -> bool:
        """Train until the budget is spent (True) or `deadline` (time.monotonic()) is reached (False).

        The state is saved every `checkpoint_seconds` and at the end.
        """
        state, options = self.state, self.options
        if state.conversations != len(training):
            # Another set of conversations has another order.
            fresh = state.conversations == 0
            state.place, state.conversations = Place(0 if fresh else state.place.epoch + 1, 0), len(training)
        began = time.monotonic() - state.seconds
        saved = evaluated = time.monotonic()
        pending: deque[mx.array] = deque()
        recent: list[float] = []
        source = training_batches(
            training,
            state.place,
            batch_size=options.batch_size,
            micro_batch=self.micro_batch,
            blocks=Blocks(options.anchors, self.drafter.config.block_size, options.small_blocks),
            longest=options.max_length,
            seed=options.seed,
        )
        with Prefetch(source) as batches:
            for place, parts in batches:
                now = time.monotonic()
                state.seconds = now - began
                share = budget_share(options, state)
                stopped = deadline is not None and now >= deadline
                if share >= 1 or stopped:
                    break
                pending.append(self._step(parts, learning_rate(options, share=share, step=state.step)))
                state.step, state.place = state.step + 1, place
                if len(pending) >= _IN_FLIGHT:
                    recent.append(_number(pending.popleft()))
                if state.step % _LOG_EVERY == 0:
                    self._log(recent, progress, share)
                if now - evaluated >= options.eval_seconds:
                    self.evaluate(held_out[: options.eval_conversations], progress)
                    evaluated = time.monotonic()
                if now - saved >= options.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        recent += [_number(loss) for loss in pending]
        self._log(recent, progress, share)
        state.seconds = time.monotonic() - began
        self.save()
        return share >= 1

    def _step(self, parts: list[Batch], rate: float) -> mx.array:
        """One update from the parts of a batch. Returns the loss, not yet computed."""
        total_loss: mx.array | None = None
        gradients: Tree | None = None
        for part in parts:
            loss, more = self._gradients(self.state.parameters, *part.arrays())
            if gradients is None or total_loss is None:
                total_loss, gradients = loss, more
            else:
                total_loss, gradients = total_loss + loss, tree_map(mx.add, gradients, more)
                # One part's activations at a time.
                mx.eval(total_loss, gradients)
        assert total_loss is not None
        scale = 1.0 / len(parts)
        self.state.parameters, self.state.optimizer = self._apply(
            self.state.parameters, self.state.optimizer, gradients, mx.array(rate), mx.array(scale)
        )
        total_loss = total_loss * scale
        mx.async_eval(self.state.parameters, self.state.optimizer, total_loss)
        return total_loss

    def evaluate(self, held_out: list[Conversation], progress: Progress) -> Replay | None:
        """Replay acceptance of the present weights; kept in the state's history."""
        self.load_weights()
        result = replay(self.target, self.drafter, held_out, longest=self.options.max_length, chunk=self.chunk)
        if result is not None:
            self.state.replays.append({"step": self.state.step, "seconds": self.state.seconds, **result.to_json()})
            progress.say(
                f"step {self.state.step}: acceptance length {result.mean_acceptance_length:.3f} "
                f"on {result.conversations} held-out answers"
            )
        return result

    def load_weights(self) -> None:
        """Put the present weights into the drafter, in the compute dtype."""
        self.drafter.update(weights(self.state.parameters, self.state.feature_sizes, self.compute_dtype))
        mx.eval(self.drafter.parameters())

    def save(self) -> None:
        save_state(self.state_path, self.state)

    def _log(self, recent: list[float], progress: Progress, share: float) -> None:
        if not recent:
            return
        loss = sum(recent) / len(recent)
        recent.clear()
        state = self.state
        state.losses.append([state.step, round(state.seconds, 2), round(loss, 5)])
        if len(state.losses) > _HISTORY_POINTS:
            state.losses = state.losses[::2]
        rate = state.step / max(state.seconds, 1e-9)
        progress.update(share, f"step {state.step:,}, loss {loss:.4f}, {rate:.2f} steps/s")


def make_step(
    target: Target,
    drafter: DFlashDrafter,
    options: TrainOptions,
    *,
    compute_dtype: mx.Dtype,
    chunk: int,
    feature_sizes: mx.array | None = None,
) -> tuple[Callable[..., tuple[mx.array, Tree]], Callable[..., tuple[Tree, Tree]]]:
    """Two functions. Not compiled: on CUDA compiling them took a minute for each sequence length, a step 0.16 s.

    gradients(parameters, tokens (B, T), anchors, ends, sizes (B, A)) -> loss, gradients
    apply(parameters, optimizer state, gradients, learning rate, gradient scale) -> parameters, optimizer state
    """
    optimizer: optim.Optimizer = make_optimizer(options)

    def loss_of(parameters: Tree, tokens: mx.array, anchors: mx.array, ends: mx.array, sizes: mx.array) -> mx.array:
        features = target_features(target, tokens, drafter.config.target_layer_ids)
        return block_loss(
            target,
            drafter,
            weights(parameters, feature_sizes, compute_dtype),
            features.astype(compute_dtype),
            tokens,
            anchors,
            ends,
            sizes,
            options=options,
            chunk=chunk,
        )

    def apply(parameters: Tree, state: Tree, gradients: Tree, rate: mx.array, scale: mx.array) -> tuple[Tree, Tree]:
        gradients = tree_map(lambda g: g * scale, gradients)
        gradients, _ = optim.clip_grad_norm(gradients, options.clip)
        optimizer.state = state
        optimizer.learning_rate = rate
        return optimizer.apply_gradients(gradients, parameters), optimizer.state

    return mx.value_and_grad(loss_of), apply


def block_loss(
    target: Target,
    drafter: DFlashDrafter,
    parameters: Tree,
    features: mx.array,
    tokens: mx.array,
    anchors: mx.array,
    ends: mx.array,
    sizes: mx.array,
    *,
    options: TrainOptions,
    chunk: int,
) -> mx.array:
    """The training loss of the drafter with `parameters` (in the compute dtype) given the target's features.

    That of DFlash 2 holds its selector's, too (`training/selector.py`).

    features: (B, T, taps * D); tokens: (B, T); anchors, ends, sizes: (B, A), as in `batches.Batch`.
    """
    drafter.update(parameters)
    block = drafter.config.block_size
    labels, valid = labels_of(tokens, anchors, ends, block)
    anchor_tokens = mx.take_along_axis(tokens, anchors, axis=1)
    hidden = draft_hidden(drafter, target.embed, features, anchor_tokens, anchors, sizes)[:, :, 1:]
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    selector = drafter.candidate_selector if isinstance(drafter, DFlash2Drafter) else None
    losses, *best = candidate_losses(
        lambda h: drafter.adjust_logits(target.head(h)),
        None if selector is None else selector.candidates,
        rows,
        wanted,
        chunk=chunk,
    )
    more = None
    if selector is not None:
        columns, unary = best
        previous = previous_tokens(anchor_tokens, labels).reshape(-1)
        chosen = selector_losses(selector, rows, columns, unary, previous, wanted, chunk=chunk)
        more = SHARE * chosen.reshape(labels.shape)
    return weighted_loss(
        losses.reshape(labels.shape),
        valid,
        kind=options.weights,
        alpha=options.alpha,
        gamma=options.decay(block),
        more=more,
    )


def _number(x: mx.array) -> float:
    """Wait for a scalar."""
    value: Any = x.item()
    return float(value)
