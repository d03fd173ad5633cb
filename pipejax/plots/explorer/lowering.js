// Lowering in the page: a table becomes a program under a link model, as in engine/lowering.
//
// Costs of a table stand in one vector, as in `CostLayout`:
//
//   [ 0 | op times: phase by stage | fused pairs | latency | transmit | latency + transmit ]
//                                                  each by direction, pipe, stage boundary

/** Ops of a table as columns, numbered row by row. */
export function opsOf({ cells, pipeOf, placement, pipes, stages }) {
  const size = cells.length;
  const column = () => new Int32Array(size);
  const ops = {
    phase: column(), stage: column(), microbatch: column(), worker: column(), pipe: column(),
    with_phase: column(), with_stage: column(), with_microbatch: column(),
  };
  cells.forEach(({ worker, ops: [one, other] }, op) => {
    ops.phase[op] = one.phase;
    ops.stage[op] = one.stage;
    ops.microbatch[op] = one.microbatch;
    ops.worker[op] = worker;
    ops.pipe[op] = pipeOf[Math.max(0, one.microbatch)];
    ops.with_phase[op] = other?.phase ?? 0;
    ops.with_stage[op] = other?.stage ?? 0;
    ops.with_microbatch[op] = other?.microbatch ?? 0;
  });
  const flat = new Int32Array(pipes * stages);
  placement.forEach((row, pipe) => flat.set(row, pipe * stages));
  return { ops, placement: flat };
}

/** Positions in the cost vector of a table. */
export function layoutOf({ stages, pipes, cells }, { timed }) {
  const kinds = new Map(); // fused pairs: stage of F, phase and stage of the backward
  for (const { ops } of cells) {
    if (ops.length === 2) kinds.set(`${ops[0].stage} ${ops[1].phase} ${ops[1].stage}`, ops);
  }
  const rows = new Map(timed.map((phase, row) => [phase, row]));
  const op = (phase, stage) => (rows.has(phase) ? 1 + rows.get(phase) * stages + stage : 0);
  const pairs = [...kinds.keys()].sort();
  const places = new Map(pairs.map((key, k) => [key, k]));
  const firstPair = 1 + timed.length * stages;
  const firstLink = firstPair + pairs.length;
  const links = 2 * pipes * (stages - 1);
  const link = (cost, { direction, pipe, boundary }) =>
    firstLink + cost * links + (direction * pipes + pipe) * (stages - 1) + boundary;
  const duration = (ops) => (ops.length === 2
    ? firstPair + places.get(`${ops[0].stage} ${ops[1].phase} ${ops[1].stage}`)
    : op(ops[0].phase, ops[0].stage));
  const joined = pairs.flatMap((key) => {
    const [one, other] = kinds.get(key);
    return [op(one.phase, one.stage), op(other.phase, other.stage)];
  });
  return { op, link, duration, joined, firstPair, firstLink, links, size: firstLink + 3 * links };
}

const LATENCY = 0; // rows of the costs of a link
const TRANSMIT = 1;
const MESSAGE = 2;

/** What ops wait for in other rows, by the order of those that make it; orders in a row are checked. */
export function messagesOf(table, grammar) {
  const { stages, microbatches, cells, placement, pipeOf } = table;
  const where = new Map(); // by phase: op of each stage and microbatch
  cells.forEach(({ ops }, op) => {
    for (const { phase, stage, microbatch } of ops) {
      if (microbatch < 0) continue;
      if (!where.has(phase)) where.set(phase, new Int32Array(stages * microbatches).fill(-1));
      where.get(phase)[stage * microbatches + microbatch] = op;
    }
  });
  const sent = [];
  const own = []; // within a row
  for (const [consumer, producers, offset] of grammar.rules) {
    const waiting = where.get(consumer);
    if (!waiting) continue;
    const made = producers.map((phase) => where.get(phase)).filter(Boolean);
    for (let stage = Math.max(0, -offset); stage < stages - Math.max(0, offset); stage++) {
      for (let m = 0; m < microbatches; m++) {
        const to = waiting[stage * microbatches + m];
        const from = made.reduce((most, ops) => Math.max(most, ops[(stage + offset) * microbatches + m]), -1);
        if (to < 0 || from < 0) continue;
        const pipe = pipeOf[m];
        const direction = offset > 0 ? 1 : 0;
        const edge = {
          from, to, pipe, direction, microbatch: m, stage: stage + offset, toStage: stage,
          boundary: Math.min(stage, stage + offset),
          sender: cells[from].worker, receiver: cells[to].worker,
        };
        if (placement[pipe][stage] !== placement[pipe][stage + offset]) sent.push(edge);
        else if (from < to) own.push(edge);
        else throw new Error(`worker ${edge.sender}: an op of microbatch ${m} stands before what it waits for`);
      }
    }
  }
  const order = [...sent.keys()].sort((one, other) =>
    sent[one].from - sent[other].from || sent[one].direction - sent[other].direction || one - other);
  return { sent: order.map((k) => sent[k]), own };
}

