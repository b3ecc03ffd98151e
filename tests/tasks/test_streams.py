"""Text as parallel streams: every token once, in order, whatever the sizes; position and memory come back on resume."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fw_fairseq.models  # noqa: F401
from fw_fairseq.data import loading as batches_loading
from fw_fairseq.data.streams import StreamDataset, StreamIterator
from fw_fairseq.data.text import Text
from fw_fairseq.modules import LayerStates, Streams
from fw_fairseq.ops import FastWeightState

pytestmark = pytest.mark.quick

PAD, EOS = 1, 2


def streams(tokens, segment, rows, *shard, **options):
    return StreamDataset(Text(torch.arange(10, 10 + tokens), "train"), segment, rows, PAD, EOS, *shard, **options)


@settings(deadline=None, derandomize=True)
@given(tokens=st.integers(1, 200), segment=st.integers(1, 40), rows=st.integers(1, 6), shards=st.integers(1, 3))
def test_every_token_is_a_target_once_and_follows_its_source(tokens, segment, rows, shards):
    if tokens < rows * shards:
        with pytest.raises(ValueError, match="use at most that many"):
            streams(tokens, segment, rows, shards=shards)
        return
    seen, lengths = [], set()
    for shard in range(shards):
        dataset = streams(tokens, segment, rows, shard, shards)
        lengths.add(len(dataset))
        batches = [dataset[i] for i in range(len(dataset))]
        source = torch.cat([b["net_input"]["src_tokens"] for b in batches], dim=1)
        target = torch.cat([b["target"] for b in batches], dim=1)
        assert all(b["target"].shape[1] <= segment for b in batches)
        assert sum(b["ntokens"] for b in batches) == target.ne(PAD).sum()
        assert torch.cat([b["id"] for b in batches]).tolist() == list(range(len(dataset) * rows))
        for sources, targets in zip(source, target):
            length = int(targets.ne(PAD).sum())
            assert sources[0] == EOS and torch.equal(sources[1:length], targets[: length - 1])
            assert (sources[length:] == PAD).all() and (targets[length:] == PAD).all()
            seen += targets[:length].tolist()
    assert seen == list(range(10, 10 + tokens))
    assert len(lengths) == 1  # every worker has as many batches


@pytest.mark.parametrize("tokens", [1, 3, 12, 13, 19])
def test_shares_of_a_segment_are_the_segment(tokens):
    """All as wide, also where the last segment is shorter than there are parts; what is made up with is padding."""
    whole, parts = streams(tokens, 12, 1), [streams(tokens, 12, 1, share=(i, 4)) for i in range(4)]
    assert [len(part) for part in parts] == [len(whole)] * 4
    assert sum(whole[index]["ntokens"] for index in range(len(whole))) == tokens
    for index in range(len(whole)):
        want, got = whole[index], [part[index] for part in parts]
        width = want["target"].shape[1]
        assert len({batch["target"].shape for batch in got}) == 1 and sum(batch["ntokens"] for batch in got) == want["ntokens"]
        for found, wanted in zip(zip(*map(tensors, got)), tensors(want)):
            found = torch.cat(found, 1)
            assert torch.equal(found[:, :width], wanted) and (found[:, width:] == PAD).all()


def tensors(batch):
    return batch["target"], batch["net_input"]["src_tokens"]


def test_the_buffer_is_loaded_by_all_processes_together(monkeypatch):
    """Each loads so many batches ahead that they are the buffer at least, and two as torch does."""
    asked = []
    monkeypatch.setattr(batches_loading, "DataLoader", lambda *args, **options: asked.append(options) or [])
    for workers, buffer in ((3, 10), (3, 2), (0, 10)):
        iterator = StreamIterator(streams(100, 7, 2), Streams(), num_workers=workers, buffer_size=buffer)
        iterator.next_epoch_itr()
    assert [options.get("prefetch_factor") for options in asked] == [4, 2, None]


def test_the_processes_end_before_the_last_batch_is_handed_over():
    """Whoever has it need not ask for more."""
    others = multiprocessing.active_children()
    batches = StreamIterator(streams(100, 7, 2), Streams(), num_workers=1).next_epoch_itr()
    running = [len(multiprocessing.active_children()) - len(others) for _ in batches]
    assert running == [1] * 7 + [0]


@pytest.mark.parametrize("loading", [{}, {"num_workers": 1, "buffer_size": 10}, {"num_workers": 2}], ids=str)
def test_iterator_resumes_at_its_position_with_its_memory(loading):
    """However many segments the loader's processes are ahead."""
    decoder, read_by = torch.nn.Identity(), Streams()
    iterator = StreamIterator(streams(100, 7, 2), read_by, **loading)
    batches = iterator.next_epoch_itr(shuffle=True)
    assert [next(batches)["segment"] for _ in range(3)] == [0, 1, 2]  # in order, though shuffling was asked for
    state = FastWeightState(torch.randn(2, 1, 3, 3, requires_grad=True) * 2, torch.randn(2, 1, 3))
    read_by.of(decoder).after = {0: state}
    saved = iterator.state_dict()
    again = Streams()
    resumed = StreamIterator(streams(100, 7, 2), again, **loading)
    resumed.load_state_dict(saved)
    batch = next(resumed.next_epoch_itr())
    assert batch["segment"] == 3 and batch["streams"] is again
    loaded = FastWeightState(*again.of(decoder).last()[0])
    assert torch.equal(loaded.memory, state.memory) and not loaded.memory.requires_grad
    assert torch.equal(loaded.normaliser, state.normaliser)
    assert torch.equal(resumed.state_dict()["carried"][0][0][0], loaded.memory), "saved again before a step"
    assert [batch["segment"] for batch in resumed._cur_epoch_itr] == [4, 5, 6, 7]


