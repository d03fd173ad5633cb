"""Paths through a program as lower bounds of the step time of every split.

The makespan is the longest path, so each path is a lower bound of it, whatever stages hold. How
often a path has each cost is read off one run; what it lasts under another split follows from the
prices of holdings, stage by stage.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import op_counts
from pipejax.base import longest_path
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.engine.recurrence_host import HostRun
from pipejax.schedules.cells.ops import TIMED
from pipejax.search.partition.holdings import HoldingPrices

Counts = Int[NumpyArray, " costs"]


class Cut(NamedTuple):
    """A path: no split is faster than `fixed` plus what it counts of each stage's holding."""

    of_holding: Float[NumpyArray, "holdings stages"]  # seconds of what it counts on each stage
    fixed: float  # of its messages [s]


class PathCuts:
    """Cuts from the runs of one program."""

    def __init__(self, program: Program, prices: HoldingPrices) -> None:
        """Find what waits for each node, and the nodes of each worker."""
        self.program, self.prices = program, prices
        preds = np.asarray(program.preds)
        head, column = np.nonzero(preds != SOURCE)
        order = np.argsort(preds[head, column], kind="stable")
        self.head, self.column = head[order], column[order]
        tail = preds[self.head, self.column]
        self.first = np.searchsorted(tail, np.arange(len(preds) + 1))  # of each node's edges
        worker = np.asarray(program.worker)
        self.nodes_of = [np.flatnonzero(worker == each) for each in range(program.num_workers)]
        self.known: set[bytes] = set()
        self.cuts: list[Cut] = []

    def of_run(self, run: HostRun, vector: Float[NumpyArray, " costs"]) -> list[Cut]:
        """The critical path, and the longest path through each worker; only those that are new."""
        found = []
        for counts in self._paths(run):
            if (key := counts.tobytes()) not in self.known:
                self.known.add(key)
                found.append(self.of_counts(counts, vector))
        self.cuts += found
        return found

    def lower_bounds(
        self, points: Int[NumpyArray, "points stages"], first: int = 0
    ) -> Float[NumpyArray, " points"]:
        """The longest of the known paths, from one on, under each split (points) [s]."""
        longest = np.zeros(len(points))
        stages = np.arange(points.shape[1])
        for cut in self.cuts[first:]:
            np.maximum(longest, cut.fixed + cut.of_holding[points, stages].sum(axis=1), out=longest)
        return longest

    def _paths(self, run: HostRun) -> Iterator[Counts]:
        """Count (costs) how often the paths have each cost."""
        tails = longest_path.tails(run.preds, run.duration, run.lag)
        through = run.finish + tails
        for nodes in (np.arange(1, len(through)), *self.nodes_of):
            if len(nodes):
                longest = int(nodes[through[nodes].argmax()])
                ends = self._before(run, longest), self._behind(run, tails, longest)
                yield self._counted([*ends[0], *ends[1]])
        index = np.asarray(self.program.duration_index)
        for nodes in self.nodes_of:  # a worker's ops run one after the other
            if len(nodes):
                first, last = int(nodes[0]), int(nodes[-1])
                ends = self._before(run, first), self._behind(run, tails, last)
                yield self._counted([*ends[0], *index[nodes[1:]].tolist(), *ends[1]])

    def _counted(self, spent: list[int]) -> Counts:
        counts: Counts = np.bincount(spent, minlength=self.program.layout.size)
        return counts

    def _before(self, run: HostRun, node: int) -> list[int]:
        """Costs on the longest path to the end of a node."""
        program, spent = self.program, []
        while node != SOURCE:
            column = int((run.finish[run.preds[node]] + run.lag[node]).argmax())
            spent += [int(program.duration_index[node]), int(program.lag_index[node, column])]
            node = int(run.preds[node, column])
        return spent

    def _behind(self, run: HostRun, tails: Float[NumpyArray, " nodes"], node: int) -> list[int]:
        """Costs on the longest path from the end of a node on."""
        program, spent = self.program, []
        while tails[node] > 0:
            edges = slice(self.first[node], self.first[node + 1])
            heads, columns = self.head[edges], self.column[edges]
            after = run.lag[heads, columns] + run.duration[heads] + tails[heads]
            best = int(after.argmax())
            node = int(heads[best])
            edge = node, columns[best]
            spent += [int(program.duration_index[node]), int(program.lag_index[edge])]
        return spent

    def of_counts(self, counts: Counts, vector: Float[NumpyArray, " costs"]) -> Cut:
        """Price what a path counts under every holding."""
        layout, prices = self.program.layout, self.prices
        weights = counts.astype(float)
        pairs = weights[layout.first_pair : layout.first_link, None]
        np.add.at(weights, self.program.pair_index, pairs * self._shares_of_pairs(vector))
        ops = weights[1 : layout.first_pair].reshape(len(TIMED), *layout.op_shape)
        seconds = np.zeros((len(prices.holdings), layout.num_stages))
        for phase, times in zip(TIMED, ops, strict=True):
            if times.any():
                seconds += in_sum(prices.seconds[PHASE_FIELDS[phase.name]], times)
        shape = (len(LINK_COSTS), *layout.link_shape)
        latency, transmit, both = weights[layout.first_link :].reshape(shape).sum(axis=-1)
        fixed = float(((latency + both) * prices.latency).sum())
        sent = ((transmit + both) * prices.transmit).sum(axis=(0, 1))  # (boundaries)
        # behind the layers for further tokens a message is longer: their stage says where that is
        more = prices.mtp_layers * np.append(np.cumsum(sent[::-1])[::-1], 0.0)
        seconds += prices.counts("mtp")[:, None] * more
        return Cut(seconds, fixed + float(sent.sum()))

    def _shares_of_pairs(self, vector: Float[NumpyArray, " costs"]) -> Float[NumpyArray, "pairs 2"]:
        """How much of its two ops a fused pair lasts at least, under any split (pairs, 2)."""
        # max(F, B) + k min(F, B) is the larger of F + k B and B + k F where k <= 1: either is a
        # lower bound, and the one of the run is exact there. With k > 1 the sum is one.
        factor = self.prices.pair_factor
        both = vector[self.program.pair_index]
        if factor is None or float(factor) >= 1:
            return np.ones(both.shape)
        is_longer = both >= both[:, ::-1]
        is_longer[:, 1] = ~is_longer[:, 0]  # at a tie the forward
        return np.where(is_longer, 1.0, float(factor))


