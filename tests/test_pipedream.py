"""Experiments with PipeDream: tables of whole rounds, best step sizes, and verdicts that can fail."""

import numpy as np
import pytest
import xarray as xr

from pipejax.analysis.staleness import op_times
from pipejax.training import random_quadratic
from sweeps import pipedream, pipedream_claims
from sweeps.claims import HOLDS, judge
from sweeps.pipedream_schemes import (
    SAMPLES,
    best,
    curves,
    geometric_mean,
    powers,
    randomized,
    stacked,
    table_of,
    timeline,
)

pytestmark = pytest.mark.compiles


def dataset(ends, *, stages=None, seeds=2):
    """Curves that fall to given gaps; step sizes 1/16 and 1/32, of which the first is better."""
    fall = np.linspace(0, 1, 5)
    gap = np.stack(
        [np.stack([[end**fall] * seeds, [np.sqrt(end) ** fall] * seeds]) for end in ends.values()]
    )
    data = xr.Dataset(
        {
            "gap": (("scheme", "step_size", "seed", "sample"), gap),
            "diverged": (("scheme", "step_size", "seed"), np.zeros(gap.shape[:3], bool)),
            "time": (("scheme", "sample"), np.tile(100 * fall, (len(ends), 1))),
            "updates": (("scheme", "sample"), np.tile(100 * fall, (len(ends), 1))),
        },
        coords={"scheme": list(ends), "step_size": [1 / 16, 1 / 32]},
    )
    return data if stages is None else data.expand_dims(stages=stages)


def published():
    """Data in which every claim comes out."""
    stages = np.array([2, 4, 8])
    law = {
        "max_delay_law": stages**2 - stages / 2,
        "mean_delay_law": (stages**2 - 1) / 2 + stages / 4,
    }
    late = {"late_measured": 0.2, "late_total": 9.0, "late_total_without_delay": 0.1}
    local = {f"local-sgd H={h}": gap for h, gap in ((2, 20e-2), (5, 23e-2), (30, 0.8))}
    logistic = {
        "pipedream": 4e-2,
        "local-sgd H=2": 2e-2,
        "local-sgd H=5": 7e-3,
        "local-sgd H=30": 0.18,
    }
    own = {f"{name}, own models": gap for name, gap in logistic.items() if "local" in name}
    language = {
        "pipedream": 0.25,
        **{f"local-sgd H={h}": g for h, g in ((1, 0.28), (4, 0.27), (8, 0.265))},
    }
    falls = [
        dataset({"pipedream": 1e-2, "rpd": 1e-2, "local-sgd H=5": end}).isel(sample=-1)
        for end in (1.3e-2, 5e-3, 1.7e-3)
    ]
    return {
        "staleness": xr.Dataset(
            {
                "max_delay": ("stages", np.floor(law["max_delay_law"])),
                "mean_delay": ("stages", law["mean_delay_law"]),
                **{name: ("stages", values) for name, values in law.items()},
            },
            coords={"stages": stages},
        ),
        "convergence_bound": xr.Dataset({name: ("late", [value]) for name, value in late.items()}),
        "pipedream_quadratic": dataset(
            {
                "pipedream": 3e-7,
                "pipedream, epochs": 3e-7,
                "rpd delta=8": 1e-11,
                "rpd delta=30": 3e-11,
                "rpd delta=60": 2e-6,
                "rpd delta=180": 3e-3,
                "rpd delta=420": 0.4,
            }
        ),
        "pipedream_match": dataset({"pipedream": 3e-7, "rpd": 2e-6}, stages=[8]),
        "pipedream_nesterov": dataset({"pipedream": 3e-2, **local}),
        "pipedream_logistic": dataset({**logistic, **own}),
        "pipedream_language": dataset(language),
        "pipedream_scaling": xr.concat(falls, xr.Variable("stages", stages)),
        "pipedream_machines": dataset({"pipedream": 1e-3, "local-sgd H=1": 1e-2}).expand_dims(
            objective=["logistic"], system=["slow", "fast"]
        ),
    }