def test_workers_that_share_the_streams_in_another_way_resume_with_their_states():
    """One worker with four streams, then two with two each, then one again."""
    one, read_by = StreamIterator(streams(100, 7, 4), Streams()), torch.nn.Identity()
    batches = one.next_epoch_itr()
    [next(batches) for _ in range(2)]
    state = FastWeightState(torch.randn(4, 1, 3, 3), None)
    one.streams.of(read_by).after = {1: state}
    saved, memories = one.state_dict(), []
    for shard in range(2):
        worker = StreamIterator(streams(100, 7, 2, shard, 2), Streams(), shard=shard, shards=2)
        worker.load_state_dict(saved)
        memories.append(worker.memories())
        assert torch.equal(memories[shard][1][0], state.memory[2 * shard : 2 * shard + 2]) and memories[shard][1][1] is None
        assert next(worker.next_epoch_itr())["segment"] == 2
    one.load_state_dict(saved | {"rows": 2, "carried": memories})
    assert torch.equal(one.memories()[1][0], state.memory)


def test_another_cut_of_the_text_does_not_resume_within_it(caplog):
    caplog.set_level("INFO")

    def stopped(batches, *cut, tokens=100):
        iterator = StreamIterator(streams(tokens, *cut), Streams())
        at = iterator.next_epoch_itr()
        [next(at) for _ in range(batches)]
        return iterator.state_dict()

    saved = stopped(3, 7, 2)
    for cut, message in [
        ((5, 2), "--tokens-per-sample is 5, but the checkpoint stopped within the text with 7; resume with 7, or"),
        ((50, 2), "--tokens-per-sample is 50, "),
        ((7, 4), "--batch-size, the streams of a worker, is 4, but .* with 2; resume with 2, .* --reset-dataloader"),
    ]:
        resumed = StreamIterator(streams(100, *cut), Streams())
        with pytest.raises(ValueError, match=message):
            resumed.load_state_dict(saved)
        resumed.load_state_dict(stopped(8, 7, 2))  # at the end of the epoch
    resumed = StreamIterator(streams(100, 7, 2, 1, 2), Streams(), shard=1, shards=2)
    with pytest.raises(ValueError, match=r"--batch-size, the streams of a worker, is 2, but .* with 1; resume with 1, "):
        resumed.load_state_dict(saved)
    resumed = StreamIterator(streams(100, 7, 2), Streams())
    with pytest.raises(ValueError, match=r"the number of tokens of the text is 100, but .* within the text with 90; "):
        resumed.load_state_dict(stopped(3, 7, 2, tokens=90))
    with pytest.raises(ValueError, match="the checkpoint stopped within a text that was not read as streams; resume with its task"):
        resumed.load_state_dict({name: value for name, value in saved.items() if name != "carried"})
    with pytest.raises(ValueError, match=r"is 2, but .* within the text with 1\.5; "):  # of three streams
        StreamIterator(streams(100, 7, 2, 1, 2), Streams(), shard=1, shards=2).load_state_dict(stopped(3, 7, 3))
    resumed = StreamIterator(streams(100, 5, 2), Streams())
    with pytest.raises(ValueError, match="--tokens-per-sample is 5, "):
        resumed.load_state_dict(stopped(1, 7, 2))
    resumed.load_state_dict({"epoch": 4})  # which has no place within it
    assert resumed.next_epoch_idx == 4
    before = {name: value for name, value in saved.items() if name not in ("segment", "rows")}  # of an older version
    resumed = StreamIterator(streams(100, 5, 2), Streams())
    resumed.load_state_dict(before)
    assert next(resumed.next_epoch_itr())["segment"] == 3
    assert "does not say how its text was cut into streams" in caplog.text


def test_states_start_again_from_the_same_until_they_advance():
    states, first, second = LayerStates(), *(FastWeightState(torch.randn(1, 1, 2, 2)) for _ in range(2))
    states.after[0] = first
    states.advance()
    states.after[0] = second
    assert torch.equal(states.before[0].memory, first.memory)
    states.advance()
    assert torch.equal(states.before[0].memory, second.memory) and not states.after
    states.advance()
    assert torch.equal(states.before[0].memory, second.memory), "a layer that was left out of a segment"


def test_every_decoder_has_states_of_its_own():
    """Those of an ensemble, each of which starts from the checkpoint's."""
    read_by, decoders, saved = Streams(), [torch.nn.Identity(), torch.nn.Identity()], FastWeightState(torch.ones(1, 1, 2, 2))
    read_by.restart({0: saved})
    first, second = map(read_by.of, decoders)
    assert first is read_by.of(decoders[0]) and first is not second
    for states in (first, second):
        states.advance()
        assert torch.equal(states.before[0].memory, saved.memory)
    first.after[0] = FastWeightState(torch.zeros(1, 1, 2, 2))
    assert torch.equal(second.last()[0].memory, saved.memory)
    read_by.restart()
    assert not read_by.last() and not read_by.of(decoders[0]).last()
