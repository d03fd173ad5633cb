"""Any table runs as the event loop runs it: all settings of links, costs and cells at once.

`make fuzz EXAMPLES=100000` draws so many others. Nothing is compiled: a run is one of `evaluate`.
"""

import os

import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, settings, strategies as st
from test_stragglers import SlowRun

import pipejax as pj

EXAMPLES = int(os.environ.get("EXAMPLES", "200"))
FACTORS = st.lists(st.integers(2, 12).map(lambda k: k / 4), min_size=4, max_size=4)
QUEUES = st.sampled_from(["worker", "pair", "direction"])
# what waits for most is drawn most often
MODELS = st.sampled_from([*strategies.LINKS, "rendezvous", "rendezvous"])
OF_TABLE = {"max_pipes": 4, "sharding": True}


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_table_runs_as_the_event_loop(data):
    does = {"communication": data.draw(st.booleans()), "by_microbatch": data.draw(st.booleans())}
    pairs = data.draw(st.booleans())
    case = data.draw(strategies.cases(**does, pairs=pairs, step_end=True, **OF_TABLE))
    table, workers = case.table, case.table.num_workers
    model, queues = data.draw(MODELS), data.draw(QUEUES)
    groups = data.draw(strategies.host_links(workers))
    more = data.draw(strategies.carried(model, workers))
    slow = [1.0] * workers
    costs = case.costs
    if not (pairs and does["by_microbatch"]) and data.draw(st.booleans()):
        slow = data.draw(FACTORS)[:workers]
        costs = pj.costing.scaled_costs(costs, table, workers=slow)
    links = pj.Links(model, queues, groups, **more)
    microbatch_pipes = table.pipe_of_microbatch.tolist()
    try:
        where = model, queues, groups
        expected = SlowRun(slow, case.rows, microbatch_pipes, case.theirs, *where, **more)
    except reference.DeadlockError:
        with pytest.raises(pj.ScheduleError, match="deadlock"):
            pj.evaluate(table, costs, link=links)
        return
    result = pj.evaluate(table, costs, link=links)
    same(result.makespan, expected.makespan)
    same(result.busy, expected.busy())
    assert result.peak_in_flight.tolist() == expected.peak_in_flight()
    cells = [event for event in expected.end if isinstance(event[0], int)]
    workers, slots = zip(*cells, strict=True)
    same(result.start[workers, slots], [expected.start[cell] for cell in cells])
    same(result.finish[workers, slots], [expected.end[cell] for cell in cells])


def same(result, expected):
    np.testing.assert_allclose(result, expected, rtol=1e-12)
