"""t2r_distillation and --train-only new: what is matched, what is trained."""

from __future__ import annotations

import pytest
import torch
from fairseq.logging import metrics
from support.commands import train_two_workers
from support.distillation import sample
from support.language_models import build, make_task
from support.pretrained import SHAPE

from fw_fairseq.criterions import T2rDistillation
from fw_fairseq.criterions import t2r_distillation as module
from fw_fairseq.tools.convert.conversion import convert

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

ADAPTIVE = {"adaptive_softmax_cutoff": "10,30", "adaptive_input": True, "adaptive_input_cutoff": "10,30"}
DECAY = {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"}


@pytest.fixture
def criterion(monkeypatch):
    """``criterion(teacher, ...)``; the checkpoint is read as this model."""

    def make(model, **options):
        monkeypatch.setattr(module.checkpoint_utils, "load_model_ensemble", lambda *args, **kwargs: ([model], None))
        settings = {"teacher": "t.pt", "match": "hidden", "match_updates": 0, "teacher_weight": 0.5} | options
        return T2rDistillation(make_task(40), False, "legacy_ddp", 0.0, **settings)

    return make


def loss_of(criterion, student, batch):
    student.train().zero_grad()
    loss, size, log = criterion(student, batch)
    return loss / size, log


def softmax(seed: int = 1, **options):
    torch.manual_seed(seed)
    return build(mixer="softmax", **options)


@pytest.mark.parametrize("options", [{}, ADAPTIVE], ids=["plain", "adaptive"])
@pytest.mark.parametrize("settings", [{"match_updates": 1}, {"match_updates": 1, "match": "attention"}, {"teacher_weight": 1.0}])
def test_nothing_is_left_to_learn_from_itself(options, settings, criterion):
    student, batch = softmax(**options), sample()
    same, _ = loss_of(criterion(softmax(**options), **settings), student, batch)
    other, _ = loss_of(criterion(softmax(2, **options), **settings), student, batch)
    assert abs(same.item()) < 1e-10 < 1e-3 < other.item()


@pytest.mark.parametrize("options", [{}, ADAPTIVE], ids=["plain", "adaptive"])
def test_matched_words_are_those_of_the_whole_vocabulary(options, criterion):
    """The text's share is the cross entropy, the teacher's the divergence; of an adaptive softmax, in the clusters of the text."""
    teacher, student, batch = softmax(**options), build(**DECAY, **options), sample(40)
    batch["target"][1, 5:] = 1
    real = batch["target"] != 1
    with torch.no_grad():
        p, q = (m.get_normalized_probs(m(**batch["net_input"]), log_probs=True) for m in (teacher, student))
    text, _ = loss_of(criterion(teacher, teacher_weight=0.0), student, batch)
    torch.testing.assert_close(text.detach().double(), -q.gather(2, batch["target"][..., None])[..., 0][real].mean().double())
    if not options:
        divergence, _ = loss_of(criterion(teacher, teacher_weight=1.0), student, batch)
        torch.testing.assert_close(divergence.detach(), (p.exp() * (p - q)).sum(2)[real].mean())


def test_matched_attention_reads_the_teachers_layers(criterion):
    """Each layer by itself: what the first one gives changes nothing for the second."""
    teacher, student, batch = softmax(), build(**DECAY), sample()
    objective = criterion(teacher, match="attention", match_updates=1)
    first, _ = loss_of(objective, student, batch)
    first.backward()
    gradient = student.decoder.layers[1].self_attn.mixer.in_proj.weight.grad.clone()
    with torch.no_grad():
        student.decoder.layers[0].self_attn.mixer.out_proj.weight.mul_(3)
    second, _ = loss_of(objective, student, batch)
    second.backward()
    torch.testing.assert_close(student.decoder.layers[1].self_attn.mixer.in_proj.weight.grad, gradient)
    assert second != first and student.decoder.layers[0].fc1.weight.grad is None


def test_layers_first_words_then_and_plain_validation(criterion):
    teacher, student, batch = softmax(), build(**DECAY), sample()
    objective = criterion(teacher, match_updates=2)
    logged = []
    for update in range(4):
        student.set_num_updates(update)
        logged.append("distil_match" in loss_of(objective, student, batch)[1])
    assert logged == [True, True, False, False]
    _, _, log = objective(student.eval(), batch)
    assert not any(key.startswith("distil") for key in log)


@pytest.mark.parametrize("settings", [{"match_updates": 1}, {"match_updates": 1, "match": "attention"}, {"teacher_weight": 0.5}])
def test_a_batch_of_padding_teaches_nothing(settings, criterion):
    """A worker may get one. Its gradients are 0, not NaN."""
    student, batch = build(**DECAY).train(), sample()
    batch["target"].fill_(1)
    loss, size, _ = criterion(softmax(), **settings)(student, batch)
    loss.backward()
    assert (float(loss), size) == (0, 0)
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"teacher": ""}, "--teacher is missing; it is the checkpoint that fw-convert started from"),
        ({"match": "attention"}, "--match attention has no effect without --match-updates, the updates that match layers"),
    ],
)
def test_mistakes(settings, message, criterion):
    with pytest.raises(ValueError, match=message):
        criterion(softmax(), **settings)


