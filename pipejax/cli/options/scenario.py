"""Scenarios as options: `parse_scenario` reads them, `command_line` writes them, its inverse.

Each part has its two functions side by side. Nothing below this folder knows names of options.
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.base.data_files import load_json
from pipejax.base.progress import Notice
from pipejax.cli.options import line
from pipejax.cli.options.catalogue import CATALOGUE, OF_ARGUMENTS, flag
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit
from pipejax.cli.options.option import (
    number_text,
    parse_counts,
    parse_list,
    parse_number,
    parse_seconds,
    seconds_text,
    seconds_texts,
    warn_of_mixed_units,
    whole_numbers,
)
from pipejax.costs.model.workload_fields import OF_EXPERTS, WORKLOAD_FIELDS
from pipejax.schedules.builders.published import Builder
from pipejax.schedules.cells.ops import HOST_LINK, SPLIT, STEP_END, TIMED
from pipejax.schedules.naming import find
from pipejax.schedules.table.table_files import REPAIRS

if TYPE_CHECKING:
    from pipejax.cli.options.tables import SizedSchedule, TableOptions
    from pipejax.costs.edits import Edit
    from pipejax.costs.sources import CostSource
Options = dict[str, Any]
# fields of a workload that are options of models
WORKLOAD = tuple(name for name, field in WORKLOAD_FIELDS.items() if field.head)
NEEDED_DEGREES: Mapping[str, tuple[str, ...]] = {  # degrees without which an option saves nothing
    "zero": ("data_parallel", "context_parallel"),
    "overlap": ("data_parallel", "context_parallel"),
    "tensor_overlap": ("tensor_parallel",),
    "expert_overlap": ("expert_parallel",),
}


class CostFields(NamedTuple):
    """The part of a scenario that any table may have."""

    costs: "CostSource"
    edits: "tuple[Edit, ...]"
    files: Mapping[str, str]


def parse_scenario(
    run: Any, *, settings: "TableOptions | None" = None, point: "SizedSchedule | None" = None
) -> "pj.Scenario":
    """Make a scenario of the options of a command, which are the fields of the record `run`."""
    # `point` is the schedule and its size if the command takes several schedules. `settings` are
    # options of the schedule instead of those of `run`.
    link = getattr(run, "links", pj.Links)()  # a closed form has its own, and no costs
    settings = settings or run.settings
    costs = getattr(run, "cost_fields", None) or CostFields(pj.costing.SlotCosts(), (), {})
    if point is None:
        fields = _parse_table(run, settings)
    else:
        sizes = {"num_workers": point.workers, "num_microbatches": point.microbatches}
        fields = {"schedule": point.name, **sizes}
        if settings.repair is not None and settings.builder(point.name).sizes is not None:
            fields["schedule"] = pj.costing.TableFile(point.name, settings.repair)
    if isinstance(fields["schedule"], str):
        settings.check([fields["schedule"]])
        options = settings.only(fields["schedule"]).options
        workload = costs.costs.workload  # its weight share holds for any schedule
        if "memory_limit" in options:
            options["memory_limit"] = _parse_room(fields, options, workload)
        if workload is not None and options.get("weight_share") == workload.weight_share:
            options.pop("weight_share", None)
        fields["options"] = options
    edits = (*settings.edits, *costs.edits)
    return pj.Scenario(**fields, costs=costs.costs, link=link, edits=edits, files=costs.files)


def scenario_options(scenario: "pj.Scenario") -> Options:
    """Return the options that give this scenario, with their values, in the order of the help."""
    # Raises ValueError if no option can set a part of the scenario, such as costs in no file.
    options = _table_options(scenario)
    options |= _source_options(scenario)
    options |= _edit_options(scenario)
    for name, value in scenario.links.changed().items():
        text = value if isinstance(value, str) else seconds_text(value)
        options["link" if name == "model" else name] = text  # --link sets `Links.model`
    if "launcher" in scenario.files:
        options["launcher"] = scenario.files["launcher"]
    return {name: options[name] for name in CATALOGUE if name in options}


def command_line(
    scenario: "pj.Scenario", command: str = "evaluate", without: Iterable[str] = (), **more: Any
) -> str:
    """Write a command on a scenario, with further options, as it is typed."""
    options = scenario_options(scenario)
    options = {name: value for name, value in options.items() if name not in without} | more
    return line.command_line(command, options)


# columns of a measured row that no option of a run sets
SETTINGS = ("node_bandwidth", "network_bandwidth", "steps_overlap")


def explain_commands(
    row: "pj.files.MeasuredRows", system: str | None, link: str = "delay"
) -> tuple[str, ...]:
    """Return the commands that explain a measured row; empty if no options give its run."""
    # The second command has the launcher of the row, if defaults of the launcher differ from what
    # the row assumes.
    from pipejax.analysis.step.step_time import row_workloads
    from pipejax.costs.measured.measured_rows import STEP
    from pipejax.costs.model.launchers import LAUNCHERS
    from pipejax.costs.model.stack import load_stack

    files = {"model": str(row.model_file[0]), "system": system or str(row.system[0])}
    machine, stack = pj.load_system(files["system"]), str(row.stack[0])
    is_other = row.accelerators_per_node[0] not in (0, machine.gpus_per_node)
    if is_other or row.op[0] != STEP or any(getattr(row, name)[0] for name in SETTINGS):
        return ()
    if stack:
        machine, files["stack"] = load_stack(stack).on(machine), stack
    stages = int(row.stages_per_worker[0])
    scenario = pj.Scenario(
        str(row.schedule[0]),
        num_workers=int(row.pipeline[0]),
        num_microbatches=int(row.microbatches[0]),
        options={"stages_per_worker": stages} if stages > 1 else {},
        costs=pj.costing.ModelCosts(row_workloads(row)[0], machine, stack=stack),
        link=str(row.link[0]) or link,
        files=files,
    )
    # the launcher that the source of the row names, else none: others would advise wrong options
    source = str(row.source[0])
    launchers = [name for name in LAUNCHERS if name.partition("-")[0] in source][:1]
    for launcher in launchers:
        with suppress(ValueError, OSError):  # the launcher's defaults differ from the row
            launcher_files = files | {"launcher": launcher}
            return (command_line(scenario.replace(files=launcher_files), "explain"),)
    with suppress(ValueError, OSError):
        command = command_line(scenario, "explain")
        return (command, *(f"{command} --launcher {launcher}" for launcher in launchers))
    return ()


# tables

SIZES = ("workers", "microbatches")


def _parse_table(run: Any, settings: "TableOptions") -> Options:
    """Return the schedule with its sizes, or the table file, as fields of a scenario."""
    if (run.schedule is None) == (run.table is None):
        raise ValueError("give --schedule with --workers and --microbatches, or --table FILE")
    if run.name is not None:
        # a table from a file has sizes of its own
        for size, default in zip(SIZES, find(run.name).sizes or (None, None), strict=True):
            if getattr(run, size) is None and default is None:
                raise ValueError(f"--schedule needs {flag(size)}")
        numbers = {f"num_{size}": getattr(run, size) for size in SIZES}
        return {"schedule": run.name, **numbers}
    # from here on there is a file of one table, which states sizes and options itself
    extra = [flag(name) for name in SIZES if getattr(run, name) is not None]
    extra += [option_text(name) for name in settings.options if name not in settings.run_options]
    if extra:
        raise ValueError(f"{extra[0]} needs --schedule: the file of --table sets it already")
    repair = None if run.repair is None else resolve_choice(run.repair, REPAIRS, "--repair")
    return {"schedule": pj.costing.TableFile(run.table, repair)}


def _table_options(scenario: "pj.Scenario") -> Options:
    """Return the command-line options that build the table, or that name its file."""
    schedule = scenario.schedule
    if isinstance(schedule, pj.ScheduleTable):
        raise ValueError(f"table {schedule.name} is in no file: write it and give its path")
    if not isinstance(schedule, str):
        repair = {} if schedule.repair is None else {"repair": schedule.repair}
        return {"table": schedule.path, **repair}
    sizes = {"workers": scenario.num_workers, "microbatches": scenario.num_microbatches}
    options: Options = {"schedule": schedule}
    options |= {name: size for name, size in sizes.items() if size is not None}
    custom = []  # options of a schedule of the user's own
    for name, value in scenario.options.items():
        option = OPTION_NAMES.get(name, name)
        if name == "slots":
            options[option] = ",".join(f"{k}={number_text(t)}" for k, t in value.items())
        elif option in CATALOGUE:
            options[option] = list_text(value) if isinstance(value, float | list) else value
        else:
            custom.append(f"{name}={_json_text(value)}")
    return options | ({"schedule_options": ",".join(custom)} if custom else {})


def _json_text(value: Any) -> str:
    """Write a value of --schedule-options, without quotes where these are not needed."""
    # Words that are no JSON are read as texts: plain needs no quotes, the text "3" does.
    text = json.dumps(value)
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            text = value
    if "," in text:
        raise ValueError(f"no option has a value with commas, got {value!r}")
    return text


# options of builders that the command line calls otherwise: runs have these names too
OPTION_NAMES = {argument: OF_ARGUMENTS[argument] for argument in ("transfer", "offload", "load")}


def list_text(values: float | Sequence[float]) -> str:
    """Write a number, or several with commas."""
    numbers = values if isinstance(values, list | tuple) else [values]
    return ",".join(map(number_text, numbers))


def flag_name(name: str) -> str:
    """Return a builder option's flag, such as --weight-share; its bare name if it is free-form."""
    return name if is_free_form(name) else flag(OPTION_NAMES.get(name, name))


