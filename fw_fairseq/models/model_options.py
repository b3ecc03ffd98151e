"""Options of whole models: what they cannot go with, their opposites, and those of loaded checkpoints."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any, cast

from fairseq.utils import safe_getattr
from omegaconf import ListConfig
from torch import Tensor, nn

from ..config import FastWeightConfig, layer_mixers, mixer_options, read_config, refuse_beside
from ..errors import Mistake
from ..mixers.pooled import layer_window

# fairseq's and this project's options with which later layers could not get the values of layer 0, or not with their gradient
APART = ("encoder_layers", "decoder_layerdrop", "checkpoint_activations", "offload_activations", "reversible", "qkv_sparsity")


def check_value_mixing(config: FastWeightConfig, args: Namespace, mixers: list[str]) -> None:
    """Refuses value mixing where layers would not get the values of layer 0."""
    if not config.value_mixing_rank:
        return
    if mixers[0] != "fast_weight":
        raise Mistake(f"--value-mixing-rank mixes in the values of layer 0, which is {mixers[0]}: make it fast_weight, or give 0")
    refuse_beside("--value-mixing-rank", args, *APART)


def add_opposites(group: argparse._ActionsContainer, own: Collection[str] = ()) -> None:
    """Adds --no-NAME for every switch --NAME of a group of options, and --NAME for every switch --no-NAME.

    An architecture sets only what was not given, so that its switches can be turned off. ``own``: the options of this project.
    fairseq makes an option that is True by default a switch --NAME that turns it off; here --NAME turns on, as it says.
    """
    kinds = (argparse._StoreTrueAction, argparse._StoreFalseAction)
    actions = getattr(group, "_group_actions", group._actions)  # a whole parser has no group
    for action in [action for action in actions if isinstance(action, kinds)]:
        if action.dest in own:
            action.const = True
        name = action.option_strings[0].removeprefix("--")
        opposite = "--" + (name.removeprefix("no-") if name.startswith("no-") else f"no-{name}")
        if opposite not in group._option_string_actions:
            text, default = f"the opposite of --{name}", argparse.SUPPRESS
            group.add_argument(opposite, dest=action.dest, action="store_const", const=not action.const, default=default, help=text)


def keep_layers(args: Namespace, kind: type = FastWeightConfig) -> None:
    """Gives the layers that --decoder-layers-to-keep keeps the mixers and windows that they had in the whole model.

    It is called before fairseq reduces ``decoder_layers`` to the number of layers kept.
    """
    kept, layers = safe_getattr(args, "decoder_layers_to_keep", None), args.decoder_layers
    if not kept:
        return
    parts = [part.strip() for part in kept.split(",")]
    if not all(part.isdecimal() and int(part) < layers for part in parts) or len({*parts}) < len(parts):
        raise Mistake(f"--decoder-layers-to-keep is {kept!r}; it must have different numbers from 0 to {layers - 1}")
    numbers = sorted(map(int, parts))
    if len(numbers) == layers:
        return
    config = read_config(kind, args)
    if config.value_mixing_rank and 0 not in numbers:
        raise Mistake("--decoder-layers-to-keep leaves out layer 0, whose values the others mix in; keep it")
    mixers = layer_mixers(config, layers)
    args.mixer, args.mixer_pattern = FastWeightConfig.mixer, ",".join(mixers[number] for number in numbers)
    if any("window_sizes" in mixer_options(name) for name in mixers):
        args.window_sizes = ",".join(str(layer_window(config, number, layers)) for number in numbers)


def write_kept_layers(args: Namespace) -> None:
    """Writes the numbers of --encoder-layers-to-keep and --decoder-layers-to-keep as a text, which fairseq's models read. Its
    command line makes a list of them where the model is one of translation."""
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        if isinstance(kept := safe_getattr(args, name, None), (list, ListConfig)):
            setattr(args, name, ",".join(map(str, kept)))


class KnowsItsUpdates:
    """A mixin for fairseq's models that keeps the number of updates so far, for criterions that change during training."""

    num_updates = 0

    def set_num_updates(self, num_updates: int) -> None:
        """Is called by fairseq before each update."""
        cast(Any, super()).set_num_updates(num_updates)
        self.num_updates = num_updates


class NamesWhatDiffers:
    """A mixin for fairseq's models, which refuses the parameters of a different model in one sentence."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs) -> Any:
        try:
            return cast(Any, super()).load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            own, theirs = (
                {name: x.shape for name, x in state.items()} for state in (cast(nn.Module, self).state_dict(), state_dict)
            )
            differing = [name for name in own | theirs if own.get(name) != theirs.get(name)]
            if not differing:
                raise
            raise Mistake(
                f"the checkpoint was trained with other options: it and the model differ in {differing[0]} and {len(differing) - 1}"
                " more; give the options it was trained with"
            ) from error