/** Lower a table under a link model; what cannot run says why. */
export function lower(table, model, layout, { sent, own }, grammar) {
  const { cells, workers } = table;
  const meets = model === "rendezvous";
  const edges = []; // tail, head, lag
  const add = (tail, head, lag = 0) => { edges.push([tail, head, lag]); };
  // nodes: the source, then ops, then transfers
  const node = Int32Array.from(cells, ({ ops }) => (meets || !grammar.waits.includes(ops[0].phase) ? 1 : 0));
  let nodes = 1;
  node.forEach((runs, op) => { if (runs) node[op] = nodes++; });
  const lasts = [0];
  cells.forEach(({ ops }, op) => { if (node[op]) lasts.push(layout.duration(ops)); });
  chain(cells.map((_, op) => op).filter((op) => node[op]), (op) => cells[op].worker)
    .forEach(([one, other]) => add(node[one], node[other]));
  const carried = model === "delay" ? null : sent.map(() => nodes++);
  if (carried) sent.forEach((message) => lasts.push(layout.link(meets ? MESSAGE : TRANSMIT, message)));
  sent.forEach((message, k) => { if (carried) add(node[message.from], carried[k]); });
  const turns = [...sent.keys()];
  if (meets) {
    const ends = queueOrder(table, sent, own, grammar);
    chain(ends, ({ worker }) => worker).forEach(([one, other]) => add(carried[one.k], carried[other.k]));
  } else if (carried) {
    chain(turns, (k) => sent[k].sender * workers + sent[k].receiver)
      .forEach(([one, other]) => add(carried[one], carried[other]));
  }
  const behind = sent.map((message) =>
    (meets ? 0 : layout.link(carried ? LATENCY : MESSAGE, message)));
  sent.forEach(({ from, to }, k) => add(carried ? carried[k] : node[from], node[to], behind[k]));
  if (model === "blocking") holdNext(cells, sent, grammar, (k, op) => add(carried[k], node[op]));
  if (meets) holdRows(cells, sent, grammar, (k, op) => add(carried[k], node[op]));
  return laidOut(nodes, edges, lasts, node, carried ?? sent.map(() => 0), behind);
}

/** Neighbours among entries that share a key. */
function chain(entries, keyOf) {
  const last = new Map();
  const found = [];
  for (const entry of entries) {
    const key = keyOf(entry);
    if (last.has(key)) found.push([last.get(key), entry]);
    last.set(key, entry);
  }
  return found;
}

/** Let the sender's next op wait until messages have left. */
function holdNext(cells, sent, { rowOps }, add) {
  const next = new Int32Array(cells.length).fill(-1);
  const isOp = cells.map(({ ops }) => rowOps.includes(ops[0].phase));
  chain(cells.map((_, op) => op).filter((op) => isOp[op]), (op) => cells[op].worker)
    .forEach(([one, other]) => { next[one] = other; });
  sent.forEach(({ from }, k) => { if (next[from] >= 0) add(k, next[from]); });
}

/** Let waits for a SEND end with its transfer. */
function holdRows(cells, sent, { waits, letters }, add) {
  const held = new Map();
  cells.forEach(({ ops: [{ phase, stage, microbatch }] }, op) => {
    if (waits.includes(phase)) held.set(`${letters[phase].endsWith("B") ? 1 : 0} ${stage} ${microbatch}`, op);
  });
  sent.forEach(({ direction, stage, microbatch }, k) => {
    const op = held.get(`${direction} ${stage} ${microbatch}`);
    if (op !== undefined) add(k, op);
  });
}

/**
 * Both ends of every transfer in the order of the queues of workers: by their cells where the table
 * has SENDs and RECVs, else by the end of what makes the message in a run with unit slots.
 */
function queueOrder(table, sent, own, grammar) {
  if (table.transfers.length) return endsByCell(table, sent, grammar);
  const end = unitEnds(table, sent, own, grammar);
  const order = [...sent.keys()].sort((a, b) => {
    const [one, other] = [sent[a], sent[b]];
    return end[one.from] - end[other.from] || one.sender - other.sender || one.stage - other.stage ||
      one.microbatch - other.microbatch || a - b;
  });
  return order.flatMap((k) => [{ k, worker: sent[k].sender }, { k, worker: sent[k].receiver }]);
}

