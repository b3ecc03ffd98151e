"""Random mistakes by the thousand: each ends in the right result or in one sentence that names what is wrong."""

from __future__ import annotations

import random
import re
from argparse import Namespace
from dataclasses import fields

import pytest
import torch
from fairseq.data import Dictionary, data_utils, indexed_dataset
from omegaconf import OmegaConf

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.errors import Mistake
from fw_fairseq.feature_maps import FEATURE_MAPS, NORMS
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel
from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.checks import BACKENDS
from fw_fairseq.patches.mistakes import sentence
from fw_fairseq.rules import RULES
from fw_fairseq.tools.convert.pretrained import Vocabulary, lm_options

pytestmark = pytest.mark.usefixtures("one_thread")


def attempt(call):
    """What it returns, or the sentence that fairseq's commands show instead of a traceback."""
    try:
        return call(), ""
    except Mistake as error:
        text = sentence(error)
    assert text and "\n" not in text and len(text) < 400, text
    return None, text


# The operation

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
ARGUMENTS = "q|k|v|rule|gates|state|backend|attention_norm|eps|padding_mask|key_log_scale|reset_mask|feature_map|cu_seqlens"


def operation_call(draw: random.Random) -> tuple[dict, int]:
    """Arguments that fit, with up to two of them changed, and how many are."""
    rule = draw.choice(list(RULES))
    size = dict(B=draw.randint(1, 2), H=draw.randint(1, 2), T=draw.randint(1, 70), K=draw.randint(1, 9), V=draw.randint(1, 9))

    def tensor(letters, dtype=torch.float32, uniform=False):
        shape = [size[letter] for letter in letters]
        return (torch.rand(shape) if uniform else torch.randn(shape) * 0.3).abs().to(dtype)

    def gates_of(name):
        return {gate: tensor("BHT" + (spec.axis or ""), uniform=True) for gate, spec in RULES[name].gates.items()}

    call = dict(
        q=tensor("BHTK"), k=tensor("BHTK"), v=tensor("BHTV"), rule=rule, gates=gates_of(rule), backend=draw.choice(BACKENDS[:3])
    )
    call["attention_norm"] = RULES[rule].normaliser is not None and draw.random() < 0.4
    if RULES[rule].step and call["backend"] == "chunkwise":
        call["backend"] = "auto"
    if draw.random() < 0.3:
        call["padding_mask"] = tensor("BT", uniform=True) > 0.7
    if draw.random() < 0.3:
        call["reset_mask"] = tensor("BT", uniform=True) > 0.9
    changed = draw.randint(0, 2)
    for _ in range(changed):
        name = draw.choice([*call, "state", "eps", "key_log_scale", "feature_map", "cu_seqlens"])
        other, letters = draw.choice(list(RULES)), "".join(draw.choice("BHTKV") for _ in range(draw.randint(0, 5)))
        wrong = [
            tensor(letters, draw.choice(DTYPES)),
            None,
            "delta",
            3,
            [1.0],
            tensor("BHTK", draw.choice(DTYPES)),
            tensor("BT") > 9,
        ]
        wrong += [
            gates_of(other),
            {},
            other,
            draw.choice(BACKENDS),
            -1.0,
            True,
            fast_weight(tensor("BHTK"), tensor("BHTK"), tensor("BHTV"), "sum")[1],
        ]
        call[name] = draw.choice(wrong)
    return call, changed


@torch.no_grad()
def test_the_operation():
    draw, ran = random.Random(0), 0
    for i in range(800):
        torch.manual_seed(i)
        call, changed = operation_call(draw)
        try:
            result, refusal = attempt(lambda call=call: fast_weight(**call))
        except (TypeError, AttributeError, RuntimeError, ValueError):  # Python's or torch's word on an argument of another kind
            assert changed, call
            continue
        if refusal:
            assert re.match(rf"({ARGUMENTS})\b", refusal), refusal
            continue
        y, state = result
        assert y.shape == call["v"].shape and y.dtype == call["v"].dtype and y.isfinite().all() and state.memory.isfinite().all()
        expected = fast_weight(**call | {"backend": "recurrent"})[0]
        torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2)
        ran += 1
    assert 250 < ran < 700


