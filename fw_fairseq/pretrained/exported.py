"""A decoder of transformers with heads of this project, as a folder of transformers holds it; ``fw-export-hf`` writes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel

from .adapter import adapt
from .heads import Sizes

OF_THE_DECODER = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class ConvertedConfig(PretrainedConfig):
    """``text_config``: the decoder's own configuration. ``sizes``: what ``probe`` found, by layer. The others are arguments of
    ``adapt``."""

    model_type = "fw_fairseq_converted"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        text_config: Any = None,
        mixers: list[str] | None = None,
        mixer_options: dict | None = None,
        memory_window: int = 0,
        drop_rotary: bool = False,
        sizes: list | None = None,
        **given,
    ) -> None:
        values = {"model_type": "gpt2"} if text_config is None else text_config
        if isinstance(values, dict):
            values = AutoConfig.for_model(**values)
        self.text_config, self.mixers, self.mixer_options = values, mixers or [], mixer_options or {}
        self.memory_window, self.drop_rotary, self.sizes = memory_window, drop_rotary, sizes or []
        own: dict[str, Any] = {name: getattr(values, name, None) for name in (*SPECIAL, "tie_word_embeddings")}
        super().__init__(**own | given)

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_DECODER and "text_config" in self.__dict__:
            return getattr(self.text_config, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")


class ConvertedForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder, whose cache holds the states of converted layers, so that they take the same time for every token."""

    config_class = ConvertedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _is_stateful = True  # a state cannot take tokens back

    def __init__(self, config: ConvertedConfig) -> None:
        super().__init__(config)
        self.model = AutoModelForCausalLM.from_config(config.text_config)
        sizes = {layer: Sizes(*numbers) for layer, numbers in enumerate(config.sizes)}
        adapt(self.model, config.mixers, config.mixer_options, config.memory_window, config.drop_rotary, sizes)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others,
    ) -> Any:
        """As that of the decoder."""
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            labels=labels, use_cache=use_cache, logits_to_keep=logits_to_keep, **others,
        )  # fmt: skip

    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict:
        return self.model.prepare_inputs_for_generation(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.set_output_embeddings(value)
