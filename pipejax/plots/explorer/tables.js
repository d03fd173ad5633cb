// Tables that the page reads itself: the text of their cells becomes ops, row by row.
//
// The meaning of cells comes with the page (`grammar`), from the records of the library. The page
// refuses every table that the command line refuses.

const PAIR = /^\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B$/;
const FORMAT = "pipejax-table";

/** Read a table: PyTorch's CSV, or the JSON of `pipejax export`. */
export function readTable(text, name, grammars) {
  const plain = text.replace(/^\ufeff/, "").replace(/\r\n?/g, "\n");
  if (plain.includes("\0") || !plain.trim()) throw new Error("it holds no text");
  if (!plain.trimStart().startsWith("{")) return makeTable({ rows: readRows(plain), name }, grammars[0]);
  const data = JSON.parse(plain);
  if (data.format !== FORMAT) throw new Error(`it is JSON, but no "format": "${FORMAT}"`);
  const shares = data.stage_shares?.some((share) => share !== 1) ? data.stage_shares : null;
  const { placement, pipe_of_microbatch: microbatchPipes } = data;
  const shape = { rows: data.rows, name: data.name, placement, microbatchPipes, shares };
  return makeTable(shape, findGrammar(data, grammars));
}

const KIND_KEYS = ["kinds", "rules", "items"];
const SHAPE_KEYS = ["slices", "forward_only", "graph"];

/** The grammar that a table states: a usual one with slices or a graph, or one of this page. */
function findGrammar(data, grammars) {
  if (data.lanes !== undefined) throw new Error("a page does not read tables whose gathers or reductions are on lanes");
  const [usual] = grammars;
  const stated = (keys, table) => keys.filter((key) => table[key] !== undefined);
  if (!stated(KIND_KEYS, data).length) {
    if (!stated(SHAPE_KEYS, data).length) return usual;
    const { slices = 1, forward_only: forwardOnly = false, graph = [] } = data;
    const rules = slices > 1 ? [...usual.rules, ...usual.sliceRules] : usual.rules;
    return { ...usual, isUsual: false, slices, forwardOnly, graph, rules };
  }
  const form = (table) => JSON.stringify([...KIND_KEYS, ...SHAPE_KEYS].map((key) => [key, canonical(table[key], key)]));
  const match = grammars.find((grammar) => form(grammar.data) === form(data));
  if (match) return match;
  const letters = (data.kinds ?? []).map((kind) => kind.letters).join(", ");
  throw new Error(`its own kinds and rules (${letters}) are those of no table that this page was written with`);
}

/** A part of a grammar for comparison: kinds with their defaults, keys in one order. */
function canonical(value, key) {
  const sorted = (record) => Object.fromEntries(Object.entries(record).sort());
  if (key === "kinds") {
    return (value ?? []).map(({ letters, ...kind }) =>
      sorted({ letters, name: letters, time: letters, lane: "compute", of: "microbatch", ...kind }));
  }
  return key === "rules" ? (value ?? []).map((rule) => rule.replace(/\s+/g, "")) : value;
}

