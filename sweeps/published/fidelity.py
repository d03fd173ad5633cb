"""Errors of predictions on all measured tables: a page, a dataset for its figure, an exit code.

    python -m sweeps.published.fidelity --out results/fidelity.zarr --page docs/accuracy.md

Predictions are those of a machine's file as it comes, of calibrations that left rows out, and of
times that a publication profiled. Ends with exit code 1 where an error is beyond its limit.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.analysis import (
    DEFAULT_STACK,
    EVIDENCE,
    Runs,
    as_numbers,
    as_runs,
    error_range,
    group_errors,
    judge,
    measured_tables,
    prediction_errors,
)
from pipejax.files import DATA, MeasuredRows, check_writable, joined, provenance, write_file
from pipejax.results import PredictionErrors, Validation
from pipejax.typing import Float, NumpyArray
from sweeps.kit import command
from sweeps.published import llama3_accuracy, zero_bubble_accuracy
from sweeps.published.accuracy import BIAS, EACH, MEAN, MEDIAN, Accuracy, report
from sweeps.published.page import Section, page, with_summary
from sweeps.published.step_line import median_times, on_one_line, step_line

FIGURE = "accuracy.png"  # beside the page
UNSEEN = "Unseen runs by class"
SUMMARIES = (Path("README.md"), Path("docs/limits.md"))  # pages with a summary of that section
FITTED = ("a100-vtrain", "b200-simumax")  # machines whose numbers come from the same runs


class Limit(NamedTuple):
    """Limit of errors.

    Attributes:
      percent: at most.
      of: of their mean or median, of each, or of their bias.
    """

    percent: float
    measure: str = MEAN


# step times by the machine's own file; what is not named here is reported without a limit
OUT_OF_BOX: Mapping[str, tuple[Limit, ...]] = {
    "korthikanti_a100": (Limit(2.5),),
    "llm_foundry_a100_40gb": (Limit(9.0),),
    "llm_foundry_h100": (Limit(9.0),),
    "megatron_2021_a100": (Limit(4.0),),
    "mlperf_h100": (Limit(3.0), Limit(15.0, EACH)),
    "simumax_b200": (Limit(5.5),),
    "torchtitan_h100": (Limit(9.0),),
}
MEMORY: Mapping[str, tuple[Limit, ...]] = {"simumax_b200": (Limit(5.0),)}
# kinds of models in one source, judged together: what their names contain, and what is allowed
KINDS: Mapping[str, tuple[tuple[str, ...], Limit | None]] = {
    "dense": (("llama",), Limit(9.0)),
    "experts": (("qwen", "deepseek"), Limit(15.0)),
    "gpt-oss": (("oss",), None),
}
BRIDGE = "megatron_bridge"
# classes of unseen runs, and the mean error that is allowed of each
GPT_OSS, NEMO_2025, EXPERTS = "gpt-oss", "DeepSeek-V3 in NeMo of mid-2025", "models with experts"
BLACKWELL, FSDP = "dense models on Blackwell", "FSDP on A100, H100"
CLUSTERS, HOPPER = "A100 clusters, links described", "dense pipelines on H100"
CLASSES: Mapping[str, Limit | None] = {
    HOPPER: Limit(5.0),
    FSDP: Limit(8.0),
    CLUSTERS: Limit(12.0),
    BLACKWELL: Limit(7.0),
    EXPERTS: Limit(18.0),
    GPT_OSS: None,
    NEMO_2025: None,
}
# calibrated on five rows of a source, judged by its other rows
FIVE: Mapping[str, Limit] = {
    "llm_foundry_a100_40gb": Limit(4.5),
    "llm_foundry_h100": Limit(4.5),
    "torchtitan_h100": Limit(6.0),
    "mlperf_h100": Limit(3.0),
    "megatron_bridge_b200": Limit(10.0),
    "megatron_bridge_b300": Limit(10.0),
    "megatron_bridge_h100": Limit(10.0),
}
DRAWS, KEPT = 10, 5
# of machines whose runs have attention written out in products, and kernels fused alike
NUMBERS = (
    *("compute.efficiency", "compute.latency", "memory.efficiency", "memory.latency"),
    *("kernels.misaligned_efficiency", "kernels.sharpness", "optimizer.efficiency"),
    *("host.launch", "host.collective", "host.microbatch", "host.step"),
    *("collectives.latency", "network.efficiency", "network.latency"),
)
Seconds = Float[NumpyArray, " rows"]
NANOTRON = "nanotron_h100"
FAULT, SLOW_LINKS = "before the mend of pipelines", "slow links"  # what `release` says of its rows
PLAYBOOK = {True: Limit(15.0, MEDIAN), False: Limit(25.0, MEDIAN)}  # above 10 % of the peak, below
SIMULATORS: Mapping[str, tuple[str, str]] = {  # whose predictions, of which table
    "simumax_b200": ("SimuMax", "simumax_b200"),
    "calculon_korthikanti_a100": ("Calculon", "korthikanti_a100"),
}


class Fit(NamedTuple):
    """A calibration that leaves rows out and predicts them.

    Attributes:
      what: is fitted, and left out.
      tables: whose rows.
      hold_out: as `pj.calibrate` reads it; empty where the fit itself is judged.
      limits: of the errors.
      layer_times: columns whose combinations have a layer time of their own, or none.
    """

    what: str
    tables: tuple[str, ...]
    hold_out: str
    limits: tuple[Limit, ...]
    layer_times: str | None = None


SINGLE, MULTI = "vtrain_single", "vtrain_multi"
FITS = (
    Fit("one node, (h, t, b) left out", (SINGLE,), "group:h,t,b", (Limit(7.0), Limit(2.0, BIAS))),
    Fit("many nodes, model size left out", (MULTI,), "group:h", (Limit(7.5),)),
    Fit("many nodes, 175B left out", (MULTI,), "hidden=12288", (Limit(3.0),)),
    Fit("many nodes, from 8 rows", (MULTI,), "few:8", (Limit(9.0),)),
    Fit("both together, (h, t, b) left out", (SINGLE, MULTI), "group:h,t,b", (Limit(7.0),)),
    Fit("both together, 175B left out", (SINGLE, MULTI), "hidden=12288", (Limit(3.0),)),
    Fit("one node, a time per layer shape", (SINGLE,), "", (Limit(1.0),), "h,t,b"),
)


def read(*tables: str) -> MeasuredRows:
    """Read rows of the tables that come with pipejax."""
    return joined([pj.files.read_rows(DATA / "measured" / f"{name}.csv") for name in tables])


def judged(group: str, runs: str, errors: PredictionErrors, *limits: Limit) -> list[Accuracy]:
    """One row per limit, or one without."""
    return [Accuracy(group, runs, errors, *limit) for limit in limits or ((None, MEAN),)]


def time_errors(validation: Validation) -> PredictionErrors:
    """Errors of the step times, which every table has."""
    if validation.time is None:
        raise ValueError(f"{validation.measured.file[0]}: no step time was measured")
    return validation.time


def out_of_box(validations: Sequence[Validation], *reasons: str) -> Section:
    """Step times by the machines' own files."""
    rows = []
    for validation in validations:
        name = Path(validation.measured.file[0]).stem
        machines = ", ".join(dict.fromkeys(validation.measured.system.tolist()))
        if name in (SINGLE, MULTI):
            machines += ", fitted to these rows"
        if name == "simumax_b200":
            machines += ", a profile of these runs"
        once = validation.by_configuration
        rows += judged(name, machines, time_errors(once), *table_limits(OUT_OF_BOX, name))
    text = (
        "pipejax predicts the step times of every table of measured runs. The system file of "
        "the machine and the software stack come with pipejax. Each configuration of a run "
        "counts as one row. The numbers of the A100's kernels and of the host are fitted to "
        "the runs of vTrain. All other rates come from data sheets and published measurements "
        "of kernels. Some tables have no limit."
    )
    return Section("Out of the box", text, tuple(rows), reasons)


