"""Loading checkpoints with other options than those of training."""

from __future__ import annotations

import re

from fairseq.utils import safe_getattr
from omegaconf import ListConfig

from ..config import FastWeightConfig, layer_mixers, mixer_options, read_config
from ..errors import Mistake
from ..mixers.pooled import layer_window
from .mixing_options import check_kept


def keep_layers(args, kind: type = FastWeightConfig) -> None:
    """Gives the layers that --decoder-layers-to-keep keeps the mixers and windows that they had in the whole model.

    It is called before fairseq reduces ``decoder_layers`` to the number of layers kept.
    """
    kept, layers = safe_getattr(args, "decoder_layers_to_keep", None), args.decoder_layers
    if not kept:
        return
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", kept):
        raise Mistake(f"--decoder-layers-to-keep is {kept!r}; it must be numbers of layers, separated by commas")
    numbers = sorted(map(int, kept.split(",")))
    if not {*numbers} <= {*range(layers)}:
        raise Mistake(f"--decoder-layers-to-keep is {kept!r}; the model has layers 0 to {layers - 1}")
    if len({*numbers}) < len(numbers):
        raise Mistake(f"--decoder-layers-to-keep is {kept!r}; each layer can be kept only once")
    if len(numbers) == layers:
        return
    config = read_config(kind, args)
    check_kept(config.value_mixing_rank, numbers)
    mixers = layer_mixers(config, layers)
    args.mixer, args.mixer_pattern = FastWeightConfig.mixer, ",".join(mixers[number] for number in numbers)
    if any("window_sizes" in mixer_options(name) for name in mixers):
        args.window_sizes = ",".join(str(layer_window(config, number, layers)) for number in numbers)


def write_kept_layers(args) -> None:
    """Writes the numbers of --encoder-layers-to-keep and --decoder-layers-to-keep as a text, which fairseq's models read. Its
    command line makes a list of them where the model is one of translation."""
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        if isinstance(kept := safe_getattr(args, name, None), (list, ListConfig)):
            setattr(args, name, ",".join(map(str, kept)))


class NamesWhatDiffers:
    """A mixin for fairseq's models, which refuses the parameters of a different model in one sentence."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            own, theirs = ({name: x.shape for name, x in state.items()} for state in (self.state_dict(), state_dict))
            differing = [name for name in own | theirs if own.get(name) != theirs.get(name)]
            if not differing:
                raise
            raise Mistake(
                f"the checkpoint was trained with other options: it and the model differ in {differing[0]} and {len(differing) - 1}"
                " more; give the options it was trained with"
            ) from error
