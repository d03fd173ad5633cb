// A schedule of the page: its arrays, the recurrence, and its run at the factors of the sliders.

import { writeNumber } from "./text.js";
import { unpack } from "./unpacking.js";

// The recurrence of the engine, on a program that Python lowered:
//
//   finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])
//
// Nodes stand in topological order, node 0 is the source, which ends at 0. Sums are added up in the
// same order as in the engine and the first of equals wins, so results are equal to the last bit.

/** Lay out the edges of a program: those into `node` have the numbers first[node] to first[node + 1] - 1. */
export function layOut({ degree, back, lag, durations, op, carrier, arrives }) {
  const nodes = degree.length;
  const first = new Int32Array(nodes + 1);
  const pred = new Int32Array(back.length);
  const isAwaited = new Uint8Array(nodes);
  for (let node = 0, edge = 0; node < nodes; node++) {
    first[node + 1] = first[node] + degree[node];
    if (degree[node] === 0) isAwaited[0] = 1;
    for (; edge < first[node + 1]; edge++) {
      pred[edge] = node - back[edge];
      isAwaited[pred[edge]] = 1;
    }
  }
  return {
    nodes, first, pred, lag, durations, op, carrier, arrives, isAwaited,
    start: new Float64Array(nodes),
    finish: new Float64Array(nodes),
    lastEdge: new Int32Array(nodes), // the edge on which the last arrival comes, -1 without any
    tail: new Float64Array(nodes),
  };
}

/** The cost vector: base costs times the factor of their kind; a message is latency plus transmit
 * time, a pair the longer of its ops plus a share of the shorter one. */
export function costVector(costs, factors) {
  const { base, kind, pair, overlap, firstPair, firstLink } = costs;
  const vector = new Float64Array(base.length);
  for (let k = 0; k < base.length; k++) {
    vector[k] = kind[k] === 0 ? base[k] : base[k] * factors[kind[k] - 1];
  }
  if (firstPair >= 0) {
    for (let k = 0; 2 * k < pair.length; k++) {
      const times = [vector[pair[2 * k]], vector[pair[2 * k + 1]]];
      vector[firstPair + k] = Math.max(...times) + overlap[k] * Math.min(...times);
    }
  }
  const links = (base.length - firstLink) / 3; // latencies, transmit times, and their sums
  for (let k = firstLink; k < firstLink + links; k++) {
    vector[k + 2 * links] = vector[k] + vector[k + links];
  }
  return vector;
}

/** Fill in start, finish and lastEdge of a program, with recorded starts if there are any; return the makespan. */
export function runProgram(program, vector) {
  const { nodes, first, pred, lag, durations, start, finish, lastEdge, recordedStarts } = program;
  let makespan = 0;
  for (let node = 0, edge = 0; node < nodes; node++) {
    let latest = 0;
    let last = -1;
    for (const end = first[node + 1]; edge < end; edge++) {
      const arrival = finish[pred[edge]] + vector[lag[edge]];
      if (last < 0 || arrival > latest) {
        latest = arrival;
        last = edge;
      }
    }
    start[node] = recordedStarts?.[node] >= 0 ? recordedStarts[node] : latest;
    lastEdge[node] = last;
    finish[node] = start[node] + vector[durations[node]];
    if (finish[node] > makespan) makespan = finish[node];
  }
  return makespan;
}

/** Fill in the tails: the longest time from the end of each node to the makespan. */
export function findTails(program, vector) {
  const { nodes, first, pred, lag, durations, tail } = program;
  tail.fill(0);
  for (let node = nodes - 1; node > 0; node--) {
    const after = tail[node] + vector[durations[node]];
    for (let edge = first[node]; edge < first[node + 1]; edge++) {
      const value = after + vector[lag[edge]];
      if (value > tail[pred[edge]]) tail[pred[edge]] = value;
    }
  }
}

/** Nodes of the critical path, from its end back to its beginning; the first of equals wins. */
export function criticalPath(program) {
  const { nodes, finish, isAwaited, lastEdge, pred } = program;
  let node = 0;
  let latest = -1;
  for (let k = 0; k < nodes; k++) {
    if (!isAwaited[k] && finish[k] > latest) {
      latest = finish[k];
      node = k;
    }
  }
  const path = [];
  while (node > 0) {
    path.push(node);
    node = lastEdge[node] < 0 ? 0 : pred[lastEdge[node]];
  }
  return path;
}

const HIDDEN = new Set(["WAIT_O", "WAIT_SEND_F", "WAIT_SEND_B"]); // phases that take no time
const UNCOUNTED = new Set(["O", "L"]); // offloads and loads change no activations in flight
const COMPUTE = "compute"; // the lane of a worker's row, all others lie beside it

