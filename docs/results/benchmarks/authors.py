"""layers.py --peers: SRU, LEAP and additive attention beside their authors' code, where it is installed, and an LSTM."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fw_fairseq.mixers import Additive, Leap, Sru
from fw_fairseq.tools.bench.contest import machine, settings, spread, take_turns, timed, times_faster

LSTM, OF_SRU = "torch.nn.LSTM", "sru.SRU"
OF_LEAP, OF_ADDITIVE = "leap.LEAP.MultiheadLeap", "leap.fastformerLM.fastformer.FastSelfAttention"


class Case(NamedTuple):
    """Layers that do the same job, one of ours first, and the input of all of them, (T,B,C)."""

    name: str
    layers: dict[str, nn.Module]
    x: Tensor
    trains: bool
    times: int  # calls that are timed together


class AuthorsLeap(nn.Module):
    """Attention of their LeapBlock, with its projections: (T,B,C) -> (T,B,C). Our published form has as many products."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.projections = nn.Linear(width, 4 * width, bias=False)
        self.leap = author("leap.LEAP", "MultiheadLeap")(width, heads, window, dropout=0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.leap(*self.projections(x.transpose(0, 1)).chunk(4, -1)).transpose(0, 1), None


class AuthorsAdditive(nn.Module):
    """Their two rounds of additive attention, with norm and projections: (T,B,C) -> (T,B,C). Ours has one product more."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        options = dict(hidden_size=width, n_heads=heads, rescale=10, initializer_range=width**-0.5, hidden_dropout_prob=0.0)
        self.attention = author("leap.fastformerLM.fastformer", "FastSelfAttention")(SimpleNamespace(**options), window)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        mask = x.new_zeros(x.shape[1], x.shape[0], 1)
        return self.attention(x.transpose(0, 1), mask).transpose(0, 1), None


def author(module: str, name: str) -> Any:
    """Returns a class of the authors' code."""
    return getattr(importlib.import_module(module), name)


def measure(args: Namespace) -> dict:
    """Times every layer and its peers in the same rounds."""
    torch.manual_seed(0)
    missing: dict[str, str] = {}
    rows = []
    for case in cases(args, missing):
        calls = {
            name: partial(timed, partial(call, case, layer.to(args.device)), args.device) for name, layer in case.layers.items()
        }
        seconds = take_turns(calls, args.rounds, case.name)
        seconds = {name: [value / case.times for value in values] for name, values in seconds.items()}
        own = next(iter(seconds.values()))
        rows += [
            {"name": case.name, "layer": name, **spread(values), "times_faster": times_faster(values, own)}
            for name, values in seconds.items()
        ]
    return {"machine": machine(args), "settings": settings(args), "peers": rows, "not_measured": missing}


def call(case: Case, layer: nn.Module) -> None:
    """Calls the layer; in training, with its backward pass."""
    with torch.set_grad_enabled(case.trains):
        for _ in range(case.times):
            if case.trains:
                layer.zero_grad()
                layer(case.x)[0].sum().backward()
            else:
                layer(case.x)


def cases(args: Namespace, missing: dict[str, str]) -> list[Case]:
    """Returns what is compared. missing: gets a sentence for each layer that cannot be had."""
    width, heads, found = args.width, args.heads, []
    jobs = (
        ("sru, training", args.batch, args.length, True, 1), ("sru, no gradients", args.batch, args.length, False, 1),
        ("sru, no gradients, one sequence", 1, args.length, False, 20), ("sru, no gradients, one token", 1, 1, False, 100),
    )  # fmt: skip
    for name, batch, length, trains, times in jobs:
        layers: dict[str, nn.Module] = {"sru": Sru(width, heads, sru_highway_bias=0.0)}
        add(layers, OF_SRU, missing, lambda: author("sru", "SRU")(width, width, num_layers=1))
        layers[LSTM] = nn.LSTM(width, width)
        found.append(case_of(name, layers, length, batch, args, trains, times))
    for window in args.windows:
        seen = f"window {window}" if window else "all of the past"
        leaps: dict[str, nn.Module] = {"leap, published form": Leap(width, heads, window=window, pooling_form="published")}
        add(leaps, OF_LEAP, missing, partial(AuthorsLeap, width, heads, window or args.tokens))
        leaps["leap"] = Leap(width, heads, window=window)
        additives: dict[str, nn.Module] = {"additive": Additive(width, heads, window=window)}
        add(additives, OF_ADDITIVE, missing, partial(AuthorsAdditive, width, heads, window or args.tokens))
        found.append(case_of(f"leap, {seen}, training", leaps, args.tokens, 1, args))
        found.append(case_of(f"additive, {seen}, training", additives, args.tokens, 1, args))
    return found


def case_of(
    name: str, layers: dict[str, nn.Module], length: int, batch: int, args: Namespace, trains: bool = True, times: int = 1
) -> Case:
    """Returns the layers with a random input."""
    x = torch.randn(length, batch, args.width, device=args.device, requires_grad=trains)
    return Case(name, {name: layer.train(trains) for name, layer in layers.items()}, x, trains, times)


def add(layers: dict[str, nn.Module], name: str, missing: dict[str, str], make: Callable[[], nn.Module]) -> None:
    """Adds a layer of another package, or says why there is none."""
    if name in missing:
        return
    try:
        layers[name] = make()
    except Exception as error:  # of any kind: it is their code, and may compile some
        missing[name] = f"{name} is not measured: {type(error).__name__}: {error}".split("\n")[0]


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; width {s['width']}; sru: batch {s['batch']}, length "
        f"{s['length']}; the others: one sequence of {s['tokens']}, {s['heads']} heads; medians of {s['rounds']} rounds",
        "",
        "| | layer | ms | the first is so many times as fast |",
        "|---|---|---:|---:|",
    ]
    for row in report["peers"]:
        lines.append(f"| {row['name']} | {row['layer']} | {1e3 * row['seconds']:.3g} | {row['times_faster']:.2f} |")
    return "\n".join([*lines, *(f"\n{sentence}" for sentence in report["not_measured"].values())])
