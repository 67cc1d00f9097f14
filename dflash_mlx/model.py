"""A model that `mlx_lm.load` returned, and a drafter for it, as one object with a method `generate`."""

from collections.abc import Iterator

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.generation import GenerationResponse, Prompt, generate, stream_generate
from dflash_mlx.loading import pair_around
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams


class DFlashModel:
    """`DFlashModel(*mlx_lm.load(...), draft_model=...)` answers prompts as the model does, and sooner.

    draft_model, method: the drafter and how to draft, as for `load_pair`. The model keeps its weights and their
    precision; with kernels=False its layers compute as before, too. `pair` is what `load_pair` gives. Raises what
    `load_pair` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        *,
        draft_model: str | None = None,
        method: str = "auto",
        kernels: bool = True,
    ) -> None:
        self.pair = pair_around(model, tokenizer, draft_model=draft_model, method=method, kernels=kernels)
        # What has been measured for a config is kept with its pair.
        self._configured: dict[DFlashConfig, ModelPair] = {}

    def generate(
        self, prompt: Prompt, config: DFlashConfig | None = None, params: SamplingParams | None = None
    ) -> GenerationResponse:
        """The whole answer. prompt, params: as for `generation.generate`; config: how to draft, by default in one step.

        Raises PromptError and UsageError.
        """
        return generate(self._pair_for(config), prompt, params)

    def stream_generate(
        self, prompt: Prompt, config: DFlashConfig | None = None, params: SamplingParams | None = None
    ) -> Iterator[GenerationResponse]:
        """The same, a response for each round."""
        return stream_generate(self._pair_for(config), prompt, params)

    def _pair_for(self, config: DFlashConfig | None) -> ModelPair:
        if config is None:
            return self.pair
        if config not in self._configured:
            self._configured[config] = self.pair.with_config(config)
        return self._configured[config]
