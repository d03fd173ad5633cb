"""Logs of trainers that say times and no layout: rows of them, with the columns they lack."""

import csv
import gzip
import itertools
import os
import re
import shutil

import pytest
from daily import read_cases, with_cases

from pipejax.base.progress import Notice
from pipejax.costs.measured.megatron_log import read_log as read_any_log
from pipejax.costs.measured.rows_file import read_rows

pytestmark = pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
COLUMNS = "tensor=2,pipeline=2,accelerators=8,microbatch_size=1,recompute=full"
BATCH = ",global_batch=16"
LOGS = read_cases("lines of logs")
TITAN, ENGINE, TIMER, NEMO, NANOTRON, MAXTEXT, FACE, BARE, *_ = (text for text, *_ in LOGS.values())
HALF = "0.5 samples/sec: 64"  # 32 sequences
IN_TOKENS = NANOTRON.replace("elapsed_time", "time").replace("1.02K", "4.19M")
STEPS = "completed step: {}, seconds: {}"  # one is cut after its step
OTHER_NUMBERS = {
    "exponents": (STEPS, ("4.5E+01", "1.2E+01", "1.2e+01"), BATCH, 16, 12.0),
    "a cut number": (STEPS, ("45", "8.0", ".", "8."), BATCH, 16, 8.0),
    "no time": (ENGINE, ("9 samples/sec: 3.55", "0 samples/sec: inf", HALF), "", 32, 0.5),
    # newer nanotron counts the batch in tokens
    "tokens": (IN_TOKENS, ("9.9K", "1.25K", "1.35K"), ",global_batch=512", 512, 1.3),
}


def written(path, name):
    text, numbers, *_ = LOGS[name]
    lines = [text.format(k, number) for k, number in enumerate(numbers, 1)]
    path.write_text("\n".join(["a line of something else", *lines, ""]))
    return path


@pytest.mark.parametrize("name", LOGS)
def test_a_log_and_columns_give_rows(name, tmp_path, answer):
    _, _, more, batch, seconds = LOGS[name]
    path, out = written(tmp_path / "train.log", name), tmp_path / "rows.csv"
    columns = COLUMNS.replace("tensor=2,pipeline=2", "tensor=2,data=2,pipeline=2") + more
    options = "--model", "llama3-8b", "--columns", columns, "--out", out
    answer("init", "rows", "--from", path, *options)
    rows = read_rows(out)
    assert (rows.seconds[0], rows.global_batch[0]) == (pytest.approx(seconds), batch)
    assert (rows.tensor[0], rows.data[0], rows.recompute[0]) == (2, 2, "full")
    assert rows.source[0] == f"train.log, iterations timed by {name}"


@with_cases("name today older", *read_cases("test_lines_of_older_years_are_read"))
def test_lines_of_older_years_are_read(name, today, older, tmp_path, answer):
    path, out = written(tmp_path / "train.log", name), tmp_path / "rows.csv"
    path.write_text(path.read_text().replace(today, older).replace("global_batch_size: 512", ""))
    options = "--model", "llama3-8b", "--columns", COLUMNS + BATCH, "--out", out
    answer("init", "rows", "--from", path, *options)
    assert read_rows(out).seconds[0] == LOGS[name][4]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_without_columns_says_what_it_lacks(name, tmp_path, mistake):
    path = written(tmp_path / "train.log", name)
    text = mistake("init", "rows", "--from", path, "--model", "llama3-8b", "--force")
    missing = ["tensor", "pipeline", "accelerators", "microbatch_size", "recompute"]
    missing += ["global_batch"] if LOGS[name][2] else []
    assert f"does not have {', '.join(missing)}: give --columns tensor=..,pipeline=.." in text
    assert ("give the log from its start" in text) is False
    assert (f"this log of {name}" in text) is (name != "Megatron")
    assert f"log of {name}" in mistake("init", "model", "--from", path, "--force")


