// Lowering in the page: a table becomes a program under a link model, as in engine/lowering.
//
// Costs of a table stand in one vector, as in `CostLayout`:
//
//   [ 0 | op times: phase by stage | fused pairs | latency | transmit | latency + transmit ]
//                                                  each by direction, pipe, stage boundary

const NO_OP = { phase: 0, stage: 0, microbatch: 0 };

/** Ops of a table as columns, numbered row by row; columns `with_..` are of the second op of a pair. */
export function tableOps({ cells, microbatchPipes, placement }) {
  const column = (value) => Int32Array.from(cells, ({ worker, ops: [op, partner] }) =>
    value(op, partner ?? NO_OP, worker));
  const ops = {
    phase: column((op) => op.phase),
    stage: column((op) => op.stage),
    microbatch: column((op) => op.microbatch),
    worker: column((op, partner, worker) => worker),
    pipe: column((op) => microbatchPipes[Math.max(0, op.microbatch)]),
    with_phase: column((op, partner) => partner.phase),
    with_stage: column((op, partner) => partner.stage),
    with_microbatch: column((op, partner) => partner.microbatch),
  };
  return { ops, placement: Int32Array.from(placement.flat()) };
}

/** First position of the times of each phase in the cost vector of a table, and their number. */
export function costPlaces({ stages, workers }, { timed, workerPhases }) {
  const positions = new Map();
  let first = 1;
  for (const phase of timed) {
    const count = workerPhases.includes(phase) ? workers : stages;
    positions.set(phase, { first, count });
    first += count;
  }
  return { of: positions, end: first };
}

/** Positions in the cost vector of a table. */
export function costLayout(table, grammar) {
  const { stages, pipes, cells } = table;
  const kinds = new Map(); // fused pairs: stage of F, phase and stage of the backward
  for (const { ops } of cells) {
    if (ops.length === 2) kinds.set(`${ops[0].stage} ${ops[1].phase} ${ops[1].stage}`, ops);
  }
  const times = costPlaces(table, grammar);
  const op = (phase, place) => (times.of.has(phase) ? times.of.get(phase).first + place : 0);
  const pairs = [...kinds.keys()].sort();
  const places = new Map(pairs.map((key, k) => [key, k]));
  const firstPair = times.end;
  const firstLink = firstPair + pairs.length;
  const boundaries = grammar.graph.length || stages - 1;
  const links = 2 * pipes * boundaries;
  const link = (cost, { direction, pipe, boundary }) =>
    firstLink + cost * links + (direction * pipes + pipe) * boundaries + boundary;
  const duration = ({ ops, worker }) => (ops.length === 2
    ? firstPair + places.get(`${ops[0].stage} ${ops[1].phase} ${ops[1].stage}`)
    : op(ops[0].phase, ops[0].stage < 0 ? worker : ops[0].stage));
  const joined = pairs.flatMap((key) => {
    const [first, second] = kinds.get(key);
    return [op(first.phase, first.stage), op(second.phase, second.stage)];
  });
  const size = firstLink + 3 * links;
  return { op, times, link, duration, joined, firstPair, firstLink, links, size };
}

const COST_ROWS = { latency: 0, transmit: 1, message: 2 }; // of a link

/** Dependencies by rules: those with a message, in the order of their producers, and the others. */
export function tableMessages(table, grammar) {
  const { microbatches, cells, microbatchPipes } = table;
  const where = placed(table, grammar);
  const sent = [];
  const unsent = []; // without a message
  const seen = new Set(); // two rules may give one dependency
  for (const rule of grammar.rules) {
    const producerOps = rule.producers.map((phase) => where.get(phase)).filter(Boolean);
    for (const { to, place, m } of waitingBy(rule, table, where)) {
      for (const [source, microbatch] of waitedFor(rule, table, grammar, cells[to].worker, place, m)) {
        const from = producerOps.reduce((op, ops) => Math.max(op, ops[source * microbatches + microbatch]), -1);
        if (from < 0) continue;
        const edge = {
          from, to, pipe: microbatchPipes[microbatch], microbatch, stage: source, toStage: place,
          ...crossing(grammar.graph, source, place),
          sender: cells[from].worker, receiver: cells[to].worker,
        };
        const isApart = edge.sender !== edge.receiver;
        const isSent = isApart && rule.sends;
        const key = `${from} ${to} ${source} ${place} ${microbatch} ${isSent}`;
        if (seen.has(key)) continue;
        seen.add(key);
        (isSent ? sent : unsent).push(edge);
      }
    }
  }
  const order = [...sent.keys()].sort((one, other) =>
    sent[one].from - sent[other].from || sent[one].direction - sent[other].direction ||
    sent[one].toStage - sent[other].toStage || one - other);
  return { sent: order.map((k) => sent[k]), unsent };
}

