"""What every option is: kind of value, one line of help, short letter, and its panel."""

from collections.abc import Mapping
from typing import NamedTuple

from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS, WorkloadField
from pipejax.runtimes.formats import FORMATS


class ValueKind(NamedTuple):
    """Kind of a value."""

    metavar: str  # stands for the value in help
    least: int | None = None  # smallest number, if there is one
    most: int | None = None  # largest number, likewise
    note: str = ""  # how a value is written, where the metavar alone does not say it


FLAG = ValueKind("")
COUNT = ValueKind("N", 1)
WHOLE = ValueKind("N", 0)
NUMBER = ValueKind("X")
NUMBERS = ValueKind("X,..")
NAME = ValueKind("NAME")
NAMES = ValueKind("NAME,..")
FILE = ValueKind("FILE")
FOLDER = ValueKind("FOLDER")
FILE_OR_FOLDER = ValueKind("FILE|FOLDER")
NAME_OR_FILE = ValueKind("NAME|FILE")
RULES = ValueKind("TEXT")
SIZE = ValueKind("SIZE")
TIME = ValueKind("TIME", note="40us, 1ms, 2.5s, or a plain number of seconds")
TIMES = ValueKind("TIMES", note=TIME.note)
TIME_OF_STAGES = ValueKind("TIME,..", note=TIME.note)
SHARE = ValueKind("SHARE", note="0.1, or 10%")
LIMIT = ValueKind("LIMIT", note="activations (3), or bytes of a device with a model (40GB, 80GiB)")


class OptionRecord(NamedTuple):
    """What is known of an option wherever it stands."""

    kind: ValueKind  # of its value
    head: str  # its help in one line
    short: str = ""  # its letter, if it has one
    frequent: bool = False  # whether `--help` gives it a line where it cannot give all of them one
    # what completes its value: words, or the name of a list of `--completion`
    names: tuple[str, ...] | str = ()
    more: str = ""  # its help beyond the line, wherever it stands
    argument: str = ""  # what the library calls it, where that is something else


def _often(
    kind: ValueKind,
    head: str,
    short: str = "",
    names: tuple[str, ...] | str = (),
    argument: str = "",
) -> OptionRecord:
    return OptionRecord(kind, head, short, True, names, argument=argument)


def _of_workload(field: WorkloadField) -> OptionRecord:
    kinds = {
        **{"whole": ValueKind("N", field.least, field.largest), "flag": FLAG, "name": NAME},
        "share": NUMBER,
    }
    return OptionRecord(kinds.get(field.kind, RULES), field.head, names=field.names)


_LINKS = ("delay", "queued", "blocking", "rendezvous")
_QUEUES = ("worker", "pair", "direction")
_SEGMENTS = ("warmup", "steady", "cooldown")
_TIME_UNITS = ("s", "ms", "us", "ns")
_PLACES = ("under", "beside")
_RUNTIMES = ("jax", "torch")
_FORMATS = ("text", "markdown", "latex", "csv")