def table_limits(limits: Mapping[str, tuple[Limit, ...]], name: str) -> tuple[Limit, ...]:
    """The limits of a table, if it has any."""
    return limits.get(name, ())


def bridge(validations: Sequence[Validation]) -> Section:
    """Megatron-Bridge's tables by kind of model, on all machines together."""
    rows = []
    bridge_tables = [
        validation
        for validation in validations
        if Path(validation.measured.file[0]).stem.startswith(BRIDGE)
    ]
    for kind, (names, limit) in KINDS.items():
        parts = []
        for validation in bridge_tables:
            models = validation.measured.column("model")
            parts.append(validation.take(np.array([any(n in m for n in names) for m in models])))
        machines = [part for part in parts if len(part.measured)]
        together = np.concatenate([part.by_configuration.errors for part in machines])
        limits = () if limit is None else (limit,)
        errors = prediction_errors(1 + together, np.ones(len(together)))
        rows += judged(kind, "all machines, by configuration", errors, *limits)
        for part in machines:
            name = part.measured.system[0]
            rows += judged(kind, name, time_errors(part.by_configuration))
    text = (
        "Each configuration counts as one row, with the mean over software releases. The "
        "options follow the recipes of each release, and no number is fitted to these runs. "
        "Step times of one layout differ by up to a factor of two between releases of a "
        "framework."
    )
    return Section("Megatron-Bridge, by kind of model", text, tuple(rows))


