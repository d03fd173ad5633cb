"""The sweep of the tabular-schedule paper on a corner of its grid, its claims and its figures."""

import csv
import dataclasses

import numpy as np
import pytest
import tabular_data
import xarray as xr
from daily import daily

import pipejax as pj
from pipejax.schedules.table.slot_simulation import slot_times
from sweeps.kit.cases import CASES
from sweeps.kit.claims import COUNTED, judge
from sweeps.tabular import claims as tabular_claims, table as tabular_table
from sweeps.tabular.checks import HANAYO, Evidence
from sweeps.tabular.fit import FIT, fit
from sweeps.tabular.pricing import flat, price
from sweeps.tabular.schedules import sweep
from sweeps.tabular.settings import (
    ALL_EQUAL,
    AS_REPORTED,
    AT_SQUARE,
    CALIBRATED,
    DEAR_STAGE,
    DOUBLE,
    DRAWN,
    EQUAL,
    EXCHANGES,
    H100_BANDWIDTH,
    MAIN,
    REPORTED,
    SETTINGS,
    SLOW_LINK,
    SYSTEMS,
    Setting,
    draw,
    main_setting,
    slots_drawn_with,
    system_at,
    workload,
)

# the sweep that most of these look at is made once for all, and again by `make paper`
MANY = tuple(case for case in CASES if case.split(",")[0] not in ("hanayo", "interleaved-1f1b"))
ONCE, BY_UNIT = "one stage after the other", "after every P microbatches"
FEW_SETTINGS = SETTINGS | {"minibatch": (1024,), "link": ("blocking",)}
FEW_SETTINGS |= {"exchange": (ONCE, BY_UNIT), "inequality": (ALL_EQUAL, SLOW_LINK)}
DIFFER = {"2d", "3e", "3f", "6b"}


@pytest.fixture(scope="module")
def fits():
    few = {name: FEW_SETTINGS[name] for name in ("link", "inequality")}
    return fit({**FIT, **few, "minibatch": (256, 1024)})


@pytest.fixture(scope="module")
def few(fits):
    return sweep((4, 8), (8, 16), (*MANY, HANAYO), FEW_SETTINGS, fits)


@pytest.fixture(scope="module")
def whole(few, fits):
    many = sweep((4, 8), (64, 128), MANY, FEW_SETTINGS, fits).reindex(schedule=few.schedule)
    return xr.concat([few, many], "microbatches", data_vars="minimal", join="exact")


@pytest.fixture(scope="module")
def data(whole):
    return main_setting(whole)


def test_the_grid_is_full(few):
    shape = [len(MANY) + 1, 2, 2, *(len(values) for values in FEW_SETTINGS.values()), len(SYSTEMS)]
    assert few.makespan.shape == tuple(shape)
    assert not few.makespan.isnull().any()
    assert {"pipejax", "commit", "dtype", "model", "fit residual"} <= set(few.attrs)
    assert all("units" in few[name].attrs for name in few.data_vars)


def test_only_square_orders_are_drawn_with_equal_slots(few):
    at = few.sel(schedule=HANAYO, setting=AS_REPORTED).makespan
    mixed, equal, double = (at.sel(drawn=rule) for rule in DRAWN)
    square = (at.workers == at.microbatches).broadcast_like(mixed)
    assert (mixed == equal.where(square, double)).all()
    assert (equal != double).any()


def test_more_microbatches_are_admitted_to_the_pipes_of_chimera_alone(few):
    less, more = (few.makespan.sel(admission=rule) for rule in ("P", "1.25 P"))
    differ = (less != more).any([name for name in less.dims if name != "schedule"])
    assert set(few.schedule.values[differ]) <= {rule for rule in MANY if "chimera" in rule}
    assert differ.any()