export class Schedule {
  /** Unpack a schedule; each program is unpacked when its link model is first chosen. */
  static async load(data, phases) {
    const schedule = new Schedule();
    Object.assign(schedule, data);
    schedule.ops = await unpack(data.ops);
    schedule.placement = (await unpack(data.ops.placement)).placement;
    schedule.messages = await unpack(data.messages);
    schedule.costs = { ...data.costs, ...(await unpack(data.costs)) };
    schedule.held = await unpack(data.memory);
    schedule.starts = data.starts && (await unpack(data.starts)).start; // of a recorded run
    schedule.settle(phases);
    return schedule;
  }

  /** Set the fields that follow from the ops. */
  settle(phases) {
    Object.assign(this, { phases, loaded: {} });
    // whether memory differs from activations in flight: parts are freed, or sizes differ
    this.hasSizes = this.held.place.some((place) => this.held.size[place] !== 1);
    this.depth = depths(this.placement.subarray(0, this.stages));
    const { phase: code, with_phase: withCode, stage, with_stage } = this.ops;
    const [depth, withDepth] = [stage, with_stage].map((stages) => Float64Array.from(stages, (k) => this.depth[k] ?? 0));
    this.ofPhases = { isByPhase: true, code, withCode, depth, withDepth };
    this.lanes = this.layLanes();
    const ops = this.ops.phase.length;
    // times of each op in row order, NaN if it does not run: read far more often than set
    this.opStart = new Float64Array(ops);
    this.opFinish = new Float64Array(ops);
    this.onCompute = Uint8Array.from({ length: ops }, (_, op) =>
      (this.ops.worker[op] >= 0 && this.opLane(op) === 0 ? 1 : 0));
    this.messagesTo = byConsumer(this.messages.consumer, ops);
    // positions of the cost vector that pairs and messages read; `prepare` adds those of ops
    const { base, pair, firstLink } = this.costs;
    this.isRead = new Uint8Array(base.length);
    for (const position of pair) this.isRead[position] = 1;
    if (this.messages.producer.length) this.isRead.fill(1, firstLink);
  }

  /**
   * Memory of every worker at the times of the run: {time, held, peak, peakAt} each.
   * `unit` is "flight" for activations in flight, or "memory".
   */
  memorySteps(unit) {
    if (this.curves[unit]) return this.curves[unit];
    const { moment, place, change, worker, share, size } = this.held;
    const numStages = size.length / share.length; // a place is part * stages + stage
    const changes = Array.from({ length: this.workers }, () => []); // of each worker: [time, amount]
    for (let k = 0; k < moment.length; k++) {
      const op = moment[k] >> 1; // moment 2 op is its start, 2 op + 1 its end
      if (unit === "flight" && UNCOUNTED.has(this.letter(op))) continue;
      const time = moment[k] & 1 ? this.opFinish[op] : this.opStart[op];
      const weight = unit === "flight" ? share[Math.floor(place[k] / numStages)] : size[place[k]];
      changes[worker[k]].push([time, change[k] * weight]);
    }
    this.curves[unit] = changes.map((pairs) => levels(pairs.sort((first, second) => first[0] - second[0])));
    return this.curves[unit];
  }

  /** Ops of each worker in row order: those on its compute, and those on each lane beside it. */
  layLanes() {
    const { phase, worker, stage } = this.ops;
    const visible = [...new Set(phase)].sort((one, other) => one - other)
      .filter((code) => !HIDDEN.has(this.phases[code].letter));
    this.lanesBeside = [...new Set(visible.map((code) => this.phases[code].lane))]
      .filter((lane) => lane !== COMPUTE);
    const lanes = Array.from({ length: this.workers }, () =>
      Array.from({ length: 1 + this.lanesBeside.length }, () => []));
    for (let op = 0; op < phase.length; op++) {
      if (!visible.includes(phase[op])) continue;
      const workers = worker[op] >= 0 ? [worker[op]] : this.participants(stage[op]);
      for (const worker of workers) lanes[worker][this.opLane(op)].push(op);
    }
    return lanes.map((workerLanes) => workerLanes.map((lane) => Int32Array.from(lane)));
  }

  /** Workers that hold a stage, and take part in its all-reduce. */
  participants(stage) {
    const workers = new Set();
    for (let at = stage; at < this.placement.length; at += this.stages) workers.add(this.placement[at]);
    return [...workers];
  }

  letter(op) {
    return this.phases[this.ops.phase[op]].letter;
  }

  /** Number of the lane of its worker on which an op runs: 0 is compute, others lie beside it. */
  opLane(op) {
    return 1 + this.lanesBeside.indexOf(this.phases[this.ops.phase[op]].lane);
  }