def nanotron() -> Section:
    """The playbook's runs: network-bound ones apart, and what ran out of memory."""
    validation = pj.validate(DATA / "measured" / f"{NANOTRON}.csv")
    measured = validation.measured
    is_faulty = np.char.startswith(measured.release.astype(str), FAULT)
    ran = validation.take(~measured.out_of_memory & ~is_faulty)
    slow = validation.take(~measured.out_of_memory & is_faulty)
    flop = np.array([6 * _parameters(model) for model in measured.models])[ran.measured.model]
    tokens = ran.measured.global_batch * ran.measured.column("sequence")
    mfu = flop * tokens / (ran.measured.seconds * ran.measured.accelerators * 989e12)
    unseen = ran.predicted._replace(seconds=sizes_left_out(ran.measured))
    rows = []
    for what, part in (("", ran), (", size left out", Validation(ran.measured, unseen))):
        for is_above, name in ((True, "above 10 % of the peak"), (False, "below")):
            errors = time_errors(part.take((mfu > 0.1) == is_above))
            rows += judged(NANOTRON, name + what, errors, PLAYBOOK[is_above])
    rows += judged(NANOTRON, "pipelines that a fault slowed, mended since", time_errors(slow))
    text = (
        "pipejax predicts runs of nanotron on 8 to 512 H100. The bandwidth between nodes is "
        "the one that each job measured. Within a node, it is 425 or 458 GB/s, which other "
        "jobs measured. Pipelines that a fault of the framework slowed are counted separately. "
        "In rows with `size left out`, the machine is fitted to runs of other model sizes with "
        "the same bandwidth."
    )
    return Section(
        "The Hugging Face playbook's runs", text, tuple(rows), (out_of_memory(validation),)
    )


def sizes_left_out(rows: MeasuredRows) -> Seconds:
    """Step times by numbers fitted to rows of other models, jobs with slow links apart [s]."""
    seconds = np.empty(len(rows))
    are_slow = np.char.endswith(rows.release.astype(str), SLOW_LINKS)
    for kind in (are_slow, ~are_slow):
        machine = pj.load_system(rows.system[0])
        calibration = pj.calibrate(rows.take(kind), machine, fit=["all"], hold_out="model")
        seconds[kind] = calibration.predicted_unseen
    return seconds