def is_free_form(name: str) -> bool:
    """Return whether a builder's option has no flag, only a place in --schedule-options."""
    return OPTION_NAMES.get(name, name) not in CATALOGUE


def option_text(name: str) -> str:
    """Return how an option of builders is given on the command line."""
    return f"--schedule-options {name}" if is_free_form(name) else flag_name(name)


def _parse_room(fields: Options, options: Options, workload: "pj.Workload | None") -> float:
    """Convert a memory limit to activations, for schedules planned within it."""
    from pipejax.costs.planning import similar_table

    builder = find(fields["schedule"])
    size = {name: fields[name] for name in ("num_workers", "num_microbatches")}
    activations = ActivationOptions(options.get("weight_share"), None)
    limit: MemoryLimit = options["memory_limit"]
    return limit.room(similar_table(builder, size, options), activations, workload).activations


# sources of costs

_TIMES = ("stage_times", "worker_times", "costs", "model")  # one of them gives the times of ops
_WITH_MODEL = ("system", "minibatch", "stack", "sequence", *WORKLOAD)
_EDITS = (  # options that change costs, and need some
    *("offload", "lengths", "microbatch_scale", "microbatch_order", "recompute_again"),
    *("pair_factor", "stragglers", "scale"),
)


def parse_costs(run: Any) -> CostFields:
    """Make costs, their edits and files of options; without times, the slots of the table."""
    nodes, places = _parse_machine(run)
    microbatches = _parse_microbatches(run)
    messages = _parse_messages(run, nodes)
    source = _parse_source(run, messages, nodes, places, microbatches)
    if run.load is not None and run.offload is None:
        raise ValueError(f"--load {run.load} needs --offload")
    if source is None:
        for name in _EDITS:
            if getattr(run, name) not in (None, False):
                raise ValueError(
                    f"{flag(name)} needs op times: give --stage-times, --costs or --model"
                )
        if nodes or places:
            raise ValueError("--workers-per-node needs op times: give --stage-times")
        source = pj.costing.SlotCosts()
    names = "model", "system", "stack", "lengths"
    files = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
    if run.launcher is not None:
        from pipejax.costs.model.launchers import find_launcher

        files["launcher"] = find_launcher(run.launcher).name
    return CostFields(source, tuple(_parse_edits(run, source, microbatches)), files)