function endsByCell({ transfers, cells }, sent, { letters }) {
  const at = new Map(transfers.map(({ worker, slot, ops: [{ phase, stage, microbatch }] }) =>
    [`${letters[phase]} ${stage} ${microbatch} ${worker}`, slot]));
  if (at.size !== 2 * sent.length) throw new Error("every message needs one SEND and one RECV, and nothing else does");
  const ends = sent.flatMap(({ direction, stage, toStage, microbatch, sender, receiver, from, to }, k) => {
    const letter = direction ? "B" : "F";
    const sends = at.get(`SEND_${letter} ${stage} ${microbatch} ${sender}`);
    const receives = at.get(`RECV_${letter} ${toStage} ${microbatch} ${receiver}`);
    if (sends === undefined || receives === undefined || sends < cells[from].slot || receives > cells[to].slot) {
      throw new Error(`SEND_${letter} or RECV_${letter} of stage ${stage}, microbatch ${microbatch} is missing or misplaced`);
    }
    return [{ k, worker: sender, slot: sends }, { k, worker: receiver, slot: receives }];
  });
  return ends.sort((one, other) => one.slot - other.slot);
}

/** End of every op where messages take no time and ops unit slots. */
function unitEnds({ cells }, sent, own, { unit }) {
  const edges = chain(cells.map((_, op) => op), (op) => cells[op].worker)
    .concat([...sent, ...own].map(({ from, to }) => [from, to]));
  const order = sortedNodes(cells.length, edges);
  const before = cells.map(() => []);
  for (const [tail, head] of edges) before[head].push(tail);
  const end = new Float64Array(cells.length);
  for (const op of order) {
    const lasts = cells[op].ops.reduce((sum, { phase }) => sum + (unit[phase] ?? 0), 0);
    end[op] = Math.max(0, ...before[op].map((tail) => end[tail])) + lasts;
  }
  return end;
}

/** An order in which all edges lead on; there is none where things wait for each other in a circle. */
function sortedNodes(nodes, edges) {
  const left = new Int32Array(nodes);
  const after = Array.from({ length: nodes }, () => []);
  for (const [tail, head] of edges) {
    left[head]++;
    after[tail].push(head);
  }
  const order = [];
  for (let k = 0; k < nodes; k++) if (left[k] === 0) order.push(k);
  for (let k = 0; k < order.length; k++) {
    for (const head of after[order[k]]) if (--left[head] === 0) order.push(head);
  }
  if (order.length < nodes) throw new Error("a deadlock: ops or transfers wait for each other in a circle");
  return order;
}

/** A program in the form of those that Python lowers. */
function laidOut(nodes, edges, lasts, op, carrier, arrives) {
  const order = sortedNodes(nodes, edges);
  // the source first: nothing leads to it
  const place = new Int32Array(nodes);
  order.sort((one, other) => (one === 0 ? -1 : other === 0 ? 1 : 0));
  order.forEach((each, k) => { place[each] = k; });
  const degree = new Int32Array(nodes);
  const byHead = Array.from({ length: nodes }, () => []);
  for (const [tail, head, lag] of edges) byHead[place[head]].push([place[head] - place[tail], lag]);
  byHead.forEach((own, head) => { degree[head] = own.length; });
  const flat = byHead.flat();
  const numbered = (list) => Int32Array.from(list, (each) => (each > 0 ? place[each] : 0));
  return {
    degree,
    back: Int32Array.from(flat, ([back]) => back),
    lag: Int32Array.from(flat, ([, lag]) => lag),
    lasts: Int32Array.from(order, (each) => lasts[each]),
    op: numbered(op),
    carrier: numbered(carrier),
    arrives: Int32Array.from(arrives),
  };
}

/** Changes of what workers hold, as Python's memory ledger lists them. */
export function heldOf(table, grammar) {
  const { R } = grammar.codes;
  const { whole, checkpoint, leftByF } = grammar.parts;
  const again = new Set();
  for (const { ops } of table.cells) {
    for (const { phase, stage, microbatch } of ops) if (phase === R) again.add(`${stage} ${microbatch}`);
  }
  const changes = [];
  table.cells.forEach(({ worker, ops }, op) => {
    for (const { phase, stage, microbatch } of ops) {
      for (const [moment, part, change] of grammar.ledger[phase] ?? []) {
        const left = again.has(`${stage} ${microbatch}`) ? checkpoint : whole;
        changes.push({ worker, moment: 2 * op + moment, place: (part === leftByF ? left : part) * table.stages + stage, change });
      }
    }
  });
  changes.sort((one, other) => one.moment - other.moment); // ops go worker by worker
  const column = (name) => Int32Array.from(changes, (each) => each[name]);
  const size = grammar.sizes.flatMap((share) => new Array(table.stages).fill(share));
  return {
    moment: column("moment"), place: column("place"), change: column("change"),
    worker: column("worker"), size: Float64Array.from(size),
  };
}