def out_of_memory(validation: Validation) -> str:
    """Say how well runs that ended for lack of memory are told from those that did not.

    Tensors are not all: an allocator keeps more than it gives. How much more is the median of what
    it had reserved over what was predicted, in runs of other models that fitted.
    """
    rows, memory = validation.measured, validation.predicted.memory_bytes
    reserved = rows.memory_bytes / memory
    factor = np.array([np.nanmedian(reserved[rows.model != k]) for k in range(len(rows.models))])
    available = float(pj.load_system(rows.system[0]).memory_available)
    with_factor = validation.predicted._replace(
        fits=1.0 * (factor[rows.model] * memory <= available)
    )
    shares = []
    for case in (validation, Validation(rows, with_factor)):
        verdicts = case.out_of_memory
        assert verdicts is not None
        shares += [f"{verdicts.recall:.1f}", f"{verdicts.precision:.1f} %"]
    return (
        f"Of {int(rows.out_of_memory.sum()):,} runs that ended for lack of memory, pipejax "
        f"predicts {shares[0]} %. Of the runs that it predicts to lack memory, {shares[1]} did. "
        f"With the allocator's reserve ({factor.min():.2f} to {factor.max():.2f} times the "
        f"tensors, from runs of other model sizes), these shares are {shares[2]} and {shares[3]} "
        "(we aim at 90 % for each)."
    )


def _parameters(model: pj.Model) -> float:
    layers = model.layers * model.layer_parameters
    return float(layers + model.hidden * model.vocabulary)


def memory(validations: Sequence[Validation]) -> Section:
    """Memory of the fullest worker, where it was measured."""
    rows = []
    for validation in validations:
        name, errors = Path(validation.measured.file[0]).stem, validation.memory
        if errors is not None:
            rows += judged(name, "all", errors, *table_limits(MEMORY, name))
    text = (
        "The measured memory is the allocated memory of the fullest accelerator. For "
        "torchtitan, it is the allocator's reserve, which is larger."
    )
    return Section("Memory", text, tuple(rows))


class Fitted(NamedTuple):
    """Result of a calibration.

    Attributes:
      errors: of what it left out, or of all rows where it left nothing out.
      coverage: share of the rows left out that lie in a 90 % band from the others [%].
    """

    errors: PredictionErrors
    coverage: float | None


def fitted(fit: Fit) -> Fitted:
    """Calibrate the A100."""
    calibration = pj.calibrate(
        read(*fit.tables),
        pj.load_system("a100"),
        hold_out=fit.hold_out or None,
        layer_times=fit.layer_times,
        fit=NUMBERS,  # the A100's own numbers are of the same runs: these start from all machines'
        general=True,
    )
    return Fitted(calibration.held_out or calibration.fit, calibration.coverage.get(90))


def calibrated(fits: Sequence[Fitted]) -> Section:
    """Step times by calibrations, of rows that each left out."""
    rows, reasons = [], []
    for fit, (errors, coverage) in zip(FITS, fits, strict=True):
        runs = " + ".join(fit.tables)
        rows += judged(runs, fit.what, errors, *fit.limits)
        if coverage is not None:
            share = f"{coverage:.1f} % of the rows (aim: 85 to 95)"
            reasons.append(f"{runs}, {fit.what}: the 90 % band contains {share}.")
    text = (
        "`pipejax calibrate` fits the machine to some rows of a table and predicts the rows "
        "left out. These are the rows of one hidden size, tensor parallelism and microbatch "
        "size (h, t, b); the rows of one model size; or all but eight rows. The last line fits "
        "all rows, with a factor for the layer time of each shape."
    )
    return Section("Calibrated, on rows that were left out", text, tuple(rows), tuple(reasons))