def test_a_teacher_of_another_shape_is_refused(criterion):
    batch = sample()
    with pytest.raises(ValueError, match="--teacher has 3 layers of width 32, the model 2 of 32"):
        loss_of(criterion(softmax(decoder_layers=3), match_updates=1), build(**DECAY), batch)
    wide = dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), 48)
    for settings in ({"match": "hidden"}, {"match": "attention"}):
        matched = criterion(softmax(), match_updates=1, **settings)
        with pytest.raises(ValueError, match=r"^--teacher has 2 layers of width 32, the model 3 of 32; they must be the same"):
            loss_of(matched, build(**DECAY, decoder_layers=3), batch)
        with pytest.raises(ValueError, match=r"^--teacher has 2 layers of width 32, the model 2 of 48; they must be the same"):
            loss_of(matched, build(**DECAY, **wide), batch)
        with pytest.raises(ValueError, match=r"must be the same \(and --decoder-layerdrop 0\)$"):
            loss_of(matched, build(**DECAY, decoder_layerdrop=0.1), batch)
    with pytest.raises(
        ValueError, match="--match attention does not work with --checkpoint-activations or --reversible; use --match hidden"
    ):
        loss_of(criterion(softmax(), match_updates=1, match="attention"), build(**DECAY, checkpoint_activations=True), batch)


@pytest.mark.parametrize("mixer", ["softmax", "local_attention"])
def test_what_was_copied_is_not_new(mixer):
    with pytest.raises(ValueError, match="--train-only new leaves nothing to train"):
        build(mixer=mixer, train_only="new")


def test_what_is_new_learns_as_if_all_learnt():
    """Queries, keys, gates and the feature map do, in all their rows; values do not."""
    found = []
    for train_only in ("all", "new"):
        torch.manual_seed(3)
        model = build(update_rule="delta", feature_map="relu", train_only=train_only)
        model(torch.arange(4, 40).view(2, 18))[0].square().sum().backward()
        mixer = model.decoder.layers[0].self_attn.mixer
        found.append([dict(mixer.named_parameters()), model.decoder.layers[0].fc1.weight.grad])
    (every, _), (new, fc1) = found
    assert {name for name, p in new.items() if p.requires_grad} == {name for name in new if not name.startswith("out_proj")}
    assert fc1 is None and new["out_proj.weight"].grad is None
    for name in new.keys() - {"out_proj.weight", "out_proj.bias"}:
        expected = every[name].grad.clone()
        if name.startswith("in_proj"):
            expected[64:96] = 0
        torch.testing.assert_close(new[name].grad, expected)


def changed(before: dict, after: dict) -> set[str]:
    empty = "_float_tensor"  # a buffer of fairseq 0.12.2 that nothing is written to
    return {name for name in before if not (name.endswith(empty) or torch.equal(before[name], after[name]))}


@pytest.mark.slow
def test_a_warm_start_in_two_workers_trains_only_what_is_new(counting_data, pretrained, tmp_path):
    convert(pretrained, tmp_path / "start.pt", "delta", feature_dim=4)
    options = [*SHAPE.split(), "--arch", "fast_weight_lm", "--update-rule", "delta", "--feature-map", "relu", "--feature-dim", 4]
    options += ["--criterion", "t2r_distillation", "--teacher", pretrained, "--match", "attention", "--match-updates", 4]
    options += ["--train-only", "new", "--max-update", 6, "--save-dir", tmp_path, "--finetune-from-model", tmp_path / "start.pt"]
    log = train_two_workers(counting_data, *options)
    assert "distil_match" in log and "distil_teacher" in log
    before, after = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("start.pt", "checkpoint_last.pt"))
    mixers = [f"decoder.layers.{layer}.self_attn.mixer." for layer in (0, 1)]
    new = ("in_proj.weight", "in_proj.bias", "feature_map.weight", "feature_map.bias")
    assert changed(before, after) == {mixer + name for mixer in mixers for name in new}
    for mixer in mixers:
        rows = (before[mixer + "in_proj.weight"] != after[mixer + "in_proj.weight"]).any(1)
        assert rows[:32].any() and not rows[32:64].any() and rows[64:].all(), "queries and keys, values, gates"


