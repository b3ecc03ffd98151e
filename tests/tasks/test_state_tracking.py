"""state_tracking: layers with weights set by hand that track groups exactly, so that training need only find such weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fw_fairseq.mixers import FastWeight
from fw_fairseq.tasks.drawn import DrawnBatches
from fw_fairseq.tasks.state_tracking import StateTrackingConfig, StateTrackingTask

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, SEQUENCES = 512, 8
SURE = 40.0  # its sigmoid is 1, and that of -40 is 0


def of_rotations(modulus: int) -> tuple[list, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two reflections turn the plane by 2 pi x / m. What they turn are m directions, and the query is the first of them."""

    def direction(turns: float) -> list[float]:
        return [math.cos(2 * math.pi * turns), math.sin(2 * math.pi * turns)]

    keys = [[direction(0), direction(x / (2 * modulus))] for x in range(modulus)]
    start = torch.tensor([direction(-x / modulus) for x in range(modulus)]).T
    return keys, start, torch.tensor(direction(0)), torch.eye(modulus)


def of_transpositions(count: int) -> tuple[list, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A permutation is at most n - 1 transpositions, and each is a reflection. What is read are the numbers 0 to n - 1 in the order
    of the state; no other order has as large a product with them."""
    elements, keys = list(itertools.permutations(range(count))), []
    for element in elements:
        found, current = [], list(element)
        for place in range(count):
            other = current.index(place)
            if other != place:
                key = [0.0] * count
                key[place], key[other] = 1.0, -1.0
                found.append(key)
                current[place], current[other] = current[other], current[place]
        keys.append(found[::-1])
    query = torch.arange(count).float()
    orders = torch.stack([torch.empty(count).scatter(0, torch.tensor(g), query) for g in elements])
    return keys, torch.eye(count), query, orders


@torch.no_grad()
def by_hand(keys: list, start: torch.Tensor, query: torch.Tensor, answers: torch.Tensor) -> FastWeight:
    """A layer that maps element x, one of G unit vectors, to scores of the G states.

    keys: those under which x turns the memory around, in turn. start (K,X): what they turn. query (K) and answers (G,X): the score
    of a state is the product of its row with what the query reads of it. The memory starts at 0, so it holds what is turned less
    than ``start``: no write of the value start^T k changes a memory that is ``start``.
    """
    size, width, writes = len(keys), len(query), max(map(len, keys))
    mixer = FastWeight(
        size, update_rule="delta_product", product_steps=writes, negative_eigenvalues=True, feature_map="identity",
        feature_norm="l2", feature_dim=width,
    )  # fmt: skip
    parts = dict(zip(mixer.sizes, mixer.in_proj.weight.zero_().split([*mixer.sizes.values()])))
    biases = dict(zip(mixer.sizes, mixer.in_proj.bias.zero_().split([*mixer.sizes.values()])))
    biases["q"].copy_(query)
    biases["beta"].fill_(-SURE)
    for x, turned in enumerate(keys):
        for number, key in enumerate(turned):
            key = torch.tensor(key)
            parts["k"].view(writes, width, size)[number, :, x] = key
            parts["v"].view(writes, size, size)[number, : start.shape[1], x] = start.T @ key / key.norm()
            parts["beta"][number, x] = 2 * SURE
    length = query.norm()
    mixer.out_proj.weight.zero_()[:, : start.shape[1]] = -answers * length
    mixer.out_proj.bias.copy_(answers @ start.T @ query)
    return mixer


MADE = {
    "modular 3": ("modular", 3, of_rotations(3)),
    "modular 5": ("modular", 5, of_rotations(5)),
    "s3": ("s3", 5, of_transpositions(3)),
    "s5": ("s5", 5, of_transpositions(5)),
}


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_weights_by_hand_track_a_group(name):
    """Every answer of 512 is right, of a memory that starts at 0, in fp32."""
    group, modulus, made = MADE[name]
    task = StateTrackingTask(StateTrackingConfig(batch_size=1, group=group, modulus=modulus, evaluation_sequences=SEQUENCES))
    found = task.draw("valid", torch.Generator().manual_seed(1))
    first = task.source_dictionary.nspecial
    tokens, states = found["net_input"]["src_tokens"] - first, found["target"] - first
    assert tokens.shape == (SEQUENCES, LENGTH)
    scores, _ = by_hand(*made)(torch.eye(len(task.table))[tokens].transpose(0, 1))
    assert torch.equal(scores.argmax(-1).T, states)


def test_lengths_of_training():
    """Each batch draws its own, half of them below the geometric mean; 0, or as many as the longest, draw nothing."""

    def batches(**options) -> DrawnBatches:
        return DrawnBatches(StateTrackingTask(StateTrackingConfig(batch_size=2, seed=3, length=64, **options)), "train")

    given = batches(shortest_length=4, updates_per_epoch=400)
    drawn = torch.tensor([given[i]["target"].shape[1] for i in range(400)])
    assert drawn.min() == 4 and drawn.max() == 64
    for length, share in ((8, 1 / 4), (16, 1 / 2), (32, 3 / 4)):
        assert abs((drawn < length).float().mean() - share) < 0.06
    sources = [batches(shortest_length=shortest)[0]["net_input"]["src_tokens"] for shortest in (0, 64)]
    assert sources[0].shape == (2, 64) and torch.equal(*sources)