def from_five(name: str) -> list[Accuracy]:
    """Fit five random rows of a table, several times; errors of the others, and of these as is."""
    rows = read(name)
    rows = rows.take(rows.stack == max(set(rows.stack), key=list(rows.stack).count))
    machine, random = pj.load_system(rows.system[0]), np.random.default_rng(0)
    fitted, as_is = [], []
    for _ in range(DRAWS):
        order = random.permutation(len(rows))
        others = rows.take(np.sort(order[KEPT:]))
        system = pj.calibrate(rows.take(order[:KEPT]), machine).system
        fitted.append(pj.validate(others, system).errors)
        as_is.append(pj.validate(others, machine).errors)
    results = []
    for what, errors in (("as is", as_is), (f"{KEPT} rows, {DRAWS} draws", fitted)):
        all_errors = np.concatenate(errors)
        limits = () if what == "as is" else (FIVE[name],)
        results += judged(
            name, what, prediction_errors(1 + all_errors, np.ones(len(all_errors))), *limits
        )
    return results


def five(tables: Sequence[list[Accuracy]]) -> Section:
    """Report the gain of five rows of a user's runs."""
    text = (
        "`pipejax calibrate` fits the machine to five random rows of a table with the same "
        "stack, and predicts the other rows. Lines with `as is` show the errors on the same "
        "rows without this fit."
    )
    return Section("From five rows", text, tuple(row for table in tables for row in table))


def rankings(validations: Sequence[Validation]) -> str:
    """Say how well layouts of one job are ranked, table by table."""
    sentences = []
    for validation in validations:
        ranking = validation.ranking
        if ranking is not None:
            name = Path(validation.measured.file[0]).stem
            sentences.append(
                f"{name} {ranking.jobs} jobs, tau {ranking.kendall:.2f}, regret "
                f"{ranking.regret:.2f} % (at most {ranking.worst_regret:.1f})"
            )
    return f"Layouts of one job, ranked by predicted step time: {'; '.join(sentences)}."


CROSS = (("GPT-3 to Llama-3.1 405B", "gpt3-175b"), ("Llama-3.1 405B to GPT-3", "llama3-405b"))


def mlperf() -> Section:
    """MLPerf runs: on a line in the microbatches, and from one model to the other."""
    rows, reasons = [], []
    runs = read("mlperf_h100")
    for line_rows in on_one_line(runs):
        counts, medians = median_times(line_rows.microbatches, line_rows.seconds)
        between = slice(1, -1)
        line = step_line(line_rows.microbatches, line_rows.seconds)
        errors = prediction_errors(line.at(counts)[between], medians[between])
        rows += judged(line_rows.group[0], "line through two M", errors, Limit(1.0, EACH))
    for what, fitted in CROSS:
        is_fitted = runs.column("model") == fitted
        machine = pj.load_system("h100")
        calibration = pj.calibrate(runs.take(is_fitted), machine, fit=NUMBERS, general=True)
        system = calibration.system
        others = pj.validate(runs.take(~is_fitted), system)
        rows += judged("mlperf_h100", what, time_errors(others), Limit(8.0, EACH))
        reasons.append(f"{what}, by microbatches M: {by_microbatches(others)}.")
    text = (
        "In the first two rows, a straight line goes through the median step times at the "
        "smallest and the largest number of microbatches M. It predicts the median at every "
        "other M. In the last two rows, the machine is fitted to runs of one model, and runs "
        "of the other model are predicted."
    )
    return Section("MLPerf on H100", text, tuple(rows), tuple(reasons))


def by_microbatches(validation: Validation) -> str:
    """List the median errors at each number of microbatches."""
    counts, medians = median_times(validation.measured.microbatches, 100 * validation.errors)
    return ", ".join(f"{error:+.1f} % at {m}" for m, error in zip(counts, medians, strict=True))


MEGATRON = "megatron_2021_a100"


