"""Sections of a system file beyond the data sheet."""

import dataclasses
import json

import jax
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.base.progress import Notice
from pipejax.costs.system.parts import FIELDS, SECTIONS, Collectives, Kernels
from pipejax.costs.system.system import data_file, roofline_time, system_names

A100 = json.loads(data_file("hardware", "a100", "system").read_text())
EFFICIENCIES = {
    f"{name}_efficiency": value
    for name, value in {"attention": 0.7, "misaligned": 0.3, "narrow": 0.9}.items()
}
FITTED = {"source": "somewhere", "rows": 720}
LAUNCH = {"value": 50, "unit": "us", "standard_error": 2, "identified": True}
ALL = read_cases("ALL of test_system_sections")


def read(tmp_path, **sections):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(A100 | sections))
    return pj.load_system(path)


def test_sections_are_read_in_si_units(tmp_path):
    compute = A100["compute"] | {"fp8_peak_PFLOP_per_s": 2}
    system = read(tmp_path, compute=compute, memory=A100["memory"] | {"reserve_GB": 2}, **ALL)
    assert (system.kernels.priced, system.kernels.sharpness) == (1, 8)
    assert {name: getattr(system.kernels, name) for name in EFFICIENCIES} == EFFICIENCIES
    host = {"launch": 5e-5, "layer": 2e-6, "collective": 6e-5, "microbatch": 3e-4, "step": 1e-3}
    host["memory_bandwidth"] = 76.8e9
    assert {name: getattr(system.host, name) for name in host} == pytest.approx(host)
    assert system.optimizer_efficiency == 0.9
    assert (system.host_link.bandwidth, system.host_link.latency) == pytest.approx((25e9, 1e-5))
    assert system.price == pytest.approx(1e-3)
    assert system.memory_reserve == 2e9
    assert system.peak("FP8") == 2e15
    assert system.peak("bf16") == system.peak("fp16") == system.peak_flops
    band, parameter = system.calibration.bands[0], system.calibration.parameters[0]
    assert (band.percent, band.low, band.high, system.calibration.rows) == (90, 0.9, 1.2, 720)
    assert (parameter.name, parameter.value, parameter.unit) == ("host.launch", 50, "us")


@with_cases("section key value", *read_cases("numbers far above all machines"))
def test_a_number_that_no_machine_is_near_to_is_said(section, key, value, tmp_path):
    changes = {section: A100[section] | {key: value}}
    name = f"{section}.{key.split('_')[0]}"
    with pytest.warns(Notice, match=rf"mine.json: {name} is \d+ times the largest"):
        read(tmp_path, **changes)
    read(tmp_path, node=A100["node"] | {"latency_us": 0})  # a latency may be left out
    assert read(tmp_path).memory_bandwidth > 0  # and of a usual one nothing: warnings are errors


@with_cases("section key value", *read_cases("numbers far below all machines"))
def test_a_number_far_below_all_machines_is_said_once(section, key, value, tmp_path, call):
    content = A100 | {section: A100[section] | {key: value}}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    line = ("-s", "1f1b", "-P", 2, "-M", 4, "-m", "llama3-8b", "--minibatch", 4)
    _, _, errors = call("evaluate", *line, "-y", tmp_path / "mine.json")
    assert errors.count(f"{section}.{key.split('_')[0]} is ") == 1
    assert "times below the smallest of all systems" in errors


def test_a_file_without_them_has_whole_layers_and_a_free_host():
    system = pj.load_system("fast_nw_fast_cp")
    assert system.kernels.priced == 0
    assert not any(dataclasses.astuple(system.host))
    assert (system.optimizer_efficiency, system.price, system.memory_reserve) == (1, 0, 0)
    assert system.host_link.bandwidth == 0
    assert system.calibration is None


def test_systems_of_all_files_have_the_same_numbers():
    """Whatever sections their files have: so that they stack, once their flags are numbers."""
    plain = [
        dataclasses.replace(pj.load_system(name), name="", source="", calibration=None)
        for name in system_names()
    ]
    flags = {"collectives": Collectives(), "kernels": Kernels()}
    names = {jax.tree.structure(dataclasses.replace(system, **CURVES, **flags)) for system in plain}
    assert len({str(name).replace("gpus_per_node=4", "gpus_per_node=8") for name in names}) == 1


FLAT = pj.load_system("fast_nw_fast_cp").compute_efficiency
CURVES = {"compute_efficiency": FLAT, "memory_efficiency": FLAT, "gpus_per_node": 8}


def test_every_quantity_has_its_place_in_a_system():
    """But for those that are no cost of a run: accelerators in a node, reserve, price."""
    named = {f"{part}.{name}" for part, names in SECTIONS.items() for name in names}
    assert set(FIELDS) <= named
    system = pj.load_system("a100")
    for path in FIELDS.values():
        value = system
        for part in path:
            value = getattr(value, part)


def test_a_precision_without_a_peak_is_named():
    system = pj.load_system("a100")
    with pytest.raises(ValueError, match="a100: no peak is known for precision 'fp8'"):
        roofline_time(system, 1e12, 1e9, "fp8")
