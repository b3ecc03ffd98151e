"""What fast_weight_cross_entropy logs and adds to the loss, also where LayerDrop leaves layers out."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.logging import metrics
from support.distillation import sample
from support.draws import PLAIN
from support.language_models import build, make_task
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq.criterions import FastWeightCrossEntropy, FastWeightLabelSmoothedCrossEntropy
from fw_fairseq.criterions.fast_weight_cross_entropy import FastWeightCrossEntropyConfig, FastWeightLabelSmoothedCrossEntropyConfig
from fw_fairseq.criterions.memory_logging import MemoryLogging

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def criterion(penalty: float = 0.0) -> FastWeightCrossEntropy:
    return FastWeightCrossEntropy(make_task(40), False, "legacy_ddp", penalty)


@pytest.fixture
def leave_out(monkeypatch):
    """``leave_out(layer, ...)`` of two from now on."""

    def choose(*layers):
        drawn = torch.tensor([float(layer not in layers) for layer in range(2)])
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda x: x.copy_(drawn))

    return choose


def logged(*logs) -> dict[str, float]:
    with metrics.aggregate(new_root=True) as found:
        FastWeightCrossEntropy.reduce_metrics(list(logs))
    return {name: value for name, value in found.get_smoothed_values().items() if name.startswith("fw_")}


@pytest.mark.parametrize("rule", [*PLAIN, "mamba2", "gdn2"])
def test_a_layer_that_is_left_out_logs_nothing_and_has_no_penalty(rule, leave_out):
    model, with_penalty = build(update_rule=rule, decoder_layerdrop=0.5).train(), criterion(0.1)
    logs = []
    for layers in ([], [1], [0, 1]):
        leave_out(*layers)
        loss, _, log = with_penalty(model, sample())
        loss.backward()
        logs.append(log)
    assert [*logs[0]] == [*logs[1]] == [*logs[2]], "workers add them up"
    whole, part = logged(logs[0]), logged(logs[1])
    assert {name[:5] for name in whole} == {"fw_0_", "fw_1_"} and {name[:5] for name in part} == {"fw_0_"}
    assert logged(*logs)["fw_1_state_norm"] == whole["fw_1_state_norm"] and not logged(logs[2])
    assert loss.item() == logs[2]["loss"].item()


@pytest.mark.parametrize("penalty", [0.1, 0.0])
def test_a_model_can_be_copied_after_a_penalty_or_none(penalty):
    model = build().train()
    loss, _, log = criterion(penalty)(model, sample())
    loss.backward()
    assert (loss > log["loss"]) == (penalty > 0)
    copy.deepcopy(model)


def test_no_criterion_has_a_penalty_of_its_own():
    for config in (FastWeightCrossEntropyConfig, FastWeightLabelSmoothedCrossEntropyConfig):
        assert config().state_norm_penalty == 0


def test_the_penalty_of_translations_criterion():
    """Beside the smoothed loss."""
    model, batch = build().train(), sample()

    def losses(penalty):
        made = FastWeightLabelSmoothedCrossEntropy(make_task(40), False, 0.1, 0, False, penalty)
        return made(model, batch)

    plain, size, log = losses(0.0)
    norms = [log[f"fw_{layer}_state_norm"] / size for layer in (0, 1)]
    torch.testing.assert_close(losses(0.25)[0] - plain, 0.25 * size * sum(norms) / 2, rtol=1e-3, atol=1e-4)
    assert plain.item() != criterion()(model, batch)[0].item()


def test_another_criterion_with_these_statistics_has_no_penalty():
    class Own(MemoryLogging, CrossEntropyCriterion):
        pass

    loss, _, log = Own(make_task(40), False)(build().train(), sample())
    assert loss.item() == log["loss"].item() and "fw_1_state_norm" in log


def test_statistics_are_means_over_the_tokens_of_all_workers():
    logs = [{"ntokens": n, "sample_size": n, "loss": 0.0, "ran_0": n, "fw_0_gate": n * value} for n, value in ((1, 0.1), (3, 0.9))]
    assert logged(*logs) == {"fw_0_gate": 0.7}
    logs = [{"ntokens": 3, "sample_size": 3, "loss": 0.0, "ran_0": 3, "fw_0_gate": 1.0}]
    assert logged(*logs) == {"fw_0_gate": 0.3333}, "four places"
    assert logged(*logs, {}) == {"fw_0_gate": 0.3333}, "and a worker without words"


def test_the_penalty_is_the_mean_norm_of_the_layers_for_each_token():
    """In training; validation has the plain loss and no statistics."""
    model, batch = build().train(), sample()
    plain, size, log = criterion()(model, batch)
    loss, _, _ = criterion(0.25)(model, batch)
    norms = [log[f"fw_{layer}_state_norm"] / size for layer in (0, 1)]
    torch.testing.assert_close(loss - plain, 0.25 * size * sum(norms) / 2, rtol=1e-3, atol=1e-4)
    valid, _, log = criterion(0.25)(model.eval(), batch)
    assert valid.item() == log["loss"].item() and not any(name.startswith("fw_") for name in log)


@pytest.mark.parametrize(
    "penalty, options, message",
    [
        (1, {"mixer": "sru"}, "--state-norm-penalty needs fast-weight layers, and the model has none"),
        (1, {"checkpoint_activations": True}, "--state-norm-penalty does not work with --checkpoint-activations"),
    ],
)
def test_refused_penalties(penalty, options, message):
    with pytest.raises(ValueError, match=message):
        criterion(penalty)(build(**options).train(), sample())


def options_of(kind):
    labels = FastWeightLabelSmoothedCrossEntropyConfig(sentence_avg=False)
    return labels if kind is FastWeightLabelSmoothedCrossEntropy else FastWeightCrossEntropyConfig(False, ddp_backend="legacy_ddp")


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [FastWeightCrossEntropy, FastWeightLabelSmoothedCrossEntropy])
def test_statistics_are_those_of_updates_that_fairseq_logs(kind):
    """And of a run's first one. Other updates run what fairseq's criterion runs, and not one operator more."""
    config = options_of(kind)
    config.log_interval = 3
    model, batch, made = build().train(), sample(), kind.build_criterion(config, make_task(40))
    logged_at, ran = [], []
    for update in range(7, 15):  # of a run that was resumed
        model.set_num_updates(update)
        with Names() as names:
            _, _, log = made(model, batch)
        logged_at += [update] * any(name.startswith(("fw_", "ran_")) for name in log)
        ran.append(names.count)
    assert logged_at == [7, 8, 11, 14]
    plain = super(MemoryLogging, made).forward
    with Names() as names:
        plain(model, batch)
    assert ran[2] == ran[3] == ran[5] == names.count and ran[4].total() > names.count.total()


def test_several_batches_of_one_update_log_alike():
    """Those of --update-freq, and those of all workers."""
    config = options_of(FastWeightCrossEntropy)
    config.log_interval = 100
    model, made = build().train(), FastWeightCrossEntropy.build_criterion(config, make_task(40))
    assert [*made(model, sample())[2]] == [*made(model, sample())[2]]
    model.set_num_updates(1)
    assert [*made(model, sample())[2]] == ["loss", "ntokens", "nsentences", "sample_size"]


def test_the_interval_is_fairseqs_option():
    for config in (FastWeightCrossEntropyConfig, FastWeightLabelSmoothedCrossEntropyConfig):
        assert config().log_interval == "${common.log_interval}"