def megatron() -> str:
    """Say what microbatch sizes and stages per worker change, which the table leaves open."""
    rows = read(MEGATRON)
    alone, deep = rows.take(rows.pipeline == 1), rows.take(rows.pipeline > 1)

    def bias(part: MeasuredRows, **columns: Any) -> str:
        changed: dict[str, Any] = {k: np.full(len(part), v) for k, v in columns.items()}
        errors = time_errors(pj.validate(part.with_columns(**changed)))
        return f"{errors.bias:+.1f} %"

    sizes = ", ".join(f"{bias(alone, microbatch_size=b)} at b = {b}" for b in (1, 4, 8))
    return (
        f"{MEGATRON}: the source states neither the microbatch size b nor the stages per worker. "
        f"The bias on runs without a pipeline is {sizes}. The bias on runs with a pipeline is "
        f"{bias(deep)} with the assumed stages per worker, and "
        f"{bias(deep, stages_per_worker=1, schedule='1f1b')} with one stage per worker."
    )


def zero_bubble() -> Section:
    """Zero-bubble schedules from the paper's profiled times."""
    rows = read("zero_bubble_a100")
    text = (
        "The predictions of step times and memory (Table 4 of the paper) start from its "
        f"profile of F, I, W and messages. {zero_bubble_accuracy.reason(rows)}"
    )
    return Section(
        "Zero bubble, from profiled times", text, tuple(zero_bubble_accuracy.accuracies(rows))
    )


def llama3() -> Section:
    """Share of the peak of Llama-3 405B, in percentage points."""
    rows, reason = llama3_accuracy.accuracies(pj.load_system("h100"))
    text = (
        "The Llama 3 report (Table 4) states the MFU of three runs. Predictions use the "
        "numbers of the H100's data sheet, without calibration; errors are in percentage points."
    )
    return Section("Llama-3 405B on 8,192 and 16,384 H100", text, tuple(rows), (reason,))


def simulators(validations: Sequence[Validation]) -> Section:
    """Other simulators, and pipejax on the same rows."""
    rows = []
    for file, (name, table) in SIMULATORS.items():
        validation = next(
            candidate for candidate in validations if Path(candidate.measured.file[0]).stem == table
        )
        theirs, ours = judge(validation, DATA / "predictions" / f"{file}.csv")
        rows += judged(table, "pipejax", time_errors(ours), Limit(time_errors(theirs).mape))
        rows += judged(table, name, time_errors(theirs))
    text = (
        "The authors of other simulators published these predictions; pipejax predicts the "
        "same rows. Its limit is the mean error of the other simulator."
    )
    return Section("Beside other simulators", text, tuple(rows))


def dataset(validations: Sequence[Validation]) -> xr.Dataset:
    """All rows, measured and predicted by the machines' own files."""
    rows = joined([validation.measured for validation in validations])
    predicted = np.concatenate([validation.predicted.seconds for validation in validations])
    return xr.Dataset(
        {
            "measured": ("row", rows.seconds, {"units": "s"}),
            "predicted": ("row", predicted, {"units": "s"}),
        },
        coords={
            "table": ("row", [Path(file).stem for file in rows.file]),
            "group": ("row", rows.group),
            "number": ("row", rows.row),
        },
        attrs={"title": "Measured and predicted step times", **provenance()},
    )


def predicted(paths: Sequence[Path]) -> list[Validation]:
    """Predict some tables at once, and split them again."""
    whole = pj.validate(paths)
    files = whole.measured.file
    return [whole.take(files == file) for file in dict.fromkeys(files.tolist())]


def by_machine() -> list[list[Path]]:
    """Group the tables by their machine: rows of one machine share compilations."""
    groups: dict[str, list[Path]] = {}
    for path in measured_tables():
        groups.setdefault(pj.files.read_rows(path).system[0], []).append(path)
    return list(groups.values())


