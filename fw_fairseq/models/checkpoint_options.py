"""Checkpoints that meet other options than those that they were trained with."""

from __future__ import annotations

from fairseq.utils import safe_getattr

from ..config import FastWeightConfig, layer_mixers, read_config
from ..mixers.pooled import layer_window


def keep_layers(args, kind: type = FastWeightConfig) -> None:
    """What --decoder-layers-to-keep leaves of a larger model has its mixers and windows still. Before fairseq counts its layers."""
    kept, layers = safe_getattr(args, "decoder_layers_to_keep", None), args.decoder_layers
    if not kept or len(kept.split(",")) == layers:
        return
    numbers, config = sorted(map(int, kept.split(","))), read_config(kind, args)
    if not {*numbers} <= {*range(layers)}:
        raise ValueError(f"--decoder-layers-to-keep is {kept!r}; the model has layers 0 to {layers - 1}")
    mixers = layer_mixers(config, layers)
    args.mixer_pattern = ",".join(mixers[number] for number in numbers)
    args.window_sizes = ",".join(str(layer_window(config, number, layers)) for number in numbers)


class NamesWhatDiffers:
    """Goes before one of fairseq's models: parameters of another one are refused in a sentence."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            own, theirs = ({name: x.shape for name, x in state.items()} for state in (self.state_dict(), state_dict))
            differing = [name for name in own | theirs if own.get(name) != theirs.get(name)]
            if not differing:
                raise
            raise ValueError(
                f"the checkpoint was trained with other options: it and the model differ in {differing[0]} and {len(differing) - 1}"
                " more; give the options it was trained with"
            ) from error