def _parse_machine(run: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of nodes, as (8,) or (4, 8), and each worker's place; () if not stated."""
    per_node = run.workers_per_node
    if per_node is not None and (run.costs is not None or run.model is not None):
        node_source = "--costs: its file" if run.costs is not None else "--model: the system"
        raise ValueError(f"--workers-per-node has no effect with {node_source} sets the nodes")
    nodes: tuple[int, ...] = ()
    if per_node is not None:
        from pipejax.costs.topology import check_sizes

        sizes = whole_numbers(per_node)
        if sizes is None:
            form = "a number, or several as 4,8"
            raise ValueError(f"--workers-per-node must be {form}, got {per_node!r}")
        nodes = check_sizes(sizes, "--workers-per-node")
    if run.worker_places is None:
        return nodes, ()
    from pipejax.costs.measured.costs_file import read_key
    from pipejax.costs.topology import check_places, parse_places

    has_nodes = run.model is not None or (
        nodes if run.costs is None else read_key(run.costs, "workers_per_node")
    )
    if not has_nodes:
        raise ValueError(
            "--worker-places needs a machine of nodes: give --workers-per-node, a --costs file "
            "with nodes, or --model"
        )
    text = run.worker_places
    if not text.endswith(".json"):
        return nodes, parse_places(text, "--worker-places")
    return nodes, check_places(load_json(text).get("places", ()), f"{text}: places")


def _parse_messages(run: Any, nodes: tuple[int, ...]) -> tuple[dict[str, float], ...]:
    """Return {"latency": s, "transmit": s} for each level of the machine, inside a node first."""
    texts = {"latency": run.latency, "transmit": run.transmit}
    if run.comm is not None:
        if texts != {"latency": None, "transmit": None}:
            raise ValueError(
                "--comm is latency 0 and a transmit time: give it, or --latency and --transmit"
            )
        texts = {"comm": run.comm}
    levels = len(nodes) + 1
    messages: tuple[dict[str, float], ...] = tuple({} for _ in range(levels))
    for name, text in texts.items():
        if text is None:
            continue
        times = parse_list(text, flag(name), seconds=True)
        if len(times) not in (1, levels):
            allowed = (
                f"one time, or {levels}: inside a node, between nodes, and so on"
                if nodes
                else "one time, or with --workers-per-node one for each level of the machine"
            )
            raise ValueError(f"{flag(name)} must be {allowed}, got {text!r}")
        for level, message in enumerate(messages):
            message["transmit" if name == "comm" else name] = times[level % len(times)]
    return messages


def _parse_source(
    run: Any,
    messages: tuple[dict[str, float], ...],
    nodes: tuple[int, ...],
    places: tuple[int, ...],
    microbatches: "pj.costing.Microbatches",
) -> "CostSource | None":
    """Return the source of the costs; None if no option gives times of ops."""
    options = [name for name in _TIMES if getattr(run, name) is not None]
    if len(options) > 1:
        raise ValueError(f"{flag(options[0])} and {flag(options[1])} both give times: choose one")
    model_options = [name for name in _WITH_MODEL if getattr(run, name) not in (None, False)]
    if model_options and run.model is None:
        raise ValueError(f"{flag(model_options[0])} needs --model")
    option = options[0] if options else ""
    if any(messages) and option not in ("stage_times", "worker_times"):
        raise ValueError(
            "--comm, --latency and --transmit go with op times of --stage-times or --worker-times "
            "alone: a model and a file of costs have message times"
        )
    if option == "":
        return None
    stages = run.measured_stages
    if stages is not None and option not in ("costs", "stage_times"):
        raise ValueError(f"--measured-stages {stages} goes with --costs or --stage-times")
    if option == "model":
        return _parse_model(run, places, microbatches)
    if option == "costs":
        return pj.costing.CostsFile(run.costs, stages=stages, places=places)
    times = _parse_times(option, getattr(run, option), messages)
    for name in ("comm", "latency", "transmit"):
        warn_of_mixed_units(getattr(run, name) or "", flag(name), getattr(run, option))
    per_worker = option == "worker_times"
    return pj.costing.GivenTimes(times, messages, per_worker, nodes, stages=stages, places=places)


def _parse_times(name: str, text: str, messages: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Read times [s] of ops from an option such as "F=1,B=2,pair=2.5"."""
    # The keys are fields of `Costs`, or the letters of a kind of op that a table defines.
    from pipejax.costs.costs import TIME_FIELDS, check_backward

    option, times = flag(name), dict[str, float]()
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        field = TIME_FIELDS.get(letter, letter)
        if letter not in TIME_FIELDS and not re.fullmatch("[A-Z][A-Za-z_]*", letter):
            raise ValueError(
                f"{option}: {entry.strip()!r} is not LETTER=TIME: letters are "
                f"{', '.join(TIME_FIELDS)}"
            )
        if field in times:
            raise ValueError(f"{option}: {letter} is given twice")
        times[field] = parse_seconds(value, f"{option}: {letter}")
    if "forward" not in times and not times.keys() - TIME_FIELDS.values():
        raise ValueError(f"{option}: F is missing, got {text!r}")
    warn_of_mixed_units(text, option)
    try:  # before any table is built
        check_backward(times)
        usual = {name: time for name, time in times.items() if name in TIME_FIELDS.values()}
        for message in messages:
            pj.Costs(**usual, **message)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
    return times


def _parse_model(
    run: Any, places: tuple[int, ...], microbatches: "pj.costing.Microbatches"
) -> "CostSource":
    """Read a model on a system as source of costs, with defaults of its launcher."""
    if run.system is None or run.minibatch is None:
        raise ValueError(f"--model needs {'--system' if run.system is None else '--minibatch'}")
    fields = workload_fields(run, WORKLOAD)
    for name, value in fields.items():
        if names := WORKLOAD_FIELDS[name].names:
            fields[name] = resolve_choice(value, names, flag(name))
    if run.weight_share is not None:
        fields["weight_share"] = run.weight_share
    if run.recompute_again:
        fields["recompute_again"] = True
    from pipejax.costs.model.launchers import launcher_defaults, merge_fields
    from pipejax.costs.stage.stage_costs import check_machine

    bare, loaded = pj.load_system(run.system), load_with(run.model, run.sequence)
    workers = getattr(run, "workers", None)
    model, software, defaults = launcher_defaults(run.launcher, loaded, bare, run.stack, workers)
    machine = software.on(bare)
    chosen = {name for name, value in fields.items() if value not in (None, 0, False)}
    fields = merge_fields(defaults, fields, run.launcher)
    for name, degrees in NEEDED_DEGREES.items():
        if name in chosen and all(fields.get(degree, 1) == 1 for degree in degrees):
            needs = " or ".join(map(flag, degrees))
            text = f"{flag(name)} {fields[name]:g} saves nothing without {needs} above 1"
            warnings.warn(text, Notice, stacklevel=2)
    workload = pj.Workload(model, run.minibatch, **fields, worker_places=places)
    check_machine(workload, machine)
    lengths = microbatches.lengths
    return pj.costing.ModelCosts(workload, machine, stack=software.name, lengths=lengths)


_READERS = {"share": parse_number, "seconds": parse_seconds}  # of texts, by kind of the field


def workload_fields(run: object, names: Iterable[str]) -> Options:
    """Return the fields of a workload that options give; shares and seconds as numbers."""
    fields: Options = {}
    for name in names:
        value, read = getattr(run, name), _READERS.get(WORKLOAD_FIELDS[name].kind)
        if value is not None and value is not False:
            fields[name] = value if read is None else read(value, flag(name))
    return fields


def load_with(model: str, sequence: int | None) -> "pj.Model":
    """Load a model, with sequences of another length if one is given."""
    loaded = pj.load_model(model)
    loaded = loaded if sequence is None else dataclasses.replace(loaded, sequence=sequence)
    if loaded.window is not None and loaded.window > loaded.sequence:
        tokens = f"{loaded.window} tokens, hides nothing of sequences of {loaded.sequence}"
        warnings.warn(f"{loaded.name}: its window, {tokens}", Notice, stacklevel=2)
    return loaded


def _source_options(scenario: "pj.Scenario") -> Options:
    """Return the options that give the costs; raise if no option can."""
    source = scenario.source
    if source.workload is not None:
        return _model_options(scenario)
    options: Options = {} if source.stages is None else {"measured_stages": source.stages}
    if source.places:
        options["worker_places"] = list_text(source.places)
    if isinstance(source, pj.costing.CostsFile):
        return options | {"costs": source.path}
    if isinstance(source, pj.costing.GivenTimes):
        return options | _times_options(source)
    if source != pj.costing.SlotCosts():
        raise ValueError("costs are in no file: write them, and give `CostsFile` of its path")
    return options


def _times_options(source: Any) -> Options:
    """Return op and message times as options, such as stage_times: "F=1,B=2"."""
    from pipejax.costs.costs import TIME_FIELDS

    letters = {field: letter for letter, field in TIME_FIELDS.items()}
    texts = zip(source.times, seconds_texts(source.times.values()), strict=True)
    entries = ",".join(f"{letters.get(field, field)}={text}" for field, text in texts)
    options: Options = {"worker_times" if source.per_worker else "stage_times": entries}
    if source.nodes:
        options["workers_per_node"] = list_text(source.nodes)
    names = [name for name in ("latency", "transmit") if name in source.messages[0]]
    for name in names:
        option = "comm" if names == ["transmit"] else name
        options[option] = ",".join(seconds_texts(message[name] for message in source.messages))
    return options


def _model_options(scenario: "pj.Scenario") -> Options:
    """Return the options of a model: those that differ from the defaults of its software."""
    from pipejax.costs.model.launchers import default_overlap, launcher_defaults, merge_fields

    workload, system, files = scenario.source.workload, scenario.source.system, scenario.files
    assert workload is not None
    assert system is not None
    names = {"model": workload.model.name, "system": system.name, **files}
    options: Options = {k: v for k, v in names.items() if k in ("model", "system", "stack")}
    bare, model = pj.load_system(names["system"]), pj.load_model(names["model"])
    if model.sequence != workload.model.sequence:
        options["sequence"] = workload.model.sequence
        model = dataclasses.replace(model, sequence=workload.model.sequence)
    launcher, stack, workers = files.get("launcher"), names.get("stack"), scenario.num_workers
    with warnings.catch_warnings():  # the run has warned already
        warnings.simplefilter("ignore")
        model, software, defaults = launcher_defaults(launcher, model, bare, stack, workers)
    pairs = {"model": (model, workload.model), "system": (software.on(bare), system)}
    for name, (loaded, value) in pairs.items():
        if loaded != value:
            raise ValueError(f"{name} {names[name]} differs from its file: write it to a new file")
    options["minibatch"] = workload.minibatch
    defaults = default_overlap(launcher, workload.zero) | defaults
    usual_fields = merge_fields(defaults, {"pipeline_layout": workload.pipeline_layout})
    # the layout sets units of embedding and head; without it here, it is written as an option
    usual = pj.Workload(model, workload.minibatch, **usual_fields | {"pipeline_layout": ""})
    for field in dataclasses.fields(workload):
        name, value = field.name, getattr(workload, field.name)
        # the command line refuses options that have no effect on this workload
        needed = line.NEEDS[name].other if name in line.NEEDS else ""
        is_refused = needed != "" and getattr(workload, needed) == 1
        is_refused |= name in OF_EXPERTS and not workload.has_experts
        if value == getattr(usual, name) or is_refused:
            continue
        if name in _WRITERS:
            options[name] = _WRITERS[name](value)
        elif value is False or name not in (*WORKLOAD, "weight_share", "recompute_again"):
            raise ValueError(f"no option sets {name} of a workload to {value!r}")
        else:
            options[name] = number_text(value) if isinstance(value, float) else value
    return options


# edits


def _parse_microbatches(run: Any) -> "pj.costing.Microbatches":
    """Read lengths, factors and order of the microbatches."""
    for name in ("microbatch_scale", "sequence"):
        if run.lengths is not None and getattr(run, name) is not None:
            raise ValueError(f"--lengths and {flag(name)} set the same lengths: give one")
    lengths = None if run.lengths is None else pj.files.read_lengths(run.lengths)
    scale, order = run.microbatch_scale, run.microbatch_order
    return pj.costing.Microbatches(
        None if lengths is None else tuple(lengths),
        None if scale is None else tuple(parse_list(scale, "--microbatch-scale")),
        None if order is None else tuple(_parse_order(order)),
    )


def _parse_order(text: str) -> list[int]:
    """Read an order such as 2,0,1, or the file that `pipejax tune microbatches` wrote."""
    order = whole_numbers(text)
    if order is None and "," not in text:
        order = load_json(text).get("order")
    if not isinstance(order, list):
        raise ValueError(
            "--microbatch-order must be numbers of microbatches, as 2,0,1, or a file with a list "
            f'"order", got {text!r}'
        )
    return order


def _parse_host_times(run: Any, source: "CostSource") -> "pj.costing.HostTimes":
    """Read the times of offloads and loads [s]; by the host link for "system"."""
    if run.offload == BY_LINK:
        if source.workload is None:
            raise ValueError("--offload system needs --model, and a --system with a host_link")
        return pj.costing.HostTimes(None)
    offload = tuple(parse_list(run.offload, "--offload", seconds=True))
    load = None if run.load is None else tuple(parse_list(run.load, "--load", seconds=True))
    return pj.costing.HostTimes(offload, load, source.workload is not None)


BY_LINK = "system"  # as --offload: the time of the system's host link


def _parse_edits(
    run: Any, source: "CostSource", microbatches: "pj.costing.Microbatches"
) -> "Iterable[Edit]":
    """Yield the edits of the costs, in the order in which they apply."""
    if run.offload is not None:
        host_times = _parse_host_times(run, source)
        if source.lengths is None:  # a model prices O and L of each length
            yield host_times
    if source.lengths is not None:
        microbatches = dataclasses.replace(microbatches, lengths=None)
    if microbatches != pj.costing.Microbatches():
        yield microbatches
    if run.recompute_again and source.workload is None:
        yield pj.costing.RecomputedAgain()
    if run.pair_factor is not None:
        yield pj.costing.PairFactor(parse_number(run.pair_factor, "--pair-factor"))
    if run.stragglers is not None:
        from pipejax.costs.scaling import parse_stragglers

        yield pj.costing.SlowWorkers(parse_stragglers(run.stragglers, "--stragglers"))
    if run.scale is not None:
        yield pj.costing.ScaledTimes(run.scale)


def parse_gathering(lane: str | None, lookahead: str | None, residency: str | None) -> Any:
    """Read how sharded weights are gathered; None if no option says so."""
    if lane == HOST_LINK or lane == "":
        raise ValueError(f"--sharding-lane must be compute, net or another name, got {lane!r}")
    ahead = () if lookahead is None else parse_counts(lookahead, "--lookahead", 0)
    held = () if residency is None else parse_counts(residency, "--residency")
    gathering = pj.costing.ShardingCells(lane, tuple(ahead), tuple(held))
    return None if gathering == pj.costing.ShardingCells() else gathering


def _write_numbers(edit: Any, names: str) -> Options:
    """Write lists of numbers of an edit that are given."""
    values = {name: getattr(edit, name) for name in names.split()}
    return {name: list_text(value) for name, value in values.items() if value}


def _write_host_times(edit: "pj.costing.HostTimes") -> Options:
    if edit.offload is None:
        return {"offload": BY_LINK}
    times = {"offload": edit.offload, "load": edit.load}
    return {name: ",".join(seconds_texts(t)) for name, t in times.items() if t is not None}


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "worker_places": list_text,
    "stragglers": lambda factors: ",".join(
        f"{worker}={number_text(factor)}" for worker, factor in dict(factors).items()
    ),
    "pair_factor": number_text,
}


def _edit_options(scenario: "pj.Scenario") -> Options:
    """Return the options that make the edits of a scenario."""
    writers: Mapping[type, Callable[[Any], Options]] = {
        pj.costing.RecomputeCells: lambda _: {"recompute_cells": True},
        pj.costing.ShardingCells: lambda edit: (
            _write_numbers(edit, "lookahead residency")
            | ({} if edit.lane is None else {"sharding_lane": edit.lane})
        ),
        pj.costing.HostTimes: _write_host_times,
        pj.costing.Microbatches: lambda edit: {
            f"microbatch_{name}": text for name, text in _write_numbers(edit, "scale order").items()
        },
        pj.costing.RecomputedAgain: lambda _: {"recompute_again": True},
        pj.costing.PairFactor: lambda edit: {"pair_factor": _WRITERS["pair_factor"](edit.factor)},
        pj.costing.SlowWorkers: lambda edit: {"stragglers": _WRITERS["stragglers"](edit.factors)},
        pj.costing.ScaledTimes: lambda edit: {"scale": edit.rules},
    }
    options: Options = {}
    for edit in scenario.edits:
        options |= writers[type(edit)](edit)
    if scenario.microbatches.lengths is not None:
        if "lengths" not in scenario.files:
            raise ValueError("lengths are in no file: write them, and name it in files")
        options["lengths"] = scenario.files["lengths"]
    return options


# Checks and results of scenarios, for commands


def required(scenario: "pj.Scenario") -> "pj.Scenario":
    """Return a scenario with times; without times, raise an error that names their options."""
    if not scenario.has_times:
        raise ValueError(
            "times are missing: give --stage-times F=1,B=2, --worker-times F=1,B=2, --costs FILE "
            "or --model NAME --system NAME --minibatch N"
        )
    return scenario


def build(scenario: "pj.Scenario") -> pj.ScheduleTable:
    """Build the table of a scenario, and refuse times that it does not use."""
    table, schedule = scenario.table(), scenario.schedule
    check_used(scenario, [table], [find(schedule)] if isinstance(schedule, str) else [])
    if (launch := named_launch(scenario)) and launch.lacks:
        warnings.warn(launch.refusal, Notice, stacklevel=2)
    return table


def named_launch(scenario: "pj.Scenario") -> "pj.results.Launch | None":
    """Return the options of the launcher that a run names; None if it names none."""
    if "launcher" not in scenario.files:
        return None
    from pipejax.search.remedies.candidates import run_launch

    return run_launch(scenario, scenario.files["launcher"])


def check_used(
    scenario: "pj.Scenario",
    tables: Sequence[pj.ScheduleTable],
    builders: Iterable[Builder] = (),
    letters: Collection[str] | None = None,
) -> None:
    """Refuse a time of ops that no table has, and for which no builder plans its order."""
    # `letters` are those of the ops to check, "pair" for fused pairs; default: all ops.
    from pipejax.costs.costs import PHASE_FIELDS

    used_letters: set[str] = set()
    valid_letters = dict.fromkeys(("pair", *PHASE_FIELDS))
    for table in tables:
        used_letters |= {phase.name for phase in table.used_phases}
        used_letters |= {"pair"} if table.is_fused.any() else set()
        valid_letters |= dict.fromkeys(table.grammar.letters)
    # fields of costs for which builders plan their order
    planned = {field for builder in builders for field in builder.takes}
    for letter, text in _optional_times(scenario).items():
        if letters is not None and letter not in letters:
            continue
        if letter not in valid_letters:
            raise ValueError(f"{text} is not LETTER=TIME: letters are {', '.join(valid_letters)}")
        if letter not in used_letters and PHASE_FIELDS.get(letter) not in planned:
            noun = "fused pair" if letter == "pair" else letter
            names = ", ".join(dict.fromkeys(table.name for table in tables))
            raise ValueError(f"{text} has no effect: no {noun} in {names}")


# times without effect on a table that lacks these ops; without cells, the step ends with A and U
_OPTIONAL = [phase.name for phase in TIMED if phase not in (*SPLIT, pj.Phase.B, *STEP_END)]


def _optional_times(scenario: "pj.Scenario") -> dict[str, str]:
    """Return {letter: option} for times of ops that most tables lack, such as --stage-times: R."""
    from pipejax.costs.costs import PHASE_FIELDS, TIME_FIELDS

    source, texts = scenario.source, {}
    if isinstance(source, pj.costing.GivenTimes):
        option, times = flag("worker_times" if source.per_worker else "stage_times"), source.times
        texts = {k: f"{option}: {k}" for k in _OPTIONAL if PHASE_FIELDS[k] in times}
        custom = times.keys() - TIME_FIELDS.values()
        texts |= {k: f"{option}: '{k}={times[k]:g}'" for k in times if k in custom}
        texts |= {"pair": f"{option}: pair={times['pair']:g}"} if "pair" in times else {}
    if (host := scenario.find_edit(pj.costing.HostTimes)) is not None:
        host_texts = _write_host_times(host)
        texts |= {PHASES[name]: f"{flag(name)} {text}" for name, text in host_texts.items()}
    workload = source.workload
    is_again = workload is not None and workload.recompute_again
    if is_again and "launcher" in scenario.files:
        from pipejax.costs.model.launchers import LAUNCHERS

        is_again = not LAUNCHERS[scenario.files["launcher"]].workload.get("recompute_again")
    if is_again or scenario.find_edit(pj.costing.RecomputedAgain):
        texts["W"] = "--recompute-again"
        if workload is None or workload.recompute == "none":
            texts["R"] = "--recompute-again"
    if (pairs := scenario.find_edit(pj.costing.PairFactor)) is not None:
        texts["pair"] = f"--pair-factor {number_text(pairs.factor)}"
    return texts


PHASES = {"offload": "O", "load": "L"}


def check_alike(scenario: "pj.Scenario", command: str) -> None:
    """Refuse microbatches of different lengths."""
    if scenario.microbatches != pj.costing.Microbatches():
        raise ValueError(
            f"{command} takes microbatches as alike: leave out --lengths, --microbatch-scale "
            "and --microbatch-order"
        )


def memory_room(scenario: "pj.Scenario", table: pj.ScheduleTable) -> Options:
    """Return the memory that workers need, and whether the system has it; empty without a model."""
    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        return {}
    need = pj.memory_bytes(workload, table)
    return {"memory_bytes": need, "fits": bool(need.max() <= float(system.memory_available))}