  /** How an op is written: 3F12, or 3F12+0B4 for a fused pair. */
  label(op) {
    const { phase, stage, microbatch, with_phase, with_stage, with_microbatch } = this.ops;
    const name = this.cell(stage[op], phase[op], microbatch[op]);
    if (with_phase[op] === 0) return name;
    return `${name}+${this.cell(with_stage[op], with_phase[op], with_microbatch[op])}`;
  }

  cell(stage, phase, microbatch) {
    return `${stage < 0 ? "" : stage}${this.phases[phase].letter}${this.number(microbatch)}`;
  }

  number(microbatch) {
    return writeNumber(microbatch, this.slices);
  }

  /** The op of a label, or -1. */
  find(label) {
    for (let op = 0; op < this.ops.phase.length; op++) if (this.label(op) === label) return op;
    return -1;
  }

  /** Colours of the ops: by residual, or by phase. */
  colours(shown) {
    return shown.residuals && this.residuals?.isThere ? this.residuals : this.ofPhases;
  }

  /** Run under a link model, or set `error` to the reason that it cannot; a recorded run runs once. */
  async evaluate(model, factors) {
    if (this.starts && this.program) return;
    const packed = this.programs[model];
    this.error = packed.error ?? "";
    if (this.error) return;
    this.loaded[model] ??= await this.prepare(packed);
    this.program = this.loaded[model];
    this.vector = costVector(this.costs, factors);
    this.makespan = runProgram(this.program, this.vector);
    this.hasTails = false;
    this.sumUp();
    Object.assign(this, { curves: {}, cachedTimes: null }); // forget those of the earlier run
    this.peakInFlight ??= this.memorySteps("flight").map(({ peak }) => peak);
  }

  /** Lay a program out, with the op or the message of each node. */
  async prepare(packed) {
    const program = layOut(await unpack(packed));
    program.nodeOps = new Int32Array(program.nodes).fill(-1);
    program.nodeMessages = new Int32Array(program.nodes).fill(-1);
    program.op.forEach((node, op) => { if (node > 0) program.nodeOps[node] = op; });
    program.recordedStarts = this.starts && Float64Array.from(program.nodeOps, (op) => this.starts[op] ?? NaN);
    program.carrier.forEach((node, k) => { if (node > 0) program.nodeMessages[node] = k; });
    for (const at of program.durations) this.isRead[at] = 1;
    return program;
  }

  /** Set busy times, the bubble ratio, and the costs on the critical path. */
  sumUp() {
    const { program, vector, ops, costs, opStart, opFinish } = this;
    this.busy = new Float64Array(this.workers);
    this.shortest = Infinity;
    this.longest = 0;
    for (let op = 0; op < opStart.length; op++) {
      const node = program.op[op];
      opStart[op] = node > 0 ? program.start[node] : NaN;
      opFinish[op] = node > 0 ? program.finish[node] : NaN;
      const time = node > 0 ? vector[program.durations[node]] : 0;
      if (this.onCompute[op]) this.busy[ops.worker[op]] += time;
      if (time > this.longest) this.longest = time;
      if (time > 0 && time < this.shortest) this.shortest = time;
    }
    const mean = this.busy.reduce((sum, seconds) => sum + seconds, 0) / this.workers;
    this.bubbleRatio = this.makespan > 0 ? (this.makespan - mean) / this.makespan : 0;
    this.path = this.starts ? [] : criticalPath(program); // a recorded run does not show it
    this.isCritical = new Uint8Array(program.nodes);
    this.shares = new Map();
    for (const node of this.path) {
      this.isCritical[node] = 1;
      this.spend(program.durations[node], costs, vector);
      if (program.lastEdge[node] >= 0) this.spend(program.lag[program.lastEdge[node]], costs, vector);
    }
  }

  /** Add the cost at a position to the shares of the critical path. */
  spend(position, { kind, firstPair, firstLink }, vector) {
    if (vector[position] === 0) return;
    const isPair = firstPair >= 0 && position >= firstPair;
    const key = position >= firstLink ? "message" : isPair ? "pair" : this.keys[kind[position] - 1];
    this.shares.set(key, (this.shares.get(key) ?? 0) + vector[position]);
  }

  /** Whether any op or message has this kind of cost. */
  has(key) {
    const kind = this.keys.indexOf(key) + 1;
    return this.costs.kind.some((costKind, k) => costKind === kind && this.isRead[k]);
  }

  runs(op) {
    return this.program.op[op] > 0;
  }

  /** Time by which an op can grow before the makespan grows. */
  slack(op) {
    if (!this.hasTails) findTails(this.program, this.vector);
    this.hasTails = true;
    const node = this.program.op[op];
    return this.makespan - this.program.finish[node] - this.program.tail[node];
  }

  /** Time from the last arrival at an op to its start. */
  stall(op) {
    return Math.max(this.opStart[op] - (this.waits(op)[0]?.at ?? 0), 0);
  }

