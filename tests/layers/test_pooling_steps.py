"""Pooling token by token against its definition, a loop over the tokens in float64: every window, every way to use a state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.definitions import by_definition

from fw_fairseq.ops.scans import stacks
from fw_fairseq.ops.scans.pooling import PoolState, pool

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
WINDOWS = [1, 2, 3, 20, 33, 34, 35, 40, 41, 64, 100, 129, 300]
LENGTH = 420


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def draw(length: int = LENGTH, batch: int = 2):
    return torch.randn(batch, 2, length, dtype=torch.float64) * 3, torch.randn(batch, 2, length, 3, dtype=torch.float64)


def read(a, x, window, state, tokens, padding=None, reset=None):
    """Reads the tokens ``range`` one by one."""
    outputs = []
    for t in tokens:
        masks = [None if mask is None else mask[:, t : t + 1] for mask in (padding, reset)]
        y, state = pool(a[:, :, t : t + 1], x[:, :, t : t + 1], window, state, *masks)
        outputs.append(y)
    return torch.cat(outputs, 2), state


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("prompt", [1, 150])
def test_every_token_after_a_prompt(window, prompt):
    a, x = draw()
    first, state = pool(a[:, :, :prompt], x[:, :, :prompt], window)
    rest, last = read(a, x, window, state, range(prompt, LENGTH))
    torch.testing.assert_close(torch.cat([first, rest], 2), by_definition(a, x, window))
    assert last.tokens() == state.tokens() == window - 1
    assert size(last) - size(state) in (0, 2 * 2 * 2 * 4)  # two aggregates more


def size(state: PoolState) -> int:
    return sum(part.numel() for part in state if part is not None and part.is_floating_point())


@pytest.mark.parametrize("window", [3, 40, 90, 129])
def test_segments_between_tokens(window):
    """A state of any phase passes to a segment of any length and back."""
    a, x = draw()
    state, parts, start = None, [], 0
    for length, number in ((5, 70), (2, 33), (60, 1), (3, 100), (130, 16)):
        y, state = pool(a[:, :, start : start + length], x[:, :, start : start + length], window, state)
        parts.append(y)
        y, state = read(a, x, window, state, range(start + length, start + length + number))
        parts.append(y)
        start += length + number
    assert start == LENGTH
    torch.testing.assert_close(torch.cat(parts, 2), by_definition(a, x, window))


@pytest.mark.parametrize("window", [34, 61])
def test_a_state_of_any_phase(window):
    """A segment that replaces the whole window can follow any token, and so can the first token of another text."""
    length = 4 * window
    a, x = draw(length + window)
    expected, begins = by_definition(a, x, window), torch.tensor([[True], [False]])
    _, state = pool(a[:, :, :window], x[:, :, :window], window)
    found, wanted = [], []
    for t in range(window, length):
        segment, _ = pool(a[:, :, t : t + window], x[:, :, t : t + window], window, state)
        fresh, _ = pool(a[:, :, t : t + 1], x[:, :, t : t + 1], window, state, None, begins)
        found += [segment, fresh]
        wanted += [expected[:, :, t : t + window], torch.cat([x[:1, :, t : t + 1], expected[1:, :, t : t + 1]])]
        _, state = read(a, x, window, state, [t])
    torch.testing.assert_close(torch.cat(found, 2), torch.cat(wanted, 2))


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("kinds", ["padding", "reset", "both"])
def test_padding_and_resets_at_single_tokens(window, kinds):
    """Rows then have read different numbers of tokens."""
    a, x = draw(200, 3)
    padding = torch.rand(3, 200) < 0.1 if kinds != "reset" else None
    reset = torch.rand(3, 200) < 0.03 if kinds != "padding" else None
    expected = by_definition(a, x, window, padding, reset)
    y, _ = read(a, x, window, None, range(200), padding, reset)
    torch.testing.assert_close(y, expected)


def test_a_prompt_with_padding():
    """Rows of different lengths stay in phase, because a state is the last tokens of each."""
    a, x = draw(batch=3)
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[0, :45], padding[1, 20:90] = True, True
    expected = by_definition(a, x, 60, padding)
    first, state = pool(a[:, :, :100], x[:, :, :100], 60, None, padding[:, :100])
    rest, _ = read(a, x, 60, state, range(100, LENGTH))
    torch.testing.assert_close(torch.cat([first, rest], 2), expected)


@pytest.mark.parametrize("window", [20, 70])
def test_beams_exchange_their_states(window):
    """Each hypothesis continues a hypothesis before; its past is that of the one that it continues."""
    a, x = draw(250, 4)
    tokens, state, order = torch.arange(4)[:, None].expand(-1, 250).clone(), None, torch.arange(4)
    generator, outputs = torch.Generator().manual_seed(1), []
    for t in range(250):
        if t % 5 == 4:
            order = torch.randint(4, (4,), generator=generator)
            state, tokens[:, :t] = state.index_select(order), tokens[order, :t]
            outputs = [output[order] for output in outputs]
        y, state = pool(a[:, :, t : t + 1], x[:, :, t : t + 1], window, state)
        outputs.append(y)
    times = torch.arange(250)
    past_a, past_x = a[tokens, :, times].transpose(1, 2), x[tokens, :, times].transpose(1, 2)
    torch.testing.assert_close(torch.cat(outputs, 2), by_definition(past_a, past_x, window))


def test_greedy_search_copies_nothing():
    _, state = read(*draw(), 64, None, range(100))
    assert state.index_select(torch.arange(2)) is state
    assert state.index_select(torch.tensor([0])).back.shape[0] == state.index_select(torch.tensor([1, 0])).back.shape[0] - 1 == 1


@pytest.mark.parametrize("made", ["as it is", "copied", "pickled", "detached"])
@pytest.mark.parametrize("start", [60, 75, 76, 90, 111])
def test_texts_that_continue_from_one_state(start, made):
    """Each of them reads on alone, by turns, and the state that they come from can be used again."""
    window, (a, x), (b, y) = 64, draw(250), draw(250)
    _, state = read(a, x, window, None, range(start))
    before = [None if part is None else part.clone() for part in state]
    change = {"copied": copy.deepcopy, "pickled": lambda s: pickle.loads(pickle.dumps(s)), "detached": PoolState.detach}
    texts = [(a, x), (torch.cat([a[:, :, :start], b[:, :, start:]], 2), torch.cat([x[:, :, :start], y[:, :, start:]], 2))]
    states, outputs = [state, change.get(made, lambda s: s)(state)], ([], [])
    for t in range(start, 250):
        for i, text in enumerate(texts):
            output, states[i] = read(*text, window, states[i], [t])
            outputs[i].append(output)
    for text, output in zip(texts, outputs):
        torch.testing.assert_close(torch.cat(output, 2), by_definition(*text, window)[:, :, start:])
    for part, same in zip(state, before):
        assert part is None or part.dtype == torch.long or torch.equal(part, same)


def test_inference_mode_and_gradients_afterwards():
    a, x = draw(300)
    expected = by_definition(a, x, 50)
    with torch.inference_mode():
        first, state = read(a, x, 50, None, range(120))
    second, state = read(a, x, 50, state, range(120, 240))
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        third, _ = read(a, leaf, 50, state, range(240, 300))
        [gradient] = torch.autograd.grad(third.sum(), leaf)
        whole = by_definition(a, leaf, 50)[:, :, 240:]
        [own] = torch.autograd.grad(whole.sum(), leaf)
    torch.testing.assert_close(torch.cat([first, second, third], 2), expected)
    torch.testing.assert_close(gradient[:, :, 240:], own[:, :, 240:])


def test_a_state_of_tokens():
    """The form of a segment, and of states in checkpoints of earlier versions."""
    a, x = draw(200)
    old = PoolState(a[:, :, 50:99], x[:, :, 50:99])
    expected = by_definition(a, x, 50)[:, :, 99:]
    for y, _ in (pool(a[:, :, 99:], x[:, :, 99:], 50, old), read(a, x, 50, old, range(99, 200))):
        torch.testing.assert_close(y, expected)


def test_a_token_touches_few_numbers(monkeypatch):
    """What is computed for a token does not grow with the window, also where the second front ends."""
    taken = []
    monkeypatch.setattr(stacks, "prefix", lambda a, x: taken.append(a.shape[2]) or PREFIX(a, x))
    for window in (100, 1000):
        a, x = draw(2600, 1)
        _, state = pool(a[:, :, :window], x[:, :, :window], window)
        _, state = read(a, x, window, state, [window])
        taken.clear()
        read(a, x, window, state, range(window, 2600))
        assert 0 < max(taken) <= 3 * stacks.GROUP and sum(taken) <= 3 * (2600 - window)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("window", [62, 100, 401])
def test_a_text_that_goes_on_is_not_copied(window, inference, monkeypatch):
    """Its rows are written where there is room for them, and there is room for little more than two and a half windows."""
    copied, numbers = [], []
    monkeypatch.setattr(stacks, "roomy", lambda rows, count: copied.append(rows.shape[2]) or ROOMY(rows, count))
    with torch.inference_mode(inference):
        a, x = draw(5 * window, 3)
        _, state = pool(a[:, :, :window], x[:, :, :window], window)
        for t in range(window, 5 * window):
            _, state = read(a, x, window, state, [t])
            storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in state if part is not None}
            numbers.append(sum(storages.values()) / (3 * 2 * 4 * 8))
    assert copied and not any(copied)
    assert max(numbers) <= 2.5 * window + 50


PREFIX, ROOMY = stacks.prefix, stacks.roomy
