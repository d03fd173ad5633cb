"""Of the second checker: kinds and rules of a table's own, as docs/certificates.md has them."""

import re

USUAL = (*"FBIWRUOLA", "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_O")
USUAL += ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B", "IDLE")
STAGES = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
KEYS = ("kinds", "rules", "items", "slices", "forward_only", "graph", "lanes")
OF = ("microbatch", "stage", "copy", "worker")
PARTS = ("activation", "for_w", "checkpoint")
TEXTS = ("letters", "name", "time", "lane", "of")
END = r"(?:([0-9]*)([A-Za-z_]+)([0-9]*)(?:\.([0-9]+))?(?:@(first|last|[+-][0-9]+))?)"
RULE = re.compile(rf"{END}\s*<-\s*{END}\s*(?:\((?:(all)|slice ([+-][0-9]+))\))?\s*(\[message\])?")


def is_whole(value, least=None):
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and (least is None or value >= least)


class End:
    """One end of a rule: letters, and a stage, a microbatch or an offset if it has one."""

    def __init__(self, own, stage, letters, microbatch, part, place, hold):
        self.letters, self.stage, self.microbatch, self.offset = letters, None, None, 0
        hold(letters in own.kinds or letters in own.usual, f"{letters} is no kind")
        if microbatch:
            hold((part is None) == (own.slices == 1), "a microbatch in slices is m.k")
            self.microbatch = int(microbatch) * own.slices + int(part or 0)
            hold(int(part or 0) < own.slices, "no such slice")
        hold(microbatch or part is None, "a slice of no microbatch")
        if stage:
            self.stage = int(stage)
        if place in ("first", "last"):
            self.stage = 0 if place == "first" else "last"
        elif place:
            self.offset = int(place)


