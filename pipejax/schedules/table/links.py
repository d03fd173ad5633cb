"""Settings of links between workers and to the host, used wherever a table runs.

docs/semantics.md defines each setting.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import (
    ArgumentError,
    MismatchError,
    check_types,
    number,
    resolve_name,
    whole_number,
    wrong,
)
from pipejax.base.display import short_repr
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import WAIT_SEND, AnyPhase

Pair = tuple[int, int]
PairLinks = Mapping[Pair, str] | Sequence[tuple[Sequence[int], str] | list[Any]]
PairModels = tuple[tuple[Pair, str], ...]
_TEXT = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*=\s*([A-Za-z]+)\s*", re.ASCII)


def _check_pair(pair: Any, where: str) -> Pair:
    """Check a pair of different workers, sender and receiver, and return it."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise wrong(f"{where}:", f"a pair is a sender and a receiver, got {pair!r}")
    sender, receiver = (whole_number(w, f"{where}: a worker", minimum=0) for w in pair)
    if sender == receiver:
        raise wrong(f"{where}:", f"worker {sender} sends nothing to itself")
    return sender, receiver


def _check_pair_links(pair_links: Any) -> PairModels:
    """Check pairs of workers and their link models, and return them sorted by pair."""
    items = list(pair_links.items()) if isinstance(pair_links, Mapping) else pair_links
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise wrong("pair_links", f"must be as {{(0, 1): 'rendezvous'}}, got {pair_links!r}")
    models: dict[Pair, str] = {}
    for item in items:
        if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
            raise wrong("pair_links:", f"a pair and its link model are needed, got {item!r}")
        pair = _check_pair(item[0], "pair_links")
        if pair in models:
            raise wrong("pair_links", f"names the pair {pair} twice")
        models[pair] = resolve_name(item[1], tuple(LINK_MODELS), "link model")
    return tuple(sorted(models.items()))


def parse_pair_links(text: str, where: str) -> PairModels:
    """Read link models of pairs of workers, such as 0-1=rendezvous,1-2=queued."""
    matches = [_TEXT.fullmatch(part) for part in text.split(",")]
    items = [(int(a), int(b), model) for a, b, model in (m.groups() for m in matches if m)]
    if len(items) < len(matches):
        raise ValueError(
            f"{where}: expected pairs of workers and link models, as 0-1=rendezvous,1-2=queued, "
            f"got {text!r}"
        )
    return tuple(((a, b), model) for a, b, model in items)


def format_pair_links(pair_links: PairModels) -> str:
    """Return the text of link models of pairs; the inverse of `parse_pair_links`."""
    return ",".join(f"{a}-{b}={model}" for (a, b), model in pair_links)


@dataclasses.dataclass(frozen=True)
class LinkModel:
    """Effects of a message between workers on its link (docs/semantics.md)."""

    name: str  # name of the model
    occupancy: str  # duration for which a message occupies its link: "transmit", "message" or ""
    lag: str  # time from the end of the occupancy to the arrival: "message", "latency" or ""
    blocks: bool = False  # whether the next op of the sender waits for the end of the occupancy
    is_rendezvous: bool = False  # SEND and RECV are one transfer in the queues of both workers
    meaning: str = ""  # text on how messages hold each other up


SENDER_WAITS = "a sender waits until its message is transmitted"
NO_WAITS = "messages overlap with compute and never wait for each other"
BOTH_QUEUES = "a message waits until sender and receiver are done with their earlier messages"
# all link models by name, the simplest first
LINK_MODELS: dict[str, LinkModel] = {
    model.name: model
    for model in (
        LinkModel("delay", "", "message", meaning=NO_WAITS),
        LinkModel("queued", "transmit", "latency", meaning="a link takes one message at a time"),
        LinkModel("blocking", "transmit", "latency", blocks=True, meaning=SENDER_WAITS),
        LinkModel("rendezvous", "message", "", is_rendezvous=True, meaning=BOTH_QUEUES),
    )
}
LINKS = tuple(LINK_MODELS)
LINK_TEXTS = {name: f"{model.meaning} (--link {name})" for name, model in LINK_MODELS.items()}
MEETING = tuple(model.name for model in LINK_MODELS.values() if model.is_rendezvous)
QUEUES = ("worker", "pair", "direction")
POSTINGS = ("early", "program")
PAIRS = "pairs"  # stands for a group of both directions of every pair of workers

Groups = Sequence[Sequence[int]]
PairGroups = Sequence[Sequence[Sequence[int]]]


