"""The command `train`: against the library, as JSON, drawn and saved, and its mistakes."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import pipejax as pj
from pipejax.cli.commands.train import HEIGHTS, _bars
from pipejax.cli.options.objective import MAKERS, choose_step_sizes
from pipejax.training import (
    TrainingRun,
    choose_step_size,
    language_model,
    random_logistic,
    random_quadratic,
    summarise,
    sweep_randomized_pipedream,
    sweep_replay,
)
from pipejax.training.training_run import RULES

pytestmark = pytest.mark.compiles

TABLE = "--schedule", "pipedream", "--workers", "2", "--microbatches", "24"
SMALL = "--dimension", "4", "--batches", "6", "--batch-size", "5", "--seeds", "2", "--times", "4"
OBJECTIVE = {"dimension": 4, "num_batches": 6, "batch_size": 5, "seed": 0}
SIZES = "--step-sizes", "80,0.125,0.25"
KEYS = {
    "method",
    "schedule",
    "objective",
    "stages",
    "seeds",
    "step_sizes",
    "final_gap",
    "spread",
    "diverged",
    "best_step_size",
    "unit",
    "time",
    "updates",
    "gap",
    "value",
    "loss",
    "noise",
    "batch_order",
    "rule",
    "out",
    "figure",
}


def in_cli_precision(function, *arguments, **options):
    """The command line computes in double precision."""
    with jax.enable_x64(True):
        return function(*arguments, **options)


def check(result, runs):
    """What the command says of runs that the library made."""
    gap = np.asarray(runs.gap)
    assert result["step_sizes"] == [80.0, 0.125, 0.25]
    assert result["diverged"] == [2, 0, 0]
    means = gap[1:, :, -1].mean(axis=1)
    assert result["final_gap"][0] is result["spread"][0] is None
    np.testing.assert_allclose(result["final_gap"][1:], means, rtol=1e-12)
    np.testing.assert_allclose(result["spread"][1:], gap[1:, :, -1].std(axis=1, ddof=1), rtol=1e-9)
    best = 1 + int(means.argmin())
    assert result["best_step_size"] == result["step_sizes"][best]
    np.testing.assert_allclose(result["gap"], gap[best].mean(axis=0), rtol=1e-12)
    assert result["updates"] == runs.update.tolist()


def library_replay(costs=None, link="delay"):
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=24)
    return sweep_replay(
        random_quadratic(2, **OBJECTIVE),
        table,
        step_sizes=[80, 0.125, 0.25],
        seeds=range(2),
        costs=costs,
        link=link,
        times=4,
    )


def library_rpd(**law):
    return sweep_randomized_pipedream(
        random_quadratic(2, **OBJECTIVE),
        step_sizes=[80, 0.125, 0.25],
        seeds=range(2),
        updates=48,
        every=12,
        **law,
    )


def test_along_a_timeline(answer, tmp_path):
    out, save = tmp_path / "gap.svg", tmp_path / "runs.zarr"
    result = answer("train", *TABLE, *SMALL, *SIZES, "--figure", out, "--out", save)
    runs = in_cli_precision(library_replay)
    assert {*result} == KEYS | {"microbatches"}
    assert (result["method"], result["schedule"], result["unit"]) == (
        "timeline",
        "pipedream",
        "slots",
    )
    assert result["time"] == runs.time.tolist()
    check(result, runs)
    assert "80: diverged" in out.read_text()
    assert "time [slots]" in out.read_text()
    assert "gap" in out.read_text()
    data = xr.open_zarr(save).load()
    assert dict(data.sizes) == {"step_size": 3, "seed": 2, "sample": 5}
    assert data.gap.isnull().all(["seed", "sample"]).values.tolist() == [True, False, False]
    assert data.diverged.sum("seed").values.tolist() == [2, 0, 0]
    np.testing.assert_array_equal(data.gap[1:], runs.gap[1:])
    assert (data.time.units, data.attrs["schedule"], data.attrs["objective"]) == (
        "slots",
        "pipedream",
        "quadratic",
    )
    assert data.updates.values.tolist() == result["updates"]


def test_time_follows_costs_and_links(answer):
    times = "--stage-times", "F=1,B=2", "--comm", "0.5", "--link", "blocking"
    result = answer("train", *TABLE, *SMALL, *SIZES, *times)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
    runs = in_cli_precision(library_replay, costs, "blocking")
    assert (result["unit"], result["link"]) == ("s", "blocking")
    np.testing.assert_allclose(result["time"], runs.time)
    check(result, runs)
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=24)
    assert result["time"][-1] == pj.evaluate(table, costs, link="blocking").makespan


def test_noise_orders_rules_and_reports(answer, call, tmp_path):
    out, save = tmp_path / "f.svg", tmp_path / "runs.zarr"
    how = "--noise", "0.5", "--batch-order", "cyclic", "--rule", "stable", "--report", "value"
    given = *TABLE, *SMALL, *SIZES, "--objective", "logistic"
    result = answer("train", *given, *how, "--figure", out, "--out", save)
    assert [result[key] for key in ("noise", "batch_order", "rule")] == [0.5, "cyclic", "stable"]
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=24)
    objective = in_cli_precision(random_logistic, 2, **OBJECTIVE)
    given = {"seeds": range(2), "times": 4, "batches": "cyclic", "noise": 0.5}
    sizes = result["step_sizes"]
    runs = in_cli_precision(sweep_replay, objective, table, step_sizes=sizes, **given)
    found = summarise(runs, "stable", sizes)
    assert result["best_step_size"] == sizes[found.best]
    for name in ("gap", "value", "loss"):
        curve = np.asarray(getattr(found, name)[found.best].filled(np.nan))
        np.testing.assert_allclose(np.array(result[name], float), curve, rtol=1e-9)
    difference = np.subtract(result["value"], result["gap"])
    np.testing.assert_allclose(difference, objective.minimum, rtol=1e-9)
    assert "objective" in out.read_text()
    data = xr.open_zarr(save).load()
    np.testing.assert_allclose(data.value - data.gap, objective.minimum, rtol=1e-9)
    assert (data.loss.isnull().all(["step_size", "seed"]) == (data.sample == 0)).all()
    assert (data.attrs["noise"], data.attrs["batch_order"]) == (0.5, "cyclic")
    _, shown, _ = call("train", *TABLE, *SMALL, *SIZES, "--report", "loss")
    assert "final training loss" in shown
    assert "training loss of the best over time" in shown


def test_rules_choose_a_step_size():
    curves = np.array(
        [
            [9.0, 99.0, np.nan, 0.0],
            [9.0, 0.1, 0.5, 0.3],
            [9.0, 1.0, 1.9, 0.1],
            [9.0, 2.0, 1.0, 0.5],
            [9.0, 8.0, 7.0, 6.0],
        ]
    )
    sizes = [8.0, 4.0, 2.0, 1.0, 0.5]
    assert [choose_step_size(curves, rule, sizes) for rule in RULES] == [2, 1, 2]
    assert choose_step_size(curves[::-1], "stable", sizes[::-1]) == 2
    assert choose_step_size(curves[:2], "stable", sizes[:2]) is None
    assert choose_step_size(curves[:1]) is None
    curves[2, 2] = 2.1
    assert choose_step_size(curves, "stable", sizes) == 3
    with pytest.raises(ValueError, match="rule must be one of final, mean, stable, got 'best'"):
        choose_step_size(curves, "best")
    with pytest.raises(ValueError, match="rule stable needs 5 step_sizes, got None"):
        choose_step_size(curves, "stable")


def test_randomized_pipedream(answer, tmp_path):
    save = tmp_path / "runs.zarr"
    rpd = "train", "--rpd", "--updates", "48", *SMALL, *SIZES
    result = answer(*rpd, "--workers", "2", "--delta", "3", "--out", save)
    assert {*result} == KEYS | {"delta"}
    assert (result["method"], result["delta"], result["schedule"], result["time"]) == (
        "rpd",
        3,
        None,
        None,
    )
    check(result, in_cli_precision(library_rpd, delta=3))
    data = xr.open_zarr(save).load()
    assert (data.attrs["delta"], "time" in data) == (3, False)
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=24)
    result = answer(*rpd, *TABLE, "--stage-times", "F=1,B=2", "--comm", "9")
    assert (result["schedule"], result["delta"]) == ("pipedream", None)
    delays = pj.staleness(table, pj.Costs(forward=1.0, backward=2.0, transmit=9.0)).delays
    assert not np.array_equal(delays, pj.staleness(table).delays)
    check(result, in_cli_precision(library_rpd, delays=delays))


@pytest.mark.parametrize("objective", [name for name in MAKERS if name != "language"])
def test_objectives_with_default_step_sizes(answer, objective):
    result = answer(
        "train",
        "--schedule",
        "pipedream-2bw",
        "--workers",
        "3",
        "--microbatches",
        "30",
        "--objective",
        objective,
        "--dimension",
        "6",
        "--batches",
        "6",
        "--batch-size",
        "4",
        "--seeds",
        "1",
        "--times",
        "2",
    )
    steps = np.array(result["step_sizes"])
    assert np.all(np.log2(steps) % 1 == 0)
    assert np.all(steps[1:] == steps[:-1] / 2)
    assert result["best_step_size"] in result["step_sizes"]
    assert result["gap"][-1] < result["gap"][0]
    assert result["spread"] == [None] * len(steps)


def test_text_and_tables_are_read(answer, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, " * 20)
    answer(
        "export",
        "--schedule",
        "local-sgd",
        "--workers",
        "3",
        "--microbatches",
        "12",
        "--local-steps",
        "2",
        "--format",
        "json",
        "--out",
        tmp_path / "table.json",
    )
    one = "--objective", "language", "--dimension", "2", "--batches", "2", "--batch-size", "2"
    result = answer(
        "train",
        "--table",
        tmp_path / "table.json",
        *one,
        "--seeds",
        "1",
        "--times",
        "2",
        "--text",
        tmp_path / "text.txt",
        "--step-sizes",
        "0.5",
    )
    assert (result["schedule"], result["stages"], result["microbatches"]) == ("local-sgd", 3, 12)
    assert 0 < result["final_gap"][0] < result["gap"][0]
    model = language_model(3, text="to be or not to be " * 20, seed=0)
    assert choose_step_sizes(None, model) == [2.0, 1.0, 0.5, 0.25]


def test_shown_to_people(call):
    code, out, err = call("train", *TABLE, *SMALL, *SIZES)
    assert (code, err) == (0, "")
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert "diverged" in lines["80"]
    assert "2 of 2" in lines["80"]
    assert [size for size, line in lines.items() if "best" in line] in (["0.125"], ["0.25"])
    bars = [line for line in out.splitlines() if line.startswith(HEIGHTS[-1])]
    assert [len(line) for line in bars] == [5]
    assert "largest of the step sizes" not in out  # that is 80
    _, out, _ = call("train", *TABLE, *SMALL, "--step-sizes", "0.001,0.002,0.003")
    assert "the best is the largest of the step sizes: one beyond it may be better" in out
    code, out, _ = call("train", *TABLE, *SMALL, "--step-sizes", "80,90,99")
    assert (code, "every step size diverged" in out) == (0, True)
    _, out, _ = call("train", *TABLE, *SMALL, "--step-sizes", "80,90,99", "--json")
    result = json.loads(out)
    assert (result["best_step_size"], result["gap"], result["final_gap"]) == (
        None,
        None,
        [None] * 3,
    )
    code, _, _ = call(
        "train",
        "--schedule",
        "pipedream",
        "--workers",
        "3",
        "--microbatches",
        "2",
        "--seeds",
        "1",
        "--times",
        "2",
        "--step-sizes",
        "0.01",
    )
    assert code == 0  # a pipe that is never full trains as well


def test_a_picture_says_that_all_diverged(call, tmp_path):
    sizes, drawn = ("--step-sizes", "80,90"), tmp_path / "gap.svg"
    assert call("train", *TABLE, *SMALL, *sizes, "--figure", drawn)[0] == 0
    text = drawn.read_text()
    assert "every step size diverged" in text
    assert "the best thick" not in text
    assert "0.04" not in text  # the time axis is that of the run


def test_bars():
    assert _bars(np.array([100.0, 10.0, 1.0])) == "█▅▁"
    assert _bars(np.array([1.0, 0.1, 0.0, -1e-17])) == "█▁▁▁"
    assert _bars(np.array([0.0, -1.0])) == "▁▁"
    assert len(_bars(np.geomspace(1, 1e-9, 500))) == 60


def test_summary_needs_its_axes():
    gap, no = np.ones((2, 3)), np.zeros(2, bool)
    with pytest.raises(
        ValueError, match=r"axes \(step_sizes, seeds\), got a gap of shape \(2, 3\)"
    ):
        summarise(
            TrainingRun(
                np.arange(3),
                jnp.asarray(gap),
                jnp.asarray(no),
                jnp.asarray(gap[None]),
                jnp.zeros(2),
                None,
            )
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*TABLE, "--step-sizes", "0.5,nan"],
            "--step-sizes must be finite numbers above 0.*got 'nan'",
        ),
        ([*TABLE, "--step-sizes", "0"], "--step-sizes must be finite numbers above 0.*got '0'"),
        ([*TABLE, "--step-sizes", "-1"], "--step-sizes must be finite numbers above 0.*got '-1'"),
        ([*TABLE, "--step-sizes", "inf"], "--step-sizes must be finite.*got 'inf'"),
        ([*TABLE, "--step-sizes", "0.5,"], "--step-sizes must be finite.*got ''"),
        ([*TABLE, "--step-sizes", "0.5,0.50"], "--step-sizes must name each once, got 0.5 twice"),
        ([*TABLE, "--noise", "-1"], "--noise.*got '-1'"),
        ([*TABLE, "--noise", "nan"], "--noise.*got 'nan'"),
        ([*TABLE, "--batch-order", "sorted"], "--batch-order must be one of epochs, cyclic, drawn"),
        (
            ["--rpd", "--updates", "100", "--workers", "2", "--batch-order", "epochs"],
            "--batch-order with --rpd must be one of drawn, cyclic, got 'epochs'",
        ),
        ([*TABLE, "--rule", "best"], "--rule must be one of final, mean, stable, got 'best'"),
        ([*TABLE, "--report", "f"], "--report must be one of gap, value, loss, got 'f'"),
        ([*TABLE, "--minimiser", "normal"], "--minimiser does not go with .* quadratic"),
        ([*TABLE, "--admission", "all"], "admission must be one of each-stage, first-stage, got"),
        ([*TABLE, "--seeds", "0"], "--seeds.*got '0'"),
        ([*TABLE, "--times", "0"], "--times.*got '0'"),
        ([*TABLE, "--dimension", "5"], "--dimension must be a multiple of 2 stages, got 5"),
        ([*TABLE, "--objective", "cubic"], "--objective must be one of quadratic, .*, got 'cubic'"),
        ([*TABLE, "--objective", "language"], "language needs at least 3 stages, .*, got 2"),
        ([*TABLE, "--objective", "language", "--dimension", "5"], "must be even .*, got 5"),
        ([*TABLE, "--objective", "language", "--text", "no.txt"], "--text no.txt: No such file"),
        ([*TABLE, "--objective", "language", "--text", "{tmp}/latin"], "latin must be UTF-8"),
        ([*TABLE, "--text", "no.txt"], "--text does not go with --objective quadratic"),
        ([*TABLE, "--condition-number", "9"], "--condition-number does not go with .* quadratic"),
        (
            [*TABLE, "--objective", "nesterov", "--condition-number", "nan"],
            "--condition-number must be a finite number above 1, got nan",
        ),
        (
            [*TABLE, "--objective", "nesterov", "--batches", "1"],
            "must be at least the dimension 16",
        ),
        ([*TABLE, "--delta", "3"], "--delta needs --rpd"),
        ([*TABLE, "--updates", "30"], "--updates needs --rpd"),
        ([*TABLE, "--local-steps", "0"], "--local-steps.*got '0'"),
        ([*TABLE, "--local-steps", "2"], "--local-steps: pipedream takes no local steps"),
        (["--schedule", "1f1b", *TABLE[2:]], "1f1b is synchronous, no U cell updates its weights"),
        (["--rpd", "--updates", "100", "--schedule", "1f1b", *TABLE[2:]], "1f1b is synchronous"),
        ([], "give either --schedule with --workers and --microbatches, or --table FILE"),
        (["--rpd", "--workers", "2", "--delta", "1"], "--rpd needs --updates"),
        (
            ["--rpd", "--updates", "150", "--workers", "2", "--delta", "1"],
            "--updates must be a multiple of --times 100, got 150",
        ),
        (
            ["--rpd", "--updates", "100", "--workers", "2"],
            "--rpd needs --delta with --workers, or a",
        ),
        (["--rpd", "--updates", "100", "--delta", "1"], "--delta needs --workers"),
        (["--rpd", "--updates", "100", "--workers", "2", "--delta", "-1"], "--delta.*got '-1'"),
        (
            ["--rpd", "--updates", "100", "--workers", "2", "--delta", "70000"],
            "delta must be at most 65535, got 70000",
        ),
        (
            ["--rpd", "--updates", "100", "--delta", "1", *TABLE],
            "--schedule does not go with --delta",
        ),
        (
            ["--rpd", "--updates", "100", "--delta", "1", "--workers", "2", "--local-steps", "2"],
            "--local-steps does not go with --delta",
        ),
        (
            [
                "--rpd",
                "--updates",
                "100",
                "--delta",
                "1",
                "--workers",
                "2",
                "--stage-times",
                "F=1,B=2",
            ],
            "times do not go with --delta",
        ),
        (
            [
                "--rpd",
                "--updates",
                "100",
                "--schedule",
                "pipedream",
                "--workers",
                "4",
                "--microbatches",
                "3",
            ],
            "must be at least that of stages, 4, got 3: the pipe is never full",
        ),
        (
            [*TABLE, "--out", "gap.txt"],
            "--out must end in one of .png, .pdf, .svg, .zarr, got 'gap.txt'",
        ),
        ([*TABLE, "--out", "no/gap.png"], "--out no/gap.png: there is no folder no"),
        ([*TABLE, "--out", "runs.nc"], "--out must end in one of .*, .zarr, got 'runs.nc'"),
        ([*TABLE, "--out", "{tmp}/full.zarr"], "exists: give another, or --force"),
    ],
)
def test_mistakes(mistake, tmp_path, arguments, message):
    (tmp_path / "full.zarr").mkdir()
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 99)
    assert re.search(message, mistake("train", *(a.format(tmp=tmp_path) for a in arguments)))
