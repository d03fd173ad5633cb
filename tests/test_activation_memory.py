"""Activation memory over time against a sweep in plain Python, and by hand."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import strategies
from daily import read_cases, with_cases
from hypothesis import given, settings, strategies as st
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.stage_work import stage_bytes, stage_work, static_parts
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.table.held_activations import held_counts, held_in_rows, static_bytes

THIRD = Fraction(1, 3)
SECONDS = {"forward": 1.0, "backward": 2.0, "input_grad": 1.0, "weight_grad": 1.0}
COSTS = pj.Costs(**SECONDS, recompute=1.0, offload=3.0, load=2.0)
ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
TIMES = ["--stage-times", "F=1,I=1,W=1"]
LLAMA = pj.load_model("llama3-70b")  # h 8192, 64 heads, 8 of keys and values, MLP 28672


def check_rows_against_time(table, costs, seed):
    """Compare peaks of rows with peaks in time: equal if every op takes time and none is offloaded."""
    rng = np.random.default_rng(seed)
    names = ("forward", "backward", "input_grad", "weight_grad", "recompute")
    timed = {name: 0.1 + rng.random(table.num_stages) for name in names}
    run = pj.evaluate(table, dataclasses.replace(costs, **timed, offload=0.0, load=0.0, pair=None))
    whole, inputs = 8.0 * rng.integers(1, 9, (2, table.num_stages))
    shares = rng.integers(0, 9, table.num_stages) / 8
    at_work = 8.0 * rng.integers(0, 9, (3, table.num_stages))
    how = {"sizes": whole, "weight_share": shares, "checkpoints": inputs, "at_work": at_work}
    memory = pj.analysis.activation_memory(run, **how)
    sizes = np.stack([whole, shares * whole, inputs, *at_work])
    # the rows and their counts are exact for whole numbers
    peaks = held_in_rows(table, at_work=True).peaks(sizes, table.num_workers)
    assert held_counts(table).activation_bytes(tuple(sizes)).tolist() == peaks.tolist()
    assert memory.peak.tolist() == peaks.tolist()


@pytest.mark.parametrize("name", pj.schedules.REGISTRY)
def test_rows_say_what_the_run_says(name):
    table = build(name, 4, 8)
    for seed in range(3):
        check_rows_against_time(table, pj.Costs(update=0.5), seed)


@settings(max_examples=60)
@given(case=strategies.cases(pairs=True, step_end=True), seed=st.integers(0, 99))
def test_random_rows_say_what_the_run_says(case, seed):
    check_rows_against_time(case.table, case.costs, seed)


def get_memory(row, costs, **options):
    run = pj.evaluate(pj.ScheduleTable.from_rows([row]), costs)
    return pj.analysis.activation_memory(run, **options)


def test_a_wait_bounds_the_memory_whatever_the_times_are():
    row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
    for offload in (0.0, 0.1, 100.0):
        costs = dataclasses.replace(COSTS, offload=offload)
        assert get_memory(row, costs).peak.tolist() == [1.0]


def test_thirds_add_up_to_whole_numbers():
    first = [f"0{phase}{m}" for m in range(30) for phase in "FI"]  # I before the next F
    costs = pj.Costs(forward=0.1, input_grad=0.7, weight_grad=0.3)
    memory = get_memory([*first, *(f"0W{m}" for m in range(30))], costs)
    thirds = 3 * memory.held
    np.testing.assert_allclose(thirds, np.round(thirds), atol=1e-9)
    assert memory.peak[0] == pytest.approx(1 + 29 * THIRD, abs=1e-9)
    assert memory.held[-1] == 0.0


def test_evaluate_prints_the_peak_and_when(answer, call):
    memory = answer("evaluate", *ONE, *TIMES)["activation_memory"]
    assert [memory[key] for key in ("unit", "weight_share")] == ["activations", 1 / 3]
    assert memory["peak"] == [4, 3, 2, 1]
    given_sizes = ["--weight-share", "1", "--activation-sizes", "2,1,1,1"]
    held = answer("evaluate", *ONE, *TIMES, *given_sizes)
    assert held["activation_memory"]["peak"][0] == 2 * held["peak_in_flight"][0]
    _, out, _ = call("evaluate", *ONE, *TIMES, "--details")
    assert f"4 at {memory['peak_at'][0]:g} s" in out


def test_a_model_gives_bytes(answer):
    model = ["-s", "1f1b", "-P", 4, "-M", 8, "-m", "gpt-22b", "-y", "a100", "--minibatch", 8]
    result = answer("evaluate", *model)["activation_memory"]
    assert result["unit"] == "bytes"
    table = build("1f1b", 4, 8)
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=8)
    memory = stage_bytes(workload, table)
    held = pj.memory_bytes(workload, table) - static_bytes(table, memory.static)
    np.testing.assert_allclose(result["peak"], held, rtol=1e-14)
    assert result["weight_share"] == memory.weight_share.tolist()


def test_show_draws_memory_and_host_links(answer, call, tmp_path):
    path = tmp_path / "offload.csv"
    row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
    pj.write_table(pj.ScheduleTable.from_rows([row]), path)
    arguments = ["show", "--table", path, "--stage-times", "F=1,B=2,O=3"]
    _, out, _ = call(*arguments, "--memory", "--width", "80")
    _, compute, host, memory, *legend = out.splitlines()
    assert "WAIT" not in out
    assert ["F0" in compute, "O0" in compute, "O0" in host, "L0" in host] == [1, 0, 1, 1]
    assert memory.split()[:2] == ["peak", "1"]
    assert ["█" in memory, "held" in " ".join(legend)] == [True, True]
    _, out, _ = call(*arguments, "--width", "80")
    *_, legend = out.splitlines()[:4]  # host line always, memory only where asked for
    assert legend.startswith("number: microbatch")
    rows = [["0F0", "0O0", "0WAIT_O0", "0L0", "0B0"], ["1F0", "1B0"]]
    lines = []
    for row in (rows[0], [cell for cell in rows[0] if "WAIT" not in cell]):
        other = tmp_path / "wait.csv"
        pj.write_table(pj.ScheduleTable.from_rows([row, rows[1]]), other)
        _, out, _ = call("show", "--table", other, "--stage-times", "F=1,B=2,O=0.2")
        lines.append(out.splitlines()[1])
    assert lines[0] == lines[1]  # a wait takes no time and no column
    picture = tmp_path / "offload.svg"
    answer(*arguments, "--memory", "--out", picture)
    text = picture.read_text()
    for word in ("offload", "load", "activations held, peak 1", "time [s]"):
        assert word in text
    assert "WAIT_O" not in text
    curves = answer(*arguments, "--memory")["activation_memory"]["curves"]
    assert curves == [{"time": [0.0, 4.0, 7.0, 12.0], "held": [1.0, 1.0, 1.0, 0.0]}]


# runs without a backward: weights, keys and values, activations of one layer
def prefill(workers, slices, requests=1):
    return build("chunked-prefill", workers, requests, slices=slices)


def caches(workload, table):
    """Keys and values (workers) at the end of the run [B]."""
    return pj.memory_bytes(workload, table) - sum(static_parts(workload, table).values())


def at_work(workload, table):
    return static_parts(workload, table)["activations"]


def test_a_prompt_in_chunks():
    table, workload = prefill(8, 8), pj.Workload(LLAMA, 1)
    # 10 layers a stage, 2 x 1024 units of keys and values, 8192 tokens, 2 bytes
    np.testing.assert_allclose(caches(workload, table), 10 * 2 * 1024 * 8192 * 2)
    # one layer of a chunk of 1024 tokens: 6 h + 2 x 1024 + 3 x 28672 units, two bytes each
    layer = 2 * 1024 * (6 * 8192 + 2048 + 3 * 28672)
    np.testing.assert_allclose(at_work(workload, table)[1:7], layer)
    # the logits of the last token in float32
    assert at_work(workload, table)[7] - layer == pytest.approx(4 * 128256)
    assert {*static_parts(workload, table)} == {"parameters", "activations"}
    # 10 layers of 855.6 million parameters, and an embedding or head of 128256 x 8192 at the ends
    needs = pj.memory_bytes(workload, table) / 1e9
    np.testing.assert_allclose(needs[[1, 0]], [17.11 + 0.34 + 0.28, 19.21 + 0.34 + 0.28], atol=0.01)


def test_requests_at_once_keep_their_keys_and_values():
    # 3 requests of 2 prompts each, all of whose tokens are held at the end
    table, workload = prefill(4, 4, requests=3), pj.Workload(LLAMA, 6)
    np.testing.assert_allclose(caches(workload, table), 20 * 2 * 1024 * 8192 * 2 * 6)
    layer = 2 * 2 * 2048 * (6 * 8192 + 2048 + 3 * 28672)
    assert at_work(workload, table)[1] == pytest.approx(layer)
    assert at_work(workload, table)[3] - layer == pytest.approx(2 * 4 * 128256)


@pytest.mark.parametrize(("tensor", "heads"), [(4, 2), (8, 1), (16, 1)])
def test_a_head_of_keys_and_values_is_on_one_accelerator(tensor, heads):
    # 8 heads of 128 units: beyond 8 accelerators each holds a whole one
    table, workload = prefill(8, 8), pj.Workload(LLAMA, 1, tensor_parallel=tensor)
    np.testing.assert_allclose(caches(workload, table), 10 * 2 * 128 * heads * 8192 * 2)


def test_latent_attention_keeps_its_vector():
    # 512 + 64 units of each token, whole on every accelerator; 61 layers on 1 worker
    model, table = pj.load_model("deepseek-v3"), prefill(1, 4)
    for tensor in (1, 8):
        workload = pj.Workload(model, 1, tensor_parallel=tensor)
        np.testing.assert_allclose(caches(workload, table), 61 * 576 * 4096 * 2)


def test_experts_at_work():
    # a token meets 2 experts of 14336: in and out 2 x 2 h, inside 2 x 3 x 14336
    model, table = pj.load_model("mixtral-8x7b"), prefill(4, 8)
    layer = 2 * 4096 * (6 * 4096 + 2048 + 2 * 2 * 4096 + 2 * 3 * 14336)
    assert at_work(pj.Workload(model, 1), table)[1] == pytest.approx(layer)
    cached = caches(pj.Workload(model, 1), table)
    np.testing.assert_allclose(cached, 8 * 2 * 1024 * model.sequence * 2)


def test_dropout_has_no_masks_and_scores_grow_with_the_chunk():
    # gpt-22b, 2 chunks of 1024 tokens: 8 h + 2 x 4 h units, and the second meets 1536 on the mean
    model, table = pj.load_model("gpt-22b"), prefill(4, 2)
    work = at_work(pj.Workload(model, 1), table)[1]
    units = 1024 * 16 * 6144
    assert work - 2 * units == pytest.approx(2 * 64 * 1024 * 3072)  # scores as they are counted


def test_a_table_of_ones_own_without_slices():
    grammar = Grammar(forward_only=True)
    rows = [["0F0", "0F1", "0F2", ""], ["", "1F0", "1F1", "1F2"]]
    table = pj.ScheduleTable.from_rows(rows, grammar=grammar)
    workload = pj.Workload(LLAMA, 6)  # 2 sequences a request, 40 layers a stage
    np.testing.assert_allclose(caches(workload, table), 40 * 2 * 1024 * 8192 * 2 * 6)
    memory = stage_bytes(workload, table)
    zeros = memory.gradients, memory.optimizer, memory.version, *memory.at_work
    assert not np.any(zeros)


def test_the_report_says_what_is_held(answer, call):
    run = ["evaluate", "-s", "chunked-prefill", "-P", 8, "-M", 1, "--slices", 8]
    run += ["-m", "llama3-70b", "-y", "h100", "--minibatch", 1]
    result = answer(*run)
    assert result["fits"]
    assert {*result["memory_parts"]} == {"parameters", "activations", "keys and values", "reserve"}
    _, text, _ = call(*run, "--details")
    assert "keys and values 0.336 GB" in " ".join(text.split())
    assert "peak keys and values" in " ".join(text.split())


def test_dropout_is_off_where_nothing_is_trained():
    model = dataclasses.replace(LLAMA, dropout=True)
    same = [at_work(pj.Workload(m, 1), prefill(8, 8)).tolist() for m in (model, LLAMA)]
    assert same[0] == same[1]


@with_cases("mtp_layers tensor fused", *read_cases("test_every_loss_of_mtp_keeps_its_logits"))
def test_every_loss_of_mtp_keeps_its_logits(mtp_layers, tensor, fused):
    model = dataclasses.replace(LLAMA, layers=4, sequence=4096, dropout=False, fused_loss=fused)
    further = dataclasses.replace(model, mtp_layers=mtp_layers)
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)

    def last_activations(model, layers):
        sizes = dataclasses.replace(model, layers=layers)
        workload = pj.Workload(sizes, 4, tensor_parallel=tensor, sequence_parallel=tensor > 1)
        return stage_bytes(workload, table).activations[-1]

    layer = (last_activations(model, 8) - last_activations(model, 4)) / 2
    # 4,096 tokens: input and output of the last norm, 16 bits a unit; logits of the loss; then the
    # embedding's norm keeps h and the product of embedding and state 2 h
    logit = 2 if fused else 4
    loss = 4096 * (2 * 2 * 8192 + logit * 128256) / tensor
    joined = 4096 * 3 * 2 * 8192 / tensor
    added = last_activations(further, 4) - last_activations(model, 4)
    assert added == pytest.approx(mtp_layers * (layer + loss + joined), rel=1e-12)


def test_w_of_mtp_needs_its_joint_input():
    model = dataclasses.replace(LLAMA, layers=4, sequence=4096)
    table = pj.schedules.build("zb-h1", num_workers=2, num_microbatches=4)
    plain, further = (
        stage_bytes(pj.Workload(dataclasses.replace(model, mtp_layers=count), 4), table)
        for count in (0, 1)
    )
    until_w = [memory.weight_share[-1] * memory.activations[-1] for memory in (plain, further)]
    layer = plain.weight_share[0] * plain.activations[0] / 2  # stage 0: two layers, no dropout
    # the head needs its input and the logits' gradient, the product of MTP 2 h
    assert until_w[1] - until_w[0] == pytest.approx(
        layer + 4096 * 2 * (3 * 8192 + 128256), rel=1e-12
    )


def test_full_recomputation_includes_mtp_layers():
    # as Megatron: an MTP layer keeps its embedding, and its forward is repeated; `block` keeps all
    model = dataclasses.replace(LLAMA, layers=4, sequence=4096)
    further = dataclasses.replace(model, mtp_layers=1)
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)

    def last_stage(model, recompute):
        workload = pj.Workload(model, 4, recompute=recompute)
        memory = stage_bytes(workload, table)
        work = stage_work(workload, table)
        return memory.activations[-1], sum(count[-1] for count in work.recomputed)

    loss, state = 4096 * (2 * 2 * 8192 + 4 * 128256), 4096 * 2 * 8192
    (size, count), (plain_size, plain_count) = (
        last_stage(sizes, "full") for sizes in (further, model)
    )
    assert (count, plain_count) == (3, 2)
    assert size - plain_size == pytest.approx(loss + state, rel=1e-12)
    assert last_stage(further, "block:1")[1] == 1
    assert last_stage(further, "none")[1] == 0
