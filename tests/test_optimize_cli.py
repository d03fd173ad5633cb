"""`pipejax optimize`: what it prints, that it keeps time and limits, and mistakes."""

import json
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.search.schedule import initial_plans

ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
THREE = [*ONE, "--stage-times", "F=10,I=10,W=10", "--memory-limit", "3"]
HARD = shlex.split("-s 1f1b -P 6 -M 16 -T F=10,I=11,W=9 --comm 0.7 --memory-limit 3")
MODEL = ["--model", "gpt-22b", "--system", "h100", "--minibatch", "8", "--tensor-parallel", "8"]
KEYS = (
    "status makespan lower_bound gap bubble_ratio peak_in_flight offloaded seconds baseline rounding "
    "best value baselines evaluated stopped peak_memory memory_limit source"
)


@pytest.fixture
def few_baselines(monkeypatch):
    monkeypatch.setattr(
        initial_plans, "baseline_tables", lambda problem, table: iter([("1f1b", table)])
    )


@pytest.fixture
def store_options(tmp_path):
    return ["--store", tmp_path / "store"]


def test_json(answer, store_options, tmp_path):
    first = answer("optimize", *THREE, *store_options)
    assert set(first) >= set(KEYS.split())
    assert (first["status"], first["makespan"], first["gap"]) == ("optimal", 310.0, 0.0)
    assert (first["lower_bound"], first["rounding"], first["offloaded"]) == (310.0, 0.0, 0)
    assert first["bubble_ratio"] == pytest.approx(70 / 310)
    assert max(first["peak_memory"]) <= 3
    assert first["memory_limit"] == [3.0] * 4
    assert first["baseline"]["1f1b"] is None  # it holds 4 activations
    assert first["baseline"]["zero-bubble"] == 310.0
    assert first["idle_saved"] == 0.0
    assert 0 < first["found_after"] <= first["seconds"]
    again = answer("optimize", *THREE, *store_options)
    assert again["source"] == "store"
    others = "source", "seconds", "effort", "found_after", "evaluated"
    same = [key for key in first if key not in others]
    assert [again[key] for key in same] == [first[key] for key in same]


def test_the_report(call, store_options, few_baselines):
    code, out, _ = call("optimize", *THREE, *store_options, "--details")
    assert code == 0
    texts = "optimal: no other can be shorter", "310 s", "bubble ratio", "1f1b", "0 activations"
    for text in (*texts, "peak memory"):
        assert text in out
    assert out.startswith("310 s per step within the memory limit")


OFFLOADS = "-T F=0.0101,I=0.0103,W=0.0097 --comm 0.0007 --memory-limit 2 --effort 0.5"
OFFLOADS = [*ONE, *shlex.split(OFFLOADS)]


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_what_is_written_can_be_read_evaluated_shown_and_exported(
    answer, call, store_options, tmp_path, few_baselines, suffix
):
    """Its makespan is that of `evaluate`, bit by bit, and its memory keeps the limit there."""
    out = tmp_path / f"best{suffix}"
    result = answer("optimize", *OFFLOADS, "--offload", "0.012", *store_options, "--out", out)
    times = ["--stage-times", "F=0.0101,I=0.0103,W=0.0097,O=0.012", "--comm", "0.0007"]
    run = answer("evaluate", "--table", out, *times)
    assert result["offloaded"] > 0
    for key in ("makespan", "bubble_ratio", "peak_in_flight"):
        assert run[key] == result[key]
    assert run["activation_memory"]["peak"] == result["peak_memory"]
    assert max(result["peak_memory"]) <= 2
    table = pj.read_table(out)
    assert int((table.phase == pj.Phase.O).sum()) == result["offloaded"]
    assert call("show", "--table", out, *times)[0] == 0
    path = tmp_path / "torch.csv"
    code, _, err = call("export", "--table", out, "--format", "torch-csv", "--out", path)
    assert code == 0
    assert re.search(r"warning: \d+ O, \d+ L, .*left out", err)
    assert not re.search("[OL]", path.read_text())


@pytest.mark.slow
def test_times_of_o_and_l_let_activations_go_and_nothing_else_does(
    answer, store_options, few_baselines
):
    options = [*OFFLOADS, "--offload", "0.012", "--load", "0.013", *store_options]
    by_option = answer("optimize", *options)
    times = "-T F=0.0101,I=0.0103,W=0.0097,O=0.012,L=0.013 --comm 0.0007"
    times = shlex.split(f"{times} --memory-limit 2 --time-limit 1")
    by_times = answer("optimize", *ONE, *times, *store_options)
    assert by_times["makespan"] <= by_option["makespan"]  # the same problem: it is in the store
    assert by_times["offloaded"] > 0
    assert answer("optimize", *OFFLOADS, *store_options)["offloaded"] == 0


def test_stages_have_their_own_times_of_o_and_l(answer, store_options, tmp_path, few_baselines):
    """On the command line as in a file of costs: the second problem is in the store."""
    two = ["--schedule", "1f1b", "--workers", "2", "--microbatches", "4", "--memory-limit", "1"]
    path = tmp_path / "costs.json"
    path.write_text('{"unit": "seconds", "F": 1, "I": 1, "W": 1, "O": [2, 1], "L": [1, 3]}')
    options = [*two, "--stage-times", "F=1,I=1,W=1", "--offload", "2,1", *store_options]
    by_option = answer("optimize", *options, "--load", "1,3")
    by_file = answer("optimize", *two, "--costs", path, *store_options)
    assert (by_option["status"], by_file["source"]) == ("optimal", "store")
    assert by_file["makespan"] == by_option["makespan"]
    assert answer("optimize", *options, "--load", "3,1")["source"] != "store"


