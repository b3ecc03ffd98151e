"""Associative retrieval: its data, its model against the memory it stands for, its recipes."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from support.commands import USER_DIR, fairseq
from support.draws import PLAIN
from support.recipes import recipe
from torch.nn import functional as F

import fw_fairseq.models  # noqa: F401
from fw_fairseq.criterions import RetrievalMse
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.ops import fast_weight
from fw_fairseq.patches.checkpoints import model_options
from fw_fairseq.rules import RULES, Gate, Rule
from fw_fairseq.tasks.associative_retrieval import AssociativeRetrievalConfig, AssociativeRetrievalTask

pytestmark = pytest.mark.usefixtures("one_thread")
NON_NEGATIVE = [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]


def batches(split: str, setting: str, epoch: int = 1, symbols: int = 7, count: int = 5, **options):
    task = AssociativeRetrievalTask(
        AssociativeRetrievalConfig(symbols=symbols, setting=setting, batch_size=count, updates_per_epoch=3, seed=1, **options)
    )
    task.load_dataset(split)
    return list(task.get_batch_iterator(task.dataset(split), epoch=epoch).next_epoch_itr(shuffle=False))


def options_of(rule: str, phi: str) -> dict:
    norm = "none" if rule == "fwm" else "sum" if phi in NON_NEGATIVE else "l2"
    return {"update_rule": rule, "feature_map": phi, "feature_norm": norm}


@pytest.mark.parametrize(
    "split, sequences, setting, length, options",
    [
        ("train", 5, "1", 7, {}),
        ("valid", 20, "1", 7, {}),
        ("train", 5, "2", 14, {"evaluation_pairs": 9}),
        ("valid", 20, "2", 7, {}),
        ("valid", 20, "2", 9, {"evaluation_pairs": 9}),
    ],
)
def test_the_answer_is_the_last_value_of_the_key(split, sequences, setting, length, options):
    for batch in batches(split, setting, **options):
        keys, values, queries = batch["net_input"].values()
        assert keys.shape == values.shape == (sequences, length)
        for row in range(sequences):
            last = dict(zip(keys[row].tolist(), values[row].tolist()))
            assert batch["target"][row].tolist() == [last.get(query, -1) for query in queries[row].tolist()]
            assert setting == "2" or sorted(last) == sorted(last.values()) == list(range(7))
        assert (queries.shape[1] == 1 and batch["target"].min() >= 0) if split == "train" else queries[0].tolist() == list(range(7))


def test_the_sizes_of_schlag_et_al():
    """20 keys of which each is told once, if nothing else is said; the least are two."""
    config = AssociativeRetrievalConfig()
    assert (config.symbols, str(config.setting), config.evaluation_pairs) == (20, "1", 0)
    [first, *_] = batches("valid", "1", symbols=2)
    assert first["net_input"]["keys"].sum(1).tolist() == [1] * 20 and first["ntokens"] == 40
    with pytest.raises(ValueError, match="--evaluation-pairs is 9; --setting 1 has every key once, leave it out"):
        batches("valid", "1", evaluation_pairs=9)


def test_data_is_drawn_anew_each_epoch_and_the_same_in_each_run():
    drawn = [[batch["net_input"]["keys"] for batch in batches("train", "2", epoch)] for epoch in (1, 1, 2)]
    assert all(torch.equal(one, same) and not torch.equal(one, other) for one, same, other in zip(*drawn))
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_the_task_of_a_checkpoint():
    """As fairseq's loader of checkpoints sets it up, for fairseq-validate."""
    config = AssociativeRetrievalConfig(symbols=7, batch_size=2)
    assert AssociativeRetrievalTask.setup_task(config, from_checkpoint=True).cfg is config


