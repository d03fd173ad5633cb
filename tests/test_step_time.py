"""Step times of measured rows: each is what `evaluate` says, with exact gradients."""

import dataclasses

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.system.parts import system_number
from pipejax.costs.system.system import DATA

HEADER = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,schedule,"
LAYOUTS = ((1, 2, 1, 2, 8), (2, 1, 2, 1, 4), (8, 2, 4, 1, 24), (2, 4, 4, 2, 64))
NAMES = (
    "compute.efficiency compute.latency memory.efficiency kernels.sharpness host.launch "
    "host.step network.latency network.efficiency collectives.latency"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [
        f"{layers},1024,16,512,{t},{d},{p},{b},{batch},1f1b,0,none,0.5"
        for layers in (8, 12)
        for t, d, p, b, batch in LAYOUTS
    ]
    path.write_text(HEADER + "sequence_parallel,recompute,seconds\n" + "\n".join(lines))
    with pytest.warns():
        return read_rows(path)


@pytest.fixture(scope="module")
def system():
    machine = pj.load_system("a100")
    return dataclasses.replace(machine, kernels=dataclasses.replace(machine.kernels, priced=1.0))


@pytest.fixture(scope="module")
def times(rows):
    return StepTimes(rows, layer_group=rows.tensor // 8)


@pytest.fixture(scope="module")
def at(system):
    return np.array([float(system_number(system, n)) or 1e-4 for n in NAMES.split()] + [1.0, 1.0])


@pytest.fixture(scope="module")
def result(times, system, at):
    steps = np.diag(1e-5 * at)
    return times.predict_and_grad(
        system, NAMES.split(), np.array([at, *(at + steps), *(at - steps)])
    )


@pytest.mark.slow
def test_rows_take_what_evaluate_says(times, system, at, result):
    assert len(times.batches) == 1
    for name, value in zip(NAMES.split(), at, strict=False):
        system = system.with_number(name, value)
    for k in (1, 6):
        table = times.tables[k]
        costs = pj.stage_costs(times.workloads[k], system, table)
        assert result[0][0, k] == pytest.approx(pj.evaluate(table, costs).makespan, rel=1e-12)


def test_gradients_are_those_of_finite_differences(at, result):
    seconds, slopes = result
    count = len(at)
    rises = (seconds[1 : 1 + count] - seconds[1 + count :]).T / 2e-5
    np.testing.assert_allclose(slopes[0] * at, rises, atol=1e-6 * seconds[0].max())
    assert (np.abs(slopes[0] * at).max(axis=0) > 1e-6 * seconds[0].max()).all()


@pytest.mark.parametrize(
    "table", ["megatron_bridge_b200", "megatron_bridge_h100", "unseen/dgxc_moe"]
)
def test_rows_with_experts_have_slopes_of_finite_differences(table):
    rows = read_rows(DATA / "measured" / f"{table}.csv")
    has_experts = [rows.models[k].moe is not None for k in rows.model]
    rows = rows.take(np.flatnonzero(has_experts & np.isfinite(rows.seconds))[[0, -1]])
    names = ["compute.efficiency", "network.efficiency"]
    system = pj.load_system(str(rows.system[0]))
    at = np.array([float(system_number(system, name)) for name in names])
    steps = np.diag(1e-5 * at)
    points = np.array([at, *(at + steps), *(at - steps)])
    seconds, slopes = StepTimes(rows, system=system).predict_and_grad(system, names, points)
    rises = (seconds[1:3] - seconds[3:]).T / 2e-5
    np.testing.assert_allclose(slopes[0] * at, rises, atol=1e-6 * seconds[0].max())


def test_a_factor_lengthens_the_layers_of_its_group_alone(rows, at, result):
    group_slopes = result[1][0, :, len(NAMES.split()) :]
    np.testing.assert_array_equal(group_slopes > 0, (rows.tensor // 8)[:, None] == np.arange(2))
    assert (group_slopes.sum(axis=1) < result[0][0]).all()


OVERLAPPING = [  # layers, workers, sequences, schedule, and whether steps overlap
    (8, 4, 16, "zb-2p", 1),
    (8, 4, 16, "zb-2p", 0),
    (8, 2, 5, "zb-1p", 1),
    (12, 4, 6, "gpipe", 1),
    (7, 4, 9, "zb-2p", 1),
]


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "overlapping.csv"
    lines = [
        f"{layers},4096,32,1024,1,1,{p},1,{batch},{schedule},0,none,0.5,{overlaps},512"
        for layers, p, batch, schedule, overlaps in OVERLAPPING
    ]
    header = HEADER + "sequence_parallel,recompute,seconds,steps_overlap,vocabulary\n"
    path.write_text(header + "\n".join(lines))
    with pytest.warns():
        return StepTimes(read_rows(path))


def worker_times(table, costs):
    """Return each worker's first start and the end of its update, cell by cell."""
    run = pj.evaluate(table, dataclasses.replace(costs, update=0.0, all_reduce=0.0))
    is_op = table.cells.phase > 0
    begins = np.where(is_op, run.start, np.inf).min(axis=1)
    # the last op of a worker completes the gradient of its stage
    ends = np.where(is_op, run.finish, 0).max(axis=1) + costs.all_reduce + costs.update
    return begins, ends


def test_a_step_that_overlaps_the_next_lasts_as_its_longest_worker(overlapping, system, at):
    names = NAMES.split()
    numbers = np.append(at[: len(names)], 1.0)
    steps = np.diag(1e-5 * numbers)
    values = np.array([numbers, *(numbers + steps), *(numbers - steps)])
    seconds, slopes = overlapping.predict_and_grad(system, names, values)
    for name, value in zip(names, at, strict=False):
        system = system.with_number(name, value)
    for k, (*_, overlaps) in enumerate(OVERLAPPING):
        table = overlapping.tables[k]
        costs = pj.stage_costs(overlapping.workloads[k], system, table)
        begins, ends = worker_times(table, costs)
        expected = (ends - begins).max() if overlaps else ends.max()
        assert seconds[0, k] == pytest.approx(expected, rel=1e-12)
        if table.name == "zb-2p":
            assert (seconds[0, k] < 0.999 * ends.max()) == bool(overlaps)
    count = len(numbers)
    rises = (seconds[1 : 1 + count] - seconds[1 + count :]).T / 2e-5
    np.testing.assert_allclose(slopes[0] * numbers, rises, atol=1e-6 * seconds[0].max())
