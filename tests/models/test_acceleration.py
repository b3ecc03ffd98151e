"""transformers' recurrent layers compute the same with ``accelerate()`` as without it, in less time."""

from __future__ import annotations

import functools
import importlib
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fw_fairseq import acceleration  # noqa: E402
from fw_fairseq.acceleration import REPLACED, accelerate, marked_functions, replacement  # noqa: E402
from fw_fairseq.tools.bench.recurrent_models import build, model_types  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

UPDATES = ("causal_conv1d_update", "selective_state_update")  # of one token, in place
FOUND = [found for found in marked_functions() if found[1] in REPLACED]
WHOLE = [found for found in FOUND if found[1] not in UPDATES]


def inputs(kernel: str, dtype: torch.dtype, T: int = 70) -> tuple[list, dict]:
    """T tokens, more than a chunk; the state that they begin with; and the options that layers give."""
    torch.manual_seed(1)
    H, K, V = 4, 16, 8
    if kernel.startswith("mamba"):
        tensors = [torch.randn(2, T, H, V), torch.randn(2, T, H), -3 * torch.rand(H), *torch.randn(2, 2, T, 2, K)]
        named = {"D": torch.randn(H), "dt_bias": torch.randn(H), "initial_states": torch.randn(2, H, V, K)}
        options = {"chunk_size": 32, "dt_softplus": True, "dt_limit": (0.01, 1.0), "return_final_states": True}
    elif kernel.startswith("selective"):
        tensors = [*torch.randn(2, 2, H, T), -3 * torch.rand(H, K), *torch.randn(2, 2, K, T)]
        named = {"D": torch.randn(H), "delta_bias": torch.randn(H), "z": torch.randn(2, H, T)}
        options = {"delta_softplus": True, "return_last_state": True}
    else:
        channels, of_keys = ((K,), H) if kernel.endswith("kda") else ((), H // 2)
        tensors = [*torch.randn(2, 2, T, of_keys, K), torch.randn(2, T, H, V), -2 * torch.rand(2, T, H, *channels)]
        tensors += [torch.rand(2, T, H)]
        named = {"initial_state": torch.randn(2, H, K, V)}
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    made = [x.to(dtype).requires_grad_() for x in (*tensors, *named.values())]
    return made[:5], dict(zip(named, made[5:])) | options


def results(function, kernel: str, dtype: torch.dtype, T: int = 70) -> list[torch.Tensor]:
    """Outputs, the last state, and the gradients of all inputs."""
    tensors, given = inputs(kernel, dtype, T)
    if not kernel.startswith(("mamba", "selective")):
        given |= dict(zip(("g", "beta"), tensors[3:]))
    y, state = function(*tensors[: 5 - 2 * ("g" in given)], **given)
    ((y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum() + state.cos().sum()).backward()
    return [y, state, *(x.grad for x in (*tensors, *given.values()) if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("module, kernel, name", WHOLE, ids=lambda x: x.split(".")[-2] if "." in x else x)
def test_the_functions_are_the_references(module, kernel, name):
    reference = getattr(importlib.import_module(module), name)
    own = replacement(kernel, reference)
    for T in (70, 1):
        for one, other in zip(results(own, kernel, torch.float32, T), results(reference, kernel, torch.float32, T)):
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("module, kernel, name", [found for found in FOUND if found[1] in UPDATES])
def test_updates_are_the_references(module, kernel, name):
    """Of one token, with the state that they change; with a gradient, or for several tokens, they are the reference."""
    reference = getattr(importlib.import_module(module), name)
    own, (H, P, N) = replacement(kernel, reference), (4, 3, 8)
    torch.manual_seed(1)
    heads = (P,) if name.startswith("mamba2") else ()  # Mamba 2 has channels in heads, and groups of keys
    per_head = lambda x: x.view(*x.shape, *[1] * len(heads)).expand(*x.shape, *heads)  # noqa: E731
    if kernel == "causal_conv1d_update":
        cases = [(torch.randn(2, H, T), torch.randn(2, H, N), torch.randn(H, N)) for T in (1, 3)]
        named = {"bias": torch.randn(H), "activation": "silu"}
    else:
        A, keys = -torch.rand(H, N), (2,) if heads else ()
        A = -torch.rand(H, 1, 1).expand(H, P, N) if heads else A
        state, x, dt = torch.randn(2, H, *heads, N), torch.randn(2, H, *heads), per_head(torch.randn(2, H))
        cases = [(state, x, dt, A, *torch.randn(2, 2, *keys, N))]
        named = {"D": per_head(torch.randn(H)), "dt_bias": per_head(torch.randn(H)), "dt_softplus": True}
        named |= {} if heads else {"z": torch.randn(2, H)}
    for tensors in cases:
        for grows in (False, True):
            results = []
            for function in (own, reference):
                given = [x.clone() for x in tensors] if heads == () else [tensors[0].clone(), *tensors[1:]]
                place = 0 if kernel.startswith("selective") else 1
                other = given[1 - place].requires_grad_(grows)
                with torch.set_grad_enabled(grows):
                    y = function(*given, **named)
                results.append([y, given[place], *(torch.autograd.grad(y.sum(), other) if grows else ())])
            for one, expected in zip(*results, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [kernel for kernel in REPLACED if kernel not in UPDATES])
def test_they_compute_in_float64_what_they_compute_in_float32(kernel):
    """Where the references know float32 alone."""
    reference = {found[1]: found for found in FOUND}[kernel]
    own = replacement(kernel, getattr(importlib.import_module(reference[0]), reference[2]))
    for one, other in zip(results(own, kernel, torch.float64), results(own, kernel, torch.float32)):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other.double(), rtol=1e-4, atol=2e-5)


def cached(model, tokens) -> list[torch.Tensor]:
    """Logits and the cache after a prompt, and after one more token."""
    found, cache = [], None
    for part in tokens.split(tokens.shape[1] - 1, 1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        kept = [vars(layer).values() for layer in cache.layers]
        kept = [x for values in kept for value in values for x in (value.values() if isinstance(value, dict) else [value])]
        found += [outputs.logits, *(x.clone() for x in kept if isinstance(x, torch.Tensor) and x.is_floating_point())]
    return found


def logits_caches_and_gradients(model, tokens) -> list[torch.Tensor]:
    with torch.no_grad():
        found = cached(model.eval(), tokens)
    model.train().zero_grad()
    logits = model(tokens, labels=tokens)
    logits.loss.backward()
    return [*found, logits.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


class Float64:
    """torch, in whose place transformers' code computes in float64 where it says float32."""

    def __getattr__(self, name):
        return torch.float64 if name == "float32" else getattr(torch, name)


def compute_in_float64(monkeypatch) -> None:
    """Lets the code of transformers, and no other, compute in float64 where it says float32."""
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]:
        if getattr(module, "torch", None) is torch:
            monkeypatch.setattr(module, "torch", Float64())
    single = torch.Tensor.float
    of_transformers = lambda: sys._getframe(2).f_globals["__name__"].startswith("transformers.")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.double() if of_transformers() else single(x))


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="float32"), pytest.param(torch.float64, id="float64", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", model_types())
def test_models_are_the_same(name, dtype, monkeypatch):
    """Logits, caches, gradients and what they generate; our functions are called, in the prompt and at each token."""
    model, tokens = build(name, 32, 2, 2, 50), torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(2))
    if dtype == torch.float64:
        model.double().set_experts_implementation("eager")  # PyTorch's grouped products have no float64
        compute_in_float64(monkeypatch)
    near = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-10}}[dtype]
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls: list[str] = []
    for kernel, function in REPLACED.items():
        counted = lambda *args, kernel=kernel, function=function, **more: calls.append(kernel) or function(*args, **more)  # noqa: E731
        monkeypatch.setitem(REPLACED, kernel, functools.wraps(function)(counted))
    want, written = logits_caches_and_gradients(model, tokens), model.eval().generate(tokens, **given)
    assert not calls
    with accelerate():
        for one, other in zip(logits_caches_and_gradients(model, tokens), want, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, **near)
        assert calls
        calls.clear()
        assert torch.equal(model.eval().generate(tokens, **given), written)
    assert len(calls) >= 8
    calls.clear()
    model(tokens)
    assert not calls