PANELS: Mapping[str, Mapping[str, OptionRecord]] = {
    "Schedule": {
        "schedule": OptionRecord(
            NAME,
            "schedule to build, see `pipejax schedules`",
            "s",
            frequent=True,
            names="schedules",
            more="a name, a table, or a function of your own as FILE.py:FUNCTION.",
        ),
        "schedules": OptionRecord(
            NAMES,
            "schedules, as gpipe,1f1b,chimera",
            "S",
            frequent=True,
            names="schedules",
            more="names, tables (.csv, .json), folders of tables, functions as FILE.py:FUNCTION.",
        ),
        "tables": _often(FILE_OR_FOLDER, "a table, or a folder of tables, to look at too"),
        "table": _often(FILE, "table to read: PyTorch's CSV, or JSON", "t"),
        "workers": _often(COUNT, "workers P", "P", argument="num_workers"),
        "microbatches": _often(COUNT, "microbatches M", "M", argument="num_microbatches"),
        "stages_per_worker": OptionRecord(COUNT, "stages per worker V, where interleaved", "V"),
        "waves": OptionRecord(COUNT, "waves of hanayo"),
        "slices": OptionRecord(COUNT, "slices K of a microbatch, of seq-1f1b and its like"),
        "schedule_options": OptionRecord(
            RULES, "options that have no flag of their own, as variant=1"
        ),
        "prompt": _often(COUNT, "tokens of a prompt", argument="tokens"),
        "num_chunks": OptionRecord(COUNT, "chunks that the prompt is cut into"),
        "multiple": OptionRecord(COUNT, "tokens that the size of a chunk is a multiple of"),
        "slots": OptionRecord(RULES, "slot durations the table is drawn with, as F=1,B=2"),
        "planned_comm": OptionRecord(
            NUMBER, "its order is made for messages of so many slots", argument="transfer"
        ),
        "planned_offload": OptionRecord(
            NUMBERS, "its order is made for an O of so many slots", argument="offload"
        ),
        "planned_load": OptionRecord(
            NUMBERS, "its order is made for an L of so many slots", argument="load"
        ),
        "offload_share": OptionRecord(NUMBER, "share of activations that pipe-offload may offload"),
        "group_size": OptionRecord(COUNT, "microbatches of a group, interleaved or offloaded"),
        "pipes": OptionRecord(COUNT, "pipes of chimera: 2f, f down and f up"),
        "stage_shares": OptionRecord(NUMBERS, "layers per stage of chimera-asymmetric, as 1,1,2,2"),
        "sharding_lane": OptionRecord(NAME, "lane of UNSHARD and REDUCE_GRAD: compute or net"),
        "lookahead": OptionRecord(NUMBERS, "gather sharded weights so many uses ahead"),
        "residency": OptionRecord(NUMBERS, "stages of a worker gathered at once, at most"),
        "accumulation": OptionRecord(COUNT, "microbatches of an update, of pipedream-2bw"),
        "admission": OptionRecord(
            NAME, "what limits pipedream in flight", names=("each-stage", "first-stage")
        ),
        "runs": OptionRecord(COUNT, "models R that local-sgd trains side by side"),
        "local_steps": OptionRecord(COUNT, "updates H of local-sgd between two averages"),
        "repair": OptionRecord(NAME, "read a table known to be wrong", names=("torch-1f1b",)),
    },
    "Times and costs": {
        "stage_times": _often(TIMES, "time of each op of a stage, as F=1ms,B=2ms", "T"),
        "worker_times": _often(TIMES, "time of one microbatch on one worker", "W"),
        "costs": _often(FILE, "measured costs: JSON, or CSV by stage", "C"),
        "comm": _often(TIME, "time of a message: latency 0, this transmit", "c"),
        "latency": OptionRecord(TIME, "latency of a message"),
        "transmit": OptionRecord(TIME, "transmit time of a message"),
        "offload": OptionRecord(
            TIME_OF_STAGES, "how long O takes in the run: an activation to the host"
        ),
        "load": OptionRecord(TIME_OF_STAGES, "how long L takes in the run: it comes back"),
        "pair_factor": OptionRecord(
            NUMBER, "a fused F and B takes max(F, B) + k min(F, B): this k"
        ),
        "stragglers": OptionRecord(RULES, "slow workers and their factors, as 3=1.2,5=2"),
        "scale": OptionRecord(RULES, "factors on times, as compute@stage3*0.8,message*2"),
        "measured_stages": OptionRecord(COUNT, "stages that times are of, if the table has others"),
    },
    "Model and system": {
        "model": _often(NAME_OR_FILE, "model: a name, or a JSON file", "m", "models"),
        "system": _often(NAME_OR_FILE, "system: a name, or a JSON file", "y", "systems"),
        "stack": OptionRecord(NAME_OR_FILE, "software: a name, or a JSON file", names="stacks"),
        "gpus": _often(COUNT, "accelerators of the job, all of which are used"),
        "minibatch": OptionRecord(COUNT, "sequences per step of one pipeline"),
        "microbatch_size": OptionRecord(COUNT, "sequences of a microbatch b"),
        "sequence": OptionRecord(COUNT, "tokens of a sequence; the model's own if not given"),
        **{name: _of_workload(field) for name, field in WORKLOAD_FIELDS.items() if field.head},
        "workers_per_node": OptionRecord(RULES, "workers that share a node of the machine"),
        "worker_places": OptionRecord(RULES, "place of each worker on the machine"),
    },
    "Layouts to search": {
        "tensor": OptionRecord(COUNT, "degrees t of tensor parallelism, as 4,8"),
        "context": OptionRecord(COUNT, "degrees c of context parallelism"),
        "expert": OptionRecord(COUNT, "degrees e of expert parallelism"),
        "expert_tensor": OptionRecord(COUNT, "accelerators that split each expert, as 1,4"),
        "data": OptionRecord(COUNT, "replicas d of the pipeline"),
        "pipeline": OptionRecord(COUNT, "workers p of a pipeline"),
        "edge_units": OptionRecord(WHOLE, "layers that embedding and head each count as"),
        "exhaustive": OptionRecord(FLAG, "evaluate every layout exactly"),
        "runners_up": OptionRecord(WHOLE, "layouts to show after the best"),
    },
    "Microbatches that differ": {
        "lengths": OptionRecord(FILE, "file of the tokens of each microbatch"),
        "microbatch_scale": OptionRecord(NUMBERS, "factors on the times of each, as 1,0.5,2"),
        "microbatch_order": OptionRecord(RULES, "their order, as 2,0,1, or a file"),
    },
    "Links": {
        "link": _often(NAME, "|".join(_LINKS), "l", _LINKS),
        "queues": OptionRecord(NAME, "what has a queue of its own under rendezvous", names=_QUEUES),
        "posting": OptionRecord(
            NAME,
            "when a worker is ready for a transfer under rendezvous",
            names=("early", "program"),
        ),
        "eager_below": OptionRecord(TIME, "under rendezvous, shorter messages wait for nobody"),
        "pair_links": OptionRecord(RULES, "link models between certain workers"),
        "shared_links": OptionRecord(RULES, "links that carry one message at a time"),
        "host_links": OptionRecord(RULES, "workers that share a host link, as 0+1,2+3"),
    },
    "Memory": {
        "memory_limit": OptionRecord(LIMIT, "most activations that a worker may hold"),
        "headroom": OptionRecord(
            SHARE, "share of a device's memory left for what tensors do not tell"
        ),
        "no_memory_limit": OptionRecord(FLAG, "let workers need more than they have"),
        "weights_limit": OptionRecord(RULES, "most that gathered weights take on a worker at once"),
        "weight_share": OptionRecord(
            NUMBER,
            "share of an activation that is held between I and W",
            more="from 0 to 1; if not given it follows from the layers of --model, else it is 1/3.",
        ),
        "activation_sizes": OptionRecord(
            NUMBERS, "size of an activation, of all stages or each", argument="sizes"
        ),
        "memory": OptionRecord(FLAG, "show the activation memory of each worker over time"),
        "recompute_cells": OptionRecord(FLAG, "put R before every B or I"),
        "recompute_again": OptionRecord(FLAG, "W recomputes once more: it lasts W + R"),
    },
    "Slack and paths": {
        "slack": OptionRecord(FLAG, "show how much longer ops could take"),
        "target": OptionRecord(TIME, "when the step must end"),
        "corner": OptionRecord(RULES, "other costs, as slow:transmit*2"),
        "paths": OptionRecord(COUNT, "longest paths to show"),
        "distinct_counts": OptionRecord(FLAG, "of paths with equal counts only one"),
    },
    "Closed form": {
        "parameters": OptionRecord(RULES, "what it is a function of, as F,B,c_F,c_B"),
        "family": OptionRecord(
            NAME, "show how it depends on M, or on P, or M=8:80:8", names=("M", "P")
        ),
        "versus": OptionRecord(NAMES, "other schedules: where is which faster?", names="schedules"),
        "per_worker": OptionRecord(FLAG, "phases take what --worker-times says"),
        "box": OptionRecord(RULES, "ranges of parameters, as F=1ms:2ms,c_F=0:1ms"),
        "max_facets": OptionRecord(COUNT, "sums at which the search ends"),
    },
    "What varies": {
        "op": OptionRecord(RULES, "jitter of each op, as lognormal:0.1", argument="distribution"),
        "worker": OptionRecord(RULES, "jitter of each worker"),
        "message": OptionRecord(RULES, "jitter of each message"),
        "straggler": OptionRecord(RULES, "a worker is slow, as 0.01:2"),
        "op_straggler": OptionRecord(RULES, "an op is slow, as 0.01:2"),
        "quantile": OptionRecord(NUMBER, "quantile that ranks"),
        "ops": OptionRecord(FLAG, "show how often ops are on the critical path"),
        "factor": OptionRecord(NUMBER, "divide and multiply each parameter by this"),
    },
    "Fit and check": {
        "collectives": OptionRecord(FILE, "collectives and messages timed alone: a CSV file"),
        "fit": OptionRecord(RULES, "numbers to fit to the runs"),
        "hold_out": OptionRecord(RULES, "rows to predict without, as t=8, k-fold:5, model"),
        "layer_times": OptionRecord(RULES, "columns whose values have a layer time each"),
        "starts": OptionRecord(COUNT, "points to start from"),
        "general": OptionRecord(FLAG, "take priors of machines in general"),
        "tolerance": OptionRecord(NUMBER, "mean error that passes, in percent"),
        "predictions": OptionRecord(FILE, "predictions of any simulator to judge: a CSV file"),
    },
    "Points of a sweep": {
        "best": _often(COUNT, "points to list"),
        "by": _often(NAME, "what they are ranked by"),
        "where": _often(RULES, "points to look at, as systems=h100 or step_time<3s"),
        "pareto": _often(FLAG, "list the points that no other beats in two things"),
        "axes": OptionRecord(NAMES, "these two things, as step_time,memory_bytes"),
        "knee": _often(NAME, "an axis: from which value on does it not pay any more?"),
        "within": OptionRecord(NUMBER, "how near to the best is near enough, in percent"),
        "map": OptionRecord(NAMES, "two axes: which schedule is best where?"),
    },
    "Search and samples": {
        "method": OptionRecord(NAME, "how to tune", names=("gradient", "exhaustive")),
        "minimize": OptionRecord(NAME, "what is to be least", names=("makespan", "span")),
        "time_limit": _often(TIME, "longest search; Ctrl-C ends it sooner"),
        "effort": OptionRecord(
            NUMBER, "when the search ends by what it has done, the same on any machine"
        ),
        "gap": OptionRecord(SHARE, "end the search when nothing unknown saves more"),
        "iterations": OptionRecord(WHOLE, "most batches of orders to try"),
        "samples": _often(COUNT, "runs of each schedule to sample"),
        "replicas": OptionRecord(COUNT, "replicas of the pipeline, the slowest of which counts"),
        "seed": OptionRecord(WHOLE, "seed of what is drawn at random"),
        "columns": OptionRecord(RULES, "names of columns, as replica=dp,start=begin"),
        "world": OptionRecord(COUNT, "ranks of the run that was traced"),
        "only_steps": OptionRecord(RULES, "only these steps of a trace"),
        "against": _often(FILE_OR_FOLDER, "files of another run, to say what got slower"),
        "stage_layers": OptionRecord(NUMBERS, "layers of the stages that were measured"),
        "search": OptionRecord(FLAG, "run the solvers too, which take some seconds"),
        "threads": OptionRecord(
            COUNT, "threads of the solver; one per processor", argument="num_threads"
        ),
        "store": OptionRecord(FOLDER, "folder of solved problems"),
        "no_store": OptionRecord(FLAG, "neither use nor keep solved problems"),
        "scheduler": OptionRecord(RULES, "Dask scheduler whose workers evaluate"),
    },
    "Runtime": {
        "runtime": _often(NAME, "|".join(_RUNTIMES), names=_RUNTIMES),
        "hidden": OptionRecord(COUNT, "width of the layers of a stage"),
        "batch_size": OptionRecord(COUNT, "examples of a microbatch"),
        "steps": OptionRecord(WHOLE, "steps to time"),
        "trace": OptionRecord(FOLDER, "traces of the timed steps, into this new folder"),
    },
    "Picture": {
        "from_": OptionRecord(TIME, "left end of the time axis", argument="start"),
        "to": OptionRecord(TIME, "right end of the time axis", argument="stop"),
        "part": OptionRecord(NAME, "segment to show: warmup, steady or cooldown", names=_SEGMENTS),
        "unit": OptionRecord(NAME, "unit of the time axis", names=_TIME_UNITS),
        "messages": OptionRecord(FLAG, "show messages as thin lines"),
        "transfers": OptionRecord(FLAG, "show messages as bars in a lane of their workers"),
        "choose": OptionRecord(FLAG, "let schedules and sizes be chosen on the page"),
        "no_critical": OptionRecord(FLAG, "leave the critical path unmarked"),
        "title": OptionRecord(NAME, "stands above all"),
        "labels": OptionRecord(NAME, "names of the schedules, by comma, in their order"),
        "caption": OptionRecord(NAME, "write the parameters under or beside", names=_PLACES),
        "width": OptionRecord(ValueKind("N", 20, 100_000), "columns of the terminal's timeline"),
        "size": OptionRecord(SIZE, "column, page or a width, as 8.5cm"),
        "font": OptionRecord(NAME, "family of the texts"),
        "font_size": OptionRecord(NUMBER, "size of the texts in points"),
    },
    "Output": {
        "save": OptionRecord(FOLDER, "files to go on with, into this new folder"),
        "write_tables": OptionRecord(FOLDER, "write each table to this new folder"),
        "out": _often(FILE, "write to this file", "o"),
        "figure": OptionRecord(FILE, "draw a picture to this file"),
        "certificate": OptionRecord(FILE, "write what is claimed to this file (.json)"),
        "models": OptionRecord(FLAG, "list models and their sources"),
        "systems": OptionRecord(FLAG, "list systems and their sources"),
        "stacks": OptionRecord(FLAG, "list stacks of software and their sources"),
        "open": OptionRecord(FLAG, "open what is written in the browser"),
        "diff": OptionRecord(FLAG, "show what two tables do differently, and what it costs"),
        "exchange": OptionRecord(FLAG, "run the first with one row of the second"),
        "force": OptionRecord(FLAG, "replace files that are there"),
        "resume": OptionRecord(FLAG, "go on with a store that is there"),
        "worst": OptionRecord(WHOLE, "waiting transfers to list"),
        "format": OptionRecord(NAME, "|".join(_FORMATS), "f", names=_FORMATS),
        "details": _often(FLAG, "print the whole report, not its first screen"),
        "json": _often(FLAG, "print one JSON object and nothing else", "j"),
        "config": OptionRecord(FILE, "options from a file (.toml or .json)"),
        "help": OptionRecord(FLAG, "show this", "h"),
        "help_all": OptionRecord(FLAG, "explain every option"),
    },
}
CATALOGUE: Mapping[str, OptionRecord] = {
    name: option for panel in PANELS.values() for name, option in panel.items()
}
_PANELS = {name: title for title, panel in PANELS.items() for name in panel}
OF_ARGUMENTS = {option.argument: name for name, option in CATALOGUE.items() if option.argument}
SHORT = {option.short: name for name, option in CATALOGUE.items() if option.short}
# options that mean something else in a command: export prints no table, and its format is that of
# the file it writes; a file to begin with is from another one; a plan says how many pipelines a job
# has; what a runtime trains has microbatches, and its gradients are equal or not
EXCEPTIONS = {
    ("chunks", "stage_times"): OptionRecord(
        TIMES, "times of a chunk, as a=2ms,b=5us,c=0.7ns,g=1ns", "T", frequent=True
    ),
    ("chunks", "transmit"): OptionRecord(TIME, "transmit time of a message, by token"),
    ("export", "format"): OptionRecord(NAME, "|".join(FORMATS), "f", True, (*FORMATS,)),
    ("init", "from_"): OptionRecord(FILE, "what is read: a config.json, or a training log"),
    ("init", "columns"): OptionRecord(RULES, "columns of rows that a log does not say"),
    ("plan", "minibatch"): OptionRecord(COUNT, "sequences per step of the whole job"),
    ("trace", "steps"): OptionRecord(COUNT, "steps in all files, where none says it"),
    ("run", "tolerance"): OptionRecord(NUMBER, "largest error of a gradient that passes"),
}
# options that stand in another panel
PLACES = {
    ("trace", "steps"): "Schedule",
    ("init", "from_"): "Model and system",
    ("init", "columns"): "Model and system",
    ("compare", "labels"): "Schedule",
}
# options that have another default, or none, in some command, and why
DIFFERENT_DEFAULTS = {
    "format": "`export` writes a file of a format that has to be named",
    "iterations": "two searches of their own, each with as many rounds as take seconds",
    "link": "`validate` takes the link model that each row names",
    "memory_limit": "`optimize` searches under a limit, and has no other",
    "minibatch": "`plan` has no other source of costs than a model",
    "model": "`plan` has no other source of costs than a model",
    "out": "`export` and `sweep run` are for their file",
    "schedule": "`tune` takes one where nothing is said",
    "schedules": "`plan` tries three where nothing is said",
    "steps": "`run` times some steps, `trace` is told how many there are",
    "system": "`plan` has no other source of costs than a model",
    "tolerance": "`validate` counts percent, `run` an error of gradients",
}


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.rstrip('_').replace('_', '-')}"  # from_: the word is Python's own


def begin_sentence(head: str) -> str:
    """Begin a sentence with a line of the catalogue, unless it begins with values."""
    return head if "|" in head.partition(" ")[0] else head[0].upper() + head[1:]


def record(name: str, command: str = "") -> OptionRecord:
    """Return what an option is, in a command."""
    try:
        return EXCEPTIONS.get((command.removeprefix("tune "), name)) or CATALOGUE[name]
    except KeyError:
        raise LookupError(f"option {name!r} has no record in {__name__}") from None


def panel_of(name: str, command: str) -> str:
    """Return the panel of help that an option of a command stands in."""
    return PLACES.get((command, name)) or _PANELS[name]