def test_what_a_log_says_on_other_lines_is_read(tmp_path, answer, mistake):
    path, out = written(tmp_path / "train.log", "torchtitan"), tmp_path / "rows.csv"
    start = START.format(16, 4096).replace("with", "with local batch size 2,")
    path.write_text(start + path.read_text())
    options = "init", "rows", "--from", path, "--model", "llama3-8b", "--out", out, "--columns"
    built = answer(*options, COLUMNS, "--system", "h100")
    assert "memory is not read" in built["notes"][0]
    assert built["used_by"] == f"pipejax validate {out}"  # the rows say the machine
    assert "h10" in mistake(*options, COLUMNS, "--system", "h10", "--force")
    assert "give one" in mistake(*options, f"{COLUMNS},system=a100", "--system", "h100", "--force")
    rows = read_rows(out)  # 16 x 4096 tokens over 8 accelerators at 2048 a second
    assert (rows.seconds[0], rows.global_batch[0]) == (4.0, 16)
    assert rows.models[0].sequence == 4096
    text = mistake(*options, f"{COLUMNS},global_batch=8", "--force")
    assert "the log has global_batch itself: leave it out of --columns" in text


MORE = {  # further columns of a run, and options that say them
    "torchtitan": ("", ""),
    "DeepSpeed": (",stack=megatron-core-2026", "--stack megatron-core-2026"),
    "MaxText": (",schedule=gpipe,zero=1,context=2", "--context-parallel 2"),
    "NeMo": (",stages_per_worker=2,schedule=interleaved-1f1b,expert=1", "--stages-per-worker 2"),
}


@pytest.mark.parametrize("name", MORE)
def test_a_log_leads_to_an_explanation_of_its_run(name, tmp_path, answer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "train.log", name)
    cells, option = MORE[name]
    columns = f"{COLUMNS}{cells}{LOGS[name][2]}".replace("elerators=8", "elerators=32")
    options = "--model", "llama3-8b", "--columns", columns
    silent = answer("init", "rows", "--from", "train.log", *options)
    assert "next" not in silent  # the log does not say the machine
    assert silent["used_by"] == "pipejax validate rows.csv --system SYSTEM"
    options = *options, "--system", "h100", "--force"
    validate, explain, *more = answer("init", "rows", "--from", "train.log", *options)["next"]
    assert option in explain
    if name in ("torchtitan", "MaxText"):  # whose defaults are not those that a row assumes
        assert more == [f"{explain} --launcher {name}"]
        rows = answer(*more[0].split()[1:])["remedies"]
        assert all(name in row["launch"] for row in rows if row["shelf"] == "options")
    result = answer(*validate.split()[1:], "--tolerance", "1e6")
    assert result["next"] == [explain, *more]
    predicted = result["worst"][0]["predicted"]
    command, *words = explain.split()[1:]
    assert command == "explain"  # `evaluate` takes the same options, in less time
    assert answer("evaluate", *words)["makespan"] == pytest.approx(predicted, rel=1e-9)


def test_a_log_as_an_argument_is_told_its_command(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "train.log", "Megatron")
    shutil.copy("train.log", "train.txt")
    options = ["--table", "train.log"], ["-s", "1f1b", "--costs", "train.log"]
    lines = [["explain", *words] for words in (["train.log"], *options, ["train.txt"])]
    for words in (*lines, ["train.log"], ["show", "train.log"], ["validate", "train.log"]):
        code, _, error = call(*words)
        assert code == 2
        assert f"hint: give a training log to pipejax init model --from {words[-1]}" in error


def test_settings_that_maxtext_prints_are_columns(tmp_path, answer):
    lines = [MAXTEXT.format(step, seconds) for step, seconds in enumerate(("45.1", "8.0", "8.0"))]
    settings = CONFIG.replace("Config", "I0317 09:59:16.2 125 pyconfig.py:413] Config")
    text = settings.format(32, 4096) + "\n".join(lines)
    row = read_log(tmp_path / "a.log", text, COLUMNS, answer)
    assert row[:2] == (8.0, 32)
    assert read_rows(tmp_path / "a.csv").models[0].sequence == 4096


def test_other_texts_are_refused_with_what_is_read(tmp_path, mistake):
    path = tmp_path / "train.log"
    path.write_text("\nEpoch 1: loss 3.2, 12 it/s\n")
    line = "init", "rows", "--from", path, "--model", "llama3-8b"
    text = mistake(*line)
    assert "it must be a log of Megatron, torchtitan, DeepSpeed's pipeline engine, " in text
    assert "got 'Epoch 1: loss 3.2, 12 it/s'" in text
    path.write_bytes(gzip.compress(path.read_bytes())[:20])
    assert "it cannot be unpacked" in mistake(*line)