def one_run(few, at):
    table = draw(at["schedule"], at["workers"], at["microbatches"], at["drawn"], at["admission"])
    fitted = {"minibatch": 1024, "bandwidth": H100_BANDWIDTH, "exchanges": 1.0}
    fitted |= {name: at[name] for name in ("link", "inequality")}
    fitted["slots"] = slots_drawn_with(at["drawn"], 8, 8)
    place = {f"fitted_{name}": value for name, value in fitted.items()}
    ours = Setting(float(few.fitted_efficiency.sel(place)), H100_BANDWIDTH)
    system = system_at(at["system"], ours if at["setting"] == CALIBRATED else REPORTED)
    costs = pj.stage_costs(workload(), system, table)
    times = EXCHANGES[at["exchange"]](at["workers"], at["microbatches"])
    costs = dataclasses.replace(costs, all_reduce=costs.all_reduce * times)
    if at["inequality"] == SLOW_LINK:
        costs = with_slow_link(costs, table)
    return pj.evaluate(table, costs, link=at["link"])


def with_slow_link(costs, table):
    """Whatever passes between the two workers in the middle takes ten times as long."""
    middle = {table.num_workers // 2 - 1, table.num_workers // 2}
    leaves = costs.latency, costs.transmit, costs.all_reduce
    latency, transmit, exchange = map(np.array, leaves)
    for pipe, row in enumerate(table.placement):
        for stage in range(table.num_stages):
            if stage and {row[stage - 1], row[stage]} == middle:
                latency[:, pipe, stage - 1] *= 10
                transmit[:, pipe, stage - 1] *= 10
            if not pipe and {pipe_workers[stage] for pipe_workers in table.placement} == middle:
                exchange[stage] *= 10
    return dataclasses.replace(costs, latency=latency, transmit=transmit, all_reduce=exchange)


NAMES = "schedule workers microbatches system setting link drawn admission exchange inequality"
POINTS = [
    ("gpipe", 4, 8, "mid_nw_mid_cp", AS_REPORTED, "blocking", AT_SQUARE, "P", ONCE, ALL_EQUAL),
    ("chimera", 8, 16, SYSTEMS[2], CALIBRATED, "blocking", EQUAL, "P", BY_UNIT, SLOW_LINK),
    (HANAYO, 8, 8, SYSTEMS[8], CALIBRATED, "blocking", AT_SQUARE, "P", ONCE, SLOW_LINK),
    (MANY[3], 4, 16, SYSTEMS[0], AS_REPORTED, "blocking", DOUBLE, "1.25 P", BY_UNIT, ALL_EQUAL),
]
POINTS = [dict(zip(NAMES.split(), point, strict=True)) for point in POINTS]


@pytest.mark.parametrize("at", daily(POINTS))
def test_the_batch_equals_one_evaluation(few, at):
    alone = one_run(few, at)
    result = few.sel(at | {"minibatch": 1024})
    assert float(result.makespan) == pytest.approx(alone.makespan, rel=1e-9)
    assert float(result.bubble_ratio) == pytest.approx(alone.bubble_ratio, abs=1e-9)


def test_a_dearer_last_stage_has_the_time_of_one_layer_more():
    table, ones = draw("chimera-asymmetric", 4, 8), np.ones((1, 1, 2, 1))
    names = [SYSTEMS[4]]
    costs = flat(price(table, [1024], [1.0], [ALL_EQUAL, DEAR_STAGE], names, ones, 34e12 * ones))
    for plain, dear in (costs.forward, costs.backward):  # 128 layers as 21, 21, 43 and 43
        assert np.allclose(dear - plain, [0, 0, 0, plain[-1] / 43])
    assert (costs.transmit[0] == costs.transmit[1]).all()


def test_the_settings_differ_in_two_numbers():
    settings = REPORTED, Setting(0.3, 1e12)
    reported, ours = (system_at("mid_nw_mid_cp", setting) for setting in settings)
    assert reported == pj.load_system("mid_nw_mid_cp")
    both = {"compute_efficiency": reported.compute_efficiency, "memory_bandwidth": 34e12}
    assert dataclasses.replace(ours, **both) == reported


def test_exchanges_of_a_worker_follow_each_other_on_the_network():
    table, machine = draw("chimera", 8, 8), system_at("slow_nw_mid_cp", REPORTED)
    work = workload()
    costs = pj.stage_costs(work, machine, table)
    gradients = 2 * work.model.layer_parameters * work.model.layers / 8
    assert np.allclose(costs.all_reduce, gradients / 5e9 + 2 * 500e-9)
    alone = pj.Costs(forward=0.0, backward=0.0, all_reduce=costs.all_reduce)
    end = pj.evaluate(table, alone, link="blocking").makespan
    assert end == pytest.approx(2 * float(costs.all_reduce[0]))


def test_one_number_is_fitted_and_the_others_follow(whole, data):
    assert abs(whole.attrs["fit residual"]) < 1e-10
    at = data.makespan.sel(workers=8, microbatches=8)
    gain = 1 - at.sel(schedule=HANAYO) / at.sel(schedule="chimera")
    assert float(gain.sel(system="slow_nw_mid_cp")) == pytest.approx(0.0233, abs=1e-6)
    assert float(gain.sel(system="slow_nw_fast_cp")) == pytest.approx(-0.1232, abs=0.005)
    faster = gain.sel(system=[name for name in SYSTEMS if not name.startswith("slow_nw")])
    assert 0.12 <= float(faster.mean()) <= 0.14
    pair = data.makespan.sel(schedule=["gpipe", "1f1b"])
    assert float((pair.max("schedule") / pair.min("schedule")).max()) <= 1.01


def test_a_setting_that_meets_the_number_nowhere_is_not_fitted(fits):
    none = np.isnan(fits.compute_efficiency)
    assert none.any()
    assert (np.isnan(fits.hanayo_saves) == none).all()
    assert float(abs(fits.residual).max()) < 1e-10
    at = {"link": "blocking", "slots": EQUAL, "inequality": ALL_EQUAL, "minibatch": 1024}
    assert fits.sel(at, drop=True).compute_efficiency.notnull().all()


def test_the_published_points_in_slots(whole):
    slots = whole.table_bubble_ratio.sel(measured="F=1, B=2", admission="P")
    published = slots.sel(drawn="F=1, B=1", schedule="chimera", workers=8)
    assert float(published.sel(microbatches=8)) == pytest.approx(1 - 24 / 36)
    assert float(published.sel(microbatches=16)) == pytest.approx(0.26, abs=0.005)
    for rule, name, total in (
        (AT_SQUARE, "hanayo, 1 wave", 38),
        (AT_SQUARE, HANAYO, 31),
        ("F=1, B=2", HANAYO, 31.5),
        (AT_SQUARE, "hanayo, 4 waves", 27.5),
        ("F=1, B=2", "hanayo, 4 waves", 27.75),
    ):
        table = draw(name, 8, 8, rule)
        end = slot_times(table, {"F": 1, "B": 2})[1].max() * 8 / table.num_stages
        assert end == total, (name, rule)
    waves = slots.sel(workers=8, microbatches=8, schedule=HANAYO, drawn=AT_SQUARE)
    assert float(waves) == pytest.approx(1 - 24 / 31)


@pytest.mark.parametrize("case", ["chimera", "chimera-asymmetric"])
def test_activations_of_a_stage_are_those_that_its_forwards_left(few, case):
    table = draw(case, 8, 16, DOUBLE)
    held, largest = np.zeros((2, 2, 8))
    for slot in range(table.num_slots):
        for row in range(8):
            columns = (table.phase, table.stage, table.microbatch)
            phase, stage, microbatch = (int(values[row, slot]) for values in columns)
            if microbatch >= 0:
                held[microbatch % 2, stage] += 1 if phase == pj.Phase.F else -1
        largest = np.maximum(largest, held)
    point = few.sel(schedule=case, workers=8, microbatches=16, drawn=DOUBLE, admission="P")
    layers = {"chimera": [16] * 8, "chimera-asymmetric": [11] * 4 + [21] * 4}[case]
    size = point.stage_activation_bytes.squeeze() / (largest.max(0) * layers)
    assert np.allclose(size, size[0], rtol=1e-12)


def test_table_one_holds_both_outliers_and_the_memory(whole):
    rows = {row[0]: row for row in tabular_table.rows(whole)}
    assert list(rows) == [*SYSTEMS, "mean of mid and fast networks"]
    assert rows["slow_nw_mid_cp"][3:5] == ("+2.33", "+2.33 (fitted to)")
    assert rows["slow_nw_fast_cp"][3:5] == ("-12.67", "-12.32")
    assert "of 80 GB" in tabular_table.note(whole)


@pytest.fixture(scope="module")
def rows(whole, data):
    return {row["number"]: row for row in judge(tabular_claims.CLAIMS, Evidence(data, whole))}


def test_claims(rows):
    counted = [row for row in rows.values() if row["kind"] in COUNTED]
    assert {row["number"] for row in counted if row["verdict"] == "differs"} == DIFFER
    assert {row["number"] for row in counted if row["verdict"] == "open"} == {"3b"}
    assert len(counted) == 18
    for row in rows.values():
        assert row["reason"] or row["verdict"] == "reproduced"
        assert row["ours"]


def test_a_figure_is_judged_by_a_threshold_of_ours(rows):
    judged = {row["number"] for row in rows.values() if row["thresholds"]}
    assert judged == {"1a", "2b", "3b", "3d", "3g", "5a", "5b", "5c", "5d", "6c", "3f, relative"}
    assert all("(ours" in rows[number]["thresholds"] for number in judged)


def test_claims_are_judged_in_every_setting(whole, data, tmp_path):
    tabular_claims.show_settings(whole, tmp_path / "settings.csv")
    head, *rows = csv.reader((tmp_path / "settings.csv").read_text().splitlines())
    assert len(rows) == np.prod([whole.sizes[name] for name in SETTINGS])
    place = {name: k for k, name in enumerate(head)}
    (main,) = (r for r in rows if r[: len(MAIN)] == [str(value) for value in MAIN.values()])
    assert main[place["not"]].split(", ") == sorted(DIFFER | {"3b"})
    assert main[place["hold"]] == str(17 - len(DIFFER) - 1)
    assert int(main[place["hold"]]) == max(int(row[place["hold"]]) for row in rows)


def test_a_main_setting_that_another_beats_is_an_error(whole, tmp_path):
    worse = whole.assign_coords(setting=whole.setting.values[::-1])
    with pytest.raises(SystemExit, match="not among the best"):
        tabular_claims.show_settings(worse, tmp_path / "settings.csv")


@pytest.fixture(scope="module")
def world():
    return tabular_data.published()


def verdicts(world, numbers=()):
    claims = [claim for claim in tabular_claims.CLAIMS if not numbers or claim.number in numbers]
    return {row["number"]: row for row in judge(claims, Evidence(main_setting(world), world))}


def test_every_claim_can_come_out(world):
    words = {row["verdict"] for row in verdicts(world).values()}
    assert words == {"reproduced", "holds", "follows by construction", "fitted", "holds so read"}


def test_every_claim_that_is_counted_can_be_contradicted(world):
    counted = {claim.number for claim in tabular_claims.CLAIMS if claim.kind in COUNTED}
    assert set(tabular_data.MUTATIONS) == counted
    for number, contradict in tabular_data.MUTATIONS.items():
        changed = world.copy(deep=True)
        contradict(changed)
        expected = {"3b": "open", "8": "fails"}.get(number, "differs")
        assert verdicts(changed, [number])[number]["verdict"] == expected, number


def test_a_gain_that_the_source_does_not_imply_either_differs(world):
    changed = world.copy(deep=True)
    changed["makespan"].loc[{"schedule": "chimera", "microbatches": 16}] *= 0.9
    assert verdicts(changed, ["3b"])["3b"]["verdict"] == "differs"
