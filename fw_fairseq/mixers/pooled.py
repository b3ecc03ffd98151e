"""The windows of mixers that pool the past."""

from __future__ import annotations

from .. import Mistake


def layer_window(config, layer: int, layers: int) -> int:
    """Returns how many tokens the mixer of a layer sees; 0 means all of them."""
    if not config.window_sizes:
        return 0 if layer == layers - 1 else 4 * 2**layer
    sizes = [part.strip() for part in config.window_sizes.split(",")]
    for part in sizes:
        if not part.isdecimal():
            raise Mistake(f"--window-sizes has {part!r}; each part must be a number of tokens, or 0 for all before")
    if len(sizes) not in (1, layers):
        raise Mistake(f"--window-sizes has {len(sizes)} numbers but the model has {layers} layers; give one, or one per layer")
    return int(sizes[layer if len(sizes) > 1 else 0])
