"""The options of an exported model."""

from __future__ import annotations

from transformers import PretrainedConfig


class FastWeightHFConfig(PretrainedConfig):
    """The sizes and options of an exported model.

    ``mixers`` has one name for each layer, and ``mixer_options`` the options of FastWeightConfig. Widths and norms are as in
    fairseq's decoder. ``input_bands`` and ``output_bands`` give (words, width) of each cluster of an adaptive vocabulary.
    ``decoding_graph``: whether a GPU generates with CUDA graphs.
    """

    model_type = "fw_fairseq"

    def __init__(
        self,
        vocab_size=8,
        hidden_size=8,
        input_size=None,
        output_size=None,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        mixers=("fast_weight",),
        mixer_options=None,
        activation="relu",
        normalize_before=True,
        final_norm=True,
        embedding_norm=False,
        embedding_scale=1.0,
        output_scale=1.0,
        positions="none",
        max_position_embeddings=None,
        first_position=0,
        input_bands=None,
        output_bands=None,
        tie_word_embeddings=True,
        decoding_graph=True,
        **kwargs,
    ):
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        for name, value in given.items():
            setattr(self, name, value)
        self.mixers, self.mixer_options = list(mixers), dict(mixer_options or {})