def test_models_that_are_imported_later(monkeypatch):
    """And in those that were there when it is undone."""
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    original = hub.use_kernel_func_from_hub_with_fallback
    done = accelerate()
    try:

        @hub.use_kernel_func_from_hub_with_fallback("chunk_kda", "fla")
        def of_a_new_model(query, key, value, g, beta, **kwargs):
            raise AssertionError("the reference")

        assert of_a_new_model.replaces and accelerate().replaced == done.replaced  # once more changes nothing
    finally:
        accelerate(False)
    assert hub.use_kernel_func_from_hub_with_fallback is original
    tensors, given = inputs("chunk_kda", torch.float32)
    assert of_a_new_model(*tensors, **given)[0].shape == (2, 70, 4, 8)
    said = str(done)
    assert "chunk_kda" in said and "causal_conv1d_fn" in said.split(";")[1] and "qwen3_next" in said


NOT_TOLD = {
    "mamba",
    "falcon_mamba",
    "jamba",
    "mamba2",
    "granitemoehybrid",
    "zamba",
}  # transformers gives the texts' numbers to no layer, or no positions to attention


@pytest.mark.cases_in_ci(4)
@pytest.mark.parametrize("name", [name for name in model_types() if name not in NOT_TOLD])
def test_packed_texts_are_what_each_is_alone(name):
    """Logits and gradients of several texts in one row, which transformers refuses without its kernels."""
    model, lengths = build(name, 32, 2, 2, 50).train(), (5, 9, 1, 17)
    ids = torch.randint(3, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    limits = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": 17, "max_length_k": 17, "use_cache": False}
    given["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    given["seq_idx"] = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None].int()

    def results(parts, **options):
        model.zero_grad()
        logits = torch.cat([model(part, **options).logits for part in parts], 1)
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]

    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, **given)
    with accelerate():
        packed = results([ids], **given)
        for one, other in zip(packed, results(ids.split(lengths, 1), use_cache=False), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_packed_texts_that_cannot_be_told_apart_are_refused():
    """Several rows of them, Mamba 2's without the texts' numbers, and Mamba 1's, whose scan is not told."""
    model, ids = build("zamba", 32, 2, 2, 50), torch.arange(3, 13)[None]
    with accelerate(), pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, seq_idx=torch.tensor([[0] * 4 + [1] * 6]))
    made = {kernel: (module, name) for module, kernel, name in FOUND}
    own = {kernel: replacement(kernel, getattr(importlib.import_module(made[kernel][0]), made[kernel][1])) for kernel in made}
    limits = torch.tensor([0, 30, 70])
    tensors, given = inputs("chunk_gated_delta_rule", torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens divides one row, and B is 2"):
        own["chunk_gated_delta_rule"](*tensors, **given, cu_seqlens=limits)
    tensors, given = inputs("mamba_chunk_scan_combined", torch.float32)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        own["mamba_chunk_scan_combined"](*tensors, **given, cu_seqlens=limits)


def test_an_older_transformers(monkeypatch):
    monkeypatch.delattr("transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback")
    with pytest.raises(ValueError, match=r"knows transformers from 5\.15 on"):
        acceleration.accelerate()
