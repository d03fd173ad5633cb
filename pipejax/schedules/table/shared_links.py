"""Shared links: which groups of directed pairs of workers carry what is sent between two workers.

Both directions of a cable, or all pairs behind one network card, carry one message at a time.
Groups belong to the machine, not to the table.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.table.links import PAIRS, Links

Found = Int[NumpyArray, " found"]


def shared_links_of(
    links: Links,
    num_workers: int,
    sender: Int[NumpyArray, " uses"],
    receiver: Int[NumpyArray, " uses"],
) -> tuple[Found, Found]:
    """Find the groups of shared links that hold the pair of each use, one entry for each.

    Returns (found) number of the use, (found) number of the group.
    """
    if links.shared_links == PAIRS:
        low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
        return np.arange(len(sender)), low * num_workers + high
    groups = links.shared_groups
    size = np.array([len(group) for group in groups])
    ends = np.array([pair for group in groups for pair in group])
    if ends.max() >= num_workers:
        raise ValueError(
            f"shared_links names worker {ends.max()}: workers are 0 to {num_workers - 1}"
        )
    held, group = ends[:, 0] * num_workers + ends[:, 1], np.repeat(np.arange(len(groups)), size)
    by_pair = np.argsort(held, kind="stable")
    used = sender * num_workers + receiver
    first = np.searchsorted(held[by_pair], used)
    count = np.searchsorted(held[by_pair], used, side="right") - first
    # a use with several groups comes several times
    which = np.repeat(np.arange(len(used)), count)
    step = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, group[by_pair][first[which] + step]
