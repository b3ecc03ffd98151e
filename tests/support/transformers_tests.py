"""transformers' own common tests of models, on exported models with several mixers.

``tests/compatibility.sh transformers FOLDER`` runs this file; FOLDER is a checkout or a source distribution. Its tests
of generation are in checkouts only; without them, and without its tests of exporters, those parts are left out.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from dataclasses import asdict

import torch

sys.modules.setdefault("torchaudio", None)  # which may be a build for CUDA beside a torch for CPUs
FOLDER = os.environ["FW_TRANSFORMERS"]
sys.path.insert(0, FOLDER)

OPTIONS = {
    "delta": {"update_rule": "delta"},
    "decay": {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"},
    "gated_delta": {"update_rule": "gated_delta"},
    "hybrid": {"update_rule": "delta"},
}


def mixin(module: str, name: str) -> type:
    """A class of transformers' tests, or an empty one where the folder does not have it."""
    try:
        return getattr(importlib.import_module(f"tests.{module}"), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("tests"):
            raise
    package = ""
    for part in ("tests", *module.split(".")):
        package = f"{package}.{part}".lstrip(".")
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
    setattr(sys.modules[package], name, type(name, (), {}))
    return getattr(sys.modules[package], name)


Export, Generation = (
    mixin("exporters.test_export", "ExportTesterMixin"),
    mixin("generation.test_utils", "GenerationTesterMixin"),
)
Common = mixin("test_modeling_common", "ModelTesterMixin")

from fw_fairseq.config import FastWeightConfig  # noqa: E402
from fw_fairseq.huggingface import FastWeightForCausalLM, FastWeightHFConfig  # noqa: E402
from fw_fairseq.huggingface.layers import Layer  # noqa: E402

# The tests look for instances of a class of transformers whose import also loads torchaudio; Layer has its switch without it
sys.modules["tests.test_modeling_common"].GradientCheckpointingLayer = Layer


class Tester:
    """What transformers' tests ask of a model: its sizes, a configuration and inputs."""

    batch_size, seq_length, vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 99, 32, 2, 4
    is_training = True

    def __init__(self, parent: unittest.TestCase, name: str):
        self.parent, self.name = parent, name

    def get_config(self) -> FastWeightHFConfig:
        mixers = ["softmax", "fast_weight"] if self.name == "hybrid" else ["fast_weight"] * 2
        return FastWeightHFConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            mixers=mixers,
            mixer_options=asdict(FastWeightConfig(**OPTIONS[self.name])),
            embedding_scale=self.hidden_size**0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[FastWeightHFConfig, dict]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Shared(Common, Generation):
    all_model_classes = (FastWeightForCausalLM,)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True
    name = ""

    def setUp(self):
        self.model_tester = Tester(self, self.name)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        return inputs | ({"labels": inputs["input_ids"]} if return_labels else {})  # which it adds for models of its own list only

    @unittest.skip("there is no base model: the decoder and its output are one class")
    def test_model_base_model_prefix(self):
        pass

    @unittest.skip(
        "it compares draws of one seed, and mixers draw by more than torch.nn.init; test_export_hf.py has a test of this"
    )
    def test_can_init_all_missing_weights(self):
        pass


for each in OPTIONS:
    globals()[f"Test_{each}"] = type(f"Test_{each}", (Shared, unittest.TestCase), {"name": each, "__module__": __name__})