/** By phase: the op at place * microbatches + microbatch; a place is a stage, or a worker. */
function placed({ stages, workers, microbatches, cells }, { workerPhases }) {
  const where = new Map();
  cells.forEach(({ worker, ops }, op) => {
    for (const { phase, stage, microbatch } of ops) {
      if (microbatch < 0) continue;
      const isPerWorker = workerPhases.includes(phase);
      const size = (isPerWorker ? workers : stages) * microbatches;
      if (!where.has(phase)) where.set(phase, new Int32Array(size).fill(-1));
      where.get(phase)[(isPerWorker ? worker : stage) * microbatches + microbatch] = op;
    }
  });
  return where;
}

/** Consumers of a rule: op, place and microbatch. */
function* waitingBy({ consumer, consumerStage, consumerMicrobatch }, { stages, microbatches }, where) {
  const waiting = where.get(consumer) ?? [];
  for (let at = 0; at < waiting.length; at++) {
    const place = Math.floor(at / microbatches);
    const m = at % microbatches;
    if (consumerStage !== null && place !== (consumerStage + stages) % stages) continue;
    if (consumerMicrobatch !== null && m !== consumerMicrobatch) continue;
    if (waiting[at] >= 0) yield { to: waiting[at], place, m };
  }
}

/** Producers of a rule for one consumer: places and microbatches. */
function* waitedFor(rule, { stages, microbatches }, { graph, workerPhases, slices }, worker, place, m) {
  const { stageOffset: offset, producerStage, producerMicrobatch, sliceOffset } = rule;
  let places = [place + offset].filter((source) => source >= 0 && source < stages);
  if (workerPhases.includes(rule.producers[0])) places = [worker];
  else if (producerStage !== null) places = [(producerStage + stages) % stages];
  else if (offset && graph.length) {
    const ends = offset < 0 ? graph : graph.map(([a, b]) => [b, a]); // producer, consumer
    places = ends.filter(([, to]) => to === place).map(([from]) => from);
  }
  let sources = [m];
  if (rule.waitsForAll) sources = [...new Array(microbatches).keys()];
  else if (producerMicrobatch !== null) sources = [producerMicrobatch];
  else if (sliceOffset) {
    const part = (m % slices) + sliceOffset;
    sources = part >= 0 && part < slices ? [m + sliceOffset] : [];
  }
  for (const source of places) for (const microbatch of sources) yield [source, microbatch];
}

/** Direction and stage boundary between two stages; in a graph the boundary is the edge. */
function crossing(graph, from, to) {
  const along = graph.findIndex(([a, b]) => a === from && b === to);
  const back = graph.findIndex(([a, b]) => a === to && b === from);
  if (along >= 0 || back >= 0) return { direction: along >= 0 ? 0 : 1, boundary: Math.max(along, back) };
  return { direction: from > to ? 1 : 0, boundary: Math.min(from, to) };
}

/** Queue of an op: the row of its worker, or a lane beside it. */
function queueKey({ worker, ops: [{ phase }] }, { offRow }) {
  return `${worker} ${offRow[phase] ?? ""}`;
}

/** For each op the first op of its collective; an op that is not collective itself. */
function mergedOps(cells, { together }) {
  const first = new Map();
  return cells.map(({ ops: [{ phase, microbatch }] }, op) => {
    if (!together.includes(phase)) return op;
    const key = `${phase} ${microbatch}`;
    if (!first.has(key)) first.set(key, op);
    return first.get(key);
  });
}