def test_columns_that_cannot_be_are_named(tmp_path, mistake):
    path = written(tmp_path / "train.log", "NeMo")
    options = "init", "rows", "--from", path, "--model", "llama3-8b", "--columns"
    assert "--columns must be as tensor=2,pipeline=4, got 'tensor'" in mistake(*options, "tensor")
    assert "--columns must be one of model, layers" in mistake(*options, "tensors=2")
    assert "--columns must be as" in mistake(*options, "tensor=2,tensor=4")
    assert "accelerators must be a whole number" in mistake(*options, COLUMNS.replace("=8", "=x"))


def read_log(path, text, columns, answer, encoding="utf-8"):
    """Return the only row of a log, and the notes on it."""
    path.write_text(text, encoding=encoding)
    out = path.with_suffix(".csv")
    options = "--model", "llama3-8b", "--columns", columns, "--out", out
    built = answer("init", "rows", "--from", path, *options)
    (row,) = csv.DictReader(out.read_text().splitlines())
    count = int(row.get("n", 1))
    return float(row["seconds"]), int(row["global_batch"]), count, " ".join(built["notes"])


def titan(step, tokens):
    return TITAN.format(step, f"{tokens:,}")


def validation(step):
    return titan(step, 9000).replace("step:", "validate step:")


WITH_FIRST = {1: 120, 10: 2048, 20: 2048}


# steps of 16 x 8192 / (2048 x 8) = 8 s; a first step of 120 tokens/s is 136.5 s
@with_cases(
    "lines count",
    ([titan(s, WITH_FIRST[s]) for s in (1, 10, 20) for _ in range(4)], 2),
    ([titan(s, WITH_FIRST[s]) for _ in range(4) for s in (1, 10, 20)], 8),
    ([titan(s, 120 if s in (1, 11) else 2048) for s in (1, 10, 20, 11, 20, 30)], 4),
    ([line for s in (1, 10, 20) for line in (titan(s, WITH_FIRST[s]), validation(s))], 2),
    ids=["ranks in turn", "rank by rank", "a restart", "validation between"],
)
def test_only_steady_training_steps_count(lines, count, tmp_path, answer):
    row = read_log(tmp_path / "train.log", "\n".join(lines), COLUMNS + BATCH, answer)
    assert row[:3] == (8.0, 16, count)


@pytest.mark.parametrize("cut", [1, 3], ids=["first", "last"])
def test_a_line_that_was_cut_is_left_out(cut, tmp_path, answer):
    lines = [NEMO.format(step, 99.0 if step == 1 else 12.5) for step in (1, 2, 3)]
    lines[cut - 1] = lines[cut - 1].replace("global_batch_size: 512 | ", "")
    seconds, batch, _, notes = read_log(tmp_path / "a.log", "\n".join(lines), COLUMNS, answer)
    assert (seconds, batch) == (12.5, 512)
    assert "lines with fewer numbers than the others are left out: 1" in notes


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
@pytest.mark.parametrize("name", [name for name in LOGS if name != "Hugging Face's Trainer"])
@pytest.mark.parametrize("digits", [1, 2])
def test_a_last_line_that_ends_inside_a_number_is_left_out(digits, name, tmp_path, answer):
    form, numbers, more, *_ = LOGS[name]
    lines = [form.format(k, number) for k, number in enumerate([*numbers, numbers[-1]], 1)]
    last = form.format(9, numbers[-1])
    last = last[: last.rindex(numbers[-1]) + digits]
    columns = COLUMNS + more
    whole = read_log(tmp_path / "a.log", "\n".join(lines), columns, answer)
    cut = read_log(tmp_path / "b.log", "\n".join([*lines, last]), columns, answer)
    assert cut[:3] == whole[:3]
    with pytest.warns(Notice, match="its last line is cut and left out"):
        read_any_log(tmp_path / "b.log")


