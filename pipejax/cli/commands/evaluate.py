"""`pipejax evaluate`: one schedule, one set of costs."""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.analysis.step.outputs import OUTPUTS, run_outputs
from pipejax.base.progress import Notice
from pipejax.base.ties import TIE
from pipejax.cli.options import line
from pipejax.cli.options.memory import HeldMemory
from pipejax.cli.options.option import options, parse_seconds
from pipejax.cli.options.scenario import build, command_line, named_launch, required
from pipejax.cli.options.tables import SizedRunOptions
from pipejax.cli.output import plans, runs
from pipejax.cli.output.files import JSON, NO_OUTPUT, Output
from pipejax.cli.output.numbers import digits, gigabytes, percent, quantity, seconds
from pipejax.cli.output.report import Answer, heading, pick, plain, table_sizes
from pipejax.cli.output.tables import Column, TextTable, facts, grid, rows_table
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.schedules.table.links import LINK_MODELS, LINK_OPTIONS, format_pairs

MANY_SEQUENCES = 8  # of a microbatch: few jobs have so many
MAX_LISTED = 3  # workers that are equally busy
UNEVEN = 1.01  # busy time over the mean from which the busiest worker is the bottleneck
ROUNDING = 1e-12  # of the makespan: below it a slack is what sums in double precision leave


CORNERS = (
    Column("corner", "name", escape),
    Column("makespan", "makespan", seconds),
    Column("worst slack", "worst_slack", seconds),
    Column("total negative slack", "total_negative_slack", seconds),
    Column("ops with least slack here", "binding_ops"),
)


@options
class TimingSettings:
    """Options that ask for slack, corners and paths of a run."""

    slack: bool = False
    target: str | None = None
    corner: list[str] | None = None
    paths: int | None = None
    distinct_counts: bool = False

    def add_to(self, result: dict[str, Any], evaluation: "pj.Evaluation") -> Iterator[object]:
        """Add slack, corners and paths, if asked for, to the object of `--json`; yield tables."""
        target = None if self.target is None else parse_seconds(self.target, "--target")
        if self.slack or self.corner or target is not None:
            costs = self._costs(evaluation)
            corners = pj.analysis.corners(evaluation.program, costs, target=target)
            if target is not None:  # at the nominal costs
                lateness = float(corners.total_negative_slack[0])
                worst_slack = float(corners.slack[0].min())
                result |= {"target": corners.target, "worst_slack": worst_slack}
                result["total_negative_slack"] = lateness
                yield plain(
                    f"target {seconds(target)}: worst slack {seconds(worst_slack)}; total "
                    f"negative slack of the workers {seconds(lateness)}"
                )
            if self.corner:
                yield _add_corners(result, corners, evaluation)
            if self.slack:
                yield _add_slack(result, corners, evaluation)
        if self.paths is not None:
            distinct = self.distinct_counts
            paths = pj.analysis.longest_paths(evaluation, self.paths, distinct_counts=distinct)
            result["paths"] = runs.paths_json(paths)
            yield runs.paths_table(result["paths"])

    def _costs(self, evaluation: "pj.Evaluation") -> "dict[str, pj.Costs]":
        """Return the costs of each corner by name."""
        costs = {"nominal": evaluation.costs}
        for text in self.corner or ():
            name, colon, rules = (part.strip() for part in text.partition(":"))
            if not (name and colon and rules):
                raise ValueError(f"--corner must be NAME:RULES, as slow:transmit*2, got {text!r}")
            if name in costs:
                raise ValueError(f"--corner: {name!r} is the name of another corner")
            try:
                costs[name] = pj.costing.scaled_costs(evaluation.costs, evaluation.table, rules)
            except ValueError as error:
                raise ValueError(f"--corner {text}: {error}") from None
        return costs


