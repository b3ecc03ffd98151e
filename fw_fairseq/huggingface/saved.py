"""Caches in files, and prompts whose beginning was read before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Mistake
from ..files import reading, write_atomically
from ..generation.kv_cache import Past
from ..mixers import MIXERS
from ..mixers.parts.channel_mixing import LastToken
from ..ops.factored import Factors
from .layers import Cache
from .parts import CACHE
from .small import Small


def fingerprint(model: Any) -> str:
    """A number for a model: that of its parameters' names, types and first elements."""
    digest = hashlib.sha256()
    for name, x in model.named_parameters():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.detach().flatten()[:16].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def plain(x: Any) -> Any:
    """A state as lists of tensors and names, which a file can have."""
    if isinstance(x, Past):
        return ["Past", *map(plain, x.tokens())]
    if isinstance(x, tuple):
        return [type(x).__name__, *map(plain, x)]
    return x.detach().cpu().clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x


def stated(x: Any, device: torch.device) -> Any:
    """The state that ``plain`` made lists of."""
    if not isinstance(x, list):
        return x.to(device) if isinstance(x, Tensor) else x
    name, *parts = x[0], *(stated(part, device) for part in x[1:])
    if name == "Past":
        keys, values, hidden = parts
        return Past(keys, values, keys.shape[2], [keys.shape[2]], hidden)
    kinds: dict[str, Any] = {
        kind.__name__: kind for kind in (Factors, LastToken, Small, *(mixer.state_type for mixer in MIXERS.values()))
    }
    return kinds[name](*parts)


def save_cache(cache: Cache, file: str | Path, model: Any) -> None:
    """Writes the state of a text, from which ``load_cache`` lets the same model go on."""
    cache.catch_up(model)
    states = {layer: plain(state) for layer, state in cache.now().items()}
    whole = {"model": fingerprint(model), "tokens": plain(cache.tokens), "length": cache.length, "states": states}
    write_atomically(Path(file), lambda path: torch.save(whole, path))


def load_cache(file: str | Path, model: Any) -> Cache:
    """Returns the cache of a text that this model has read."""
    device, cache = next(model.parameters()).device, Cache()
    with reading(Path(file), "the state of a text"):
        whole = torch.load(file, map_location=device, weights_only=True)
        if whole["model"] == fingerprint(model):
            cache.states = {layer: stated(state, device) for layer, state in whole["states"].items()}
            cache.tokens, cache.length = whole["tokens"], whole["length"]
    if whole["model"] != fingerprint(model):
        raise Mistake(f"{file} has the state of another model; its numbers would mean nothing to this one")
    return cache


class Prefixes:
    """Beginnings of prompts in a folder, by their tokens."""

    def __init__(self, folder: str | Path, model: Any) -> None:
        self.folder, self.model = Path(folder), model
        self.model_name = fingerprint(model)

    def file(self, ids: Tensor) -> Path:
        """The file of a beginning (1,T). Its name says how long it is, and of which tokens and model."""
        name = hashlib.sha256(f"{self.model_name} {ids.flatten().tolist()}".encode()).hexdigest()
        return self.folder / f"{ids.shape[1]}-{name}.pt"

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Reads these tokens, (1,T), from the longest beginning that is there, and writes their state."""
        cache = self.find(ids)
        found = self.model(ids[:, cache.length :], use_cache=True, **{CACHE: cache})
        save_cache(found[CACHE], self.file(ids), self.model)

    def find(self, ids: Tensor) -> Cache:
        """Returns a cache that has read the longest beginning of these tokens, (1,T), that is there; at least one token is left.
        ``generate`` and ``forward`` take it as their cache."""
        lengths = {int(path.name.split("-")[0]) for path in self.folder.glob("*-*.pt")}
        for length in sorted(lengths, reverse=True):
            file = self.file(ids[:, :length])
            if length < ids.shape[1] and file.exists():
                return load_cache(file, self.model)
        return Cache()