@pytest.mark.slow
@pytest.mark.parametrize("match", ["hidden", "attention"])
def test_layers_are_matched_with_the_ddp_of_torch(match, counting_data, pretrained, tmp_path):
    """It waits for the gradient of every parameter. The last norm and the output have none while layers are matched."""
    options = [*SHAPE.split(), "--arch", "fast_weight_lm", "--update-rule", "delta", "--max-update", 4]
    options += ["--criterion", "t2r_distillation", "--teacher", pretrained, "--match", match, "--match-updates", 3]
    log = train_two_workers(counting_data, *options, "--ddp-backend", "pytorch_ddp", "--save-dir", tmp_path)
    assert "distil_match" in log and "distil_teacher" in log


def test_layers_are_matched_in_fp32(criterion, monkeypatch):
    """The squares of these values, and their sums, are beyond fp16."""
    student, teacher = torch.nn.Identity(), torch.nn.Identity()
    values = {student: [torch.full((3, 2, 8), 700.0).half()], teacher: [torch.full((3, 2, 8), 400.0).half()]}
    monkeypatch.setattr(module, "hidden", lambda model, net_input: values[model])
    distance = criterion(softmax()).match_layers(student, teacher, sample()["net_input"], torch.ones(2, 3, dtype=torch.bool))
    assert distance.dtype == torch.float32 and float(distance) == pytest.approx(300**2 / 400**2)


def test_a_layer_that_gives_zeros_can_be_matched(criterion, monkeypatch):
    """Its mean square counts as 1e-12 in the quotient."""
    values = [torch.full((3, 2, 8), 1e-6)], [torch.zeros(3, 2, 8)]
    monkeypatch.setattr(module, "hidden", lambda model, net_input: values[model])
    distance = criterion(softmax()).match_layers(0, 1, sample()["net_input"], torch.ones(2, 3, dtype=torch.bool))
    assert float(distance) == pytest.approx(1)


def test_an_update_counts_sentences_where_losses_are_means_over_sentences(criterion):
    objective, student = criterion(softmax()), build(**DECAY).train()
    objective.sentence_avg = True
    assert objective(student, sample())[1] == 2
    objective.sentence_avg = False
    assert objective(student, sample())[1] == 18


@pytest.mark.parametrize("place", [{"dtype": torch.float16}, {"device": "meta"}], ids=str)
def test_the_teacher_has_the_precision_and_the_device_of_the_model(place, criterion):
    student = build(**DECAY).to(**place)
    like, teacher = next(student.parameters()), criterion(softmax()).teacher_for(student)
    assert all((x.dtype, x.device) == (like.dtype, like.device) for x in teacher.parameters())


def test_the_parts_of_the_loss_are_means_over_the_tokens_of_all_workers():
    logs = [{"loss": 1.0, "ntokens": n, "sample_size": n, "distil_teacher": n * value} for n, value in ((1, 0.1), (5, 0.9))]
    with metrics.aggregate(new_root=True) as found:
        T2rDistillation.reduce_metrics(logs)
        T2rDistillation.reduce_metrics([{"loss": 1.0, "ntokens": 6, "sample_size": 6, "distil_teacher": 0.0}])
    assert found.get_smoothed_values()["distil_teacher"] == 0.3833


def test_a_worker_without_words_has_no_part_in_the_means():
    """It logs nothing of its own, and counts as 0."""
    with metrics.aggregate(new_root=True) as found:
        T2rDistillation.reduce_metrics([{"loss": 4.0, "ntokens": 4, "sample_size": 4, "distil_teacher": 2.0}, {}])
    assert found.get_smoothed_values()["distil_teacher"] == 0.5


def test_half_of_the_loss_is_the_teachers_from_the_first_update_if_nothing_else_is_said():
    config = module.T2rDistillationConfig()
    assert (config.match_updates, config.teacher_weight, config.state_norm_penalty) == (0, 0.5, 0.0)


def test_the_loss_of_words_is_shared_between_the_teacher_and_the_text(criterion):
    teacher, student, batch = softmax(), build(**DECAY), sample()
    text, both, words = (loss_of(criterion(teacher, teacher_weight=share), student, batch)[0] for share in (0.0, 0.25, 1.0))
    torch.testing.assert_close(both, 0.75 * text + 0.25 * words)
