"""Options and scores that end in one sentence, wherever they come from."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, distributed_utils, models, options, tasks
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.quantization import scalar
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from support.checkpoints import parse, save, save_format
from support.language_models import build, draw, make_task
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq import Mistake
from fw_fairseq.generation.graphs import VARIABLE
from fw_fairseq.mixers import MIXERS
from fw_fairseq.patches.checkpoints.model_options import deciding, differing, written
from fw_fairseq.patches.mistakes import sentence, shortened
from fw_fairseq.patches.non_finite import NotFinite

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = "--encoder-embed-dim 8 --decoder-embed-dim 8 --encoder-ffn-embed-dim 8 --decoder-ffn-embed-dim 8 --encoder-layers 1"
SMALL += " --decoder-layers 1 --encoder-attention-heads 2 --decoder-attention-heads 2"


@pytest.fixture(scope="module")
def checkpoint(dictionary, tmp_path_factory):
    cfg = convert_namespace_to_omegaconf(parse("--arch fast_weight_lm", dictionary))
    tensors = tasks.setup_task(cfg.task).build_model(cfg.model).state_dict()
    groups = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return save(save_format(tensors, cfg={name: groups[name] for name in ("task", "model")}), tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(
    "words, said",
    [
        ("--task language_modeling", "--arch is missing; name the architecture to train, for example --arch fast_weight_lm"),
        (
            "--arch fast_weight_lm",
            "--arch fast_weight_lm is a language model, which --task translation does not train; name its task, for example --task"
            " language_modeling",
        ),
        (
            "--arch=transformer_lm --task translation --tokens-per-sample 16",  # an option of the task that is missing
            "--arch transformer_lm is a language model, which --task translation does not train; name its task, for example --task"
            " language_modeling",
        ),
        (
            "--arch fast_weight_transformer --task stateful_language_modeling",
            "--arch fast_weight_transformer is a model with an encoder, which --task stateful_language_modeling does not train;"
            " name its task, for example --task translation",
        ),
    ],
)
def test_a_model_and_a_task_that_do_not_belong_together_are_refused(words, said):
    with pytest.raises(Mistake, match=f"^{re.escape(said)}$"):
        options.parse_args_and_arch(options.get_training_parser(), ["data", *words.split()])


@pytest.mark.parametrize(
    "arch, task", [("fast_weight_lm", "stateful_language_modeling"), ("fast_weight_transformer", "translation")]
)
def test_a_model_and_its_task_are_taken(arch, task):
    words = ["data", "--arch", arch, "--task", task]
    assert options.parse_args_and_arch(options.get_training_parser(), words).arch == arch
    options.parse_args_and_arch(options.get_training_parser(), [*words, "--other"], parse_known=True)


def test_only_tpu_is_for_tpus():
    """With --bf16 fairseq looks for one too."""
    for precision, tpu in (("--bf16", False), ("--bf16 --tpu", True)):
        words = f"data --arch fast_weight_lm --task language_modeling {precision}"
        args = options.parse_args_and_arch(options.get_training_parser(), words.split())
        assert (args.tpu, args.bf16) == (tpu, True)


@pytest.mark.parametrize(
    "words, listed",
    [
        ("--arch fast_weight_lm --task stateful_language_modeling", ["--update-rule", "--reset-at-eos", "--max-update"]),
        ("--arch fast_weight_transformer -h --criterion fast_weight_cross_entropy", ["--linear-attention", "--loss-chunk"]),
        ("", ["--max-update"]),
    ],
)
def test_help_lists_the_options_of_what_is_given(words, listed, capsys, monkeypatch):
    """From the command line and from a list; without an architecture what fairseq lists."""
    given = [*words.split(), *([] if "-h" in words else ["--help"])]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *given])
    printed = []
    for arguments in (given, None):
        with pytest.raises(SystemExit) as end:
            options.parse_args_and_arch(options.get_training_parser(), arguments)
        assert end.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and all(f"\n  {option}" in printed[0] for option in listed)
    assert ("\n  --update-rule" in printed[0]) == ("--arch" in words)


def translation(languages, *arguments: str):
    words = [str(languages), "--arch", "fast_weight_transformer", "--task", "translation", "-s", "a", "-t", "b", *SMALL.split()]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), [*words, *arguments]))


def test_overrides_of_translation_models(languages):
    """Their options are no dataclass of fairseq's."""
    cfg = translation(languages)
    task = tasks.setup_task(cfg.task)
    cfg.model.update_rule = "zzz"
    with pytest.raises(Mistake, match=r"^--update-rule is 'zzz'; it must be one of: sum, "):
        task.build_model(cfg.model)


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"attention_norm": "maybe"}, "Value 'maybe' is not a valid bool (type str); full_key: attention_norm"),
        ({"feature_map": "zzz"}, "Invalid value 'zzz', expected one of [identity, "),
        ({"decoder_layers_to_keep": "a,b"}, "--decoder-layers-to-keep is 'a,b'; it must have different numbers from 0 to 1"),
    ],
)
def test_other_overrides(overrides, said, checkpoint, dictionary):
    with pytest.raises(Exception) as error:  # noqa: PT011
        checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides={"data": str(dictionary)} | overrides)
    assert (sentence(error.value) or "").startswith(said)


