"""Link models per pair of workers: how they are given, and which one each message follows.

Semantics belong to the link, not to the run: inside a node messages may queue where between nodes
they meet in a rendezvous.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import known_as, whole_number

Pair = tuple[int, int]
PairLinks = Mapping[Pair, str] | Sequence[tuple[Sequence[int], str]]
Checked = tuple[tuple[Pair, str], ...]
_TEXT = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*=\s*([A-Za-z]+)\s*", re.ASCII)


def checked_pair(pair: Any, where: str) -> Pair:
    """Return a sender and a receiver, which are two workers."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{where}: a pair is a sender and a receiver, got {pair!r}")
    sender, receiver = (whole_number(w, f"{where}: a worker", least=0) for w in pair)
    if sender == receiver:
        raise ValueError(f"{where}: worker {sender} sends nothing to itself")
    return sender, receiver


def checked_pair_links(given: Any, known: Sequence[str]) -> Checked:
    """Return pairs with the link models that they follow, sorted: one record for one meaning."""
    items = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ValueError(f"pair_links must be as {{(0, 1): 'rendezvous'}}, got {given!r}")
    found: dict[Pair, str] = {}
    for item in items:
        if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
            raise ValueError(f"pair_links: a pair and its link model are needed, got {item!r}")
        pair = checked_pair(item[0], "pair_links")
        if pair in found:
            raise ValueError(f"pair_links names the pair {pair} twice")
        found[pair] = known_as(item[1], known, "link model")
    return tuple(sorted(found.items()))


def models_of_pairs(
    pair_links: Checked,
    default: int,
    known: Sequence[str],
    num_workers: int,
    ends: tuple[Int[NumpyArray, " messages"], Int[NumpyArray, " messages"]],
) -> Int[NumpyArray, " messages"]:
    """Find the link model that each message follows, by sender and receiver.

    A pair stands for both directions, unless the other one is named too.

    Returns (messages) positions in `known`, `default` for pairs that are not named.
    """
    follows = np.full((num_workers, num_workers), default)
    named = dict(pair_links)
    largest = max((worker for pair in named for worker in pair), default=-1)
    if largest >= num_workers:
        raise ValueError(f"pair_links names worker {largest}: workers are 0 to {num_workers - 1}")
    for (sender, receiver), model in named.items():
        follows[sender, receiver] = known.index(model)
        if (receiver, sender) not in named:
            follows[receiver, sender] = known.index(model)
    return follows[ends]


def parse_pair_links(text: str, where: str) -> Checked:
    """Read link models of pairs of workers, as 0-1=rendezvous,1-2=queued."""
    found = [_TEXT.fullmatch(part) for part in text.split(",")]
    items = [(int(a), int(b), model) for a, b, model in (m.groups() for m in found if m)]
    if len(items) < len(found):
        raise ValueError(
            f"{where}: expected pairs of workers and link models, as 0-1=rendezvous,1-2=queued, "
            f"got {text!r}"
        )
    return tuple(((a, b), model) for a, b, model in items)


def format_pair_links(pair_links: Checked) -> str:
    """Return the text of link models of pairs; the inverse of `parse_pair_links`."""
    return ",".join(f"{a}-{b}={model}" for (a, b), model in pair_links)