def test_a_whole_last_line_needs_no_line_end(tmp_path, answer):
    lines = [NEMO.format(step, seconds) for step, seconds in ((9, 99.0), (10, 12.5), (11, 12))]
    assert read_log(tmp_path / "a.log", "\n".join(lines), COLUMNS, answer)[:3] == (12.25, 512, 2)


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
@pytest.mark.parametrize("context", ["", "context-parallel size: 2, "])
def test_a_megatron_log_without_arguments_says_its_layout(context, tmp_path, answer):
    layout = "tensor-model-parallel size: 2, pipeline-model-parallel size: 4"
    start = f"using world size: 32, data-parallel size: 4, {context}{layout}"
    lines = [start, *(BARE.format(step, "4000.0") for step in range(3))]
    read_log(tmp_path / "a.log", "\n".join(lines), "microbatch_size=1,recompute=none", answer)
    rows = read_rows(tmp_path / "a.csv")
    assert (rows.accelerators[0], rows.tensor[0], rows.pipeline[0]) == (32, 2, 4)
    assert rows.context[0] == (2 if context else 1)


def titan_lines(seconds):
    return [titan(s, f) for s, f in enumerate([120, *(2048 * 8 // value for value in seconds)], 1)]


@with_cases(
    "seconds note",
    ([8] * 30, ""),
    ([8] * 20 + [16] * 10, "the last 10 of 30 steps take 2 times as long as those before"),
    ([16] * 5 + [8] * 20, "the last 20 of 25 steps take 0.5 times as long as those before"),
    ([8] * 12 + [32] + [8] * 12, "1 of 25 steps take up to 32 s, the median is 8 s"),
    ([8] * 12 + [32] + [8] * 5 + [64] + [8] * 6, "2 of 25 steps take up to 64 s"),
    ([0.5] * 2 + [8] * 4, "2 of 6 steps take down to 0.5 s, the median is 8 s"),
    ([4] * 2 + [8] * 2, "4 of 4 steps take down to 4 s, the median is 6 s"),
    ([4] * 3 + [8] * 3, "6 of 6 steps take down to 4 s, the median is 6 s"),
    ([4, 8, 4, 8, 4, 8, 4, 8], "8 of 8 steps take down to 4 s, the median is 6 s"),
)
def test_a_mean_that_hides_slow_steps_says_so(seconds, note, tmp_path, answer):
    lines = "\n".join(titan_lines(seconds))
    mean, _, _, notes = read_log(tmp_path / "a.log", lines, COLUMNS + BATCH, answer)
    assert mean == pytest.approx(sum(seconds) / len(seconds), rel=1e-5)
    assert note in notes
    assert note or "mean of all" not in notes


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_numbers_in_other_forms_are_read(name, tmp_path, answer):
    form, numbers, more, batch, seconds = OTHER_NUMBERS[name]
    lines = "\n".join(form.format(step, number) for step, number in enumerate(numbers, 1))
    assert read_log(tmp_path / "a.log", lines, COLUMNS + more, answer)[:2] == (seconds, batch)


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="pipes have no path here")
def test_a_pipe_is_read_once(tmp_path):
    # more than one reader looks at a log, and a pipe is empty for the second one
    for seconds in (8.0, 9.0):  # two pipes may have the same path
        reading, writing = os.pipe()
        os.write(writing, STEPS.format(1, seconds).encode())
        os.close(writing)
        log = read_any_log(f"/dev/fd/{reading}")
        assert log.iterations[0]["seconds"] == seconds
        os.close(reading)


CONFIG = "Config param global_batch_size_to_train_on: {}\nConfig param max_target_length: {}\n"
START = "Training starts at step 1, with global batch size {}, sequence length {}, total steps 10\n"


@with_cases("form start first second why", *read_cases("test_runs_of_several_sizes_are_refused"))
def test_runs_of_several_sizes_are_refused(form, start, first, second, why, tmp_path, mistake):
    lines = "\n".join(form.format(step, "2048") for step in range(1, 4)) + "\n"
    path = tmp_path / "a.log"
    path.write_text(start.format(*first) + lines + start.format(*second) + lines)
    options = "--model", "llama3-8b", "--columns", COLUMNS, "--out", tmp_path / "a.csv"
    text = mistake("init", "rows", "--from", path, *options)
    assert "it holds 2 runs, such as" in text
    assert why in text


@pytest.mark.parametrize("batch", ["1,024", "1024", "1_024"])
def test_sizes_on_other_lines_are_read_as_numbers(batch, tmp_path, answer):
    text = START.format(batch, "8,192") + "\n".join(titan_lines([8] * 3))
    if "_" in batch:
        with pytest.raises(AssertionError, match="has '1_024': numbers are read as"):
            read_log(tmp_path / "a.log", text, COLUMNS, answer)
    else:  # 1024 x 8192 / (2048 x 8)
        assert read_log(tmp_path / "a.log", text, COLUMNS, answer)[:2] == (512.0, 1024)


@pytest.mark.parametrize("is_said", [True, False])
def test_a_sequence_length_of_the_model_is_said(is_said, tmp_path, answer):
    text = is_said * "sequence length 4096\n" + "\n".join(titan_lines([8] * 3))
    seconds, _, _, notes = read_log(tmp_path / "a.log", text, COLUMNS + BATCH, answer)
    assert seconds == (4.0 if is_said else 8.0)
    assert ("the log has no sequence length: rows have 8192" in notes) is not is_said


@pytest.mark.parametrize("sizes", [(32, 64), (32, 32, 64), (64, 32, 32, 32, 32), (16, 21)])
def test_steps_of_several_batches_are_no_batch_of_their_median(sizes, tmp_path, answer):
    lines = [ENGINE.format(k, f"0.5 samples/sec: {2 * size}") for k, size in enumerate(sizes)]
    why = f"steps have {min(sizes)} to {max(sizes)} sequences"
    with pytest.raises(AssertionError, match=why):
        read_log(tmp_path / "a.log", "\n".join(lines), COLUMNS, answer)


OF_STEPS = ["seconds=1", "n=5", "spread=0.1", "source=ours"]
SAYS_BATCH = ["Megatron", "NeMo", "DeepSpeed's pipeline engine"]


@with_cases(
    "name column",
    *itertools.product(["torchtitan", "NeMo", "Megatron"], OF_STEPS),
    *itertools.product(SAYS_BATCH, [BATCH[1:]]),
)
def test_columns_of_the_steps_are_not_for_the_user(column, name, tmp_path, mistake):
    path = written(tmp_path / "train.log", name)
    columns = COLUMNS + (BATCH if LOGS[name][2] else "")
    options = "--model", "llama3-8b", "--out", tmp_path / "rows.csv", "--columns"
    text = mistake("init", "rows", "--from", path, *options, f"{columns},{column}")
    assert f"the log has {column.partition('=')[0]} itself: leave it out of --columns" in text


@pytest.mark.parametrize("number", ["nan", "NaN", "NAN", "inf", "Inf", "INF"])
def test_lines_without_a_finite_time_are_counted(number, tmp_path, answer):
    numbers = "9000.0", "4000.0", number, "4000.0"
    text = "\n".join(BARE.format(step, n) for step, n in enumerate(numbers, 1))
    seconds, _, count, notes = read_log(tmp_path / "a.log", text, COLUMNS, answer)
    assert (seconds, count) == (4.0, 2)
    assert "1 lines without a time are left out" in notes


TOTAL = "Total optimization steps = 1,000\n"
METRICS = "{{'train_runtime': {}80000.0{}, 'train_steps_per_second': {}0.013{}}}"


@pytest.mark.parametrize("quote", ["", "'"])
@with_cases("start seconds is_rounded", *read_cases("test_step_times_of_a_whole_run_are_exact"))
def test_step_times_of_a_whole_run_are_exact(start, seconds, is_rounded, quote, tmp_path, answer):
    block = "***** train metrics *****\n  train_steps_per_second   =      0.013\n"
    text = start + METRICS.format(*4 * (quote,)) + "\n" + block
    row = read_log(tmp_path / "a.log", text, COLUMNS + BATCH, answer)
    assert row[0] == seconds
    assert ("seconds may be off by 3.8 %" in row[3]) is is_rounded  # 0.0005 / 0.013


@pytest.mark.parametrize("start", ["", f"  {TOTAL}"])
@pytest.mark.parametrize("second", [60000.0, 90000.0, 80000.5])
def test_a_log_of_two_trainings_is_refused(start, second, tmp_path, answer):
    first = METRICS.format(*4 * ("",))
    other = first.replace("80000.0", str(second))
    slow, fast = sorted((80000.0, second))
    why = f"it holds 2 runs, such as {slow:g} s and {fast:g} s\n *hint: give the log of one run"
    with pytest.raises(AssertionError, match=why):
        read_log(tmp_path / "a.log", f"{start}{first}\n{start}{other}\n", COLUMNS + BATCH, answer)
    # each rank may print the line of one training
    text = f"{start}{first}\n{first}\n"
    assert read_log(tmp_path / "b.log", text, COLUMNS + BATCH, answer)[0] in (80.0, 76.9231)


@with_cases("line", "train_steps_per_second   =       0.25", '"train_steps_per_second": 0.25,')
def test_final_metrics_are_read_as_printed_and_as_saved(line, tmp_path, answer):
    assert read_log(tmp_path / "a.log", line, COLUMNS + BATCH, answer)[0] == 4.0


@pytest.mark.parametrize(("size", "batch"), [(1, 1020), (8, 1024), (32, 1024)])
def test_a_rounded_batch_holds_whole_microbatches(size, batch, tmp_path, answer):
    # 1.02K stands for 1015 to 1025; two replicas take 2, 16 or 64 sequences at once
    lines = "\n".join(NANOTRON.format(step, "1.25K") for step in (1, 2, 3))
    columns = COLUMNS.replace("microbatch_size=1", f"microbatch_size={size}")
    assert read_log(tmp_path / "a.log", lines, columns, answer)[:2] == (1.25, batch)


@with_cases("text memory", *read_cases("memory in logs"))
def test_memory_of_a_bare_log_is_that_of_the_fullest_rank(text, memory, tmp_path, answer):
    lines = [BARE.format(step, "4000.0") for step in (1, 2, 3)]
    lines.insert(1, f"[Rank 0] (after 2 iterations) memory ({text}")
    lines.insert(2, "[Rank 1] memory (MB) | max allocated: 9")
    read_log(tmp_path / "a.log", "\n".join(lines), COLUMNS, answer)
    assert read_rows(tmp_path / "a.csv").memory_bytes[0] == memory


def test_a_log_in_utf_16_is_read(tmp_path, answer):
    lines = "\n".join(BARE.format(step, "4000.0") for step in (1, 2, 3))
    assert read_log(tmp_path / "a.log", lines, COLUMNS, answer, "utf-16")[:2] == (4.0, 64)


@with_cases("name number", *read_cases("numbers of other languages"))
def test_numbers_of_other_languages_are_refused(name, number, tmp_path, mistake):
    text, _, more, *_ = LOGS[name]
    path = tmp_path / "train.log"
    path.write_text("\n".join(text.format(step, number) for step in (1, 2, 3)))
    options = "--model", "llama3-8b", "--columns", COLUMNS + more, "--out", tmp_path / "rows.csv"
    message = mistake("init", "rows", "--from", path, *options)
    assert f"a line of {name} has {number!r}: numbers are read as 1234.5" in message


PRINTED = "[2024-05-01 10:00:00,000] [INFO] [config.py:1003:print]   train_batch_size ..... {}\n"
BAR = "Epoch 0, global_step={0}.000, consumed_samples={2}.0, train_step_timing in s={1}"
COUNTS = BARE.partition(" global")[0].replace(": 64", ": {2}")
LATER_STEPS = ("9.0", "4.0", "4.0")
# logs whose lines of iterations lack the batch, and a line that says it, if counts do not
BATCHES = {
    "a total": (FACE, ("0.25",), "  Total train batch size (w. parallel) = {}\n", 64, 4.0),
    "a printed configuration": (TIMER, ("1.0", "64.0"), PRINTED, 64, 1.0),  # 64 / 64
    "JSON": (TIMER, ("1.0", "64.0"), '    "train_batch_size": {}, \n', 64, 1.0),
    "consumed samples": (COUNTS, LATER_STEPS, "", 32, 0.004),
    "a bar of NeMo 1": (BAR, LATER_STEPS, "", 32, 4.0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_on_other_lines_is_read_and_not_contradicted(name, tmp_path, answer):
    form, numbers, start, batch, seconds = BATCHES[name]
    lines = [form.format(k, number, 32 * k) for k, number in enumerate(numbers, 1)]
    text = start.format(batch) + "\n".join([*lines, ""])
    for columns in (COLUMNS, f"{COLUMNS},global_batch={batch}"):
        row = read_log(tmp_path / f"{len(columns)}.log", text, columns, answer)
        assert row[:2] == (seconds, batch)
    with pytest.raises(AssertionError, match=f"the log has global_batch itself: .*\\({batch}\\)"):
        read_log(tmp_path / "b.log", text, COLUMNS + BATCH, answer)


@pytest.mark.parametrize(
    "counts", [(0, 8, 32, 72), ("1.02e+5", "1.03e+5", "1.03e+5", "1.04e+5")], ids=["grow", "round"]
)
def test_uneven_counts_of_sequences_give_no_batch(counts, tmp_path, answer):
    lines = "\n".join(BAR.replace(".0,", ",").format(k, "4.0", n) for k, n in enumerate(counts))
    assert read_log(tmp_path / "a.log", lines, COLUMNS + BATCH, answer)[:3] == (4.0, 16, 3)
    with pytest.raises(AssertionError, match="does not have global_batch"):
        read_log(tmp_path / "b.log", lines, COLUMNS, answer)


@pytest.mark.parametrize("sequences", [32, 1, 15])
def test_tokens_of_a_step_are_those_that_the_log_counts(sequences, tmp_path, answer):
    form = "step={0},tgs (tokens/gpu/second)=2048.0,num_consumed_tokens={1}"
    lines = "\n".join(form.format(k, 16 * 8192 * k) for k in (3, 4, 6))
    assert read_log(tmp_path / "a.log", lines, COLUMNS + BATCH, answer)[:2] == (8.0, 16)
    with pytest.raises(AssertionError, match=rf"131,072 tokens a step: .*{sequences} x 8192"):
        read_log(tmp_path / "b.log", lines, f"{COLUMNS},global_batch={sequences}", answer)


# 1.02K stands for 1,015 to 1,025
@pytest.mark.parametrize(("batch", "is_read"), [(1024, True), (1016, True), (1040, False)])
def test_the_exact_size_of_a_rounded_batch_may_be_said(batch, is_read, tmp_path, answer):
    form, numbers, *_ = LOGS["nanotron"]
    lines = "\n".join(form.format(k, number) for k, number in enumerate(numbers, 1))
    columns = f"{COLUMNS},global_batch={batch}"
    if is_read:
        assert read_log(tmp_path / "a.log", lines, columns, answer)[:2] == (1.3, batch)
        assert "3 digits" in read_log(tmp_path / "b.log", lines, COLUMNS, answer)[3]
    else:
        with pytest.raises(AssertionError, match=r"the log has global_batch itself: .*\(1020\)"):
            read_log(tmp_path / "a.log", lines, columns, answer)


@with_cases("trainer start more values", *read_cases("test_settings_that_a_log_prints_are_columns"))
def test_settings_that_a_log_prints_are_columns(trainer, start, more, values, tmp_path, answer):
    path, out = written(tmp_path / "train.log", trainer), tmp_path / "rows.csv"
    path.write_text(start + path.read_text())
    options = "--model", "llama3-8b", "--columns", COLUMNS + more + LOGS[trainer][2]
    answer("init", "rows", "--from", path, *options, "--out", out)
    with out.open() as file:
        (row,) = csv.DictReader(file)
    defaults = {"optimizer_offload": 0, "zero": 0}
    assert {key: row.get(key, str(defaults.get(key))) for key in values} == {
        key: str(value) for key, value in values.items()
    }


@with_cases(
    "name start more why", *read_cases("test_columns_against_settings_of_the_log_are_refused")
)
def test_columns_against_settings_of_the_log_are_refused(name, start, more, why, tmp_path, mistake):
    path = written(tmp_path / "train.log", name)
    path.write_text(start + path.read_text())
    columns = COLUMNS + more + LOGS[name][2]
    options = "--model", "llama3-8b", "--columns", columns, "--force"
    assert why in mistake("init", "rows", "--from", path, *options)


@with_cases("name start note", *read_cases("test_what_no_row_holds_is_said"))
def test_what_no_row_holds_is_said(name, start, note, tmp_path, answer):
    path, out = written(tmp_path / "train.log", name), tmp_path / "rows.csv"
    path.write_text(start + path.read_text())
    more = ",zero=1" if "SDP" in start else ""
    columns = COLUMNS + LOGS[name][2] + more
    if "device = 1" in start:
        columns = columns.replace("microbatch_size=1,", "")
    options = "--model", "llama3-8b", "--columns", columns, "--out", out
    notes = "\n".join(answer("init", "rows", "--from", path, *options).get("notes", ()))
    unexpected = "accumulation steps|log counts|not read: (?!it is)"
    assert note in notes if note else not re.search(unexpected, notes)