def test_polynomial_decay_ends_with_the_run(dictionary):
    """As its option's default says."""
    for given, updates in (("", 9), ("--total-num-update 5", 5)):
        words = f"--arch fast_weight_lm --lr-scheduler polynomial_decay --max-update 9 {given}"
        assert convert_namespace_to_omegaconf(parse(words, dictionary)).lr_scheduler.total_num_update == updates


@pytest.mark.parametrize("mixer", MIXERS)
def test_noise_of_product_quantisation_reaches_every_projection(mixer):
    """As it does in fairseq's attention: in training all dense layers lose blocks of 8 weights."""
    model, tokens = build(mixer=mixer, quant_noise_pq=0.9, quant_noise_pq_block_size=8), draw(2, 70)
    layer = model.decoder.layers[0].self_attn
    dense = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    before = [part.weight.detach().clone() for part in dense]
    model(tokens)
    assert dense and all(torch.equal(part.weight, weight) for part, weight in zip(dense, before))
    model.train()(tokens)
    for part, weight in zip(dense, before):
        blocks = part.weight.detach().unflatten(1, (-1, 8))
        gone = (blocks == 0).all(-1)
        torch.testing.assert_close(blocks[~gone], 10 * weight.unflatten(1, (-1, 8))[~gone])
        assert gone.any()


