"""Rules of the Trace Event Format and of Perfetto's importer; each returns its faults.

The importer reads microseconds as whole nanoseconds, takes events by time and at one time in the
order of the file, keeps a stack of slices for every track, and binds a flow to the slice that
began last on its track and has not ended. A slice that is cut by another one is dropped.
"""

from collections import defaultdict

_NEEDED = {  # keys by kind of event, beside ph, pid, tid and name
    "X": {"ts", "dur", "cat"},
    "C": {"ts", "args"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
    "M": {"args"},
}


def faults(trace):
    """Return everything that is wrong with a trace, as texts."""
    events = trace["traceEvents"]
    return [fault for rule in (_keys, _names, _counters, _slices, _flows) for fault in rule(events)]


def _keys(events):
    for event in events:
        missing = {"ph", "pid", "tid", "name"} | _NEEDED[event["ph"]]
        missing -= set(event)
        numbers = [event.get(key, 0) for key in ("pid", "tid", "ts", "dur")]
        if missing or not all(type(n) in (int, float) and n >= 0 for n in numbers):
            yield f"keys {event}"


def _names(events):
    named = defaultdict(set)
    for event in (event for event in events if event["ph"] == "M"):
        thread = event["tid"] if event["name"].startswith("thread") else None
        named[event["name"]].add((event["pid"], thread))
    for what, places in (
        ("process", {(event["pid"], None) for event in events}),
        ("thread", {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xstf"}),
    ):
        for key in (f"{what}_name", f"{what}_sort_index"):
            if missing := places - named[key]:
                yield f"no {key} for {missing}"
    count = sum(event["ph"] == "M" for event in events)
    if count != len({(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}):
        yield "something is named twice"


def _counters(events):
    for event in events:
        if event["ph"] == "C" and not all(
            type(value) in (int, float) and value >= 0 for value in event["args"].values()
        ):
            yield f"counter {event}"


def _slices(events):
    """Slices of a track nest or do not touch: as floats, and as whole nanoseconds."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        for scale in (lambda time: time, lambda time: round(time * 1000)):
            ends = []
            for event in sorted(track, key=lambda event: (event["ts"], event["dur"])):
                start, end = scale(event["ts"]), scale(event["ts"]) + scale(event["dur"])
                ends = [other for other in ends if other > start]
                if any(other < end for other in ends):
                    yield f"overlap {event}"
                ends.append(end)


def _flows(events):
    """Every end lies inside a slice, and that is the one that the importer binds it to."""
    open_on, chains = {}, defaultdict(list)
    for event in sorted(
        (e for e in events if e["ph"] in "Xstf"), key=lambda event: round(event["ts"] * 1000)
    ):
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            open_on[place] = event
            continue
        around = open_on.get(place)
        if around is None or not around["ts"] <= event["ts"] < around["ts"] + around["dur"]:
            yield f"nothing around {event}"
        if event["ph"] == "f" and event["bp"] != "e":
            yield f"not bound to what is around it: {event}"
        chains[event["id"], event["cat"], event["name"]].append(event)
    if len({number for number, *_ in chains}) != len(chains):
        yield "an id stands for two flows"
    for chain in chains.values():
        kinds = "".join(event["ph"] for event in chain)
        if kinds not in ("sf", "stf"):
            yield f"flow of {kinds}: {chain[0]}"


def slices(trace, category):
    """Return the slices of a category."""
    events = trace["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def busy(trace, num_workers):
    """Return the busy time of each worker [us], from the slices alone."""
    total = [0.0] * num_workers
    for event in slices(trace, "compute"):
        total[event["pid"]] += event["dur"]
    return total
