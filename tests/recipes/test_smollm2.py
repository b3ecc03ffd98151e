"""What follows an export in recipes/smollm2: tokens in turn, and the task of lm-evaluation-harness."""

from __future__ import annotations

import pytest
import yaml
from support.commands import succeed
from support.pretrained_models import GROUPS, HEADS, LAYERS, WIDTH, make, texts
from support.recipes import load, recipe

from fw_fairseq.pretrained.adapter import adapt

pytestmark = pytest.mark.usefixtures("one_thread")
KEPT = 2 * GROUPS * WIDTH // HEADS  # of a token and a layer, by softmax


def test_models_generate_in_turn_and_what_they_keep_is_counted():
    """Memories keep the same of any text, a window its last tokens, and softmax all of them."""
    generate, models = load("smollm2/generate.py"), {name: make("llama") for name in ("softmax", "memory", "window")}
    adapt(models["memory"], ["fast_weight"] * LAYERS, {"update_rule": "gated_delta", "feature_map": "relu", "feature_norm": "l2"})
    adapt(models["window"], ["local_attention"] * LAYERS, {"local_window": 5})
    order = []
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: order.append(name))
    for count in (4, 9):
        found = generate.measure(models, texts()[0, :count])
        memory = LAYERS * HEADS * (WIDTH // HEADS) ** 2
        assert found["softmax"][1] == LAYERS * KEPT * (count + generate.MEASURED)
        assert found["memory"][1] == memory and found["window"][1] == LAYERS * KEPT * 5 + 5 * LAYERS
        assert all(seconds > 0 for seconds, _ in found.values())
    assert order == [*models] * 2 * (1 + generate.MEASURED)


def test_rows_are_exported_before_they_are_measured(tmp_path):
    (tmp_path / "softmax" / "folder").mkdir(parents=True)
    done = recipe("smollm2/generate.sh", tmp_path, "softmax", "decay", TOY="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"generate.sh: {tmp_path}/decay/folder is missing; run recipes/smollm2/export.sh decay ")


def test_the_harness_gets_paragraphs_of_the_test_text(tmp_path):
    """A program in its place says what it was given."""
    programs, folder = tmp_path / "programs", tmp_path / "out" / "softmax" / "folder"
    for place in (programs, folder):
        place.mkdir(parents=True)
    lines = [" = a title = ", *(f"{number} " + "some words " * number for number in (20, 4, 10, 15, 30))]
    (tmp_path / "test.txt").write_text("\n".join(lines) + "\n")
    given = {"TOY": "", "DATA": str(tmp_path), "BIN": str(programs), "TEST_LINES": "2"}
    done = recipe("smollm2/harness.sh", tmp_path / "out", "softmax", **given, PATH="/usr/bin:/bin")
    assert done.returncode == 1 and "lm_eval is not on the PATH; install lm-eval[hf]" in done.stderr
    (programs / "lm_eval").write_text('#!/bin/sh\nprintf "%s\\n" "$HF_HUB_OFFLINE" "$@"\n')
    (programs / "lm_eval").chmod(0o755)
    printed = succeed(recipe("smollm2/harness.sh", tmp_path / "out", "softmax", "--limit", "1", **given)).splitlines()
    assert printed[0] == "1" and printed[-2:] == ["--limit", "1"] and f"pretrained={folder},trust_remote_code=True" in printed
    task = yaml.safe_load((tmp_path / "out" / "harness" / f"{printed[printed.index('--tasks') + 1]}.yaml").read_text())
    with open(task["dataset_kwargs"]["data_files"]["test"], encoding="utf-8") as chosen:
        assert chosen.read().splitlines() == [lines[1], lines[3]]
    assert task["doc_to_target"] == "{{text}}" and task["output_type"] == "loglikelihood_rolling"
    assert printed[printed.index("--include_path") + 1] == str(tmp_path / "out" / "harness")