def verdicts(data):
    return {row["number"]: row["verdict"] for row in judge(pipedream_claims.CLAIMS, data)}


def test_published_figures_are_reproduced():
    found = verdicts(published())
    assert {n for n, verdict in found.items() if verdict not in HOLDS} == set()


SPOILED = {
    "staleness": ("T1", "T2"),
    "convergence_bound": ("T3",),
    "pipedream_match": ("1, match",),
    "pipedream_nesterov": ("2, winner", "2, order"),
    "pipedream_logistic": ("3, winner", "3, H=2", "3, order"),
    "pipedream_language": ("4, winner", "4, order"),
    "pipedream_quadratic": ("1, order", "1, delta=420"),
    "pipedream_scaling": ("5, PipeDream", "5, LocalSGD", "5, winner"),
}


@pytest.mark.parametrize("store", SPOILED)
def test_every_verdict_can_fail(store):
    data = published()
    spoiled = data[store].copy(deep=True)
    if store == "staleness":
        spoiled["max_delay"] += 1
        spoiled["mean_delay"] += 1
    elif store == "convergence_bound":
        spoiled["late_measured"] *= 100
    elif store == "pipedream_match":
        spoiled["gap"].loc[{"scheme": "rpd"}] *= 1e3
    else:  # the schemes change places
        spoiled["gap"] = 1e-9 / spoiled.gap
    found = verdicts({**data, store: spoiled})
    assert all(found[number] == "differs" for number in SPOILED[store])


def test_the_best_step_size_has_no_diverged_seed():
    data = dataset({"a": 1e-4, "b": 1e-2})
    assert best(data).step_size.values.tolist() == [1 / 16, 1 / 16]
    data["diverged"][0, 0, 1] = True
    assert best(data).step_size.values.tolist() == [1 / 32, 1 / 16]
    np.testing.assert_allclose(geometric_mean(best(data).gap).isel(sample=-1), [1e-2, 1e-2])


@pytest.mark.parametrize(
    ("name", "options"),
    [("pipedream", {}), ("pipedream-2bw", {}), ("local-sgd", {"local_steps": 3})],
)
def test_tables_are_busy_until_the_end_and_not_much_longer(name, options):
    table = table_of(name, 4, 200.0, **options)
    end = op_times(table)[1].max()
    whole = {"pipedream": 1, "pipedream-2bw": 4, "local-sgd": 12}[name]
    assert end >= 200
    assert table.num_microbatches % whole == 0
    assert end - 200 <= 3 * whole + 8


def test_curves_of_schemes():
    objective = stacked(lambda seed: random_quadratic(2, dimension=4, seed=seed), range(2))
    schemes = [timeline("pipedream", "pipedream", 2, 60.0, batches="drawn"), randomized(2, 60)]
    runs = {s.label: s.train(objective, powers(1, 3), range(2)) for s in schemes}
    data = curves(runs, powers(1, 3))
    assert dict(data.sizes) == {"scheme": 2, "step_size": 3, "seed": 2, "sample": SAMPLES + 1}
    assert data.scheme.values.tolist() == ["pipedream", "rpd delta=3"]
    assert data.time.isel(sample=-1).values.tolist() == [60.0, 60.0]
    assert float(geometric_mean(best(data).gap).isel(sample=-1).max()) < 0.1


def test_an_experiment_that_is_there_is_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def experiment():
        made.append(1)
        return dataset({"a": 1e-2})

    monkeypatch.setattr(pipedream, "EXPERIMENTS", {"quick": experiment})
    for arguments, count in (([], 1), ([], 1), (["--only", "quick"], 2)):
        monkeypatch.setattr("sys.argv", ["pipedream", "--out", str(tmp_path), *arguments])
        pipedream.main()
        assert len(made) == count
    assert "is there: --only quick makes it anew" in capsys.readouterr().err
    with xr.open_zarr(tmp_path / "pipedream_quick.zarr") as data:
        assert "code" in data.attrs