/** Lower a table without SENDs and RECVs under a link model; throw an error if it cannot run. */
export function lower(table, model, layout, { sent, unsent }, grammar) {
  const { cells, workers } = table;
  const { occupancy, lag: later, blocks, is_rendezvous: isRendezvous } = model;
  const edges = []; // tail, head, lag
  // nodes: the source, then ops, then gates, then transfers
  const node = Int32Array.from(cells, (_, op) => op + 1);
  let nodes = 1 + cells.length;
  const durations = [0, ...cells.map(layout.duration)];
  // a collective starts at a gate, which takes no time and waits for all predecessors of its ops
  const merged = mergedOps(cells, grammar);
  const gates = new Map();
  merged.forEach((first, op) => {
    if (!grammar.together.includes(cells[op].ops[0].phase)) return;
    if (!gates.has(first)) {
      gates.set(first, nodes++);
      durations.push(0);
    }
    edges.push([gates.get(first), node[op], 0]);
  });
  const head = (op) => gates.get(merged[op]) ?? node[op];
  const add = (tail, to, lag = 0) => { edges.push([tail, to, lag]); };
  chain([...cells.keys()], (op) => queueKey(cells[op], grammar))
    .forEach(([one, other]) => add(node[one], head(other)));
  for (const { from, to } of unsent) {
    const isInLine = queueKey(cells[from], grammar) === queueKey(cells[to], grammar);
    if (!isInLine) add(node[from], head(to));
  }
  const carried = occupancy ? sent.map(() => nodes++) : null;
  if (carried) {
    sent.forEach((message, k) => {
      durations.push(layout.link(COST_ROWS[occupancy], message));
      add(node[message.from], carried[k]);
    });
  }
  if (isRendezvous) {
    const ends = queueOrder(cells, sent, unsent, grammar);
    chain(ends, ({ worker }) => worker).forEach(([one, other]) => add(carried[one.k], carried[other.k]));
  } else if (carried) {
    chain([...sent.keys()], (k) => sent[k].sender * workers + sent[k].receiver)
      .forEach(([one, other]) => add(carried[one], carried[other]));
  }
  const lags = sent.map((message) => (later ? layout.link(COST_ROWS[later], message) : 0));
  sent.forEach(({ from, to }, k) => add(carried ? carried[k] : node[from], head(to), lags[k]));
  if (blocks) holdNext(cells, sent, grammar, (k, op) => add(carried[k], head(op)));
  return laidOut(nodes, edges, durations, node, carried ?? sent.map(() => 0), lags);
}

/** Pairs of successive entries with the same key. */
function chain(entries, getKey) {
  const last = new Map();
  const pairs = [];
  for (const entry of entries) {
    const key = getKey(entry);
    if (last.has(key)) pairs.push([last.get(key), entry]);
    last.set(key, entry);
  }
  return pairs;
}

/** Let the sender's next op wait until its messages are transmitted. */
function holdNext(cells, sent, { rowOps }, add) {
  const next = new Int32Array(cells.length).fill(-1);
  const isOp = cells.map(({ ops }) => rowOps.includes(ops[0].phase));
  chain([...cells.keys()].filter((op) => isOp[op]), (op) => cells[op].worker)
    .forEach(([one, other]) => { next[one] = other; });
  sent.forEach(({ from }, k) => { if (next[from] >= 0) add(k, next[from]); });
}

/**
 * Both ends of every transfer in the order of the queues of workers: by the end of the producer in
 * a run with unit slots.
 */
function queueOrder(cells, sent, unsent, grammar) {
  const end = unitEnds(cells, sent, unsent, grammar);
  const order = [...sent.keys()].sort((a, b) => {
    const [one, other] = [sent[a], sent[b]];
    return end[one.from] - end[other.from] || one.sender - other.sender || one.stage - other.stage ||
      one.microbatch - other.microbatch || a - b;
  });
  return order.flatMap((k) => [{ k, worker: sent[k].sender }, { k, worker: sent[k].receiver }]);
}