@short_repr
@dataclasses.dataclass(frozen=True)
class Links:
    """Behaviour of messages and offloads on their links.

    If a function takes `link`, the name of a link model stands for a record with that model and
    defaults for all other fields.

    Args:
      model: name of the link model (docs/link_models.md).
      queues: scope of the communication queues under rendezvous: "worker", "pair" or "direction".
      host_links: groups of workers that share a host link, as ((0, 1), (2, 3)); a worker in no
        group has its own link.
      posting: time at which the two ends of a transfer are posted under rendezvous: "early" (from
        the start) or "program" (when the row of a worker reaches the SEND or RECV; for a table
        without these cells, as `insert_transfers` puts them).
      shared_links: groups of directed pairs of workers that carry one message or all-reduce at a
        time, as (((0, 1), (1, 0)), ((2, 3), (1, 3))), or "pairs": both directions of every pair;
        not for "delay", where messages use no resource.
      pair_links: link models of pairs of workers that do not follow `model`, as
        {(0, 1): "rendezvous"}; a pair stands for both directions, unless (1, 0) is named too.
      eager_below: under rendezvous, messages with a transmit time below this are buffered, as under
        "queued" [s]; `lower` then needs costs.

    Raises:
      ValueError: if a name is unknown, a group is empty or names a worker or a pair twice, or the
        link models know no posting, no shared links or no buffered messages.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.5)
      >>> pj.evaluate(table, costs, link=pj.Links("rendezvous", queues="pair")).makespan
      16.0
    """

    model: str = "delay"
    queues: str = "worker"
    host_links: Groups = ()
    posting: str = "early"
    shared_links: str | PairGroups = ()
    pair_links: PairLinks = ()
    eager_below: float = 0.0

    def __post_init__(self) -> None:
        """Check all options, and refuse options without effect under this link model."""
        for name, option in LINK_OPTIONS.items():
            object.__setattr__(self, name, option.check(getattr(self, name)))
        for name in self.changed():
            option = LINK_OPTIONS[name]
            if option.refusal and not self.has_effect(name):
                models = " or ".join(", ".join(option.models).rsplit(", ", 1))
                refusal = option.refusal.format(models=models, model=self.model)
                raise MismatchError(f"{name} {refusal}", name)

    @property
    def named_pairs(self) -> tuple[tuple[Pair, str], ...]:
        """Return the pairs of workers that have their own link model, sorted."""
        pairs: Any = self.pair_links  # checked by the constructor
        return tuple(pairs)

    @property
    def models(self) -> frozenset[str]:
        """Return all link models that any message follows."""
        return frozenset((self.model, *(model for _, model in self.named_pairs)))

    @property
    def is_rendezvous(self) -> bool:
        """Return whether any pair of workers exchanges messages by rendezvous."""
        return any(LINK_MODELS[model].is_rendezvous for model in self.models)

    @property
    def text(self) -> str:
        """Return the link models in words, such as "queued (0-1=rendezvous)"."""
        pairs = f" ({format_pair_links(self.named_pairs)})" if self.pair_links else ""
        return self.model + pairs

    def message_models(
        self,
        num_workers: int,
        sender: Int[NumpyArray, " messages"],
        receiver: Int[NumpyArray, " messages"],
    ) -> Int[NumpyArray, " messages"]:
        """Return the link model of each message, as a position in `LINK_MODELS`."""
        model_names, pair_models = tuple(LINK_MODELS), dict(self.named_pairs)
        largest = max((worker for pair in pair_models for worker in pair), default=-1)
        if largest >= num_workers:
            raise wrong("pair_links", f"names worker {largest}: workers are 0 to {num_workers - 1}")
        models = np.full((num_workers, num_workers), model_names.index(self.model))
        for (a, b), model in pair_models.items():
            models[a, b] = model_names.index(model)
            if (b, a) not in pair_models:  # the pair stands for both directions
                models[b, a] = model_names.index(model)
        return models[sender, receiver]

    def executed_phases(self, grammar: Grammar) -> tuple[AnyPhase, ...]:
        """Return the phases that a worker executes in row order, with WAIT_SEND if rendezvous."""
        return grammar.executed_phases + (WAIT_SEND if self.is_rendezvous else ())

    def check_known(self, names: Collection[str], who: str) -> None:
        """Refuse values other than defaults in fields that the function `who` does not support."""
        # `names` are the fields that `who` supports.
        for name, value in self.changed().items():
            if name not in names:
                raise ArgumentError(name, value, f"{who} knows no {name}, got {value!r}")

    def written(self) -> dict[str, Any]:
        """Return all options in the form of files, as texts and numbers of seconds."""
        return {name: option.write(getattr(self, name)) for name, option in LINK_OPTIONS.items()}

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, in the form of files."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {k: v for k, v in self.written().items() if getattr(self, k) != defaults[k]}

    def has_effect(self, name: str) -> bool:
        """Return whether any pair of workers has a link model that uses this option."""
        return bool(self.models & {*LINK_OPTIONS[name].models})

    def with_model(self, model: str) -> "Links":
        """Return these settings under another link model, without fields it does not use."""
        links = Links(model, pair_links=self.pair_links)
        names = [n for n, o in LINK_OPTIONS.items() if not o.refusal or links.has_effect(n)]
        return Links(**{name: getattr(self, name) for name in names} | {"model": model})

    @classmethod
    def resolve(cls, link: "str | Links") -> "Links":
        """Return `Links` unchanged, or make `Links` from the name of a link model."""
        check_types(link=(link, str, Links))
        return link if isinstance(link, Links) else cls(link)


