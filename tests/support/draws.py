"""Random inputs, gates and states of the operation, and how results are compared."""

from __future__ import annotations

import support.extension  # noqa: F401  (where it is asked for, its rule is one of RULES)
import torch
from torch.nn import functional as F

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.checks import missing_form
from fw_fairseq.rules import RULES, Rule

PLAIN = [name for name, rule in RULES.items() if not rule.several and all(gate.projected for gate in rule.gates.values())]


TRIED = [*PLAIN, "rwkv6", "rwkv7", "gdn2"]  # those differ most from them; test_field_rules.py has the others


FITTING = [name for name in TRIED if RULES[name].step is None]  # the recurrence


CHUNKED = [name for name in TRIED if missing_form(RULES[name], "chunkwise") is None]


NORMALISED = [name for name, rule in RULES.items() if rule.normaliser]


CASES = [(name, False) for name in TRIED] + [(name, True) for name in NORMALISED]  # rule, attention_norm


EXTREMES = (1e-6, 1 - 1e-6)


def draw_gates(rule: Rule, shape, dtype=torch.float64, extreme=False) -> dict[str, torch.Tensor]:
    """Gates for shape (B,H,T,K,V): uniform in (0.01, 0.99), with ``extreme`` two thirds of them at the ends of the range."""
    gates = {}
    for name, gate in rule.gates.items():
        size = gate.shape(shape)
        drawn = torch.rand(size, dtype=torch.float64) * 0.98 + 0.01
        if extreme:
            ends = torch.tensor([*EXTREMES], dtype=torch.float64)[torch.randint(2, size)]
            drawn = torch.where(torch.rand(size) < 2 / 3, ends, drawn)
        gates[name] = drawn.to(dtype).requires_grad_()
    return gates


def draw_inputs(shape, dtype=torch.float64, positive=False) -> dict[str, torch.Tensor]:
    """q, unit keys and v; with ``positive`` non-negative q and k, as attention normalisation wants them."""
    *leading, key_width, value_width = shape
    q, k, v = (torch.randn(*leading, width, dtype=torch.float64) for width in (key_width, key_width, value_width))
    if positive:
        q, k = q.abs() + 0.1, k.abs() + 0.1
    k = F.normalize(k, dim=-1)
    return {name: x.to(dtype).requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}


def draw_projections(B: int, H: int, T: int, *widths: int) -> list[torch.Tensor]:
    """One (B,H,T,width) tensor for each width, each a view of a (T,B,C) projection, as a layer has them."""
    return [torch.randn(T, B, H * width).view(T, B, H, width).permute(1, 2, 0, 3) for width in widths]


def draw_state(rule: Rule, shape, dtype=torch.float64, attention_norm=False):
    """A state as a first call leaves it, its tensors ready to collect gradients."""
    short = (*shape[:2], 5, *shape[3:])
    inputs, gates = draw_inputs(short, dtype, positive=attention_norm), draw_gates(rule, short, dtype)
    name = next(name for name, entry in RULES.items() if entry is rule)
    _, state = fast_weight(**inputs, rule=name, gates=gates, attention_norm=attention_norm)
    return state._map(lambda x: x.detach().requires_grad_())


def run_with_gradients(leaves: dict, call) -> dict[str, torch.Tensor]:
    """Outputs, final state and the gradient of every leaf, under fixed random adjoints of all outputs."""
    y, state = call()
    results = {"y": y} | {f"final {name}": x for name, x in state._asdict().items() if x is not None}
    generator = torch.Generator().manual_seed(1)
    adjoints = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results.values()]
    reached = [(x, a) for x, a in zip(results.values(), adjoints) if x.requires_grad]
    outputs, adjoints = zip(*reached)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), adjoints, allow_unused=True)
    results |= {f"gradient of {name}": g for name, g in zip(leaves, gradients) if g is not None}
    return {name: x.detach() for name, x in results.items()}


def assert_same(actual: dict, expected: dict, tolerance: float, smallest: float = 1e-3) -> None:
    """Every tensor agrees to ``tolerance`` times the largest entry of the expected one, or times ``smallest`` if that is more."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got, want = actual[name].double(), want.double()
        assert got.isfinite().all(), name
        error = (got - want).abs().max() / want.abs().max().clamp(min=smallest)
        assert error <= tolerance, f"{name}: relative error {error:.1e} above {tolerance:.0e}"
