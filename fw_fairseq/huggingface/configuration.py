"""The options of exported models."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ..mixers import FastWeight

DEFAULTS: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 8, "input_size": None, "output_size": None, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "mixers": ("fast_weight",), "mixer_options": None, "activation": "relu", "normalize_before": True,
    "norm_form": "layer", "norm_eps": 1e-5, "ffn_form": "plain",
    "final_norm": True, "embedding_norm": False, "embedding_scale": 1.0, "output_scale": 1.0, "positions": "none",
    "max_position_embeddings": None, "first_position": 0, "input_bands": None, "output_bands": None, "decoding_graph": True,
    "use_cache": True, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class FastWeightHFConfig(PretrainedConfig):
    """The sizes and options of an exported model.

    ``mixers`` has one name for each layer, and ``mixer_options`` the options of FastWeightConfig. Widths and norms are as in
    fairseq's decoder. ``input_bands`` and ``output_bands`` give (words, width) of each cluster of an adaptive vocabulary.
    ``decoding_graph``: whether a GPU generates with CUDA graphs. ``use_cache``: whether the model returns a cache outside training.
    """

    model_type = "fw_fairseq"
    norm_form, norm_eps, ffn_form = "layer", 1e-5, "plain"  # of the first exports, for whose classes transformers writes __init__

    def __init__(self, tie_word_embeddings: bool = True, **given) -> None:
        own = {name: given.pop(name, default) for name, default in DEFAULTS.items()} | {"tie_word_embeddings": tie_word_embeddings}
        super().__init__(**given | {"tie_word_embeddings": tie_word_embeddings})
        own["mixers"], options = list(own["mixers"]), dict(own["mixer_options"] or {})
        if "slots" in options:  # of an export, which has the options of all mixers
            options |= FastWeight.of_before(options)
        for name, value in (own | {"mixer_options": options}).items():
            setattr(self, name, value)


class FastWeightTranslationConfig(PretrainedConfig):
    """The sizes and options of an exported translation model.

    ``encoder`` and ``decoder`` are the options of each side; the encoder's ``mixers`` are "linear" or "softmax". ``linear_cross``:
    whether the decoder looks at the source by linear attention. With ``tie_word_embeddings`` both sides have the same embeddings.
    """

    model_type = "fw_fairseq_translation"
    sub_configs = {"encoder": FastWeightHFConfig, "decoder": FastWeightHFConfig}  # noqa: RUF012

    def __init__(
        self,
        encoder: FastWeightHFConfig | dict | None = None,
        decoder: FastWeightHFConfig | dict | None = None,
        linear_cross: bool = True,
        tie_word_embeddings: bool = False,
        is_encoder_decoder: bool = True,
        use_cache: bool = True,
        **kwargs,
    ) -> None:
        self.encoder, self.decoder = (
            side if isinstance(side, FastWeightHFConfig) else FastWeightHFConfig(**defaults | (side or {}))
            for side, defaults in ((encoder, {"mixers": ["linear"]}), (decoder, {}))
        )
        self.linear_cross, self.use_cache = linear_cross, use_cache
        super().__init__(**kwargs | {"tie_word_embeddings": tie_word_embeddings, "is_encoder_decoder": is_encoder_decoder})
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # generation may ask the decoder's configuration
            if getattr(self.decoder, name) is None:
                setattr(self.decoder, name, getattr(self, name, None))

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size
