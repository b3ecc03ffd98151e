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
    "sum": {"update_rule": "sum"},
}
LANGUAGE_MODELS = ("delta", "decay", "gated_delta", "hybrid")
TRANSLATION = ("translation", "translation_softmax")  # by linear attention to the source and within it, and by softmax attention
WORDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


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
from fw_fairseq.huggingface import (  # noqa: E402
    FastWeightForCausalLM,
    FastWeightForTranslation,
    FastWeightHFConfig,
    FastWeightTranslationConfig,
)
from fw_fairseq.huggingface.layers import Layer  # noqa: E402

# The tests look for instances of a class of transformers whose import also loads torchaudio; Layer has its switch without it
sys.modules["tests.test_modeling_common"].GradientCheckpointingLayer = Layer


class Tester:
    """What transformers' tests ask of a model: its sizes, a configuration and inputs."""

    batch_size, seq_length, vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 99, 32, 2, 4
    is_training = True

    def __init__(self, parent: unittest.TestCase, name: str):
        self.parent, self.name = parent, name

    def side(self, mixers: list[str], rule: str, **others) -> FastWeightHFConfig:
        return FastWeightHFConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            mixers=mixers,
            mixer_options=asdict(FastWeightConfig(**OPTIONS[rule])),
            embedding_scale=self.hidden_size**0.5,
            **others,
        )

    def get_config(self) -> FastWeightHFConfig:
        mixers = ["softmax", "fast_weight"] if self.name == "hybrid" else ["fast_weight"] * 2
        return self.side(mixers, self.name, **WORDS)

    def prepare_config_and_inputs_for_common(self) -> tuple[FastWeightHFConfig, dict]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TranslationTester(Tester):
    """The same of a translation model, whose sides have as many words and layers here."""

    is_encoder_decoder = True
    encoder_seq_length = decoder_seq_length = Tester.seq_length

    def get_config(self) -> FastWeightTranslationConfig:
        linear = self.name == "translation"
        encoder = self.side(["linear" if linear else "softmax"] * 2, "sum")
        decoder = self.side(["fast_weight"] * 2, "delta", tie_word_embeddings=False)
        return FastWeightTranslationConfig(encoder, decoder, linear_cross=linear, decoder_start_token_id=2, **WORDS)

    def prepare_config_and_inputs_for_common(self) -> tuple[FastWeightTranslationConfig, dict]:
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, inputs | {f"decoder_{name}": value for name, value in inputs.items()}


class Shared(Common, Generation):
    all_model_classes = (FastWeightForCausalLM,)
    asked = Tester
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True
    name = ""

    def setUp(self):
        self.model_tester = self.asked(self, self.name)

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


class Translation(Shared):
    all_model_classes = (FastWeightForTranslation,)
    asked = TranslationTester
    test_resize_embeddings = False  # the vocabularies of two languages keep their sizes, and the model says so

    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        config, inputs = super().prepare_config_and_inputs_for_generate(batch_size)
        config.eos_token_id = None  # which it takes from the decoder's configuration only, so that no sentence ends early
        return config, inputs


for kind, names in ((Shared, LANGUAGE_MODELS), (Translation, TRANSLATION)):
    for each in names:
        globals()[f"Test_{each}"] = type(f"Test_{each}", (kind, unittest.TestCase), {"name": each, "__module__": __name__})
