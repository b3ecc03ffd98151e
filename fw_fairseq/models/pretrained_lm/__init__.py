"""pretrained_lm: a pretrained decoder of transformers, of any architecture, whose attention is left or replaced layer by layer."""

import logging
from argparse import ArgumentParser
from dataclasses import dataclass, fields
from typing import Any, Optional

from fairseq.models import FairseqLanguageModel, register_model
from fairseq.tasks.fairseq_task import FairseqTask
from omegaconf import II
from torch import Tensor

from ...config import FastWeightConfig, command_line, layer_mixers, option, options_read, read_config, refuse_without_effect
from ...errors import Mistake
from ...feature_maps import FEATURE_MAPS
from ...mixers.options import MixerOptions
from ...pretrained.heads import MemoryHeads
from ...pretrained.low_rank import ADAPTER, add_adapters, merged
from ..model_options import NamesWhatDiffers, add_opposites

logger = logging.getLogger(__name__)


@command_line
@dataclass
class PretrainedLanguageModelConfig(FastWeightConfig):
    """The options of pretrained_lm."""

    feature_map: str = option("relu", "the map that queries and keys pass through", choices=FEATURE_MAPS)
    pretrained: str = option(
        "", "folder of a causal language model, as transformers saves it or with one GGUF file; checkpoints do not need it"
    )
    pretrained_config: str = option("", "the model's configuration, which checkpoints set")
    memory_window: int = option(
        0, "N: softmax reads the last N tokens, and the memory those before them; 0: the memory reads all", 0
    )
    drop_rotary: bool = option(False, "no rotary positions in converted layers")
    decoder_layers: int = option(0, "number of layers of the pretrained model", 0)
    checkpoint_activations: bool = option(False, "recompute activations in the backward, which takes less memory")
    options_from: str = option(
        "", "a checkpoint of pretrained_lm, for example one that fw-convert wrote, whose options the new model takes over"
    )
    train_only: str = option(
        "all",
        "new: train only what takes the place of softmax: gates, feature maps, shares; attention: all attention layers;"
        " adapters: matrices of low rank beside the projections of attention",
        choices=("all", "attention", "new", "adapters"),
    )
    adapter_rank: int = option(8, "the rank of --train-only adapters", 1)
    tokens_per_sample: int = II("task.tokens_per_sample")


@register_model("pretrained_lm", dataclass=PretrainedLanguageModelConfig)
class PretrainedLanguageModel(NamesWhatDiffers, FairseqLanguageModel):
    """A decoder of transformers as a language model of fairseq."""

    num_updates = 0  # for criterions that change during training
    found_options: dict  # what checkpoints need to build the model without the folder

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds all options, each switch with its opposite."""
        super().add_args(parser)
        add_opposites(parser, [f.name for f in fields(PretrainedLanguageModelConfig)])

    @classmethod
    def build_model(cls, args: Any, task: FairseqTask) -> "PretrainedLanguageModel":
        config = read_config(PretrainedLanguageModelConfig, args)
        if not config.pretrained and not config.pretrained_config:
            raise Mistake("--pretrained is missing; it is the folder of a causal language model of transformers")
        model = cls(build_decoder(config, task.source_dictionary))
        model.found_options = {
            "pretrained_config": model.decoder.configuration,
            "decoder_layers": len(model.decoder.layer_mixers),
        }
        if config.train_only != "all":
            model.freeze_all_but(config.train_only, config.adapter_rank)
        logger.info(model.describe_state())
        return model

    def options_read(self, args: Any) -> set[str]:
        """The names of this project's options that a part of the model reads."""
        read = {"mixer", "mixer_pattern", "pretrained", "pretrained_config", "decoder_layers", "options_from", "train_only"}
        read |= {"checkpoint_activations", "tokens_per_sample"}
        read |= {"adapter_rank"} if getattr(args, "train_only", "") == "adapters" else set()
        converted = {*self.decoder.layer_mixers} - {"softmax"}
        read |= {"drop_rotary"} if converted and self.decoder.relative else set()
        read |= {"local_window"} if "local_attention" in converted else set()
        if "fast_weight" not in converted:
            return read
        config = read_config(PretrainedLanguageModelConfig, args)
        memories = {*MemoryHeads.settings} & options_read(config, ["fast_weight"])
        return read | memories | {*FEATURE_MAPS[str(config.feature_map)].options} | {"memory_window"}

    def refuse_without_effect(self, args: Any) -> None:
        """Refuses options that no part of a new model reads."""
        refuse_without_effect(args, PretrainedLanguageModelConfig, self.options_read(args))

    def forward(self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None, **kwargs) -> tuple:
        return self.decoder(src_tokens, **kwargs)

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def state_size(self) -> int:
        """The number of numbers that the converted layers keep of one sequence."""
        return sum(heads.state_size() for heads in self.decoder.heads.values())

    def describe_state(self) -> str:
        """One line for the log."""
        softmax = len(self.decoder.layer_mixers) - len(self.decoder.heads)
        growing = f", and the keys and values of {softmax} softmax layers more with each token" if softmax else ""
        return f"state size: {self.state_size() / 1e6:.4g} million numbers for a sequence{growing}"

    def freeze_all_but(self, trained: str, rank: int = 0) -> None:
        """Freezes all parameters but those of heads, of attention, or of adapters, which are made here."""
        self.requires_grad_(False)
        if trained == "adapters":
            return add_adapters(self.decoder.attentions, rank)
        for part in self.decoder.attentions if trained == "attention" else self.decoder.heads.values():
            part.requires_grad_(True)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise Mistake("--train-only new leaves nothing to train, since the attention of all layers is unchanged")

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Adapters that a checkpoint lacks stay as they are; those of a checkpoint are merged into a model without."""
        super().upgrade_state_dict(state_dict)
        own = {name: value for name, value in self.state_dict().items() if ADAPTER in name}
        given = own | state_dict if own else merged(state_dict)
        state_dict.clear()
        state_dict.update(given)


def build_decoder(config: PretrainedLanguageModelConfig, dictionary: Any) -> Any:
    """The decoder. transformers is imported here, since fairseq does without it."""
    try:
        from ...pretrained import adapter, folders
        from .decoder import PretrainedDecoder
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Mistake(
            "transformers is missing; install fw_fairseq with the extra [huggingface], on Python 3.10 or later"
        ) from error
    line = config.pretrained_config
    library = folders.empty_model(line) if line else folders.load_model(config.pretrained)
    mixers = layer_mixers(config, len(adapter.attentions(library)))
    options = MixerOptions.of(config)
    sizes = adapter.adapt(library, mixers, options, config.memory_window, config.drop_rotary)
    values = {name: getattr(options, name) for name in (*MemoryHeads.settings, "local_window")}
    arguments = {
        "mixers": mixers,
        "mixer_options": {name: value if isinstance(value, (int, float)) else str(value) for name, value in values.items()},
        "memory_window": config.memory_window,
        "drop_rotary": config.drop_rotary,
        "sizes": [[*sizes[layer]] for layer in sorted(sizes)],
    }
    if config.checkpoint_activations:
        library.gradient_checkpointing_enable({"use_reentrant": False})
    return PretrainedDecoder(dictionary, library, arguments)
