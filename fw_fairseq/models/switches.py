"""Switches of a model that the command line can turn on and off."""

from __future__ import annotations

import argparse
from collections.abc import Collection


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
