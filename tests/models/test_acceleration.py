"""transformers' recurrent layers compute the same with ``accelerate()`` as without it, in less time."""

from __future__ import annotations

import importlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fw_fairseq import acceleration  # noqa: E402
from fw_fairseq.acceleration import REPLACED, accelerate, marked_functions, replacement  # noqa: E402
from fw_fairseq.tools.bench.recurrent_models import build, model_types  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = [found for found in marked_functions() if found[1] in REPLACED]


def inputs(kernel: str, dtype: torch.dtype, T: int = 70) -> tuple[list, dict]:
    """T tokens, more than a chunk; the state that they begin with; and the options that layers give."""
    torch.manual_seed(1)
    H, K, V = 4, 16, 8
    if kernel.startswith("mamba"):
        tensors = [torch.randn(2, T, H, V), torch.randn(2, T, H), -3 * torch.rand(H), *torch.randn(2, 2, T, 2, K)]
        named = {"D": torch.randn(H), "dt_bias": torch.randn(H), "initial_states": torch.randn(2, H, V, K)}
        options = {"chunk_size": 32, "dt_softplus": True, "dt_limit": (0.01, 1.0), "return_final_states": True}
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
    if not kernel.startswith("mamba"):
        given |= dict(zip(("g", "beta"), tensors[3:]))
    y, state = function(*tensors[: 5 - 2 * ("g" in given)], **given)
    ((y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum() + state.cos().sum()).backward()
    return [y, state, *(x.grad for x in (*tensors, *given.values()) if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("module, kernel, name", FOUND, ids=lambda x: x.split(".")[-2] if "." in x else x)
def test_the_functions_are_the_references(module, kernel, name):
    reference = getattr(importlib.import_module(module), name)
    own = replacement(kernel, reference)
    for T in (70, 1):
        for one, other in zip(results(own, kernel, torch.float32, T), results(reference, kernel, torch.float32, T)):
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kernel", REPLACED)
def test_they_compute_in_float64_what_they_compute_in_float32(kernel):
    """Where the references know float32 alone."""
    reference = {found[1]: found for found in FOUND}[kernel]
    own = replacement(kernel, getattr(importlib.import_module(reference[0]), reference[2]))
    for one, other in zip(results(own, kernel, torch.float64), results(own, kernel, torch.float32)):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other.double(), rtol=1e-4, atol=2e-5)


def logits_and_gradients(model, tokens) -> list[torch.Tensor]:
    model.train().zero_grad()
    logits = model(tokens, labels=tokens)
    logits.loss.backward()
    return [logits.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", model_types())
def test_models_are_the_same(name, monkeypatch):
    """Logits, gradients and what they generate; our functions are called, in the prompt and, for delta rules, at each token."""
    model, tokens = build(name, 32, 2, 2, 50), torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(2))
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls: list[str] = []
    for kernel, function in REPLACED.items():
        counted = lambda *args, kernel=kernel, function=function, **more: calls.append(kernel) or function(*args, **more)  # noqa: E731
        monkeypatch.setitem(REPLACED, kernel, counted)
    want, written = logits_and_gradients(model, tokens), model.eval().generate(tokens, **given)
    assert not calls
    with accelerate():
        for one, other in zip(logits_and_gradients(model, tokens), want):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert calls
        calls.clear()
        assert torch.equal(model.eval().generate(tokens, **given), written)
    assert len(calls) >= (1 if calls[0].startswith("mamba") else 8)
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
    assert "chunk_kda" in said and "selective_scan_fn" in said.split(";")[1] and "qwen3_next" in said


NOT_TOLD = {"mamba2", "granitemoehybrid"}  # transformers gives the texts' numbers to no layer, or no positions to attention


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
    """Several rows of them, and Mamba 2's without the texts' numbers."""
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