@pytest.mark.parametrize("mixer", ["fast_weight", "srupp"])
def test_scalar_quantisation_takes_every_dense_layer(mixer, monkeypatch):
    """Outside training all weights are quantised, however many tokens are read at once. fairseq wants a GPU for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    model, tokens = build(mixer=mixer), draw(2, 9)
    plain = model(tokens)[0]
    models.build_model.changed_by(lambda *args: model, Namespace(), object(), from_checkpoint=True)
    scalar.quantize_model_(model, p=0.5, bits=8, update_step=1000)
    found = model.eval()(tokens)[0]
    state, steps = {}, []
    for t in range(tokens.shape[1]):
        steps.append(model(tokens[:, : t + 1], incremental_state=state)[0])
    assert not any(isinstance(part, nn.Linear) for part in model.decoder.layers.modules())
    assert 0 < (found - plain).abs().max() < 0.5
    torch.testing.assert_close(torch.cat(steps, 1), found, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["decoder_layers", "decoder_embed_dim", "tokens_per_sample", "max_target_positions"])
def test_sizes_are_positive(name):
    with pytest.raises(Mistake, match=rf"^--{name.replace('_', '-')} is 0; it must be at least 1$"):
        build(**{name: 0})


@pytest.mark.parametrize("name", ["encoder-layers", "max-source-positions"])
def test_sizes_of_translation_models_are_positive(name, languages):
    cfg = translation(languages, f"--{name}", "0")
    with pytest.raises(Mistake, match=rf"^--{name} is 0; it must be at least 1$"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


def test_a_batch_of_nothing_is_refused(dictionary):
    """fairseq would put all texts into it."""
    words = "--arch fast_weight_lm --optimizer adam --lr 0.1 --cpu --batch-size"
    for size in (0, 1):
        cfg, ran = convert_namespace_to_omegaconf(parse(f"{words} {size}", dictionary)), []
        with nullcontext() if size else pytest.raises(Mistake, match=r"^--batch-size is 0; it must be at least 1$"):
            distributed_utils.call_main(cfg, ran.append)
        assert len(ran) == size


def test_an_option_without_effect_is_refused_for_new_models_only(dictionary):
    """By the task that trains, which for language models builds a model in its own way."""
    cfg = convert_namespace_to_omegaconf(parse("--arch fast_weight_lm --feature-map elu --dpfp-nu 2", dictionary))
    task = tasks.setup_task(cfg.task)
    with pytest.raises(Mistake, match=r"^--dpfp-nu "):
        task.build_model(cfg.model)
    with pytest.raises(Mistake, match=r"^--dpfp-nu "):
        models.build_model(cfg.model, task)
    assert task.build_model(cfg.model, from_checkpoint=True).decoder.fast_weight_config.dpfp_nu == 2


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("without", [False, True])
def test_the_longest_text_decides_where_positions_are_learned(learned, without):
    """A checkpoint with sines for positions, or with none, may go on with longer texts."""
    found = deciding({"decoder_learned_pos": learned, "no_token_positional_embeddings": without})
    assert ("max_target_positions" in found) == (learned and not without) and "decoder_embed_dim" in found


NAMES = {"mixer", "mixer_pattern", "activation_fn"}


@pytest.mark.parametrize(
    "saved, now, found",
    [
        ({"mixer": "sru", "activation_fn": "relu"}, {"mixer": "sru", "activation_fn": "gelu"}, {"activation_fn": ("relu", "gelu")}),
        ({"mixer": "sru", "activation_fn": None}, {"mixer": "sru", "activation_fn": "gelu"}, {}),
        ({"mixer": "sru"}, {"mixer": "delta", "mixer_pattern": "sru,sru"}, {}),
        ({"mixer": "sru"}, {"mixer": "delta", "mixer_pattern": "sru,additive"}, {"mixer_pattern": ("sru,sru", "sru,additive")}),
        ({"activation_fn": "relu"}, {"mixer": "sru", "activation_fn": "relu"}, {}),
    ],
)
def test_options_that_make_another_model(saved, now, found):
    """Of two layers. One mixer and a pattern of it are the same, and what a checkpoint does not say does not differ."""
    options = {name: saved.get(name) for name in NAMES}
    assert differing(options, Namespace(**dict.fromkeys(NAMES, "") | now, decoder_layers=2), NAMES) == found


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("no_scale_embedding", True, "--no-scale-embedding"),
        ("no_scale_embedding", False, "--scale-embedding"),
        ("scale_fc", True, "--scale-fc"),
        ("scale_fc", False, "--no-scale-fc"),
        ("dpfp_nu", 1, "--dpfp-nu 1"),
        ("mixer_pattern", "", "--mixer-pattern ''"),
    ],
)
def test_options_are_written_as_on_the_command_line(name, value, text):
    assert written(name, value) == text


def scored(model) -> list:
    dictionary, tokens = make_task(40).target_dictionary, draw(2, 6)
    return SequenceScorer(dictionary).generate([model], {"net_input": {"src_tokens": tokens}, "target": tokens})


def test_scores_that_are_nan_name_a_parameter():
    model = build()
    assert len(scored(model)) == 2
    model.decoder.layers[1].fc2.weight.data[0, 0] = float("nan")
    with pytest.raises(NotFinite, match=r"^the model's scores are NaN; the parameter decoder.layers.1.fc2.weight is not finite$"):
        scored(model)


def test_losses_that_are_nan_name_a_parameter_but_do_not_end_a_run():
    task, model, tokens = make_task(40), build(), draw(2, 6)
    task = LanguageModelingTask(Namespace(), task.target_dictionary)
    model.decoder.layers[1].fc2.weight.data[0, 0] = float("nan")
    sample = {"net_input": {"src_tokens": tokens}, "target": tokens, "ntokens": 12}
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    with pytest.raises(NotFinite, match=r"^the loss is NaN; the parameter decoder.layers.1.fc2.weight is not finite$"):
        task.valid_step(sample, model, criterion)
    trainer = SimpleNamespace(
        tpu=False, cfg=SimpleNamespace(ema=SimpleNamespace(store_ema=False)), model=model, criterion=criterion, task=task,
        data_parallel_world_size=1, _prepare_sample=lambda x: (x, False), _reduce_and_log_stats=lambda logs, size: logs[0],
    )  # fmt: skip
    task.has_trainer = True  # as a Trainer says when it is made
    assert Trainer.valid_step(trainer, sample)["loss"].isnan()


@pytest.mark.parametrize("error, code", [(Mistake("m"), 1), (NotFinite("n"), 3), (OSError(2, "No such file"), 1)])
def test_exit_codes(error, code, capsys):
    """A program that ends by an exception has Python's exit code, 1, unless the function that shows it asks for another."""
    show = shortened(sys.__excepthook__)
    if code == 1:
        show(type(error), error, None)
    else:
        with pytest.raises(SystemExit) as end:
            show(type(error), error, None)
        assert end.value.code == code
    hint = " (FW_TRACEBACK=1 shows where)" if type(error) is FileNotFoundError else ""
    assert capsys.readouterr().err.endswith(f": {sentence(error)}{hint}\n")