def run() -> tuple[list[Validation], list[Section], list[dict[str, Any]]]:
    """Predict everything, in as many processes as there are cores.

    Returns tables in the order of their names, the sections of the page, and the evidence.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        fits = [pool.submit(fitted, fit) for fit in FITS]
        tables = [pool.submit(predicted, paths) for paths in by_machine()]
        others = [pool.submit(make) for make in (mlperf, zero_bubble, llama3, nanotron)]
        left_open = pool.submit(megatron)
        fives = [pool.submit(from_five, name) for name in FIVE]
        jobs: list[Future[Any]] = [*fits, *tables, *others, *fives, left_open]
        console = Console(stderr=True)
        for job in track(as_completed(jobs), "predicting", total=len(jobs), console=console):
            job.result()
    validations = [validation for job in tables for validation in job.result()]
    validations.sort(key=lambda validation: str(validation.measured.file[0]))
    mlperf_section, zero_bubble_section, llama3_section, nanotron_section = (
        job.result() for job in others
    )
    unseen = predicted(measured_tables(unseen=True))
    records = evidence_of_tables([*validations, *unseen])
    sections = [
        out_of_box(validations, left_open.result(), rankings(validations)),
        by_class(unseen),
        sources_left_out(unseen, as_runs(records)),
        bridge(validations),
        nanotron_section,
        five([job.result() for job in fives]),
        calibrated([job.result() for job in fits]),
        mlperf_section,
        memory(validations),
        zero_bubble_section,
        llama3_section,
        simulators(validations),
    ]
    return validations, sections, records


def evidence_of_tables(tables: Sequence[Validation]) -> list[dict[str, Any]]:
    """Return the errors of tables in the form of `EVIDENCE`.

    Args:
      tables: tables with their predictions; runs to which their machine was fitted are skipped.

    Returns:
      For each source (the first word of the column), machine and stack the errors [%] of each
      regime, as in the file of a calibrated system; where memory was measured, its errors too.

    Example:
      >>> runs = pj.validate(pj.files.DATA / "measured" / "megatron_bridge_b300.csv")
      >>> [row[:3] for row in evidence_of_tables([runs])[0]["errors"]]
      [[0, 1, 8], [0, 1, 16], [0, 2, 16]]
    """
    measured = joined([table.measured for table in tables])
    error = np.concatenate([table.errors for table in tables])
    needs = [table.predicted.memory_bytes / table.measured.memory_bytes - 1 for table in tables]
    memory = np.concatenate(needs)
    stacks = np.where(measured.stack == "", DEFAULT_STACK, measured.stack)
    sources = np.array([text.replace(",", " ").split()[0] for text in measured.source])
    keys = np.array([sources, measured.system, stacks]).T
    records = []
    for source, system, stack in sorted(set(map(tuple, keys.tolist()))):
        if system in FITTED:
            continue
        is_group = (keys == [source, system, stack]).all(axis=1)
        per_node = float(pj.load_system(system).gpus_per_node)
        record: dict[str, Any] = {"source": source, "system": system, "stack": stack}
        for name, values in {"errors": error, "memory": memory}.items():
            by_regime = group_errors(measured.take(is_group), values[is_group], per_node)
            if by_regime or name == "errors":
                record[name] = [*map(list, as_numbers(by_regime))]
        records.append(record)
    return records


def coverage(judged_runs: Sequence[Runs], runs: Sequence[Runs]) -> dict[str, list[bool]]:
    """Say of each judged run, by its source, if the range from all other sources holds it."""
    inside: dict[str, list[bool]] = {}
    for group in judged_runs:
        others = [other for other in runs if other.source != group.source]
        ends = error_range(group.regime, group.system, others)
        if ends is not None:
            are_inside = [ends.low <= 1 / (1 + error / 100) <= ends.high for error in group.errors]
            inside.setdefault(group.source, []).extend(are_inside)
    return inside


def classes(rows: MeasuredRows) -> NumpyArray:
    """Name the class of each unseen row: the first that holds."""
    names = np.char.lower(rows.group.astype(str))
    files = np.array([Path(file).stem for file in rows.file])
    is_hopper = np.char.startswith(rows.system.astype(str), "h")
    is_ampere = np.char.startswith(rows.system.astype(str), "a")
    masks = {
        GPT_OSS: np.char.find(names, GPT_OSS) >= 0,
        NEMO_2025: (files == "dgxc_moe") & (np.char.find(names, "deepseek") >= 0),
        EXPERTS: rows.column("experts") > 0,
        BLACKWELL: ~is_hopper & ~is_ampere,
        FSDP: rows.zero == 3,
        CLUSTERS: is_ampere,
    }
    return np.select([*masks.values()], [*masks], HOPPER)


def by_class(unseen: Sequence[Validation]) -> Section:
    """Errors of unseen runs by class: what the front page says."""
    tables = [validation.by_configuration for validation in unseen]
    names = np.concatenate([classes(table.measured) for table in tables])
    errors = np.concatenate([table.errors for table in tables])
    is_measured = np.isfinite(errors)  # the others ran out of memory
    rows = []
    for name, limit in CLASSES.items():
        selected = errors[is_measured & (names == name)]
        errors_of_class = prediction_errors(1 + selected, np.ones(len(selected)))
        rows += judged(name, "by configuration", errors_of_class, *([limit] if limit else []))
    text = (
        "No number was fitted to these runs, but we knew their errors when we chose the terms "
        "of the cost model. Each configuration counts once, with the software stack of its "
        "framework."
    )
    return Section(UNSEEN, text, tuple(rows))


def sources_left_out(unseen: Sequence[Validation], runs: Sequence[Runs]) -> Section:
    """Tables that were not seen, and the ranges of step times on sources that were left out."""
    rows = []
    for validation in unseen:
        name = Path(validation.measured.file[0]).stem
        machines = ", ".join(dict.fromkeys(validation.measured.system.tolist()))
        rows += judged(name, machines, time_errors(validation.by_configuration))
    reasons = []
    for what, judged_runs in (
        ("of unseen tables", as_runs(evidence_of_tables(unseen))),
        ("of all tables", runs),
    ):
        inside = coverage(judged_runs, runs)
        are_inside = np.concatenate([*inside.values()])
        by_source = ", ".join(f"{name} {sum(x)} of {len(x)}" for name, x in inside.items())
        reasons.append(
            f"The 90 % range contains the measured step time of {100 * are_inside.mean():.1f} % of "
            f"{len(are_inside)} configurations {what} (aim: 85 to 95 %; mean of the sources' "
            f"shares: {100 * np.mean([np.mean(x) for x in inside.values()]):.1f} %): {by_source}."
        )
    text = (
        "No number was fitted to these tables. `evaluate` and `plan` give a 90 % range of each "
        "step time. It follows from the errors on all tables to which the machine was not "
        "fitted. To judge the range, each source of runs is left out in turn."
    )
    return Section("Sources that were left out", text, tuple(rows), tuple(reasons))


def main() -> None:
    """Write the page and the dataset, and print what the page says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="Zarr store to write")
    parser.add_argument("--page", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    command.check(options.out, parser)
    try:
        check_writable(options.page)
    except OSError as error:
        parser.error(f"--page {options.page}: {error.strerror}")
    validations, sections, records = run()
    lines = ",\n ".join(map(json.dumps, records))
    write_file(EVIDENCE, f"[\n {lines}\n]\n")
    command.save(dataset(validations), options.out)
    write_file(options.page, page(sections, FIGURE))
    summary = next(section for section in sections if section.title == UNSEEN)
    for path in SUMMARIES:
        write_file(path, with_summary(path.read_text("utf-8"), summary))
    rows = [row for section in sections for row in section.accuracies]
    report(f"Accuracy: {options.page}", rows, [r for section in sections for r in section.reasons])


if __name__ == "__main__":
    main()