def _check_groups(groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return checked groups of workers that share a host link; no worker is in two groups."""
    checked_groups = []
    form = "host_links", "((0, 1), (2, 3))"
    for group in _as_sequence(groups, *form):
        if len(_as_sequence(group, *form)) == 0:
            raise wrong("host_links", "has an empty group: a group is the workers of one link")
        checked = (whole_number(w, "host_links: a worker", minimum=0) for w in group)
        checked_groups.append(tuple(checked))
    workers = [worker for group in checked_groups for worker in group]
    if doubles := [worker for worker in workers if workers.count(worker) > 1]:
        raise wrong("host_links", f"names worker {doubles[0]} twice: each worker has one host link")
    return tuple(checked_groups)


def _check_pair_groups(groups: str | PairGroups) -> str | PairGroups:
    """Return checked groups of directed pairs that share a link, or "pairs"."""
    if isinstance(groups, str):
        if groups.strip().casefold() == PAIRS:
            return PAIRS
        raise wrong("shared_links", f"are {PAIRS!r} or groups of pairs of workers, got {groups!r}")
    checked_groups = []
    form = "shared_links", "(((0, 1), (1, 0)),)"
    for group in _as_sequence(groups, *form):
        if len(_as_sequence(group, *form)) == 0:
            raise wrong("shared_links", "has an empty group: a group is the pairs of one link")
        pairs = tuple(_check_pair(pair, "shared_links") for pair in group)
        if len(set(pairs)) < len(group):
            pair = next(pair for pair in pairs if pairs.count(pair) > 1)
            raise wrong("shared_links", f"names the pair {pair} twice in one group")
        checked_groups.append(pairs)
    return tuple(checked_groups)


def parse_pairs(text: str, where: str) -> str | tuple[tuple[tuple[int, int], ...], ...]:
    """Read groups of directed pairs of workers, such as 0-1+1-0,2-3+1-3, or "pairs"."""
    if text.strip().casefold() == PAIRS:
        return PAIRS
    groups = [[pair.strip().split("-") for pair in group.split("+")] for group in text.split(",")]
    for pair in (pair for group in groups for pair in group):
        if len(pair) != 2 or not all(
            worker.strip().isdecimal() and worker.isascii() for worker in pair
        ):
            raise ValueError(
                f"{where}: expected {PAIRS}, or pairs of workers in groups, as 0-1+1-0,2-3+1-3, "
                f"got {text!r}"
            )
    return tuple(tuple((int(a), int(b)) for a, b in group) for group in groups)


def format_pairs(groups: str | PairGroups) -> str:
    """Return the text of groups of pairs; the inverse of `parse_pairs`."""
    if isinstance(groups, str):
        return groups
    return ",".join("+".join(f"{a}-{b}" for a, b in group) for group in groups)


def _as_sequence(value: Any, where: str, example: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise wrong(where, f"must be groups, as {example}, got {value!r}")
    return value


def parse_groups(text: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Read groups of workers from a text such as 0+1,2+3."""
    groups = [[worker.strip() for worker in group.split("+")] for group in text.split(",")]
    if not all(worker.isdecimal() and worker.isascii() for group in groups for worker in group):
        raise ValueError(f"{where}: expected workers in groups, as 0+1,2+3, got {text!r}")
    return tuple(tuple(map(int, group)) for group in groups)


def format_groups(groups: Groups) -> str:
    """Return the text of groups of workers; the inverse of `parse_groups`."""
    return ",".join("+".join(map(str, group)) for group in groups)


class LinkOption(NamedTuple):
    """An option of `Links`: its values, their text form, and the link models that use it."""

    check: Callable[[Any], Any]  # returns a checked value
    names: tuple[str, ...] = ()  # names that the option may have
    # parse(text, name of the option), write(value), and the form in a sweep
    parse: Callable[[Any, str], Any] = lambda value, where: value
    write: Callable[[Any], Any] = lambda value: value
    form: str = ""  # empty without `names`: the option is a number of seconds
    caption: str = "{}"  # text in a picture, if the value is not the default
    applies: Callable[[LinkModel], Any] = lambda model: True  # whether it has an effect in a model
    refusal: str = ""  # error if it has no effect between any pair of workers

    @property
    def models(self) -> tuple[str, ...]:
        """Return the link models in which the option has an effect."""
        return tuple(model.name for model in LINK_MODELS.values() if self.applies(model))

    @classmethod
    def choice(cls, names: Collection[str], noun: str, **fields: Any) -> "LinkOption":
        """Return an option whose value is one of these names."""
        return cls(lambda value: resolve_name(value, names, noun), tuple(names), **fields)


_IS_RENDEZVOUS = attrgetter("is_rendezvous")
_NEED = "needs the link model {models}, got {model!r}: only there"

# all options, in the order of fields of `Links`, for command line, sweeps, files and checks
LINK_OPTIONS: dict[str, LinkOption] = {
    "model": LinkOption.choice(LINK_MODELS, "link model"),
    "queues": LinkOption.choice(
        *(QUEUES, "queue scope"), applies=_IS_RENDEZVOUS, caption="{} queues"
    ),
    "host_links": LinkOption(
        *(_check_groups, (), parse_groups, format_groups, "a text, as 0+1,2+3"),
        caption="shared host links",
    ),
    "posting": LinkOption.choice(
        *(POSTINGS, "posting"),
        applies=_IS_RENDEZVOUS,
        caption="{} posting",
        refusal="'program' " + _NEED + " both ends of a transfer are posted",
    ),
    "shared_links": LinkOption(
        *(_check_pair_groups, (), parse_pairs, format_pairs, "a text, as 0-1+1-0, or pairs"),
        caption="shared links",
        applies=lambda model: model.occupancy,
        refusal="need the link model {models}, got {model!r}, where messages use no resource",
    ),
    "pair_links": LinkOption(
        *(_check_pair_links, (), parse_pair_links, format_pair_links, "a text, as 0-1=rendezvous")
    ),
    "eager_below": LinkOption(
        lambda seconds: number(seconds, "eager_below"),
        applies=_IS_RENDEZVOUS,
        caption="buffered below {:g} s",
        refusal=_NEED + " messages that are not buffered meet",
    ),
}


Matches = Int[NumpyArray, " matches"]


def find_shared_links(
    links: Links,
    num_workers: int,
    sender: Int[NumpyArray, " uses"],
    receiver: Int[NumpyArray, " uses"],
) -> tuple[Matches, Matches]:
    """Find the shared links that each message or all-reduce between two workers occupies."""
    # A use is a message or an all-reduce. Return the indices of use and group of all matches: with
    # groups (0-1, 1-0) and (1-0), use 0-1 matches group 0, and 1-0 matches both: 0 1 1 and 0 0 1.
    if links.shared_links == PAIRS:
        low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
        return np.arange(len(sender)), low * num_workers + high
    groups: Any = links.shared_links
    group_sizes = np.array([len(group) for group in groups])
    ends = np.array([pair for group in groups for pair in group])
    if ends.max() >= num_workers:
        last = num_workers - 1
        raise wrong("shared_links", f"names worker {ends.max()}: workers are 0 to {last}")
    pair = ends[:, 0] * num_workers + ends[:, 1]  # one number for each member of a group
    group = np.repeat(np.arange(len(groups)), group_sizes)
    order = np.argsort(pair, kind="stable")
    pair, group = pair[order], group[order]
    # Sorted members with the pair of a use are neighbours: `count` of them from `first` on. Repeat
    # each use, and number its repeats from 0: count 2 0 1 gives use 0 0 2 and step 0 1 0.
    used_pair = sender * num_workers + receiver
    first = np.searchsorted(pair, used_pair)
    count = np.searchsorted(pair, used_pair, side="right") - first
    use = np.repeat(np.arange(len(used_pair)), count)
    step = np.arange(len(use)) - np.repeat(np.cumsum(count) - count, count)
    return use, group[first[use] + step]
