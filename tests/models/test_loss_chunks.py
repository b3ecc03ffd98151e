"""--loss-chunk: loss and gradients are those of the equations and of fairseq's criterions, and a batch's logits are never made."""

from __future__ import annotations

import re

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from support.distillation import sample
from support.language_models import build, make_task
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq.criterions import FastWeightCrossEntropy, FastWeightLabelSmoothedCrossEntropy
from fw_fairseq.criterions.chunks import Goal, cross_entropy

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
PADDING, TOKENS, WIDTH, WORDS = 1, 11, 6, 17


def operands(dtype=torch.float64, bias: bool = True):
    torch.manual_seed(3)
    features, weight = torch.randn(TOKENS, WIDTH, dtype=torch.float64), torch.randn(WORDS, WIDTH, dtype=torch.float64)
    given = [features, weight, *([torch.randn(WORDS, dtype=torch.float64)] if bias else [])]
    target = torch.randint(4, WORDS, (TOKENS,))
    target[[2, 10]] = PADDING
    return [x.to(dtype).requires_grad_() for x in given], target


def written(features, weight, bias, target, smoothing):
    """The sums over tokens of the smoothed loss, 1 - e of -log p at the target and e shared by all others, and of -log p there."""
    nll = loss = 0.0
    for x, y in zip(features, target.tolist()):
        if y != PADDING:
            powers = (weight @ x + bias).exp()
            p = powers / powers.sum()
            others = [word for word in range(WORDS) if word != y]
            nll = nll - p[y].log()
            loss = loss - (1 - smoothing) * p[y].log() - smoothing / (WORDS - 1) * p[others].log().sum()
    return loss, nll


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("smoothing, bias", [(0.0, False), (0.0, True), (0.1, False), (0.3, True)])
def test_loss_and_gradients_are_those_of_the_equations(chunk, smoothing, bias):
    given, target = operands(bias=bias)
    loss, nll = cross_entropy(*given, *([] if bias else [None]), Goal(target, PADDING, smoothing), chunk)
    wanted, wanted_nll = written(*given, *([] if bias else [0.0]), target, smoothing)
    torch.testing.assert_close((loss, nll), (wanted, wanted_nll))
    assert not nll.requires_grad
    torch.testing.assert_close(torch.autograd.grad(0.7 * loss, given), torch.autograd.grad(0.7 * wanted, given))


def test_logits_that_are_large_do_not_overflow():
    given, target = operands(bias=False)
    large = [given[0].detach().mul(1e4).requires_grad_(), given[1]]
    loss, _ = cross_entropy(*large, None, Goal(target, PADDING, 0.0), 4)
    logits = large[0] @ large[1].t()
    wanted = torch.nn.functional.cross_entropy(logits, target, ignore_index=PADDING, reduction="sum")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, large), torch.autograd.grad(wanted, large))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_in_every_precision(dtype, tolerance):
    given, target = operands(dtype)
    loss, _ = cross_entropy(*given, Goal(target, PADDING, 0.1), 3)
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted, _ = written(*exact, target, 0.1)
    wanted.backward()
    assert loss.dtype == torch.float32 and [x.grad.dtype for x in given] == [dtype] * 3
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    for x, y in zip(given, exact):
        assert (x.grad.double() - y.grad).norm() <= tolerance * y.grad.norm()


def test_fp16_keeps_the_gradients_of_improbable_words():
    """Of which fp16 has none before the loss is scaled: 1e-9 is 0 there."""
    features, weight = torch.ones(4, 1).half().requires_grad_(), torch.tensor([[0.0], [-9.0], [-20.0]]).half().requires_grad_()
    loss, _ = cross_entropy(features, weight, None, Goal(torch.zeros(4, dtype=torch.long), PADDING, 0.0), 2)
    (loss * 2**14).backward()
    p = torch.softmax(weight.detach().double()[:, 0], 0)
    torch.testing.assert_close(weight.grad[:, 0].double(), 2**14 * 4 * (p - torch.tensor([1.0, 0, 0])), rtol=0.01, atol=0)


