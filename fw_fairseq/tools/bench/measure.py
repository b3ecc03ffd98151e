"""The language models that fw-bench model measures, of one size, with random weights on random tokens; and how it measures them."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...mixers import MIXERS
from ...models.generation import Generation
from ...rules import RULES
from .contest import peak_beyond, progress, take_turns, timed

TRANSFORMER, OWN = "transformer_lm", "fast_weight_lm"
ALL = [name for name, rule in RULES.items() if rule.step is None] + [name for name in MIXERS if name != "fast_weight"]
UNTIMED_STEPS = 3


def model_names(args: Namespace) -> list[str]:
    """Returns the names of the models in the report."""
    return [f"{OWN} {mixer}" for mixer in args.mixers] + [TRANSFORMER]


def build_model(args: Namespace, name: str) -> nn.Module:
    """Returns a model with random weights."""
    from .fairseq_parts import Dictionary, FastWeightLanguageModel, TransformerLanguageModel, base_lm_architecture

    mixer, kind, options = name.removeprefix(f"{OWN} "), TransformerLanguageModel, {}
    if name != TRANSFORMER:
        kind = FastWeightLanguageModel
        options = {"update_rule" if mixer in RULES else "mixer": mixer, "no_decoding_graph": args.no_decoding_graph}
    torch.manual_seed(0)
    cfg = Namespace(
        decoder_layers=args.layers, decoder_embed_dim=args.width, decoder_attention_heads=args.heads,
        decoder_ffn_embed_dim=args.ffn, share_decoder_input_output_embed=True,
        max_target_positions=max(*args.tokens, *(c + UNTIMED_STEPS + args.steps for c in args.contexts)), **options,
    )  # fmt: skip
    base_lm_architecture(cfg)
    return kind.build_model(cfg, make_task(Dictionary(), args.vocabulary)).to(args.device)


def make_task(dictionary: Any, words: int) -> SimpleNamespace:
    """Returns the part of a task that a model needs: one dictionary for both sides."""
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index))
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def batch_rows(args: Namespace, length: int) -> int:
    """Returns the number of rows of a training batch."""
    return max(1, args.max_tokens // length)


def draw_tokens(args: Namespace, count: int, length: int) -> Tensor:
    """(count, length), without special symbols."""
    return torch.randint(4, args.vocabulary, (count, length), device=args.device)


def time_training(args: Namespace, models: dict[str, nn.Module], length: int) -> dict[str, list[float]]:
    """Returns the seconds of forward and backward by model, one for each round."""
    text = draw_tokens(args, batch_rows(args, length), length + 1)
    calls = {name: partial(timed, partial(_forward_backward, model, text), args.device) for name, model in models.items()}
    return take_turns(calls, args.rounds, f"training, {length} tokens")


def _forward_backward(model: nn.Module, text: Tensor) -> None:
    model.train()
    model.zero_grad()
    logits, _ = model(text[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()


def peak_memory(args: Namespace, models: dict[str, nn.Module], length: int) -> dict[str, int]:
    """Bytes of forward and backward beyond the parameters, by model."""
    if args.device != "cpu":
        return {name: _measure_memory(args, model, length) for name, model in models.items()}
    found = {}  # a process for each: its high-water mark is that of this one pass
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["fw_fairseq.tools.bench.fairseq_parts"])  # once for all
    with context.Pool(1, maxtasksperchild=1) as pool:
        for name in models:
            progress(f"memory of {name}, {length} tokens")
            found[name] = pool.apply(_measure_alone, (args, name, length))
    return found


def _measure_alone(args: Namespace, name: str, length: int) -> int:
    torch.set_num_threads(args.threads)
    return _measure_memory(args, build_model(args, name), length)


def _measure_memory(args: Namespace, model: nn.Module, length: int) -> int:
    _forward_backward(model, draw_tokens(args, 1, 9))  # loads libraries
    model.zero_grad()
    text = draw_tokens(args, batch_rows(args, length), length + 1)
    return peak_beyond(partial(_forward_backward, model, text), args.device)


@torch.no_grad()
def time_generation(args: Namespace, models: dict[str, Any], context: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Returns by model the seconds of a token, one for each round, and the bytes of the state."""
    text = draw_tokens(args, args.hypotheses, context + UNTIMED_STEPS + args.steps)
    states = {name: fill_state(model.eval(), text[:, :context]) for name, model in models.items()}
    sizes = {name: state_bytes(state) for name, state in states.items()}
    calls = {name: partial(time_steps, args, model, text, context, states[name]) for name, model in models.items()}
    return take_turns(calls, args.rounds, f"generation after {context} tokens"), sizes


def time_steps(args: Namespace, model: Any, text: Tensor, context: int, state: dict) -> float:
    """Median seconds of the steps after ``context``; ``state`` stays as it is.

    The turn of a model is all of its steps: taking turns token by token, each would find its weights pushed out of the processor's
    cache by the other's keys and values.
    """
    state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}
    calls = [partial(model.decoder, text[:, :end], incremental_state=state) for end in range(context + 1, text.shape[1] + 1)]
    return statistics.median([timed(call, args.device) for call in calls][UNTIMED_STEPS:])


def fill_state(model: Any, prompt: Tensor) -> dict:
    """The incremental state after the prompt. Softmax attention gets random keys and values, whose time does not depend on them."""
    state: dict = {}
    if hasattr(model.decoder, "take_prompt"):
        model.decoder.take_prompt(prompt, incremental_state=state)
        return state
    for layer in model.decoder.layers:
        attention = layer.self_attn
        shape = (prompt.shape[0], attention.num_heads, prompt.shape[1], attention.head_dim)
        buffer: dict = {name: torch.randn(shape, device=prompt.device) for name in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, {**buffer, "prev_key_padding_mask": None})
    return state


def state_bytes(state: Any) -> int:
    """Returns the bytes of all tensors in nested containers."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Generation):
        state = state.states()
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    return sum(map(state_bytes, state)) if isinstance(state, (tuple, list)) else 0