@pytest.mark.parametrize(
    "rule, attention_norm",
    [(name, norm) for name in PLAIN for norm in (False, True) if not norm or RULES[name].normaliser == "write"],
)
def test_what_is_read_is_in_the_memory(rule, attention_norm):
    options = options_of(rule, "dpfp") | {"attention_norm": attention_norm, "key_dim": 4}
    model, (batch, *_) = RetrievalModel(RetrievalConfig(**options), 7).double(), batches("valid", "2")
    seen = {}
    model.read = lambda q, k, v, gates: seen.update(q=q, k=k, v=v, gates=gates) or RetrievalModel.read(model, q, k, v, gates)
    read = model(**batch["net_input"])
    _, state = fast_weight(seen["k"], seen["k"], seen["v"], rule, seen["gates"], attention_norm=attention_norm)
    expected = seen["q"] @ state.memory
    if attention_norm:
        expected = expected / (seen["q"] @ state.normaliser.unsqueeze(-1) + 1e-6)
    expected = F.layer_norm(expected, (7,)) if rule == "fwm" else expected
    torch.testing.assert_close(read, expected.squeeze(1))


def test_softmax_weighs_the_values():
    """By the exponentials of the products of the query and the keys, divided by the square root of their width."""
    model = RetrievalModel(RetrievalConfig(mixer="softmax", key_dim=4), 7).double()
    keys, values, queries = (torch.randint(7, (3, count)) for count in (20, 20, 5))
    v = F.one_hot(values, 7).double()
    k = torch.cat([model.embedding(keys), v], -1) @ model.key_projection.weight.mT
    q = model.embedding(queries) @ model.query_projection.weight.mT
    torch.testing.assert_close(model(keys, values, queries), (q @ k.mT / 2).softmax(-1) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "other, said",
    [
        ({"update_rule": "delta"}, "--update-rule sum, and this model has --update-rule delta;"),
        ({"feature_map": "dpfp"}, "--feature-map elu, and this model has --feature-map dpfp;"),
        ({"mixer": "softmax"}, "--mixer fast_weight, and this model has --mixer softmax;"),
        ({"fast_weight_backend": "recurrent"}, None),
    ],
)
def test_a_checkpoint_of_other_options_is_refused(other, said, monkeypatch):
    """Also where the parameters have the same shapes. How the model computes may change."""
    monkeypatch.setitem(model_options.model_options, "other.pt", asdict(RetrievalConfig(update_rule="sum")))
    config = RetrievalConfig(**{"update_rule": "sum"} | other)
    given = SimpleNamespace(model=config, checkpoint=SimpleNamespace(restore_file="checkpoint_last.pt"))
    trainer = SimpleNamespace(model=RetrievalModel(config, 7), cfg=given)
    if said is None:
        return model_options.check_options(trainer, "other.pt")
    with pytest.raises(ValueError, match=f"^other.pt was made with {said}"):
        model_options.check_options(trainer, "other.pt")
    return None


def test_a_rule_of_steps_with_a_gate_of_each_feature(monkeypatch):
    """Reading leaves its memory as the last pair left it."""

    def step(memory, q, k, v, f):
        memory = f.unsqueeze(-1) * memory + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-2) @ memory).squeeze(-2), memory

    monkeypatch.setitem(RULES, "steps", Rule("", "this test", gates={"f": Gate("K")}, step=step))
    model, tokens = RetrievalModel(RetrievalConfig(update_rule="steps", key_dim=4), 7).double(), torch.randint(7, (2, 9))
    seen = {}
    model.read = lambda q, k, v, gates: seen.update(q=q, k=k, v=v, gates=gates) or RetrievalModel.read(model, q, k, v, gates)
    read = model(tokens, tokens.flip(1), tokens[:, :5])
    memory = torch.zeros(2, 1, 4, 7).double()
    for t in range(9):
        memory = seen["gates"]["f"][:, :, t, :, None] * memory
        memory = memory + seen["k"][:, :, t, :, None] * seen["v"][:, :, t, None]
    torch.testing.assert_close(read, (seen["q"] @ memory).squeeze(1))


@pytest.mark.parametrize("phi", ["favor", "rfa"])
def test_random_features_are_drawn_for_each_forward_of_training(phi):
    model, tokens = RetrievalModel(RetrievalConfig(feature_map=phi, feature_norm="l2"), 7), torch.randint(7, (2, 9))
    first, second = (model.train()(tokens, tokens, tokens) for _ in range(2))
    assert not torch.allclose(first, second)
    assert model.eval()(tokens, tokens, tokens).equal(model(tokens, tokens, tokens))