class Own:
    """What a table has of its own; its kinds by letters."""

    def __init__(self, data, demand, hold):
        self.hold = hold
        self.is_usual = not any(data.get(key) for key in KEYS[:3]) and not data.get("graph")
        self.slices = data.get("slices", 1)
        demand(is_whole(self.slices, 1), "slices")
        self.forward_only = data.get("forward_only", False)
        demand(isinstance(self.forward_only, bool), "forward_only")
        self.is_usual &= self.slices == 1 and not self.forward_only
        self.lanes = data.get("lanes", {})  # these alone leave messages as they are
        demand(isinstance(self.lanes, dict), "lanes")
        for letters, lane in self.lanes.items():
            demand(letters in ("UNSHARD", "REDUCE_GRAD") and isinstance(lane, str), "lanes")
            demand(lane not in ("", "compute", "host"), "lanes")
        self.items = data.get("items", {})
        demand(isinstance(self.items, dict), "items")
        for share in self.items.values():
            is_real = isinstance(share, int | float) and not isinstance(share, bool)
            demand(is_real and 0 <= share < 1e308, "items")
        self.kinds = {}
        for kind in self.listed(data, "kinds", dict, demand):
            self.add_kind(kind, demand)
        self.usual = [k for k in USUAL if k not in ("A", "IDLE")]
        self.graph = self.listed(data, "graph", list, demand)
        for edge in self.graph:
            demand(len(edge) == 2 and all(is_whole(s, 0) for s in edge), "graph")
            demand(edge[0] != edge[1], "graph")
        demand(len({frozenset(edge) for edge in self.graph}) == len(self.graph), "graph")
        self.rules = [self.rule(text, demand) for text in self.listed(data, "rules", str, demand)]

    def ends_backward(self, letters):
        """Whether a kind frees an activation, or what W needs of it."""
        if letters not in self.kinds:
            return letters in ("B", "W")
        kind = self.kinds[letters]
        freed, for_w = kind["at_end"], kind["at_end"].get("for_w", 0)
        is_work = (kind["lane"], kind["of"]) == ("compute", "microbatch")
        return is_work and (for_w < 0 or for_w == 0 > freed.get("activation", 0))

    def recomputes(self):
        """Kinds that make an activation from its checkpoint."""
        takes = (x for x, kind in self.kinds.items() if kind["at_start"].get("checkpoint", 0) < 0)
        return [x for x in takes if self.kinds[x]["of"] == "microbatch"]

    def listed(self, data, name, kind, demand):
        found = data.get(name, [])
        demand(isinstance(found, list) and all(isinstance(x, kind) for x in found), name)
        return found

    def add_kind(self, kind, demand):
        known = {*TEXTS, "together", "slot", "at_start", "at_end", "look"}
        demand(set(kind) <= known and "letters" in kind, "keys of a kind")
        demand(all(isinstance(kind.get(x, "x"), str) and kind.get(x, "x") for x in TEXTS), "a kind")
        letters = kind["letters"]
        demand(re.fullmatch(r"[A-Z][A-Za-z_]*", letters) and letters not in USUAL, "letters")
        demand(letters not in self.kinds, "letters")
        demand(isinstance(kind.get("together", False), bool), "together")
        slot = kind.get("slot", 1)
        is_real = isinstance(slot, int | float) and not isinstance(slot, bool)
        demand(is_real and 0 < slot < 1e308, "slot")
        demand(isinstance(kind.get("look", []), list), "look")
        kind = {"lane": "compute", "of": "microbatch", "together": False, **kind}
        demand(kind["of"] in OF, "of")
        demand(not kind["together"] or kind["of"] == "worker", "together")
        demand(kind["lane"] != "host" or kind["of"] == "microbatch", "lane")
        for moment in ("at_start", "at_end"):
            changes = kind.setdefault(moment, {})
            demand(isinstance(changes, dict), moment)
            demand(all(x in PARTS or x in self.items for x in changes), moment)
            demand(all(is_whole(n) for n in changes.values()), moment)
        self.kinds[letters] = kind

    def rule(self, text, demand):
        match = RULE.fullmatch(text.strip())
        demand(match, f"{text!r} is no rule")
        fields = match.groups()
        waits, made = End(self, *fields[:5], demand), End(self, *fields[5:10], demand)
        every, part, sends = fields[10] is not None, int(fields[11] or 0), fields[12] is not None
        of = self.of(waits.letters), self.of(made.letters)
        demand("stage" not in of and not waits.offset, text)
        for end, kind in ((waits, of[0]), (made, of[1])):
            demand(kind != "worker" or (end.stage is None and not end.offset), text)
        demand(of[0] != "worker" or of[1] == "worker" or made.stage is not None, text)
        demand(not sends or "worker" not in of, text)
        demand(made.microbatch is None or not (every or part), text)
        demand(not self.graph or abs(made.offset) < 2, text)
        return waits, made, every, part, sends

    def of(self, letters):
        if letters in self.kinds:
            return self.kinds[letters]["of"]
        return "stage" if letters in STAGES else "microbatch"

    def lane(self, letters):
        """Lane of an op; host ops and communication have their own."""
        if letters in self.kinds:
            return self.kinds[letters]["lane"]
        if letters in self.lanes:
            return self.lanes[letters]
        return "host" if letters in ("O", "L") else "compute"

    def lane_of_text(self, letters):
        """Lane that a cell may name behind its letters."""
        return "net" if letters.startswith(("SEND_", "RECV_")) else self.lane(letters)

    def needs(self, letters):
        """Of what on a lane the last of its stage before it in the row is waited for."""
        work = letters in tuple("FBIWR") or (letters in self.kinds and self.is_counted(letters))
        ends = letters in ("WAIT_REDUCE_GRAD", "U")
        return [x for x, y in (("UNSHARD", work), ("REDUCE_GRAD", ends)) if y and x in self.lanes]

    def is_counted(self, letters):
        """Whether kinds of its own say how many microbatches there are."""
        return self.lane(letters) == "compute" and self.of(letters) == "microbatch"

    def beside(self, letters, other):
        """Whether ops of one worker are on two lanes; a host link counts as compute."""
        one, two = ({"host": "compute"}.get(x, x) for x in map(self.lane, (letters, other)))
        return one != two

    def is_op(self, letters):
        is_own = letters in self.kinds and self.kinds[letters]["of"] != "stage"
        return letters in tuple("FBIWRU") or is_own

    def together(self, letters):
        return letters in self.kinds and self.kinds[letters]["together"]

    def before(self, stage):
        return [a for a, b in self.graph if b == stage] if self.graph else [stage - 1]

    def behind(self, stage):
        return [b for a, b in self.graph if a == stage] if self.graph else [stage + 1]

    def way(self, source, target):
        """Way of a message, 0 forth and 1 back, and the place of its times; None without an edge."""
        if not self.graph:
            return int(source > target), min(source, target)
        for k, edge in enumerate(self.graph):
            if {*edge} == {source, target}:
                return int(edge[0] != source), k
        return None

    def check_rule(self, rule, table):
        """Numbers of a rule exist, and something waits by it."""
        waits, made, *_ = rule
        for end in (waits, made):
            self.hold(end.stage in (None, "last", *range(table.stages)), "a rule's stage")
            self.hold(end.microbatch is None or end.microbatch < table.count, "a rule's microbatch")
        self.hold(any(self.is_meant(rule, op, table) for op in table.at), "nothing waits by a rule")

    def is_meant(self, rule, op, table):
        end = rule[0]
        stage = table.stages - 1 if end.stage == "last" else end.stage
        is_there = stage in (None, op[1]) and end.microbatch in (None, op[2])
        return end.letters == op[0] and is_there

    def makers(self, op, worker, table):
        """What an op waits for by rules: the op, whether a message goes, the number of the rule."""
        _, place, m = op
        for number, rule in enumerate(self.rules):
            if not self.is_meant(rule, op, table):
                continue
            _, made, every, part, sends = rule
            if self.of(made.letters) == "worker":
                sources = [f"worker {worker}"]
            elif made.stage is not None:
                sources = [table.stages - 1 if made.stage == "last" else made.stage]
            elif made.offset and self.graph:
                sources = self.before(place) if made.offset < 0 else self.behind(place)
            else:
                sources = [s for s in [place + made.offset] if 0 <= s < table.stages]
            if every:
                numbers = range(table.count)
            elif made.microbatch is not None:
                numbers = [made.microbatch]
            else:
                numbers = [m + part] if 0 <= m % self.slices + part < self.slices else []
            for source in sources:
                for other in numbers:
                    yield (made.letters, source, other), sends, number

    def text(self, op):
        letters, place, m = op
        whole, part = divmod(m, self.slices)
        number = "" if m < 0 else f"{whole}.{part}" if self.slices > 1 else f"{whole}"
        return f"{'' if isinstance(place, str) else place}{letters}{number}"
