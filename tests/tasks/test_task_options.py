"""Every option of this project's tasks changes their batches, or is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from fairseq.data import data_utils, indexed_dataset
from support.language_models import make_task

from fw_fairseq import Mistake
from fw_fairseq.config import option_name
from fw_fairseq.tasks.associative_retrieval import AssociativeRetrievalConfig, AssociativeRetrievalTask
from fw_fairseq.tasks.stateful_language_modeling import StatefulLanguageModelingConfig, StatefulLanguageModelingTask

pytestmark = pytest.mark.usefixtures("one_thread")

STREAMS = {
    "sample_break_mode": "complete", "tokens_per_sample": 8, "output_dictionary_size": 20, "self_target": True, "past_target": True,
    "add_bos_token": True, "shorten_method": "truncate", "shorten_data_split_list": "train", "pad_to_fixed_length": True,
    "pad_to_fixed_bsz": True, "reset_at_eos": True, "sequence_parallel": 2,
}  # fmt: skip
OF_THE_MODEL = {"_name", "data", "future_target", "max_target_positions"}  # future_target is what the task does
RETRIEVAL = {"symbols": 5, "setting": "2", "evaluation_pairs": 3, "updates_per_epoch": 3, "batch_size": 3, "seed": 2}
REFUSED = {"max_tokens": 9, "max_tokens_valid": 9, "skip_remainder_batch": True, "curriculum": 1}


def given_elsewhere(kind: type) -> set[str]:
    """The options of other groups that a task reads."""
    return {f.name for f in fields(kind) if str(f.default).startswith("${")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text of four lines."""
    folder = tmp_path_factory.mktemp("text")
    builder = indexed_dataset.make_builder(str(folder / "train.bin"), impl="mmap", vocab_size=40)
    for length in (9, 14, 3, 20):
        builder.add_item(torch.cat([torch.randint(4, 40, (length,)), torch.tensor([2])]))
    builder.finalize(str(folder / "train.idx"))
    assert data_utils.load_indexed_dataset(str(folder / "train"), None) is not None
    return folder


def batches(folder, **options) -> list[torch.Tensor] | str:
    """What an epoch gives to a model, or why the options are refused."""
    found = []
    try:
        config = StatefulLanguageModelingConfig(**{"data": str(folder), "tokens_per_sample": 6, "dataset_impl": None} | options)
        output = make_task(options.get("output_dictionary_size", 40)).source_dictionary
        targets = [name for name in ("self", "past") if options.get(f"{name}_target")] or ["future"]
        task = StatefulLanguageModelingTask(config, make_task(40).source_dictionary, output, targets)
        task.load_dataset("train")
        for batch in task.get_batch_iterator(task.dataset("train"), max_sentences=2).next_epoch_itr():
            task.bring_state(batch)
            found += [batch["target"], *(x for x in batch["net_input"].values() if isinstance(x, torch.Tensor))]
    except Mistake as error:
        return str(error)
    return found


def same(one, other) -> bool:
    if isinstance(one, str) or isinstance(other, str) or len(one) != len(other):
        return False
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(one, other))


@pytest.mark.parametrize("name", STREAMS)
def test_every_option_of_streams(name, folder):
    before, after = batches(folder), batches(folder, **{name: STREAMS[name]})
    assert same(before, batches(folder)) and not same(before, after)
    assert not isinstance(after, str) or "--" in after


def test_every_option_is_tried():
    streams = {f.name for f in fields(StatefulLanguageModelingConfig)} - given_elsewhere(StatefulLanguageModelingConfig)
    assert streams - OF_THE_MODEL == STREAMS.keys()
    assert {f.name for f in fields(AssociativeRetrievalConfig)} - {"_name"} == RETRIEVAL.keys() | REFUSED.keys()


def pairs(**options) -> list[torch.Tensor] | str:
    try:
        task = AssociativeRetrievalTask(AssociativeRetrievalConfig(**{"batch_size": 2, "seed": 1, "symbols": 4} | options))
        for split in ("train", "valid"):
            task.load_dataset(split)
    except Mistake as error:
        return str(error)
    items = [task.dataset(split)[i] for split in ("train", "valid") for i in range(len(task.dataset(split)))]
    return [x for item in items for x in (item["target"], *item["net_input"].values())]


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_drawn_batches_do_not_obey(name):
    assert (
        pairs(**{name: REFUSED[name]})
        == f"{option_name(name)} has no effect on sequences that associative_retrieval draws; leave it out"
    )
    assert same(pairs(**{name: 0}), pairs())


@pytest.mark.parametrize("name", RETRIEVAL)
@pytest.mark.parametrize("setting", ["1", "2"])
def test_every_option_of_retrieval(name, setting):
    base = {} if name == "setting" else {"setting": setting}
    after = pairs(**base | {name: RETRIEVAL[name]})
    assert same(pairs(**base), pairs(**base)) and not same(pairs(**base), after)
    if isinstance(after, str):
        assert after.startswith(option_name(name)) and (name, setting) == ("evaluation_pairs", "1")
