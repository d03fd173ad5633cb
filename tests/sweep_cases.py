"""Shared by the tests of sweeps: a declared sweep and a grid of 560 points."""

import json
import re

from pipejax.cli.app import run

OTHER_MODEL = "tabular-128l"  # of another structure: it takes programs of its own
TOML = f"""
title = "a sweep of the tests"
schedules = ["gpipe", "chimera", {{ name = "interleaved-1f1b", stages_per_worker = 2 }}]
workers = 2
minibatch = 8
microbatch_size = [1, 3, 8]
models = ["gpt-22b", "{OTHER_MODEL}"]
systems = ["h100", "slow_nw_mid_cp"]
tensor_parallel = 2
recompute = ["none", "full"]
outputs = ["bubble_ratio", "tokens_per_second", "tokens_per_second_per_gpu", "bound_by", "share"]

[system]
network.bandwidth_GB_per_s = {{ from = 1, to = 100, points = 3, scale = "log" }}
memory.capacity_GB = [200, 4000]
node.gpus = [2, 8]
compute.efficiency = [0.5]
"""
GRID = {
    "schedules": ["gpipe", "1f1b"],
    "workers": [2, 3],
    "minibatch": 12,
    "microbatch_size": [1, 2, 3, 4, 5, 6, 12],
    "models": "tabular-128l",
    "recompute": ["none", "full"],
    "systems": "mid_nw_mid_cp",
    "system": {
        "network": {"bandwidth_GB_per_s": {"from": 1, "to": 100, "points": 10, "scale": "log"}}
    },
}


def declare(folder):
    """Write the declared sweep into a folder."""
    path = folder / "sweep.toml"
    path.write_text(TOML)
    return path


def write_grid(folder):
    """Write the grid into a folder, as a declared sweep."""
    path = folder / "grid.toml"
    bandwidth = '{from = 1, to = 100, points = 10, scale = "log"}'
    system = f"[system]\nnetwork.bandwidth_GB_per_s = {bandwidth}"
    rows = "\n".join(f"{key} = {json.dumps(x)}" for key, x in GRID.items() if key != "system")
    path.write_text(f"{rows}\n{system}\n")
    return path


def refused(capsys, *arguments):
    assert run(["sweep", "run", *map(str, arguments), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch("error: .+\\n(hint: .+\\n)?", printed.err)
    return printed.err.replace("\nhint", "")
