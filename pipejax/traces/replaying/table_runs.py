"""Pipelines that ran one table, as runs of one graph."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.schedules.table.links import Links
from pipejax.traces.record import NONE, Trace
from pipejax.traces.replaying.pipelines import Pipelines
from pipejax.traces.replaying.step_graph import StepGraph, step_graph


@dataclasses.dataclass(frozen=True, eq=False)
class TableRuns:
    """Pipelines that ran one table, under a link model."""

    trace: Trace  # what was recorded
    graph: StepGraph  # of the table
    members: Int[NumpyArray, " runs"]  # their positions among the pipelines of the trace
    ops: Int[NumpyArray, " ops"]  # nodes that are ops
    slices: Int[NumpyArray, "runs ops"]  # where these are in the trace

    def some(self, most: int) -> "TableRuns":
        """So many of them that they have so many nodes at most, one at least, spread evenly."""
        apart = -(-self.members.size * len(self.graph.preds) // most)
        return dataclasses.replace(self, members=self.members[::apart], slices=self.slices[::apart])

    def replayed(
        self, link_times: Float[NumpyArray, "ways links"]
    ) -> tuple[Float[NumpyArray, "ways runs ops"], Float[NumpyArray, "ways runs"]]:
        """Starts of ops after the first one, and spans, at several times of messages [s]."""
        graph, sent = self.graph, np.flatnonzero(self.graph.link != NONE)
        duration = np.zeros((len(link_times), len(self.members), len(graph.preds)))
        duration[..., self.ops] = self.trace.end[self.slices] - self.trace.start[self.slices]
        duration[..., sent] = link_times[:, None, graph.link[sent]]
        finish = graph.finish(duration.reshape(-1, len(graph.preds))).reshape(duration.shape)
        finish = finish[..., self.ops]
        start = finish - duration[..., self.ops]
        first = start.min(axis=2)
        return start - first[..., None], finish.max(axis=2) - first


def table_runs(pipelines: Pipelines, links: Links) -> Iterator[TableRuns]:
    """All pipelines of a trace, table by table; ValueError where one deadlocks."""
    number = np.array([one.table for one in pipelines.pipelines])
    for table, cells in enumerate(pipelines.tables):
        graph = step_graph([cells], links)
        members = np.flatnonzero(number == table)
        ops = np.flatnonzero(graph.op != NONE)
        slices = np.stack([pipelines.pipelines[k].slices for k in members])[:, graph.op[ops]]
        yield TableRuns(pipelines.trace, graph, members, ops, slices)