def test_a_schedule_that_offloads_is_no_start_where_nothing_may(
    answer, store_options, tmp_path, few_baselines
):
    table = build("ada-offload", 4, 8, memory_limit=2, offload=0.5)
    pj.write_table(table, tmp_path / "given.json")
    limits = shlex.split("--stage-times F=1,I=1,W=1 --memory-limit 4 --time-limit 0.1")
    result = answer("optimize", "--table", tmp_path / "given.json", *limits, *store_options)
    assert (result["offloaded"], result["baseline"]) == (0, {"1f1b": None})


def test_schedules_that_are_planned_for_a_limit_get_it(answer, store_options, few_baselines):
    limits = shlex.split("-T F=1,I=1,W=1 --memory-limit 2 --offload 1 --time-limit 0.1")
    result = answer("optimize", "-s", "ada-offload", *ONE[2:], *limits, *store_options)
    assert result["baseline"] == {"1f1b": 29.0}
    assert result["schedule"] == "ada-offload"


def test_a_limit_for_each_worker_sizes_and_the_share_of_w(answer, store_options, few_baselines):
    limits = "8,6,4,4 --activation-sizes 2,1,1,1 --weight-share 0.5 --time-limit 0.5"
    result = answer("optimize", *THREE[:-1], *shlex.split(limits), *store_options)
    assert result["memory_limit"] == [8.0, 6.0, 4.0, 4.0]
    assert all(np.array(result["peak_memory"]) <= result["memory_limit"])
    assert result["weight_share"] == 0.5


def test_a_limit_in_bytes(answer, store_options, few_baselines):
    limits = ["--memory-limit", "30GB", "--time-limit", 0.5]
    result = answer("optimize", *ONE, *MODEL, *limits, *store_options)
    plain = answer("evaluate", *ONE, *MODEL)
    assert result["memory_unit"] == "bytes"
    own_bytes = np.array(plain["memory_bytes"]) - plain["activation_memory"]["peak"]
    assert result["static_bytes"] == pytest.approx(own_bytes)
    assert np.add(result["memory_limit"], result["static_bytes"]) == pytest.approx([30e9] * 4)
    assert all(np.array(result["peak_memory"]) <= result["memory_limit"])
    assert result["makespan"] < plain["makespan"]
    assert result["rounding"] < 1e-3 * result["makespan"]


def test_an_effort_ends_the_search_in_place_of_a_time(answer, few_baselines):
    options = "optimize", *HARD, "--effort", 0.2, "--no-store"
    first, second = answer(*options), answer(*options)
    assert (first["best"], first["effort"]) == (second["best"], second["effort"])
    assert (first["stopped"], first["status"]) == ("effort", "feasible")


def test_the_span_as_objective(answer, store_options, few_baselines):
    options = "--stage-times F=1,I=1,W=1 --memory-limit 8 --minimize span --time-limit 2"
    result = answer("optimize", *ONE, *shlex.split(options), *store_options)
    assert (result["max_span"], result["lower_bound"], result["status"]) == (24.0, 24.0, "optimal")
    assert result["makespan"] >= 27.0


def test_a_time_limit_is_kept(answer, store_options, few_baselines):
    begun = time.monotonic()
    result = answer("optimize", *HARD, "--time-limit", 0.5, *store_options)
    assert result["status"] == "feasible"
    assert result["stopped"] == "time"
    assert result["seconds"] < 1.5
    assert time.monotonic() - begun < 6  # reading the options and evaluating the best included


def test_no_store(answer, call, tmp_path, monkeypatch, few_baselines):
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))
    assert answer("optimize", *THREE, "--no-store", "--time-limit", 0.1)["store"] is None
    assert not (tmp_path / "cache").exists()
    assert answer("optimize", *THREE, "--time-limit", 0.1)["store"] == str(tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.json")
    file.write_text("{")
    code, out, err = call("optimize", *THREE, "--time-limit", 0.1, "--json")
    assert (code, json.loads(out)["makespan"]) == (0, 310.0)
    assert re.fullmatch(r"warning: store: .*cache/.*\.json is not used: .*\n", err)


def test_what_rendezvous_costs_and_the_commands_that_follow(
    answer, call, tmp_path, monkeypatch, few_baselines
):
    """The table is found under delay links; on NCCL transfers wait for each other."""
    monkeypatch.chdir(Path(__file__).parents[1])
    options = ["--table", "examples/schedule.csv", "--costs", "examples/measured.json"]
    limits = ["--memory-limit", "12", "--time-limit", "0.3", "--no-store"]
    out = tmp_path / "best.csv"
    result = answer("optimize", *options, *limits, "--out", out)
    costs = "--costs examples/measured.json"
    assert result["next"] == [f"pipejax tune messages --table {out} {costs} --out ordered.csv"]
    run_there = answer("evaluate", "--table", out, *options[2:], "--link", "rendezvous")
    assert result["rendezvous_makespan"] == run_there["makespan"] > result["makespan"]
    line = shlex.split(result["next"][0])[1:]
    ordered = answer(*line[:-1], tmp_path / line[-1], "--iterations", 3)
    assert ordered["value"] < result["rendezvous_makespan"]
    code, shown, _ = call("optimize", *options, *limits)
    first, second = re.findall(r"^next: (.*)$", shown, re.M)
    assert code == 0
    assert "with transfers as on NCCL (--link rendezvous): " in shown
    assert shlex.split(first)[1] == "optimize"
    assert first.endswith("--out best.csv")
    assert second == f"pipejax tune messages --table best.csv {costs} --out ordered.csv"
    free = answer("optimize", *THREE, "--time-limit", "1", "--no-store")  # no message takes time
    assert {"next", "rendezvous_makespan"}.isdisjoint(free)