# The options

CHOICES = {
    "mixer": [*MIXERS, "softmax"], "update_rule": list(RULES), "feature_map": list(FEATURE_MAPS), "feature_norm": list(NORMS),
    "fast_weight_backend": BACKENDS,
    "mixer_pattern": ["", "softmax,fast_weight", "sru*2", "sru*0", "nothing", "sru,", "fast_weight*3"],
    "window_sizes": ["", "4", "4,0", "4,x", "1,2,3", "-1"], "attention_norm": [False, True], "scale_output": [False, True],
}  # fmt: skip


def logits_of(options: dict, task) -> torch.Tensor:
    model = FastWeightLanguageModel.build_model(OmegaConf.create(lm_options(options)), task).eval()
    return model(torch.randint(4, 20, (2, 7)))[0]


@pytest.mark.long
def test_the_options():
    draw, dictionary, built = random.Random(0), Vocabulary(20), 0
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    names = [f.name for f in fields(FastWeightConfig) if not f.name.startswith("_")]
    small = {f"decoder_{part}_dim": 16 for part in ("embed", "input", "output", "ffn_embed")}
    small |= dict(decoder_layers=2, decoder_attention_heads=2, max_target_positions=16, tokens_per_sample=16, mixer="fast_weight")
    for _ in range(400):
        given = {}
        for name in draw.sample(names, draw.randint(1, 5)):
            flag = isinstance(FastWeightConfig.__dataclass_fields__[name].default, bool)
            given[name] = draw.choice(CHOICES.get(name, (False, True) if flag else (-1, 0, 1, 2, 3, 5, 8)))
        if draw.random() < 0.2:
            given["decoder_attention_heads"] = draw.choice((1, 3, 4, 16, 32))
        logits, refusal = attempt(lambda given=given: logits_of(small | given, task))
        if refusal:
            assert re.search(r"--[a-z]|^backend=|^in_proj was replaced", refusal), (given, refusal)
            continue
        assert logits.shape == (2, 7, 20) and logits.isfinite().all(), given
        built += 1
    assert 100 < built < 380


# Files

WORDS = [f"word{i}" for i in range(30)]


def flipped(content: bytes, draw: random.Random) -> bytes:
    content = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)


def test_binarised_text(tmp_path):
    dictionary, draw, refused = Dictionary(), random.Random(0), 0
    for word in WORDS:
        dictionary.add_symbol(word)
    texts = [[draw.randrange(4, 34) for _ in range(draw.randint(1, 12))] for _ in range(40)]
    builder = indexed_dataset.make_builder(str(tmp_path / "whole.bin"), impl="mmap", vocab_size=len(dictionary))
    for text in texts:
        builder.add_item(torch.tensor(text))
    builder.finalize(str(tmp_path / "whole.idx"))
    whole = {kind: (tmp_path / f"whole.{kind}").read_bytes() for kind in ("bin", "idx")}
    path = str(tmp_path / "changed")
    for _ in range(300):
        changed = draw.choice(("bin", "idx"))
        for kind, content in whole.items():
            (tmp_path / f"changed.{kind}").write_bytes(flipped(content, draw) if kind == changed else content)
        data, refusal = attempt(lambda: data_utils.load_indexed_dataset(path, dictionary, None))
        if refusal:
            assert refusal.startswith(f"{path}.bin and {path}.idx are not a binarised text ("), refusal
            refused += 1
            continue
        read = [data[i].tolist() for i in range(len(data))]
        assert [len(text) for text in read] == [len(text) for text in texts] and all(
            t < len(dictionary) for text in read for t in text
        )
    assert 150 < refused < 300
