"""Action tables as PyTorch's schedules write them, against the event loop, under every link model."""

import csv
import json

import numpy as np
import pytest
import reference

import pipejax as pj

FILES = [
    "1F1B_4_8.comms",
    "Interleaved1F1B_4_8.comms",
    "InterleavedZeroBubble_4_8",
    "ZBVZeroBubble_4_8",
    "DualPipeV_4_8",
    "DualPipeV_4_8.comms",
]
LINKS = [
    ("delay", "worker"),
    ("queued", "worker"),
    ("blocking", "worker"),
    ("rendezvous", "worker"),
    ("rendezvous", "pair"),
    ("rendezvous", "direction"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("link", "queues"), LINKS)
def test_agrees_with_the_event_loop(name, link, queues, data):
    path = data / f"{name}.csv"
    table = pj.read_table(path)
    stages = np.arange(table.num_stages)
    ops = {
        "F": 1 + 0.25 * (stages % 3),
        "I": 1 + 0.5 * (stages % 2),
        "W": 0.5 + 0.125 * (stages % 4),
        "B": 1.5 + 0.625 * (stages % 2),
    }
    transmit = np.stack([0.5 + 0.25 * (stages[:-1] % 2), 0.75 + 0.125 * (stages[:-1] % 3)])[:, None]
    costs = pj.Costs(
        forward=ops["F"],
        input_grad=ops["I"],
        weight_grad=ops["W"],
        backward=ops["B"],
        latency=0.125,
        transmit=transmit,
    )
    theirs = reference.Costs(
        {(phase, s): float(times[s]) for phase, times in ops.items() for s in stages},
        dict.fromkeys(np.ndindex(transmit.shape), 0.125),
        {where: float(transmit[where]) for where in np.ndindex(transmit.shape)},
    )
    rows = list(csv.reader(path.read_text().splitlines()))
    expected = reference.Run(rows, [0] * table.num_microbatches, theirs, link, queues)
    result = pj.evaluate(table, costs, link=pj.Links(link, queues))
    assert result.makespan == pytest.approx(expected.makespan, rel=1e-12)
    np.testing.assert_allclose(result.busy, expected.busy(), rtol=1e-12)
    assert result.peak_in_flight.tolist() == expected.peak_in_flight()


def test_interleaved_zb_is_pytorchs(data):  # cell by cell; columns of idle cells are not its times
    files = [(4, 8, pj.read_table(data / "InterleavedZeroBubble_4_8.csv").rows())]
    for case in json.loads((data / "torch_lowered.json").read_text())["tables"]:
        if case["schedule"] == "InterleavedZeroBubble":
            cells = [row.replace("-", "").split() for row in case["compute"]]
            table = pj.ScheduleTable.from_rows(cells)
            files.append((case["workers"], case["microbatches"], table.rows()))
    assert len(files) == 2
    for workers, microbatches, rows in files:
        ours = pj.schedules.build(
            "interleaved-zb", num_workers=workers, num_microbatches=microbatches
        )
        theirs = [[cell for cell in row if cell] for row in rows]
        assert [[cell for cell in row if cell] for row in ours.rows()] == theirs


def test_two_pipes_are_not_written_for_pytorch(tmp_path):
    table = pj.schedules.build("dualpipe", num_workers=4, num_microbatches=8)
    with pytest.raises(ValueError, match="stage 0 is on workers 0 and 3, it has one rank each"):
        pj.write_table(table, tmp_path / "dual.csv", format="torch-csv")