def in_sum(
    seconds: Float[NumpyArray, "holdings stages *microbatches"],
    times: Float[NumpyArray, "stages columns"],
) -> Float[NumpyArray, "holdings stages"]:
    """Seconds (holdings, stages) that so many ops take in sum."""
    if seconds.ndim == times.ndim:
        return seconds * times.sum(axis=-1)
    found: Float[NumpyArray, "holdings stages"] = (seconds * times).sum(axis=-1)
    return found


def busy_of_stages(
    program: Program, pair_factor: float
) -> Callable[[Costs], Float[NumpyArray, " stages"]]:
    """The least step time by the costs of each stage: its worker is busy so long (stages) [s]."""
    layout = program.layout
    counts = op_counts(program).astype(float)
    pairs = counts[:, layout.first_pair : layout.first_link] * (1 + min(pair_factor, 1.0)) / 2
    for pair, times in zip(program.pair_index, pairs.T, strict=True):
        for position in pair.tolist():  # at least half of max + k min, both ways
            counts[:, position] += times
    of_phases = counts[:, 1 : layout.first_pair].reshape(len(counts), len(TIMED), *layout.op_shape)

    def busy(costs: Costs) -> Float[NumpyArray, " stages"]:
        total = np.zeros((len(counts), layout.num_stages))
        for place, phase in enumerate(TIMED):
            seconds = getattr(costs, PHASE_FIELDS[phase.name])
            if seconds is not None:
                each = np.broadcast_to(seconds, layout.op_shape[: max(np.ndim(seconds), 1)])
                times = of_phases[:, place]
                total += (times * (each if each.ndim == 2 else each[:, None])).sum(axis=-1)
        return total.max(axis=0)

    return busy