@pytest.mark.parametrize("parser", [options.get_generation_parser, options.get_validation_parser, options.get_eval_lm_parser])
def test_commands_that_read_a_model_ask_for_its_path_and_do_not_take_bf16(parser):
    words = ["data", "--task", "language_modeling"]
    with pytest.raises(Mistake, match=r"^--path is missing; name the checkpoint of the model$"):
        options.parse_args_and_arch(parser(), words)
    with pytest.raises(Mistake, match=r"^--bf16 is for trainings; evaluation and generation take --fp16, or run in fp32$"):
        options.parse_args_and_arch(parser(), [*words, "--path", "a.pt", "--bf16"])
    assert options.parse_args_and_arch(parser(), [*words, "--path", "a.pt"]).path == "a.pt"


def test_commands_that_generate_can_leave_graphs_out(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    words = ["data", "--task", "language_modeling", "--path", "a.pt"]
    for given, value in ([], None), (["--no-decoding-graph"], "0"):
        args = options.parse_args_and_arch(options.get_generation_parser(), [*words, *given])
        assert os.environ.pop(VARIABLE, None) == value and not hasattr(args, "no_decoding_graph")


def test_overrides_are_not_run():
    words = ["data", "--task", "language_modeling", "--path", "a.pt", "--model-overrides", "print('ran')"]
    with pytest.raises(Mistake, match=r"^model_overrides is \"print\('ran'\)\"; it must be a Python literal"):
        options.parse_args_and_arch(options.get_eval_lm_parser(), words)


def test_a_validation_without_a_task_is_refused():
    with pytest.raises(Mistake, match=r"^--task is missing; name the task of the model, for example --task language_modeling$"):
        options.parse_args_and_arch(options.get_validation_parser(), ["data", "--path", "a.pt"])


def test_a_sharded_checkpoint_in_a_folder_with_a_colon(tmp_path):
    """Its own name does not exist, only those of its parts."""
    (tmp_path / "x:y").mkdir()
    (tmp_path / "x:y" / "m-shard0.pt").touch()
    asked = []
    original = checkpoint_utils.load_model_ensemble_and_task.changed_by
    for name, suffix in ((f"{tmp_path}/x:y/m.pt", "-shard0"), (f"{tmp_path}/a.pt:b.pt", "")):
        original(lambda names, *args: asked.append((names, args)), [name], suffix=suffix)
    assert [names for names, _ in asked] == [[f"{tmp_path}/x:y/m.pt"], [f"{tmp_path}/a.pt", "b.pt"]]
    assert [args for _, args in asked] == [(None, None, True, "-shard0"), (None, None, True, "")]  # True: all parameters must fit


@pytest.mark.parametrize(
    "write, said",
    [
        (lambda path: path.write_text("a,b\n1,2\n"), "its parts do not fit together: pop from empty list"),
        (lambda path: path.write_bytes(b""), "it ends too early"),
        (lambda path: torch.save({"model": {}}, path), "it has no "),
        (lambda path: path.mkdir(), "is a folder, not a checkpoint; it has no other one that is whole"),
    ],
)
def test_reasons_say_something(write, said, tmp_path):
    write(tmp_path / "a.pt")
    with pytest.raises(Mistake, match=f"a.pt .*{re.escape(said)}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))


def test_a_folder_offers_its_own_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "run" / "a.pt", tmp_path / "other.pt", tmp_path / "run" / "crash.pt"):
        torch.save({}, path)
    with pytest.raises(Mistake, match=r"run is a folder, not a checkpoint; the newest whole one in it is a.pt$"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "run"))


def test_without_defaults_only_what_was_given_is_there():
    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, ["data", "--path", "a.pt", "--fp16"], suppress_defaults=True)
    assert vars(args) == {"data": "data", "path": "a.pt", "fp16": True}