def test_the_parts_of_the_model():
    """Embeddings of width 1.1 * 2 * symbols, and keys and queries of width 64 by maps without biases. Gates start around 1/2, or
    where uniform gate initialisation has them."""
    model = RetrievalModel(RetrievalConfig(), 7)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "embedding.weight": (7, 15), "query_projection.weight": (64, 15), "key_projection.weight": (64, 22),
        "gates.beta.weight": (1, 22), "gates.beta.bias": (1,),
    }  # fmt: skip
    assert 0 < model.gates["beta"].bias.abs() < 22**-0.5
    decay = (
        RetrievalModel(RetrievalConfig(update_rule="decay", feature_norm="none", feature_map="elu"), 7).gates["f"].bias.sigmoid()
    )
    assert decay.shape == (64,) and decay.min() < 0.2 and decay.max() > 0.8


@pytest.mark.parametrize(
    "rule, phi", [*(("delta", phi) for phi in FEATURE_MAPS), *((rule, "elu") for rule in PLAIN if rule not in ("fwm", "delta"))]
)
def test_no_combination_gives_nan_with_many_keys(rule, phi):
    model = RetrievalModel(RetrievalConfig(**options_of(rule, phi)), 150).train()
    model.key_projection.weight.data *= 10
    batch = batches("train", "2", symbols=150)[0]
    read = model(**batch["net_input"])
    (read - F.one_hot(batch["target"], 150)).square().sum().backward()
    assert read.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mixer": "sru"}, "--mixer is sru; retrieval has one head of fast_weight or softmax"),
        ({"update_rule": "fwm", "feature_map": "tanh"}, "--feature-norm sum needs a non-negative --feature-map, not tanh"),
        ({"update_rule": "fwm", "attention_norm": True}, "--attention-norm is not defined for --update-rule fwm"),
        ({"key_heads": 2}, "--key-heads is 2; it must divide the number of heads, 1"),
        (
            {"update_rule": "gla"},
            "--update-rule gla is not for retrieval, which makes one key, one value and gates that are sigmoids for each pair;"
            " use one of: sum, gated, ",
        ),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        RetrievalModel(RetrievalConfig(**options), 7)


def test_the_least_width_of_keys():
    task = SimpleNamespace(cfg=SimpleNamespace(symbols=7))
    assert RetrievalModel.build_model(RetrievalConfig(key_dim=1), task).key_projection.weight.shape == (1, 22)
    with pytest.raises(ValueError, match=r"^--key-dim is 0; it must be at least 1$"):
        RetrievalModel.build_model(RetrievalConfig(key_dim=0), task)


def test_options_without_effect_are_refused():
    def refuse(**options):
        config = RetrievalConfig(**options)
        RetrievalModel(config, 7).refuse_without_effect(config)

    refuse(update_rule="decay", feature_norm="none", key_dim=8)
    refuse(update_rule="gated_delta", write_strength_init=0.5)
    refuse(mixer="softmax", key_dim=8)
    for options, name in [({"mixer": "softmax", "update_rule": "sum"}, "update-rule"), ({"scale_reads": True}, "scale-reads")]:
        with pytest.raises(ValueError, match=f"^--{name} has no effect without --mixer fast_weight; leave it out$"):
            refuse(**options)


def test_softmax_has_no_gates():
    """Nor needs those of a checkpoint that has them."""
    model = RetrievalModel(RetrievalConfig(mixer="softmax"), 7)
    assert not [name for name, _ in model.named_parameters() if "gate" in name]
    older = model.state_dict() | {"gates.beta.weight": torch.zeros(1, 22), "gates.beta.bias": torch.zeros(1)}
    model.load_state_dict(older)


@pytest.mark.long
def test_a_point_is_solved_and_not_run_again(tmp_path):
    arguments = ["capacity-3-delta-dpfp2"]
    done = recipe("synthetic/point.sh", tmp_path, *arguments, TOY="")
    assert done.returncode == 0, done.stderr
    name, loss = done.stdout.splitlines()[-1].split("=")
    assert name == "best_eval_loss" and 0 <= float(loss) < 0.001
    [log] = tmp_path.glob("*.log")
    assert "stopping training because current learning rate (0.0)" in log.read_text()
    before = log.stat().st_mtime_ns
    assert recipe("synthetic/point.sh", tmp_path, *arguments, TOY="").stdout == done.stdout and log.stat().st_mtime_ns == before