def test_autocast_computes_in_its_precision():
    given, target = operands(torch.float32)
    goal = Goal(target, PADDING, 0.0)
    rounded = [x.detach().bfloat16().requires_grad_() for x in given]
    wanted, _ = cross_entropy(*rounded, goal, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = cross_entropy(*given, goal, 4)
    assert torch.equal(loss, wanted)
    loss.backward()
    assert all(x.grad.dtype == torch.float32 for x in given)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest result of an operation."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


PLAIN = (CrossEntropyCriterion, FastWeightCrossEntropy, (False,), ("legacy_ddp", 0.0))
SMOOTH = (LabelSmoothedCrossEntropyCriterion, FastWeightLabelSmoothedCrossEntropy, (False, 0.1), (0, False, 0.0))


def pair(kind, chunk: int = 4):
    """fairseq's criterion, and this project's in chunks."""
    theirs, ours, both, own = kind
    return theirs(make_task(40), *both), ours(make_task(40), *both, *own, loss_chunk=chunk)


@pytest.mark.parametrize("kind", [PLAIN, SMOOTH], ids=["plain", "smooth"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"share_decoder_input_output_embed": True, "scale_output": True}], ids=["own", "shared"])
def test_models_have_the_loss_and_the_gradients_of_fairseqs_criterion(kind, training, options):
    model, batch = build(**options).train(training), sample()
    batch["target"][0, -3:] = PADDING
    found = []
    for criterion in pair(kind):
        model.zero_grad()
        loss, size, log = criterion(model, batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss, size, {name: log[name] for name in log if not name.startswith(("fw_", "ran_"))}, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5, check_dtype=False)  # fairseq computes them in fp32
    logits, _ = model(**batch["net_input"])
    assert logits.shape[-1] == 40, "the projection is back"


def test_a_prefix_can_be_ignored():
    model, batch = build().train(), sample()
    theirs = LabelSmoothedCrossEntropyCriterion(make_task(40), False, 0.1, 3)(model, batch)
    ours = FastWeightLabelSmoothedCrossEntropy(make_task(40), False, 0.1, 3, False, 0.0, loss_chunk=4)(model, batch)
    torch.testing.assert_close(ours[0], theirs[0], check_dtype=False)


@pytest.mark.parametrize("kind", [PLAIN, SMOOTH], ids=["plain", "smooth"])
def test_losses_of_single_tokens_are_fairseqs(kind):
    """With ``reduce=False``, where nothing is to be saved."""
    model, batch = build().train(), sample()
    theirs, ours = (criterion(model, batch, reduce=False)[0] for criterion in pair(kind))
    assert ours.numel() == 18 and torch.equal(ours, theirs)


def test_no_more_logits_are_made_than_a_chunk_has():
    """2000 words and 18 tokens: 36,000 logits, which the loss makes without chunks."""
    batch, largest = sample(), []
    for chunk in (0, 3):
        model = build(make_task(2000), decoder_embed_dim=8, decoder_input_dim=8, decoder_output_dim=8, decoder_ffn_embed_dim=8)
        criterion = FastWeightCrossEntropy(make_task(2000), False, "legacy_ddp", 0.0, loss_chunk=chunk)
        with Sizes() as sizes:
            criterion(model.train(), batch)[0].backward()
        largest.append(sizes.largest)
    assert largest == [36_000, 16_000], "16,000: the embeddings"


def test_the_projection_is_back_after_an_error():
    model, batch = build(), sample()
    _, criterion = pair(PLAIN)
    with pytest.raises(RuntimeError):
        criterion(model, batch | {"target": torch.full((2, 9), 40)})
    assert model(**batch["net_input"])[0].shape == (2, 9, 40)


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            {"loss_chunk": 4, "find_unused_parameters": True},
            "--loss-chunk does not work with --find-unused-parameters; leave one of them out",
        ),
        (
            {"loss_chunk": 4, "report_accuracy": True},
            "--report-accuracy needs all logits, which --loss-chunk does not keep; leave one of them out",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(given, sentence):
    whole, options = f"^{re.escape(sentence)}$", {"state_norm_penalty": 0.0} | given
    if "report_accuracy" not in given:
        with pytest.raises(ValueError, match=whole):
            FastWeightCrossEntropy(make_task(40), False, **{"ddp_backend": "legacy_ddp"} | options)
    with pytest.raises(ValueError, match=whole):
        FastWeightLabelSmoothedCrossEntropy(make_task(40), False, 0.1, 0, **{"report_accuracy": False} | options)


@pytest.mark.parametrize("options", [{"adaptive_softmax_cutoff": "20,30"}, {"output_sparsity": 4}])
def test_other_softmaxes_are_refused(options):
    _, criterion = pair(PLAIN)
    with pytest.raises(ValueError, match=r"^--loss-chunk needs a plain softmax, without --adaptive"):
        criterion(build(**options), sample())