/** Cells of a CSV, whose cells contain no commas. */
export function readRows(text) {
  const rows = text.split("\n").map((line) =>
    line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1")));
  while (rows.length && rows[rows.length - 1].every((cell) => !cell)) rows.pop();
  return rows;
}

/** Read cells, and find the placement of stages unless it is given. */
export function makeTable({ rows, name, placement, microbatchPipes, shares }, grammar) {
  const cells = rows.flatMap((row, worker) =>
    row.map((text, slot) => ({ worker, slot, ops: readCell(text, grammar, worker, slot) }))
      .filter(({ ops }) => ops.length > 0));
  const position = placement ? { placement, microbatchPipes } : placed(cells, rows.length, grammar);
  const table = {
    name,
    grammar,
    workers: rows.length,
    stages: position.placement[0].length,
    microbatches: position.microbatchPipes.length,
    pipes: position.placement.length,
    placement: position.placement,
    microbatchPipes: position.microbatchPipes,
    shares: shares ?? new Array(position.placement[0].length).fill(1),
    cells: cells.filter(({ ops }) => !grammar.messages.includes(ops[0].phase)),
    transfers: cells.filter(({ ops }) => grammar.messages.includes(ops[0].phase)),
  };
  check(table, grammar);
  return table;
}

/** The ops of a cell: none, one, or two of a fused pair. */
function readCell(text, grammar, worker, slot) {
  const plain = text.trim();
  if (!plain) return [];
  const pair = PAIR.exec(plain);
  const ops = (pair ? pair.slice(1) : [plain]).map((one) => nodeOps(one.trim(), grammar));
  const { F, B, I } = grammar.codes;
  const isPair = ops.length === 2 && ops[0]?.phase === F && [B, I].includes(ops[1]?.phase);
  if (ops.some((op) => !op) || (pair && !isPair)) {
    const form = grammar.slices > 1 ? "2F0.1" : "2F0";
    throw new Error(`worker ${worker}, slot ${slot}: ${JSON.stringify(plain)} is no op, as ${form} is one`);
  }
  return ops;
}

const OP = /^(\d{0,9})([A-Za-z_]+)(?:(\d{1,9})(?:\.(\d{1,9}))?)?(?:@(\w+))?$/;

function nodeOps(text, { codes, sharding, workerPhases, refused, offRow, slices }) {
  const [, stage, letters, microbatch, part, lane] = OP.exec(text) ?? [];
  const phase = codes[letters];
  if (phase === undefined || sharding.includes(phase) !== (microbatch === undefined)) return null;
  if (workerPhases.includes(phase) !== (stage === "")) return null;
  if (part === undefined ? slices > 1 && microbatch !== undefined : part >= slices || slices === 1) return null;
  if (lane !== undefined && lane !== (offRow[phase] ?? "compute")) return null;
  if (refused.includes(phase)) {
    throw new Error(`${text}: this page runs nothing on host links; pipejax evaluate does`);
  }
  const number = microbatch === undefined ? -1 : Number(microbatch) * slices + Number(part ?? 0);
  return { phase, stage: stage === "" ? -1 : Number(stage), microbatch: number };
}

/** Placement of stages: one worker each, or pipes that mirror each other. */
function placed(cells, workers, { compute }) {
  const home = new Map(); // worker of a stage and microbatch
  let stages = 0;
  let microbatches = 0;
  for (const { worker, ops } of cells) {
    for (const { phase, stage, microbatch } of ops) {
      if (!compute.includes(phase)) continue;
      const key = `${stage} ${microbatch}`;
      if ((home.get(key) ?? worker) !== worker) {
        throw new Error(`stage ${stage} of microbatch ${microbatch} is on two workers`);
      }
      home.set(key, worker);
      stages = Math.max(stages, stage + 1);
      microbatches = Math.max(microbatches, microbatch + 1);
    }
  }
  if (!home.size) throw new Error("the table holds no op");
  if (stages * microbatches > home.size) throw new Error("ops are missing: not every stage meets every microbatch");
  const kinds = new Map();
  const microbatchPipes = [];
  for (let m = 0; m < microbatches; m++) {
    const row = Array.from({ length: stages }, (_, stage) => home.get(`${stage} ${m}`));
    const key = row.join();
    if (!kinds.has(key)) kinds.set(key, { pipe: kinds.size, row });
    microbatchPipes.push(kinds.get(key).pipe);
  }
  const placement = [...kinds.values()].map(({ row }) => row);
  if (placement.length > 1) checkPipes(placement, workers);
  return { placement, microbatchPipes };
}

/** Check that pipes mirror each other, or are pairs of such pipes, shifted round the workers. */
function checkPipes(placement, workers) {
  const isEven = placement.length % 2 === 0 && workers % placement.length === 0;
  const numPairs = isEven ? placement.length / 2 : 1;
  const legal = new Set();
  for (let k = 0; k < numPairs; k++) {
    const shift = (k * workers) / numPairs;
    for (const mirrored of [false, true]) {
      legal.add(placement[0].map((worker) =>
        ((mirrored ? workers - 1 - worker : worker) + shift) % workers).join());
    }
  }
  if (placement.some((row) => !legal.has(row.join()))) {
    throw new Error("a stage has one worker, or two in pipes that mirror each other");
  }
}

/** Refuse a table in which an op is missing, stands twice, or is on a wrong worker. */
function check(table, grammar) {
  const { cells, placement, microbatchPipes, stages, microbatches } = table;
  const { F, B, I, W } = grammar.codes;
  const seen = new Set();
  for (const { worker, ops } of cells) {
    for (const { phase, stage, microbatch } of ops) {
      const isPerWorker = grammar.workerPhases.includes(phase);
      const place = isPerWorker ? `worker ${worker} ` : stage;
      const name = `${place}${grammar.letters[phase]}${microbatch < 0 ? "" : microbatch}`;
      if (stage >= stages || microbatch >= microbatches) throw new Error(`${name} is out of range`);
      if (microbatch < 0) continue; // gathers and reductions may stand several times
      if (!isPerWorker && placement[microbatchPipes[microbatch]][stage] !== worker) {
        throw new Error(`${name} is on worker ${worker}, and its stage is not`);
      }
      if (seen.has(name)) throw new Error(`${name} stands twice`);
      seen.add(name);
    }
  }
  const phases = new Set(cells.flatMap(({ ops }) => ops.map(({ phase }) => phase)));
  // the rules of a table with its own kinds of forwards and backwards say which ops it needs
  if (grammar.isUsual || [F, B, I, W].some((phase) => phases.has(phase))) checkUsual(table, grammar, seen);
}

/** Check that each stage and microbatch has an F, and either a B or an I and a W. */
function checkUsual({ stages, microbatches }, grammar, seen) {
  const { F, B, I, W } = grammar.codes;
  const has = (stage, phase, microbatch) => seen.has(`${stage}${grammar.letters[phase]}${microbatch}`);
  for (let stage = 0; stage < stages; stage++) {
    for (let m = 0; m < microbatches; m++) {
      const isWhole = has(stage, B, m);
      const isSplit = has(stage, I, m) && has(stage, W, m);
      const isMixed = isWhole && (has(stage, I, m) || has(stage, W, m));
      const isBack = grammar.forwardOnly || isWhole || isSplit;
      if (!has(stage, F, m) || isMixed || !isBack) {
        throw new Error(`stage ${stage}, microbatch ${m} needs F, and B or both I and W`);
      }
    }
  }
}