  /** Times at which each message leaves and arrives. */
  get messageTimes() {
    if (this.cachedTimes) return this.cachedTimes;
    const { carrier, arrives, start, finish } = this.program;
    const { producer } = this.messages;
    const leave = new Float64Array(carrier.length);
    const arrive = new Float64Array(carrier.length);
    for (let k = 0; k < carrier.length; k++) {
      const produced = this.opFinish[producer[k]];
      leave[k] = carrier[k] > 0 ? start[carrier[k]] : produced;
      arrive[k] = (carrier[k] > 0 ? finish[carrier[k]] : produced) + this.vector[arrives[k]];
    }
    this.cachedTimes = { leave, arrive };
    return this.cachedTimes;
  }

  /** Predecessors of an op: op and message, or -1, with the time of each arrival; the last first. */
  waits(op) {
    const { program, vector } = this;
    const node = program.op[op];
    const last = this.lastInto(node);
    const waits = [];
    for (const edge of this.edgesInto(node)) {
      const from = program.pred[edge];
      const carried = program.nodeMessages[from];
      const isMessage = carried >= 0;
      const producer = isMessage ? this.messages.producer[carried] : program.nodeOps[from];
      const hasLag = program.lag[edge] > 0;
      waits.push({
        op: producer,
        message: isMessage ? carried : hasLag ? this.messageBetween(producer, op) : -1,
        at: program.finish[from] + vector[program.lag[edge]],
        isLast: edge === last,
      });
    }
    return waits.sort((one, other) => other.isLast - one.isLast || other.at - one.at);
  }

  /** Edges into a node; instead of an edge from a gate of a collective, those into the gate. */
  *edgesInto(node) {
    const { first, pred } = this.program;
    for (let edge = first[node]; edge < first[node + 1]; edge++) {
      if (this.isGate(pred[edge])) yield* this.edgesInto(pred[edge]);
      else yield edge;
    }
  }

  /** The edge of the last arrival at a node, or -1. */
  lastInto(node) {
    const { lastEdge, pred } = this.program;
    let edge = lastEdge[node];
    while (edge >= 0 && this.isGate(pred[edge])) edge = lastEdge[pred[edge]];
    return edge;
  }

  isGate(node) {
    const { nodeOps, nodeMessages, durations } = this.program;
    return node > 0 && nodeOps[node] < 0 && nodeMessages[node] < 0 && durations[node] === 0;
  }

  /** The first op to which this op is the last arrival, by a message or in the row, or -1. */
  awaiting(op) {
    const { program } = this;
    const opNode = program.op[op];
    let earliest = -1;
    for (let node = 1; node < program.nodes; node++) {
      const edge = this.lastInto(node);
      if (edge < 0 || program.nodeOps[node] < 0) continue;
      const from = program.pred[edge];
      const carried = program.nodeMessages[from];
      if (from !== opNode && (carried < 0 || this.messages.producer[carried] !== op)) continue;
      if (earliest < 0 || program.start[node] < this.opStart[earliest]) earliest = program.nodeOps[node];
    }
    return earliest;
  }

  messageBetween(producer, consumer) {
    const { first, order } = this.messagesTo;
    for (let k = first[consumer]; k < first[consumer + 1]; k++) {
      if (this.messages.producer[order[k]] === producer) return order[k];
    }
    return -1;
  }
}

/** Place of each stage among those of its worker: 1 is the first, 0 the last or the only one. */
function depths(workers) {
  return Float64Array.from(workers, (worker, stage) => {
    const stages = [...workers.keys()].filter((k) => workers[k] === worker);
    return stages.length > 1 ? 1 - stages.indexOf(stage) / (stages.length - 1) : 0;
  });
}

/** Messages sorted by consumer: those of an op are order[first[op]] to order[first[op + 1] - 1]. */
function byConsumer(consumer, ops) {
  const first = new Int32Array(ops + 1);
  for (const op of consumer) first[op + 1]++;
  for (let op = 0; op < ops; op++) first[op + 1] += first[op];
  const next = first.slice();
  const order = new Int32Array(consumer.length);
  consumer.forEach((op, k) => { order[next[op]++] = k; });
  return { first, order };
}

/** Sum up changes [time, amount]; of changes at one time only the last level counts. */
function levels(changes) {
  const time = [];
  const held = [];
  let level = 0;
  let peak = 0;
  let peakAt = 0;
  changes.forEach(([moment, amount], k) => {
    level += amount;
    if (changes[k + 1]?.[0] === moment) return;
    time.push(moment);
    held.push(level);
    if (level > peak * (1 + 1e-12)) [peak, peakAt] = [level, moment];
  });
  return { time: Float64Array.from(time), held: Float64Array.from(held), peak, peakAt };
}
