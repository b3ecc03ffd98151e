"""Softmax attention over the keys and values of earlier tokens: their buffers, and the attention against its definition."""

from __future__ import annotations

import pytest
import torch

from fw_fairseq.generation.kv_cache import Past, attend

pytestmark = pytest.mark.quick


def some(tokens: int) -> torch.Tensor:
    return torch.randn(2, 3, tokens, 4, dtype=torch.float64)


def test_buffers_grow_to_twice_what_they_hold_once_they_are_full():
    tokens = some(9), some(9)
    past, places = Past.empty(tokens[0], 4), []
    for start, stop in ((0, 1), (1, 4), (4, 6), (6, 9)):
        past = past.add(*(x[:, :, start:stop] for x in tokens), None)
        places.append((past.keys.shape[2], past.keys.data_ptr(), past.values.data_ptr()))
        keys, values, hidden = past.tokens()
        assert keys.equal(tokens[0][:, :, :stop]) and values.equal(tokens[1][:, :, :stop]) and hidden is None
    assert [room for room, *_ in places] == [4, 4, 12, 12]
    assert places[0] == places[1] != places[2] == places[3]
    order = torch.tensor([1, 1, 0])
    chosen = past.index_select(order)
    assert chosen.keys.shape[2] == 12 and chosen.tokens()[0].equal(tokens[0][order])


def test_two_texts_that_go_on_from_one_past_do_not_write_into_each_other():
    first, one, other = some(3), some(2), some(2)
    past = Past.empty(first, 8).add(first, first, None)
    for text in (one, other):
        longer = past
        for t in range(2):
            longer = longer.add(text[:, :, t : t + 1], text[:, :, t : t + 1], None)
        text_so_far = torch.cat([first, text], 2)
        assert longer.tokens()[0].equal(text_so_far) and longer.tokens()[1].equal(text_so_far)
        if text is one:
            assert longer.keys.data_ptr() == past.keys.data_ptr()  # the first one goes on in place
            kept = longer
    assert kept.tokens()[0].equal(torch.cat([first, one], 2))


def test_tokens_without_a_mask_are_no_padding():
    past = Past.empty(some(1), 8).add(some(1), some(1), None)
    mask = torch.tensor([[False, True], [False, False]])
    past = past.add(some(2), some(2), mask)
    assert past.hidden.tolist() == [[False, False, True], [False] * 3]
    assert past.add(some(1), some(1), None).hidden.tolist() == [[False, False, True, False], [False] * 4]
    assert past.index_select(torch.tensor([1])).hidden.tolist() == [[False] * 3]


@pytest.mark.parametrize("queries, causal", [(5, True), (2, True), (2, False), (5, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_of_the_last_tokens(queries, causal, padded):
    """Each of them to the tokens up to itself, or to all; padding attends to itself too."""
    q, k, v = some(queries), some(5), some(5)
    hidden = torch.tensor([[True, False, False, True, False], [False] * 5]) if padded else None
    y = attend(q, k, v, hidden, causal)
    for row in range(2):
        for i in range(queries):
            own = 5 - queries + i
            seen = [s for s in range(own + 1 if causal else 5) if s == own or not (padded and hidden[row, s])]
            weights = (k[row][:, seen] @ q[row, :, i, :, None] / 2).softmax(1)  # 2: the root of the width
            torch.testing.assert_close(y[row, :, i], (weights * v[row][:, seen]).sum(1))