def _add_corners(
    result: dict[str, Any], corners: "pj.results.Corners", evaluation: "pj.Evaluation"
) -> object:
    """Add a row for each corner to `result`, and return the rows as a table."""
    # A row has the makespan, the lateness [s] against a target, and the number of ops whose slack
    # is least in this corner.
    binding = [row["corner"] for row in runs.op_rows(evaluation, "corner", corners.binding)]
    worst_slack, lateness = corners.slack.min(axis=1), corners.total_negative_slack
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(corners.names):
        rows.append({"name": name, "makespan": corners.makespan[k]})
        if corners.target is not None:  # without a target no op can be late
            rows[-1] |= {"worst_slack": worst_slack[k], "total_negative_slack": lateness[k]}
        rows[-1]["binding_ops"] = binding.count(k)
    result["corners"] = rows
    return rows_table(rows, (column for column in CORNERS if column.value in rows[0]))


def _add_slack(
    result: dict[str, Any], corners: "pj.results.Corners", evaluation: "pj.Evaluation"
) -> object:
    """Add the least slack of every op over all corners to `result`; return a table by phase."""
    result["slack"] = runs.op_rows(evaluation, "slack", corners.worst_slack)
    if len(corners.names) > 1:
        binding = runs.op_rows(evaluation, "corner", corners.binding)
        for entry, row in zip(result["slack"], binding, strict=True):
            entry["corner"] = corners.names[int(row["corner"])]
    rounding = ROUNDING * evaluation.makespan
    slack = np.where(np.abs(corners.worst_slack) > rounding, corners.worst_slack, 0.0)
    return runs.values_by_phase(evaluation, "slack", slack, seconds)


@options
def evaluate(
    *,
    run: SizedRunOptions = SizedRunOptions(),
    timing: TimingSettings = TimingSettings(),
    certificate: Annotated[Output, JSON] = NO_OUTPUT,
) -> Answer:
    """Evaluate one schedule: step time, bubbles, memory, critical path."""
    scenario = run.scenario()
    table, evaluation = build(scenario), required(scenario).evaluate()
    _check_links(evaluation)
    held = run.activations.scenario_sizes(scenario).held(evaluation)
    result = summary(evaluation, scenario, held) | _evidence(scenario, evaluation.makespan)
    launch = named_launch(scenario)
    if launch is not None:
        result["launch"] = plans.launch_json([launch])
    if assumed := scenario.source.assumption(table):
        result["assumes"] = assumed
    timing_parts = [*timing.add_to(result, evaluation)]
    fitting_change, next_commands = _add_memory_fit(table, scenario, result), list[str]()
    if fitting_change and scenario.source.workload is not None:
        fitting = dataclasses.replace(scenario.source.workload, **fitting_change)
        next_commands.append(command_line(scenario.with_workload(fitting)))
    if certificate.path is not None:
        certificate.save_certificate(pj.certificate(evaluation, memory=held.memory))
    lines = [] if fitting_change else [plain(f"next: {command_line(scenario, 'explain')}")]
    view = chain(_view(evaluation, result, scenario), timing_parts, lines)
    details = _details(evaluation, result, scenario, held)
    if launch is not None:
        details["launcher options"] = [*plans.launch_lines([launch])]
    return Answer(result, view, next=tuple(next_commands), details=details)


