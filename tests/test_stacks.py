"""Stacks: software apart from machines, at every door."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.base.progress import Notice
from pipejax.costs.layers.kernels import smooth_max
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.stack import stack_names
from pipejax.costs.system.system import CalibrationRecord, read_named
from pipejax.sweep import read_sweep

EVALUATE = ["evaluate", "-s", "1f1b", "--workers", "2", "--microbatches", "4", "--minibatch", "4"]
EVALUATE += ["--model", "gpt-22b", "--system", "h100", "--tensor-parallel", "8"]


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_says_its_source_and_goes_with_the_h100(name):
    stack = pj.load_stack(name)
    assert (stack.name, bool(stack.source)) == (name, True)
    h100 = pj.load_system("h100")
    result = stack.on(h100)
    assert result.kernels.elementwise == stack.elementwise >= 1
    if stack.attention:
        share = result.kernels.attention_efficiency * h100.compute_efficiency.shares[-1]
        kernel = stack.attention.replace("-", "_")
        assert share == pytest.approx(getattr(h100.attention_kernels, kernel))


def test_what_was_fitted_to_runs_of_a_stack_stays():
    h100, stack = pj.load_system("h100"), pj.load_stack("composer-2023")
    fitted = h100.with_number("kernels.attention_efficiency", 0.3)
    for name, share in ((stack.name, 0.3), ("torchtitan-2024", 0.17 / 0.7468)):
        record = CalibrationRecord("runs", 9, (), (), name)
        result = stack.on(dataclasses.replace(fitted, calibration=record))
        assert result.kernels.attention_efficiency == pytest.approx(share)


def test_a_file_of_ones_own_is_a_stack(tmp_path, answer):
    path = tmp_path / "mine.json"
    content = {"name": "mine", "source": "", "host": {"launch_us": 5}}
    content["workload"] = {"tensor_overlap": 1.0}
    path.write_text(json.dumps(content))
    assert pj.load_stack(path).on(pj.load_system("h100")).host.launch == 5e-6
    by_stack, by_option = ["--stack", path], ["--tensor-overlap", "1"]
    lines = by_stack, by_option, [*by_stack, "--tensor-overlap", "0"]
    times = [answer(*EVALUATE, *options)["step_time"] for options in lines]
    assert times[0] < min(times[1:])  # what an option says comes before the stack
    assert times[2] < times[1]  # a quicker host


def test_a_stack_says_precisions_and_what_the_host_has(tmp_path, call):
    path, terms = tmp_path / "mine.json", {"optimizer_offload": 0.5, "attention_precision": "fp8"}
    path.write_text(json.dumps({"name": "mine", "source": "", "workload": terms}))
    rows = tmp_path / "rows.csv"
    head = "model,data,zero,global_batch,stack,optimizer_offload,head_precision,seconds\n"
    rows.write_text(f"{head}llama3-8b,8,1,16,mine.json,,,1\nllama3-8b,8,1,16,mine.json,1,fp8,1\n")
    with pytest.warns():
        read = read_rows(rows)
    assert list(read.optimizer_offload) == [0.5, 1]
    assert list(read.attention_precision) == ["fp8", "fp8"]
    assert list(read.head_precision) == ["", "fp8"]
    seconds = pj.validate(read, "h100").predicted.seconds
    assert seconds[0] < seconds[1]  # more of the update on the host
    with pytest.raises(ValueError, match=r"rows.csv, row 1: a100: no peak .* 'fp8'"):
        pj.validate(read, "a100")
    on_b200 = ["b200" if option == "h100" else option for option in EVALUATE]
    code, _, message = call(*on_b200, "--stack", path)
    assert (code, "optimizer_offload must be 0 on b200" in message) == (2, True)


def test_a_row_takes_from_its_stack_what_it_does_not_say(tmp_path):
    head = "model,data,zero,global_batch,overlap,contiguous_context,stack,seconds\n"
    path = tmp_path / "rows.csv"
    rows = "llama3-8b,8,3,16,,,torchtitan-2024,1", "llama3-8b,8,3,16,0.5,0,torchtitan-2024,1"
    path.write_text(head + "\n".join(rows) + "\n")
    with pytest.warns():
        rows, composer = read_rows(path), read_rows(path, "composer-2023")
    assert (list(rows.overlap), list(rows.contiguous_context)) == ([1, 0.5], [True, False])
    assert (list(composer.overlap), set(composer.stack)) == ([0, 0.5], {"composer-2023"})
    stacks = None, "composer-2023"
    with pytest.warns():
        apart = [pj.validate(path, "h100", stack=s).predicted.seconds for s in stacks]
    assert (np.diff(apart, axis=0) > 0).all()  # a slower kernel of attention, and weights that wait
    with pytest.raises(ValueError, match="stack is for files"):
        pj.validate(rows, "h100", stack="composer-2023")


def test_stacks_are_listed(call):
    code, text, _ = call("schedules", "--stacks")
    assert (code, all(name in text for name in stack_names())) == (0, True)
    assert call("schedules", "--stacks", "--models")[0] == 2


@pytest.fixture
def calibrated(tmp_path):
    def write(**columns):
        content, _ = read_named("hardware", "h100", "system")
        record = {"source": "runs", "rows": 9, "parameters": {}, "bands": {}, **columns}
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({**content, "name": "mine", "calibration": record}))
        return path

    return write


@with_cases("settings_text overlap", *read_cases("test_a_calibrated_system_is_used_as_in_its_runs"))
def test_a_calibrated_system_is_used_as_in_its_runs(calibrated, call, settings_text, overlap):
    path = calibrated(**settings_text)

    def step(*more):
        words = [str(path) if word == "h100" else word for word in EVALUATE]
        code, out, err = call(*words, "--data-parallel", "4", "--zero", "1", *more, "--json")
        assert code == 0, err
        return json.loads(out)["step_time"], err

    seconds, message = step()
    assert ("used as in the runs that it was calibrated on" in message) == bool(settings_text)
    assert seconds == step("--overlap", str(overlap))[0]
    assert (seconds == step("--overlap", "0")[0]) == (not settings_text)
    with pytest.warns(Notice) if settings_text else contextlib.nullcontext():
        swept = read_sweep(GRID | {"systems": [str(path)]})
    ((software,),) = (axis.values for axis in swept.axes if axis.name == "stack")
    assert software.workload.get("overlap", 0.0) == overlap


def test_a_plan_uses_a_calibrated_system_as_in_its_runs(calibrated):
    path = calibrated(stack="megatron-core-2024", overlap=0.5)
    choices = {name: [1] for name in ("context", "expert", "microbatch_size", "zero")}
    choices |= {"tensor": [8], "pipeline": [2], "recompute": ["none"], "edge_units": [0]}
    options = {"choices": choices, "schedules": ["1f1b"]}
    with pytest.warns(Notice):
        result = pj.plan("gpt-22b", path, gpus=64, minibatch=16, **options)
    assert result.request.shared["overlap"] == 0.5


def test_rows_take_exchanges_as_every_command_does(tmp_path, answer):
    path = tmp_path / "rows.csv"
    path.write_text("model,tensor,data,pipeline,global_batch,zero,seconds\ngpt-22b,8,4,2,16,1,1\n")
    with pytest.warns(Notice):
        predicted = pj.validate(path, "h100").predicted.seconds[0]
    result = answer(*EVALUATE, "--data-parallel", 4, "--zero", 1, "--sequence-parallel")
    assert result["step_time"] == pytest.approx(predicted, rel=1e-12)


def test_a_sweep_refuses_systems_of_different_runs(calibrated):
    systems = {"systems": ["h100", str(calibrated(overlap=1))]}
    refused = pytest.raises(ValueError, match="h100 and mine have different software")
    with refused, pytest.warns(Notice):
        read_sweep(GRID | systems)
    read_sweep(GRID | systems | {"stack": ""})


GRID = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
GRID |= {"models": "gpt-22b", "systems": ["h100", "a100"]}
GRID |= {"tensor_parallel": 8, "data_parallel": 4, "zero": 3}


def test_a_sweep_is_known_by_what_its_stacks_say(tmp_path):
    with_numbers = read_sweep(GRID | {"stack": "torchtitan-2024"}).to_json()
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "torchtitan-2024", "source": ""}))
    assert read_sweep(GRID | {"stack": str(path)}).to_json() != with_numbers


def test_layers_that_stay_in_16_bits_cost_as_in_16_bits():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    model, gb300 = pj.load_model("llama3-8b"), pj.load_system("gb300")

    def forward(precision, **wide):
        workload = pj.Workload(model, 4, precision=precision, **wide)
        return np.asarray(pj.stage_costs(workload, gb300, table).forward)

    narrow, wide = forward("nvfp4"), forward("bf16")
    np.testing.assert_allclose(forward("nvfp4", wide_first=1, wide_last=31), wide, rtol=1e-12)
    last = forward("nvfp4", wide_last=8)  # of 8 layers on each of four stages
    np.testing.assert_allclose(last, [*narrow[:3], wide[3]], rtol=1e-12)


def test_launches_that_block_add_up_host_and_accelerator():
    a100 = pj.load_stack("megatron-deepspeed-2022").on(pj.load_system("a100"))
    assert float(smooth_max(3.0, 2.0, a100.kernels.sharpness)) == 5