/** End of every op in the message-free run with unit slots. */
function unitEnds(cells, sent, unsent, grammar) {
  const { unit } = grammar;
  const merged = mergedOps(cells, grammar);
  const edges = chain([...cells.keys()], (op) => queueKey(cells[op], grammar))
    .concat([...sent, ...unsent].map(({ from, to }) => [from, to]))
    .map(([tail, head]) => [merged[tail], merged[head]]);
  const order = sortedNodes(cells.length, edges);
  const before = cells.map(() => []);
  for (const [tail, head] of edges) before[head].push(tail);
  const end = new Float64Array(cells.length);
  for (const op of order) {
    const duration = cells[op].ops.reduce((sum, { phase }) => sum + (unit[phase] ?? 0), 0);
    end[op] = Math.max(0, ...before[op].map((tail) => end[tail])) + duration;
  }
  return merged.map((first) => end[first]);
}

/** Topological order of the nodes; throw an error if edges form a cycle. */
function sortedNodes(nodes, edges) {
  const degree = new Int32Array(nodes); // edges into each node from nodes that are not in the order
  const heads = Array.from({ length: nodes }, () => []);
  for (const [tail, head] of edges) {
    degree[head]++;
    heads[tail].push(head);
  }
  const order = [];
  for (let k = 0; k < nodes; k++) if (degree[k] === 0) order.push(k);
  for (let k = 0; k < order.length; k++) {
    for (const head of heads[order[k]]) if (--degree[head] === 0) order.push(head);
  }
  if (order.length < nodes) throw new Error("a deadlock: ops or transfers wait for each other in a circle");
  return order;
}

/** A program in the form of those that Python lowers: nodes in topological order, edges as steps back. */
function laidOut(nodes, edges, durations, op, carrier, arrives) {
  const order = sortedNodes(nodes, edges);
  // the source first: nothing leads to it
  const place = new Int32Array(nodes);
  order.sort((one, other) => (one === 0 ? -1 : other === 0 ? 1 : 0));
  order.forEach((node, k) => { place[node] = k; });
  const byHead = Array.from({ length: nodes }, () => []);
  for (const [tail, head, lag] of edges) byHead[place[head]].push([place[head] - place[tail], lag]);
  const flat = byHead.flat();
  const numbered = (list) => Int32Array.from(list, (node) => place[node]); // place[0] is 0
  return {
    degree: Int32Array.from(byHead, (headEdges) => headEdges.length),
    back: Int32Array.from(flat, ([back]) => back),
    lag: Int32Array.from(flat, ([, lag]) => lag),
    durations: Int32Array.from(order, (node) => durations[node]),
    op: numbered(op),
    carrier: numbered(carrier),
    arrives: Int32Array.from(arrives),
  };
}

/** Changes of the memory of workers, as Python's memory ledger lists them. */
export function memoryChanges(table, grammar) {
  const { R } = grammar.codes;
  const { whole, checkpoint, leftByF } = grammar.parts;
  const recomputed = new Set();
  for (const { ops } of table.cells) {
    for (const { phase, stage, microbatch } of ops) if (phase === R) recomputed.add(`${stage} ${microbatch}`);
  }
  const changes = [];
  table.cells.forEach(({ worker, ops }, op) => {
    for (const { phase, stage, microbatch } of ops) {
      for (const [moment, part, change] of grammar.ledger[phase] ?? []) {
        const remaining = recomputed.has(`${stage} ${microbatch}`) ? checkpoint : whole;
        const sizeStage = stage < 0 ? table.stages - 1 : stage; // a worker's op has the last stage's sizes
        const place = (part === leftByF ? remaining : part) * table.stages + sizeStage;
        changes.push({ worker, moment: 2 * op + moment, place, change });
      }
    }
  });
  changes.sort((one, other) => one.moment - other.moment); // ops go worker by worker
  const column = (name) => Int32Array.from(changes, (change) => change[name]);
  const size = grammar.sizes.flatMap((share) => new Array(table.stages).fill(share));
  return {
    moment: column("moment"), place: column("place"), change: column("change"),
    worker: column("worker"), size: Float64Array.from(size), share: grammar.shares,
  };
}