def _view(
    evaluation: "pj.Evaluation", result: dict[str, Any], scenario: "pj.Scenario"
) -> Iterator[object]:
    """Yield the step time and the bottleneck; then links, bubble, throughput and memory."""
    corner = ""
    if "corners" in result:  # a corner is a set of costs that --corner names
        slowest = max(result["corners"], key=lambda corner: corner["makespan"])
        corner = f" ({seconds(slowest['makespan'])} in corner {slowest['name']})"
    verdict = _bottleneck(evaluation)
    if result.get("fits") is False:
        verdict = f"[bold red]{_does_not_fit(result)}[/]"
    yield f"{seconds(result['makespan'])} per step{escape(corner)}; {verdict}"
    yield f"{heading(result)}; {_link_text(evaluation)}"
    path = dict(result["critical_path"])
    words = {name: field.replace("_", " ") for name, field in PHASE_FIELDS.items()}
    if "W" in path and scenario.find_edit(pj.costing.RecomputedAgain):
        # W recomputes: show the recomputation as a part, if its share is the same on all stages
        costs, name = evaluation.costs, "second recompute (before W)"
        ratios = np.asarray(costs.recompute) / np.asarray(costs.weight_grad)
        if np.ptp(ratios) <= TIE:
            path |= {name: path["W"] * ratios.max(), "W": path["W"] * (1 - ratios.max())}
    parts = sorted(path.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{words.get(name, name)} {percent(share)}" for name, share in parts)
    idle = percent(result["bubble_ratio"])
    yield f"workers idle {idle} of the time (bubble); critical path (shares of the step): {shares}"
    if scenario.workload is not None and scenario.system is not None:
        has_lengths = scenario.microbatches.lengths is not None
        length = "" if has_lengths else f" in sequences of {scenario.workload.model.sequence:,}"
        yield plain(
            f"{result['tokens_per_second']:,.0f} tokens per second{length} on "
            f"{result['accelerators']} accelerators; "
            f"{quantity(result['flops_per_accelerator'], 'FLOP/s')} each, MFU "
            f"{percent(result['mfu'])} of the {result['precision']} peak (causal attention "
            "counted in full)"
        )
        fullest = int(np.argmax(result["memory_bytes"]))
        sizes = {name: float(part[fullest]) for name, part in result["memory_parts"].items()}
        texts = (f"{k} {gigabytes(v)}" for k, v in sizes.items() if v > 0 and k != "reserve")
        need = gigabytes(result["memory_bytes"][fullest])
        room = gigabytes(float(scenario.system.memory_available))
        yield plain(
            f"memory: an accelerator of worker {fullest} needs {need} of the {room} that tensors "
            f"can use: {', '.join(texts)}"
        )
        size = scenario.workload.minibatch / result["microbatches"]
        if result.get("fits") is False and size >= MANY_SEQUENCES:
            yield plain(
                f"a microbatch has {size:g} sequences: --minibatch counts those of one pipeline, "
                "not of the whole job"
            )
        yield from plans.evidence_lines(result["evidence"], result["regime"], scenario.system.name)
    else:
        peak = result["peak_in_flight"]
        worker, count = peak.argmax(), peak.max()
        activations = f"{count} microbatch{'' if count == 1 else 'es'}"
        if evaluation.stages > evaluation.workers:
            activations = f"{count} forwards (each 1 microbatch on 1 stage)"
        yield f"worker {worker} holds the most activations: those of {activations}"
        if "tokens_per_second" in result:
            yield f"{digits(result['tokens_per_second'])} tokens per second"
    yield from map(plain, result.get("notes", ()))
    if "assumes" in result:
        yield plain(f"assumes {result['assumes']}")


def _bottleneck(evaluation: "pj.Evaluation") -> str:
    """Return which workers are busy longest, and for which share of the step."""
    makespan, busy = evaluation.makespan or 1.0, evaluation.busy
    if busy.max() <= UNEVEN * busy.mean():
        return f"workers are equally busy: {percent(busy.mean() / makespan)} of the step"
    busiest = [str(worker) for worker in np.flatnonzero(busy >= (1 - TIE) * busy.max())]
    if len(busiest) > MAX_LISTED:
        busiest = [busiest[0], f"{len(busiest) - 1} others"]
    subject = f"workers {' and '.join(busiest)} are" if busiest[1:] else f"worker {busiest[0]} is"
    return f"{subject} the bottleneck: busy {percent(busy.max() / makespan)} of the step"


def _details(
    evaluation: "pj.Evaluation", result: dict[str, Any], scenario: "pj.Scenario", held: HeldMemory
) -> dict[str, list[object]]:
    """Return {title: tables} for workers, totals, measured runs and parts of the step."""
    rows = [
        (output.row, quantity(result[name], output.unit))
        for name, output in OUTPUTS.items()
        if output.row and name in result
    ]
    if bands := result.get("step_time_band"):
        ranges = (f"{seconds(a)} to {seconds(b)} ({share} %)" for share, (a, b) in bands.items())
        rows.append(("range of the step time", ", ".join(ranges)))
    if "memory_room" in result and scenario.system is not None:
        whole = f"{float(scenario.system.memory_capacity) / 2**30:.3g} GiB"
        rows.append(("free memory", f"{gigabytes(result['memory_room'])}: {whole}, less a reserve"))
    details: dict[str, list[object]] = {
        "workers": [_worker_table(evaluation, result, scenario, held)],
        "totals": [facts(rows)],
    }
    if result.get("evidence"):
        details["measured runs"] = [plans.evidence_details(result["evidence"])]
    if "breakdown" in result:
        parts = {name: time for name, time in result["breakdown"].items() if time > 0}
        shares = (percent(time / (result["step_time"] or 1.0)) for time in parts.values())
        columns = ("part", parts), ("time", map(seconds, parts.values())), ("of the step", shares)
        details["parts of the step"] = [grid(columns)]
    return details


def _evidence(scenario: "pj.Scenario", step: float) -> dict[str, Any]:
    """Return the measured runs nearest to a predicted one, for `--json`; {} without a model."""
    from pipejax.analysis.step.evidence import find_evidence, workload_regime

    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        return {}
    regime = workload_regime(workload, float(system.gpus_per_node))
    launcher = scenario.files.get("launcher", "")
    evidence = find_evidence(regime, system, scenario.source.stack, launcher)
    return {"regime": str(regime), "evidence": plans.evidence_json(evidence, step)}


def _add_memory_fit(
    table: pj.ScheduleTable, scenario: "pj.Scenario", result: dict[str, Any]
) -> dict[str, Any]:
    """Add to a result whether the step of a model fits in memory."""
    # If not, return fields of the workload with which it would fit; {} if there are none.
    if scenario.workload is None or scenario.system is None:
        return {}
    room = float(scenario.system.memory_available)
    result |= {"memory_room": room, "fits": bool(result["memory_bytes"].max() <= room)}
    if result["fits"]:
        return {}
    from pipejax.analysis.step.step_report import fitting_change

    launcher = scenario.files.get("launcher")
    result["fits_with"] = fitting_change(scenario.workload, table, room, launcher)
    return result["fits_with"] or {}


def _does_not_fit(result: dict[str, Any]) -> str:
    """Return the need of the fullest worker, and the options with which the step would fit."""
    fullest = int(result["memory_bytes"].argmax())
    need, available = result["memory_bytes"][fullest] / 1e9, result["memory_room"] / 1e9
    needs = f"worker {fullest} needs {need:.1f} of {available:.1f} GB"
    if result["fits_with"] is None:
        return f"does not fit: {needs}; no --sequence-parallel, --zero or --recompute makes it fit"
    options = line.command_line("", result["fits_with"]).removeprefix("pipejax ")
    return f"does not fit: {needs}; with {options} it would"


def _check_links(evaluation: "pj.Evaluation") -> None:
    """Refuse --pair-links without messages; warn of --shared-links and --host-links without any."""
    sent, schedule = evaluation.program.messages, evaluation.schedule
    sent_pairs = set(zip(sent.sender.tolist(), sent.receiver.tolist(), strict=True))
    for (sender, other), model in evaluation.links.named_pairs:
        if not {(sender, other), (other, sender)} & sent_pairs:
            raise ValueError(
                f"--pair-links {sender}-{other}={model} has no effect: no message goes between "
                f"workers {sender} and {other} in {schedule}"
            )
    messages = []
    groups = evaluation.links.shared_links
    # a table of several pipes has copies of weights, whose gradients go over any link
    if not isinstance(groups, str) and evaluation.table.num_pipes == 1:
        for group in groups:
            if sent_pairs.isdisjoint(group):
                option = f"--shared-links {format_pairs([group])}"
                messages.append(f"{option} has no effect: {schedule} sends nothing over it")
    if evaluation.links.host_links and not evaluation.table.offloads:
        messages.append(f"--host-links has no effect: no O or L in {schedule}")
    for text in messages:
        warnings.warn(text, Notice, stacklevel=3)


def summary(
    evaluation: "pj.Evaluation", scenario: "pj.Scenario", held: HeldMemory
) -> dict[str, Any]:
    """Collect the object of `--json`."""
    links = evaluation.links
    result = table_sizes(evaluation.table) | {"link": links.model}
    if links.is_rendezvous:
        result["queues"] = links.queues
    in_json = {*LINK_OPTIONS} - {"model", "queues", "host_links"}
    result |= {name: value for name, value in links.changed().items() if name in in_json}
    if links.eager_below:
        result["eager_messages"] = int(evaluation.program.messages.eager.sum())
    result |= pick(evaluation, "makespan") | run_outputs(evaluation)
    result |= pick(evaluation, "busy peak_in_flight bound_by")
    if lanes := pj.analysis.lane_times(evaluation):
        result["lanes"] = [pick(lane, "lane busy exposed") for lane in lanes]
    if "UNSHARD" in evaluation.table.grammar.lanes:
        result["gathered_weights"] = pick(pj.analysis.gathered_weights(evaluation), "peak peak_at")
    result["critical_path"] = dict(evaluation.path_share)
    if (lengths := scenario.microbatches.lengths) is not None:
        from pipejax.costs.stage.microbatches import Packed

        replicas = getattr(scenario.source.workload, "data_parallel", 1)
        tokens = replicas * float(Packed.from_lengths(lengths).tokens.sum())
        result["tokens_per_second"] = tokens / (evaluation.makespan or np.inf)
    if scenario.workload is not None and scenario.system is not None:
        result |= runs.step_json(evaluation, scenario.workload, scenario.system)
        result |= runs.memory_json(evaluation.table, scenario.workload, scenario.system, held)
        launcher = scenario.files.get("launcher")
        result |= plans.layout_json(scenario.workload, evaluation.table, launcher)
    return result | {"activation_memory": held.as_json()}


def _link_text(evaluation: "pj.Evaluation") -> str:
    """Return the meaning of the link model, its name, and link options that differ from it."""
    links = evaluation.links
    if links == pj.Links() and np.array_equal(evaluation.message_start, evaluation.message_finish):
        return "messages take no time"
    notes = [f"--link {links.model}"]
    notes += [f"one queue per {links.queues}"] if links.is_rendezvous else []
    for name, value in links.changed().items():
        if name not in ("model", "queues"):
            text = value if isinstance(value, str) else seconds(value)
            notes.append(f"{name.replace('_', ' ')} {text}")
    return f"{LINK_MODELS[links.model].meaning} ({'; '.join(notes)})"


def _worker_table(
    evaluation: "pj.Evaluation", result: dict[str, Any], scenario: "pj.Scenario", held: HeldMemory
) -> TextTable:
    """Make a table of the workers: busy and idle time, activations and memory."""
    sizes, unit = held.stages, held.stages.unit
    if unit == "bytes":
        is_forward = evaluation.table.grammar.forward_only
        unit = "keys and values" if is_forward else "activation memory"
    peaks = zip(held.memory.peak, held.memory.peak_at, strict=True)
    # placement[pipe, stage] is a worker; pipes may put the same stage on a worker
    placement, workers = evaluation.table.placement, range(evaluation.workers)
    worker_stages = [np.argwhere(placement == worker)[:, 1].tolist() for worker in workers]
    columns: list[tuple[str, Iterable[object]]] = [
        ("worker", workers),
        ("stages", [" ".join(map(str, dict.fromkeys(stages))) for stages in worker_stages]),
        ("busy", map(seconds, result["busy"])),
        ("idle", (percent(1 - busy / (evaluation.makespan or 1)) for busy in result["busy"])),
    ]
    for lane in result.get("lanes", ()):
        for name in ("busy", "exposed"):
            columns.append((f"{lane['lane']} ({name})", map(seconds, lane[name])))
    if "gathered_weights" in result:
        peak_stages = map("{:g}".format, result["gathered_weights"]["peak"])
        columns.append(("stages gathered at once", peak_stages))
    peak_texts = (f"{sizes.text(peak)} at {seconds(at)}" for peak, at in peaks)
    columns += [("peak in flight", result["peak_in_flight"]), (f"peak {unit}", peak_texts)]
    if "memory_bytes" in result and scenario.system is not None:
        available = float(scenario.system.memory_available)
        needs = (
            gigabytes(need) + ("  [red]too much[/]" if need > available else "")
            for need in result["memory_bytes"].tolist()
        )
        columns.append((f"memory (of {gigabytes(available)})", needs))
    return grid(columns)
