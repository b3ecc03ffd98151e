"""The language models that fw-bench model measures, of one size, with random weights on random tokens; and how it measures them."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...generation.graphs import Graphs
from ...generation.kernel_memory import KernelMemory
from ...mixers import MIXERS
from ...models.generation import GENERATION, Generation
from ...ops.kernels.launch import use
from ...rules import RULES
from .contest import peak_beyond, progress, take_turns, timed

TRANSFORMER, OWN = "transformer_lm", "fast_weight_lm"
ALL = [name for name, rule in RULES.items() if rule.step is None] + [name for name in MIXERS if name != "fast_weight"]
UNTIMED_STEPS, HOST_STEPS = 3, 200


def model_names(args) -> list[str]:
    return [f"{OWN} {mixer}" for mixer in args.mixers] + [TRANSFORMER]


def build_model(args, name: str) -> nn.Module:
    from .fairseq_parts import Dictionary, FastWeightLanguageModel, TransformerLanguageModel, base_lm_architecture

    mixer = name.removeprefix(f"{OWN} ")
    options = {} if name == TRANSFORMER else {"update_rule": mixer} if mixer in RULES else {"mixer": mixer}
    options |= {} if name == TRANSFORMER else {"no_decoding_graph": args.no_decoding_graph}
    torch.manual_seed(0)
    cfg = argparse.Namespace(
        decoder_layers=args.layers, decoder_embed_dim=args.width, decoder_attention_heads=args.heads,
        decoder_ffn_embed_dim=args.ffn, share_decoder_input_output_embed=True,
        max_target_positions=max(*args.tokens, *(c + UNTIMED_STEPS + args.steps for c in args.contexts)), **options,
    )  # fmt: skip
    base_lm_architecture(cfg)
    kind = TransformerLanguageModel if name == TRANSFORMER else FastWeightLanguageModel
    return kind.build_model(cfg, make_task(Dictionary(), args.vocabulary)).to(args.device)


class Idle:
    """A launcher, and a graph, that start nothing: what is left is the work of the host."""

    device_type = "cpu"

    def __init__(self, *step):
        pass

    def why_not(self, device) -> None:
        """It runs everywhere."""

    def __call__(self, *launch) -> None:
        pass

    def replay(self) -> None:
        pass


@torch.no_grad()
def time_host(args, name: str, graph: bool) -> float:
    """Returns the median seconds of a token and of a new order of the hypotheses, with kernels and graphs that do nothing."""
    args = argparse.Namespace(**vars(args) | {"no_decoding_graph": not graph})
    model, state, seconds = build_model(args, name).eval(), {}, []
    text, order = draw_tokens(args, args.hypotheses, HOST_STEPS), torch.arange(args.hypotheses).flip(0)

    def step(length: int) -> None:
        model.decoder(text[:, :length], incremental_state=state, features_only=True)
        model.decoder.reorder_incremental_state_scripting(state, order)

    kept, Graphs.graph_type = Graphs.graph_type, Idle
    try:
        with use(Idle()):
            for length in range(1, HOST_STEPS + 1):
                seconds.append(timed(lambda: step(length), args.device))  # noqa: B023
        kernels = [isinstance(layer.stepper, KernelMemory) for layer in state[GENERATION].layers]
    except NotImplementedError as error:  # another kernel, which takes tensors of a GPU only
        raise no_step(name) from error
    finally:
        Graphs.graph_type = kept
    if not all(kernels):
        raise no_step(name)
    return statistics.median(seconds[HOST_STEPS // 4 :])


def no_step(name: str) -> Mistake:
    return Mistake(f"--mixers: the decoding kernel does not do a step of {name.removeprefix(OWN).strip()}; leave it out")


def make_task(dictionary, words: int) -> SimpleNamespace:
    """Returns the part of a task that a model needs: one dictionary for both sides."""
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index))
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def batch_rows(args, length: int) -> int:
    """Returns the number of rows of a training batch."""
    return max(1, args.max_tokens // length)


def draw_tokens(args, count: int, length: int) -> Tensor:
    """(count, length), without special symbols."""
    return torch.randint(4, args.vocabulary, (count, length), device=args.device)


def time_training(args, models: dict[str, nn.Module], length: int) -> dict[str, list[float]]:
    """Returns the seconds of forward and backward by model, one for each round."""
    text = draw_tokens(args, batch_rows(args, length), length + 1)
    calls = {name: partial(timed, partial(forward_backward, model, text), args.device) for name, model in models.items()}
    return take_turns(calls, args.rounds, f"training, {length} tokens")


def forward_backward(model, text: Tensor) -> None:
    model.train()
    model.zero_grad()
    logits, _ = model(text[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()


def peak_memory(args, models: dict[str, nn.Module], length: int) -> dict[str, int]:
    """Bytes of forward and backward beyond the parameters, by model."""
    if args.device != "cpu":
        return {name: measure_memory(args, model, length) for name, model in models.items()}
    found = {}  # a process for each: its high-water mark is that of this one pass
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["fw_fairseq.tools.bench.fairseq_parts"])  # once for all
    with context.Pool(1, maxtasksperchild=1) as pool:
        for name in models:
            progress(f"memory of {name}, {length} tokens")
            found[name] = pool.apply(measure_alone, (args, name, length))
    return found


def measure_alone(args, name: str, length: int) -> int:
    torch.set_num_threads(args.threads)
    return measure_memory(args, build_model(args, name), length)


def measure_memory(args, model: nn.Module, length: int) -> int:
    forward_backward(model, draw_tokens(args, 1, 9))  # loads libraries
    model.zero_grad()
    text = draw_tokens(args, batch_rows(args, length), length + 1)
    return peak_beyond(partial(forward_backward, model, text), args.device)


@torch.no_grad()
def time_generation(args, models: dict[str, nn.Module], context: int) -> dict[str, tuple[list[float], int]]:
    """Returns by model the seconds of a token, one for each round, and the bytes of the state."""
    text = draw_tokens(args, args.hypotheses, context + UNTIMED_STEPS + args.steps)
    states = {name: fill_state(model.eval(), text[:, :context]) for name, model in models.items()}
    sizes = {name: state_bytes(state) for name, state in states.items()}
    calls = {name: partial(time_steps, args, model, text, context, states[name]) for name, model in models.items()}
    seconds = take_turns(calls, args.rounds, f"generation after {context} tokens")
    return {name: (seconds[name], sizes[name]) for name in models}


def time_steps(args, model, text: Tensor, context: int, state: dict) -> float:
    """Median seconds of the steps after ``context``; ``state`` stays as it is.

    The turn of a model is all of its steps: taking turns token by token, each would find its weights pushed out of the processor's
    cache by the other's keys and values.
    """
    state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}
    seconds = []
    for length in range(context + 1, text.shape[1] + 1):
        seconds.append(timed(lambda: model.decoder(text[:, :length], incremental_state=state), args.device))  # noqa: B023
    return statistics.median(seconds[UNTIMED_STEPS:])


def fill_state(model, prompt: Tensor) -> dict:
    """The incremental state after the prompt. Softmax attention gets random keys and values, whose time does not depend on them."""
    state: dict = {}
    if hasattr(model.decoder, "take_prompt"):
        model.decoder.take_prompt(prompt, incremental_state=state)
        return state
    for layer in model.decoder.layers:
        attention = layer.self_attn
        shape = (prompt.shape[0], attention.num_heads, prompt.shape[1], attention.head_dim)
        buffer = {name: torch.randn(shape, device=prompt.device) for name in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, buffer | {"prev_key_padding_mask": None})
    return state


def state_bytes(state) -> int:
    """Returns the bytes of all tensors in nested containers."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Generation):
        state = state.states()
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    return sum(map(state_bytes, state)) if isinstance(state, (tuple, list)) else 0
