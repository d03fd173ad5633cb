"""Every option: kind of value, line of help, short letter, and its panel."""

from collections.abc import Mapping
from typing import NamedTuple

from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS, WorkloadField
from pipejax.runtimes.formats import FORMATS


class ValueKind(NamedTuple):
    """Kind of a value."""

    metavar: str  # stands for the value in help
    least: int | None = None  # smallest number, if there is one
    largest: int | None = None  # largest number
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
    """An option, with the same meaning in every command."""

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


def _workload_option(field: WorkloadField) -> OptionRecord:
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
            "schedule to build; `pipejax schedules` lists them",
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
        "tables": _often(FILE_OR_FOLDER, "table, or folder of tables, to add"),
        "table": _often(FILE, "table to read: PyTorch's CSV, or JSON", "t"),
        "workers": _often(COUNT, "number of workers P", "P", argument="num_workers"),
        "microbatches": _often(COUNT, "number of microbatches M", "M", argument="num_microbatches"),
        "stages_per_worker": OptionRecord(
            COUNT, "stages per worker V of interleaved schedules", "V"
        ),
        "waves": OptionRecord(COUNT, "number of waves (hanayo)"),
        "slices": OptionRecord(COUNT, "slices K of a microbatch (seq-1f1b, terapipe, slimpipe)"),
        "schedule_options": OptionRecord(
            RULES, "options of a schedule that have no flag of their own, as variant=1"
        ),
        "prompt": _often(COUNT, "length of the prompt [tokens]", argument="tokens"),
        "num_chunks": OptionRecord(COUNT, "number of chunks of the prompt"),
        "multiple": OptionRecord(COUNT, "chunk sizes are multiples of this [tokens]"),
        "slots": OptionRecord(RULES, "durations of ops in the table [slots], as F=1,B=2"),
        "planned_comm": OptionRecord(
            NUMBER, "message time assumed when the order is planned [slots]", argument="transfer"
        ),
        "planned_offload": OptionRecord(
            NUMBERS, "time of O assumed when the order is planned [slots]", argument="offload"
        ),
        "planned_load": OptionRecord(
            NUMBERS, "time of L assumed when the order is planned [slots]", argument="load"
        ),
        "offload_share": OptionRecord(
            NUMBER, "largest share of activations to offload (pipe-offload)"
        ),
        "group_size": OptionRecord(
            COUNT, "microbatches of a group (interleaved-1f1b, pipe-offload)"
        ),
        "pipes": OptionRecord(COUNT, "number of pipes 2f of chimera: f down and f up"),
        "stage_shares": OptionRecord(NUMBERS, "layers per stage of chimera-asymmetric, as 1,1,2,2"),
        "sharding_lane": OptionRecord(NAME, "lane of UNSHARD and REDUCE_GRAD: compute or net"),
        "lookahead": OptionRecord(NUMBERS, "number of uses by which weights are gathered ahead"),
        "residency": OptionRecord(NUMBERS, "largest number of gathered stages on a worker"),
        "accumulation": OptionRecord(COUNT, "microbatches per weight update (pipedream-2bw)"),
        "admission": OptionRecord(
            NAME, "limit of microbatches in flight (pipedream)", names=("each-stage", "first-stage")
        ),
        "runs": OptionRecord(COUNT, "number of models R trained side by side (local-sgd)"),
        "local_steps": OptionRecord(COUNT, "updates H between two averages (local-sgd)"),
        "repair": OptionRecord(
            NAME, "read a table with a known error, and correct it", names=("torch-1f1b",)
        ),
    },
    "Times and costs": {
        "stage_times": _often(TIMES, "time of each op on a stage, as F=1ms,B=2ms", "T"),
        "worker_times": _often(TIMES, "time of one microbatch on one worker", "W"),
        "costs": _often(FILE, "measured costs: JSON, or CSV by stage", "C"),
        "comm": _often(TIME, "transmit time of a message, without latency", "c"),
        "latency": OptionRecord(TIME, "latency of a message"),
        "transmit": OptionRecord(TIME, "transmit time of a message"),
        "offload": OptionRecord(
            TIME_OF_STAGES, "time to offload one activation to the host (op O)"
        ),
        "load": OptionRecord(TIME_OF_STAGES, "time to load one activation from the host (op L)"),
        "pair_factor": OptionRecord(NUMBER, "k of a fused pair's time max(F, B) + k min(F, B)"),
        "stragglers": OptionRecord(RULES, "slow workers and their factors, as 3=1.2,5=2"),
        "scale": OptionRecord(RULES, "factors on times, as compute@stage3*0.8,message*2"),
        "measured_stages": OptionRecord(COUNT, "number of stages that the measured times cover"),
    },
    "Model and system": {
        "model": _often(NAME_OR_FILE, "model: a name or a JSON file", "m", "models"),
        "system": _often(NAME_OR_FILE, "system: a name or a JSON file", "y", "systems"),
        "stack": OptionRecord(
            NAME_OR_FILE, "software stack: a name or a JSON file", names="stacks"
        ),
        "gpus": _often(COUNT, "number of accelerators of the job; all are used"),
        "minibatch": OptionRecord(COUNT, "sequences per step of one pipeline"),
        "microbatch_size": OptionRecord(COUNT, "sequences per microbatch b"),
        "sequence": OptionRecord(COUNT, "sequence length [tokens]; default: the model's"),
        **{name: _workload_option(field) for name, field in WORKLOAD_FIELDS.items() if field.head},
        "workers_per_node": OptionRecord(RULES, "workers per node of the machine, as 8 or 4,8"),
        "worker_places": OptionRecord(RULES, "place of each worker on the machine, as 0,4,1,5"),
    },
    "Layouts to search": {
        "tensor": OptionRecord(COUNT, "degrees t of tensor parallelism, as 4,8"),
        "context": OptionRecord(COUNT, "degrees c of context parallelism"),
        "expert": OptionRecord(COUNT, "degrees e of expert parallelism"),
        "expert_tensor": OptionRecord(COUNT, "accelerators that split each expert, as 1,4"),
        "data": OptionRecord(COUNT, "replicas d of the pipeline"),
        "pipeline": OptionRecord(COUNT, "workers p of a pipeline"),
        "edge_units": OptionRecord(
            WHOLE, "weight of embedding and head, in layers, when layers are split"
        ),
        "exhaustive": OptionRecord(FLAG, "evaluate every layout exactly"),
        "runners_up": OptionRecord(WHOLE, "layouts to show after the best"),
    },
    "Microbatches that differ": {
        "lengths": OptionRecord(FILE, "file with the length of each microbatch [tokens]"),
        "microbatch_scale": OptionRecord(
            NUMBERS, "factor on the times of each microbatch, as 1,0.5,2"
        ),
        "microbatch_order": OptionRecord(RULES, "order of the microbatches: 2,0,1 or a file"),
    },
    "Links": {
        "link": _often(NAME, "|".join(_LINKS), "l", _LINKS),
        "queues": OptionRecord(
            NAME, "unit that has one message queue (rendezvous only)", names=_QUEUES
        ),
        "posting": OptionRecord(
            NAME,
            "time at which a worker posts a transfer (rendezvous only)",
            names=("early", "program"),
        ),
        "eager_below": OptionRecord(
            TIME, "messages shorter than this are sent eagerly (rendezvous only)"
        ),
        "pair_links": OptionRecord(RULES, "link models of single pairs, as 0-1=queued"),
        "shared_links": OptionRecord(RULES, "links that share one channel, as 0-1+1-2"),
        "host_links": OptionRecord(RULES, "workers that share a host link, as 0+1,2+3"),
    },
    "Memory": {
        "memory_limit": OptionRecord(LIMIT, "limit of activation memory on each worker"),
        "headroom": OptionRecord(
            SHARE, "share of device memory reserved for fragmentation and buffers"
        ),
        "no_memory_limit": OptionRecord(FLAG, "allow layouts that do not fit in memory"),
        "weights_limit": OptionRecord(RULES, "limit of gathered weights on each worker"),
        "weight_share": OptionRecord(
            NUMBER,
            "share of an activation that is held between I and W",
            more="from 0 to 1; if not given it follows from the layers of --model, else it is 1/3.",
        ),
        "activation_sizes": OptionRecord(
            NUMBERS, "size of an activation, one number or one per stage", argument="sizes"
        ),
        "memory": OptionRecord(FLAG, "show the activation memory of each worker over time"),
        "recompute_cells": OptionRecord(FLAG, "put R before every B or I"),
        "recompute_again": OptionRecord(FLAG, "W recomputes again, so it takes W + R"),
    },
    "Slack and paths": {
        "slack": OptionRecord(FLAG, "show the slack of every op"),
        "target": OptionRecord(TIME, "deadline of the step, for slack [s]"),
        "corner": OptionRecord(RULES, "second set of costs for slack, as slow:transmit*2"),
        "paths": OptionRecord(COUNT, "number of longest paths to show"),
        "distinct_counts": OptionRecord(FLAG, "show one path of those with equal op counts"),
    },
    "Closed form": {
        "parameters": OptionRecord(RULES, "parameters of the closed form, as F,B,c_F,c_B"),
        "family": OptionRecord(
            NAME, "fit the form as a function of M or P, as M=8:80:8", names=("M", "P")
        ),
        "versus": OptionRecord(
            NAMES, "schedules to compare: the regions where each is fastest", names="schedules"
        ),
        "per_worker": OptionRecord(FLAG, "read op times as times of workers, not of stages"),
        "box": OptionRecord(RULES, "ranges of parameters, as F=1ms:2ms,c_F=0:1ms"),
        "max_facets": OptionRecord(COUNT, "number of sums at which the search stops"),
    },
    "What varies": {
        "op": OptionRecord(RULES, "jitter of each op, as lognormal:0.1", argument="distribution"),
        "worker": OptionRecord(RULES, "jitter of each worker"),
        "message": OptionRecord(RULES, "jitter of each message"),
        "straggler": OptionRecord(RULES, "slow worker, as probability 0.01 and factor 2: 0.01:2"),
        "op_straggler": OptionRecord(RULES, "slow op, as probability 0.01 and factor 2: 0.01:2"),
        "quantile": OptionRecord(NUMBER, "quantile that ranks the schedules"),
        "ops": OptionRecord(FLAG, "show how often ops are on the critical path"),
        "factor": OptionRecord(NUMBER, "factor by which each parameter is divided and multiplied"),
    },
    "Fit and check": {
        "collectives": OptionRecord(
            FILE, "CSV file of collectives and messages that were timed alone"
        ),
        "fit": OptionRecord(RULES, "parameters to fit to the runs"),
        "hold_out": OptionRecord(RULES, "rows to hold out and predict, as t=8, k-fold:5, model"),
        "layer_times": OptionRecord(RULES, "columns by whose values layer times differ"),
        "starts": OptionRecord(COUNT, "number of starting points"),
        "general": OptionRecord(FLAG, "use the priors of all machines"),
        "tolerance": OptionRecord(NUMBER, "largest mean error that passes [%]"),
        "predictions": OptionRecord(FILE, "CSV file of another simulator's predictions to judge"),
    },
    "Points of a sweep": {
        "best": _often(COUNT, "number of points to list"),
        "by": _often(NAME, "output that ranks the points"),
        "where": _often(RULES, "filter of points, as systems=h100 or step_time<3s"),
        "pareto": _often(FLAG, "list the Pareto front"),
        "axes": OptionRecord(NAMES, "two objectives of the front, as step_time,memory_bytes"),
        "knee": _often(NAME, "axis whose knee is searched: the value beyond which it gains little"),
        "within": OptionRecord(NUMBER, "distance from the best at the knee [%]"),
        "map": OptionRecord(NAMES, "two axes of a map of the best schedule"),
    },
    "Search and samples": {
        "method": OptionRecord(NAME, "method of tuning", names=("gradient", "exhaustive")),
        "minimize": OptionRecord(NAME, "quantity to minimize", names=("makespan", "span")),
        "time_limit": _often(TIME, "time limit of the search; Ctrl-C ends it sooner"),
        "effort": OptionRecord(NUMBER, "deterministic work limit of the search"),
        "gap": OptionRecord(SHARE, "stop when the bound proves that no more can be saved"),
        "iterations": OptionRecord(WHOLE, "largest number of batches of orders to try"),
        "samples": _often(COUNT, "number of sampled runs of each schedule"),
        "replicas": OptionRecord(COUNT, "replicas of the pipeline; the slowest ends the step"),
        "seed": OptionRecord(WHOLE, "seed of the random numbers"),
        "columns": OptionRecord(RULES, "names of columns, as replica=dp,start=begin"),
        "world": OptionRecord(COUNT, "ranks of the run that was traced"),
        "only_steps": OptionRecord(RULES, "steps of the trace to use, as 2:"),
        "all_steps": OptionRecord(FLAG, "keep odd steps, such as a warm-up, in all means"),
        "against": _often(FILE_OR_FOLDER, "files of an earlier run to compare with"),
        "stage_layers": OptionRecord(NUMBERS, "layers of each measured stage"),
        "launcher": OptionRecord(NAME, "launcher of the run, as megatron-lm or torchtitan"),
        "search": OptionRecord(FLAG, "search orders and splits too (some seconds)"),
        "threads": OptionRecord(
            COUNT, "threads of the solver; default: one per processor", argument="num_threads"
        ),
        "store": OptionRecord(FOLDER, "folder that keeps solved problems"),
        "no_store": OptionRecord(FLAG, "neither read nor keep solved problems"),
        "scheduler": OptionRecord(RULES, "address of a Dask scheduler whose workers evaluate"),
    },
    "Runtime": {
        "runtime": _often(NAME, "|".join(_RUNTIMES), names=_RUNTIMES),
        "hidden": OptionRecord(COUNT, "width of the layers of a stage"),
        "batch_size": OptionRecord(COUNT, "examples of a microbatch"),
        "steps": OptionRecord(WHOLE, "steps to time"),
        "trace": OptionRecord(FOLDER, "new folder for traces of the timed steps"),
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
        "title": OptionRecord(NAME, "title of the picture"),
        "labels": OptionRecord(NAME, "names of the schedules in their order, as A,B"),
        "caption": OptionRecord(NAME, "position of the parameters", names=_PLACES),
        "width": OptionRecord(ValueKind("N", 20, 100_000), "columns of the terminal's timeline"),
        "size": OptionRecord(SIZE, "column, page or a width, as 8.5cm"),
        "font": OptionRecord(NAME, "font family"),
        "font_size": OptionRecord(NUMBER, "font size [points]"),
    },
    "Output": {
        "save": OptionRecord(FOLDER, "new folder for files that other commands read"),
        "write_tables": OptionRecord(FOLDER, "new folder for the tables"),
        "out": _often(FILE, "file to write", "o"),
        "figure": OptionRecord(FILE, "picture to write (.png, .pdf, .svg)"),
        "certificate": OptionRecord(FILE, "certificate to write (.json)"),
        "models": OptionRecord(FLAG, "list models and their sources"),
        "systems": OptionRecord(FLAG, "list systems and their sources"),
        "stacks": OptionRecord(FLAG, "list stacks of software and their sources"),
        "open": OptionRecord(FLAG, "open the written page in the browser"),
        "diff": OptionRecord(FLAG, "show how two tables differ, and the cost of each difference"),
        "exchange": OptionRecord(FLAG, "evaluate the first table with each row of the second"),
        "force": OptionRecord(FLAG, "replace existing files"),
        "resume": OptionRecord(FLAG, "continue an existing store"),
        "worst": OptionRecord(WHOLE, "number of blocked transfers to list"),
        "format": OptionRecord(NAME, "|".join(_FORMATS), "f", names=_FORMATS),
        "details": _often(FLAG, "print the whole report, not its first screen"),
        "json": _often(FLAG, "print one JSON object", "j"),
        "config": OptionRecord(FILE, "options from a file (.toml or .json)"),
        "help": OptionRecord(FLAG, "show this screen", "h"),
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
    ("chunks", "transmit"): OptionRecord(TIME, "transmit time of a message [s per token]"),
    ("export", "format"): OptionRecord(NAME, "|".join(FORMATS), "f", True, (*FORMATS,)),
    ("init", "from_"): OptionRecord(FILE, "file to read: a config.json or a training log"),
    ("init", "columns"): OptionRecord(RULES, "columns that the log lacks, as model=llama3-8b"),
    ("plan", "minibatch"): OptionRecord(COUNT, "sequences per step of the whole job"),
    ("trace", "steps"): OptionRecord(COUNT, "number of steps in the files"),
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


def option_panel(name: str, command: str) -> str:
    """Return the panel of help that an option of a command stands in."""
    return PLACES.get((command, name)) or _PANELS[name]
