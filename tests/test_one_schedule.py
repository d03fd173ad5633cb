"""Every door builds the same schedule for a run: what `evaluate` says of it holds at all of them."""

import json

import numpy as np
import pytest
from legal_sizes import SLICED, at_least

import pipejax as pj
from pipejax.costs.system.system import data_file
from pipejax.schedules import REGISTRY

WORKERS = 4
# forwards alone, asynchronous, or in slices: sweeps and tuning take none of them
OTHERS = (*SLICED, "pipedream", "pipedream-2bw", "local-sgd", "naive")
PLANNED = tuple(name for name, builder in REGISTRY.items() if builder.planned)
SEEDS = 20


def is_usual(name):
    if name in OTHERS:
        return False
    microbatches = at_least(name, WORKERS, 8)
    table = pj.schedules.build(name, num_workers=WORKERS, num_microbatches=microbatches)
    return not table.grammar.custom_phases and not table.updates_within


def draw(seed, folder):
    """Draw a model and a system whose F, I and W differ, as options of the command line."""
    rng = np.random.default_rng(seed)
    model = json.loads(data_file("models", "llama3-8b", "model").read_text())
    model |= {
        "name": f"model{seed}",
        "layers": int(8 * rng.integers(2, 6)),
        "hidden": int(128 * 8 * rng.integers(1, 6)),
        "ffn_hidden": int(256 * rng.integers(8, 60)),
        "sequence_tokens": int(1024 * 2 ** rng.integers(0, 6)),
        "heads": 8,
        "kv_heads": 8,
    }
    system = json.loads(data_file("hardware", "h100", "system").read_text()) | {"name": "machine"}
    system["compute"] = system["compute"] | {"peak_TFLOP_per_s": float(rng.uniform(200, 2000))}
    network = {"bandwidth_GB_per_s": float(10 ** rng.uniform(0, 2))}
    system["network"] = system["network"] | network
    system["node"] = system["node"] | {"gpus": 2}
    system["memory"] = system["memory"] | {"capacity_GB": 4000}
    paths = folder / f"model{seed}.json", folder / f"system{seed}.json"
    for path, content in zip(paths, (model, system), strict=True):
        path.write_text(json.dumps(content))
    return ["--model", str(paths[0]), "--system", str(paths[1])]


@pytest.fixture(scope="module")
def names():
    """Schedules that all doors take, with their fewest microbatches from 8 on."""
    return {name: at_least(name, WORKERS, 8) for name in REGISTRY if is_usual(name)}


def check_doors(seed, names, folder, answer):
    """Ask every door for the step of every schedule; return those that differ from evaluate."""
    options, wrong = draw(seed, folder), []
    for count in sorted({*names.values()}):
        alike = [name for name, number in names.items() if number == count]
        sizes = ["--workers", WORKERS, "--minibatch", count]
        table = [*sizes, "--microbatches", count, *options]
        steps = {n: answer("evaluate", "--schedule", n, *table)["step_time"] for n in alike}
        doors = {"sweep": sweep_row(alike, count, options, folder)}
        compared = answer("compare", "--schedules", ",".join(alike), *table)
        doors["compare"] = {row["schedule"]: row["makespan"] for row in compared["rows"]}
        for name in [name for name in alike if name in PLANNED]:
            few = ["--schedules", name]  # its step time alone is asked for
            explained = answer("explain", "--schedule", name, *table, *few)
            doors.setdefault("explain", {})[name] = explained["step_time"]
            tuned = answer(
                "tune", "size", "--schedule", name, *sizes, *options, "--method", "exhaustive"
            )
            size = {row["microbatches"]: row["step_time"] for row in tuned["exhaustive"]["sizes"]}
            doors.setdefault("tune size", {})[name] = size[count]
        wrong += [
            (door, name, step, steps[name])
            for door, result in doors.items()
            for name, step in result.items()
            if step != pytest.approx(steps[name], rel=1e-9)
        ]
    return wrong


def sweep_row(names, count, arguments, folder):
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    grid = {
        "schedules": list(names),
        "workers": WORKERS,
        "microbatches": count,
        "minibatch": count,
        "models": options["--model"],
        "systems": options["--system"],
    }
    data = pj.run_sweep(grid, folder / f"{'-'.join(names)[:40]}{count}.zarr")
    return {n: float(s) for n, s in zip(names, np.ravel(data.step_time.values), strict=True)}


def test_every_door_answers_alike(names, tmp_path, answer):
    assert {*PLANNED} <= {*names}
    few = {name: names[name] for name in ("1f1b", *PLANNED[3::3])}
    assert not check_doors(0, few, tmp_path, answer)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_every_door_answers_alike_for_every_schedule(seed, names, tmp_path, answer):
    assert not check_doors(seed, names, tmp_path, answer)
