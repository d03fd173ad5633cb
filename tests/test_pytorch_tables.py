"""Action tables as PyTorch's schedules write them, against the checker, under every link model."""

import json

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj

FILES = [
    *("1F1B_4_8.comms", "Interleaved1F1B_4_8.comms", "InterleavedZeroBubble_4_8"),
    *("ZBVZeroBubble_4_8", "DualPipeV_4_8", "DualPipeV_4_8.comms"),
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
def test_agrees_with_the_checker(name, link, queues, data):
    table = pj.read_table(data / f"{name}.csv")
    stages = np.arange(table.num_stages)
    transmit = np.stack([0.5 + 0.25 * (stages[:-1] % 2), 0.75 + 0.125 * (stages[:-1] % 3)])[:, None]
    costs = pj.Costs(
        forward=1 + 0.25 * (stages % 3),
        input_grad=1 + 0.5 * (stages % 2),
        weight_grad=0.5 + 0.125 * (stages % 4),
        backward=1.5 + 0.625 * (stages % 2),
        latency=0.125,
        transmit=transmit,
    )
    run = pj.evaluate(table, costs, link=pj.Links(link, queues))
    assert pj.verify(pj.certificate(run)).problems == ()


def test_interleaved_zb_is_pytorchs(data):  # cell by cell; columns of idle cells are not its times
    files = [(4, 8, pj.read_table(data / "InterleavedZeroBubble_4_8.csv").rows())]
    for case in json.loads((data / "torch_lowered.json").read_text())["tables"]:
        if case["schedule"] == "InterleavedZeroBubble":
            cells = [row.replace("-", "").split() for row in case["compute"]]
            table = pj.ScheduleTable.from_rows(cells)
            files.append((case["workers"], case["microbatches"], table.rows()))
    assert len(files) == 2
    for workers, microbatches, rows in files:
        ours = build("interleaved-zb", workers, microbatches)
        theirs = [[cell for cell in row if cell] for row in rows]
        assert [[cell for cell in row if cell] for row in ours.rows()] == theirs


def test_two_pipes_are_not_written_for_pytorch(tmp_path):
    table = pj.schedules.build("dualpipe", num_workers=4, num_microbatches=8)
    with pytest.raises(ValueError, match="stage 0 is on workers 0 and 3, it has one rank each"):
        pj.write_table(table, tmp_path / "dual.csv", format="torch-csv")
