"""Rows of profiles: seconds of one op on one stage, beside seconds of whole steps."""

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.cli.app import run
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.measured.measured_rows import OPS
from pipejax.costs.measured.rows_file import read_rows

HEADER = "model,tensor,pipeline,microbatch_size,op,stage,n,spread,seconds"
TRUTH = {"compute.efficiency": 0.62, "memory.efficiency": 0.55}


@pytest.fixture(scope="module")
def a100():
    return pj.load_system("a100")


def write(path, rows, header=HEADER):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def read(path):
    with pytest.warns():
        return read_rows(path)


def profile(sizes=(1, 4), tensors=(2, 8), ops=OPS, stages=(0, 1, 3)):
    return [
        ("gpt-22b", t, 4, b, op, stage, 20, 1e-5, 1.0)
        for t in tensors
        for b in sizes
        for op in ops
        for stage in stages
    ]


def test_ops_take_what_stage_costs_say(a100, tmp_path):
    rows = read(write(tmp_path / "x.csv", profile()))
    seconds = StepTimes(rows).predict(a100)
    for k in range(len(rows)):
        size = int(rows.microbatch_size[k])
        table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
        workload = pj.Workload(
            pj.load_model("gpt-22b"),
            4 * size,
            tensor_parallel=int(rows.tensor[k]),
            sequence_parallel=True,
            scatter_gather=True,
        )
        costs = pj.stage_costs(workload, a100, table)
        expected = getattr(costs, PHASE_FIELDS[str(rows.op[k])])[rows.stage[k]]
        assert seconds[k] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_profile_finds_the_numbers_that_made_it(a100, tmp_path):
    machine = a100 = a100.with_number("host.launch", 5e-6)
    for name, value in TRUTH.items():
        machine = machine.with_number(name, value)
    steps = [("gpt-22b", t, 4, b, "step", "", "", "", 1.0) for t, b in ((2, 1), (8, 4))]
    lines = [*profile(sizes=(1, 2, 4)), *steps]
    header = HEADER + ",global_batch"
    shapes = [(*line, 8 * line[3]) for line in lines]
    rows = read(write(tmp_path / "x.csv", shapes, header))
    assert rows.op.tolist()[-2:] == ["step", "step"]
    noisy = StepTimes(rows).predict(machine)
    noisy *= np.exp(0.002 * np.random.default_rng(1).standard_normal(len(rows)))
    timed = [(*s[:8], seconds, s[9]) for s, seconds in zip(shapes, noisy, strict=True)]
    rows = read(write(tmp_path / "y.csv", timed, header))
    result = pj.calibrate(rows, a100, fit=(*TRUTH, "host.launch"))
    assert not result.parameters["host.launch"].identified  # the device is behind in every op
    for name, value in TRUTH.items():
        number = result.parameters[name]
        assert abs(number.value - value) < 4 * number.standard_error, name
        assert number.value == pytest.approx(value, rel=0.05), name
    assert result.fit.mape < 1


@pytest.mark.slow
def test_ops_that_spread_count_less(a100, tmp_path):
    """Every op is listed once more as a fifth longer, from one look with a large spread."""
    exact = StepTimes(read(write(tmp_path / "x.csv", profile()))).predict(a100)
    sure = [(*row[:8], s) for row, s in zip(profile(), exact, strict=True)]
    unsure = [(*row[:6], 1, 20 * s, 1.2 * s) for row, s in zip(profile(), exact, strict=True)]
    rows = read(write(tmp_path / "y.csv", [*sure, *unsure]))
    share = a100.compute_efficiency.shares[0]
    result = pj.calibrate(rows, a100, fit=("compute.efficiency",))
    assert result.parameters["compute.efficiency"].value == pytest.approx(share, rel=0.02)
    alike = rows.with_columns(variance=np.zeros(len(rows)))
    pulled = pj.calibrate(alike, a100, fit=("compute.efficiency",))
    assert pulled.parameters["compute.efficiency"].value < 0.95 * share


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("X,0,1,", "op must be one of .*, got 'X'"),
        ("F,4,1,", "stage must be at most 3, got 4"),
        ("step,1,1,", "stage is of an op, got stage 1 of a step"),
        ("F,0,0,", "n must be a whole number of at least 1, got 0"),
        ("F,0,1,-1", "spread must be a number above 0, got '-1'"),
    ],
)
def test_mistakes_are_named(cells, message, tmp_path):
    path = write(
        tmp_path / "x.csv", [("gpt-22b", 8, 4, 1, cells, 0.1, 8)], HEADER + ",global_batch"
    )
    with pytest.raises(ValueError, match=f"row 1: {message}"):
        read_rows(path)


def test_a_profile_is_validated_by_the_command(a100, tmp_path, capsys):
    rows = read(write(tmp_path / "x.csv", profile()))
    seconds = StepTimes(rows).predict(a100)
    timed = [(*row[:8], s) for row, s in zip(profile(), seconds, strict=True)]
    path = write(tmp_path / "y.csv", timed)
    assert run(["validate", str(path), "--system", "a100", "--tolerance", "0.01"]) == 0
    assert "48" in capsys.readouterr().out