@pytest.mark.long
def test_a_sweep_goes_through_its_points(tmp_path):
    done = recipe("synthetic/sweep.sh", tmp_path, "capacity-2-softmax", "capacity-2-gated-dpfp2", JOBS="1", TOY="")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in (tmp_path / "capacity.txt").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["gated:dpfp2", "2"], ["softmax", "2"]]
    assert all(float(loss) < 0.001 for *_, loss in rows) and "2 of 2: " in done.stderr
    assert done.stdout == (tmp_path / "capacity.txt").read_text()


@pytest.mark.long
def test_a_sweep_keeps_what_it_has_when_a_point_fails(tmp_path):
    done = recipe("synthetic/sweep.sh", tmp_path, "capacity-2-hebb-elu", "capacity-2-softmax", JOBS="1", TOY="")
    assert done.returncode != 0 and "capacity-2-hebb-elu failed" in done.stderr and "not all points have a result" in done.stderr
    assert done.stdout.split()[:2] == ["softmax", "2"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--symbols 3 --max-tokens 9", "associative_retrieval needs --batch-size"),
        ("--symbols 3 --batch-size 2 --feature-norm none", "--update-rule delta diverges with keys longer than 1"),
    ],
)
def test_mistakes(options, message, tmp_path):
    task = ["--task", "associative_retrieval", "--arch", "retrieval", "--criterion", "retrieval_mse", "--optimizer", "adam"]
    done = fairseq("train", *USER_DIR, *task, *options.split(), "--no-save", "--save-dir", tmp_path)
    assert done.returncode != 0 and f"train: {message}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("losses, best", [("nan 0.5 nan 0.25 inf", "0.25"), ("nan inf", "inf"), ("nan nan", "nan")])
def test_the_best_of_a_point_is_a_number_if_there_is_one(losses, best, tmp_path):
    train = tmp_path / "fairseq-train"
    train.write_text("#!/bin/sh\n" + "".join(f'echo \'{{"valid_loss": "{loss}"}}\'\n' for loss in losses.split()))
    train.chmod(0o755)
    done = recipe("synthetic/point.sh", tmp_path / "out", "capacity-3-dpfp1", BIN=str(tmp_path), TOY="")
    assert (done.returncode, done.stdout) == (0, f"best_eval_loss={best}\n")


def test_a_mistaken_point_says_why(tmp_path):
    done = recipe("synthetic/point.sh", tmp_path, "capacity-3-hebb-elu", TOY="")
    assert done.returncode != 0 and "invalid choice: 'hebb'" in done.stderr
    assert not list(tmp_path.glob("*.log"))


def test_the_loss_and_the_accuracy_are_of_the_queries_that_ask():
    """Of three queries one asks for nothing; of the others one is answered. Workers with more queries weigh more."""
    read = torch.tensor([[[2.0, 0.0, 0.5], [9.0, 9.0, 9.0], [1.0, 0.0, 0.5]]])
    sample = {"net_input": {"x": read}, "target": torch.tensor([[0, -1, 2]]), "nsentences": 1}
    loss, size, log = RetrievalMse(None)(lambda x: x, sample)
    assert float(loss) == (1 + 0.25) / 2 + (1 + 0.25) / 2 and size == 2
    assert {name: float(value) for name, value in log.items()} == {
        "loss": 1.25, "right": 1, "ntokens": 2, "nsentences": 1, "sample_size": 2,
    }  # fmt: skip
    with metrics.aggregate(new_root=True) as found:
        RetrievalMse.reduce_metrics([log, {"loss": 0.0123456789, "right": 1, "sample_size": 1}])
        RetrievalMse.reduce_metrics([{"loss": 0.0, "right": 0, "sample_size": 3}])
    assert found.get_smoothed_values() == {"loss": round(1.2623456789 / 6, 7), "accuracy": round(2 / 6, 4)}
    assert RetrievalMse.logging_outputs_can_be_summed() is True
