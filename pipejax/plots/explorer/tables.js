// Tables that the page reads itself: the text of their cells becomes ops, row by row.
//
// What a cell means comes with the page (`grammar`), from the records of the library. A table that
// the command line would refuse is refused here, too.

const PAIR = /^\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B$/;
const FORMAT = "pipejax-table";

/** Read a table: PyTorch's CSV, or the JSON of `pipejax export`. */
export function readTable(text, name, grammar) {
  const plain = text.replace(/^\ufeff/, "").replace(/\r\n?/g, "\n");
  if (plain.includes("\0") || !plain.trim()) throw new Error("it holds no text");
  if (!plain.trimStart().startsWith("{")) return tableOf({ rows: rowsOf(plain), name }, grammar);
  const given = JSON.parse(plain);
  if (given.format !== FORMAT) throw new Error(`it is JSON, but no "format": "${FORMAT}"`);
  const shares = given.stage_shares?.some((share) => share !== 1) ? given.stage_shares : null;
  const { placement, pipe_of_microbatch: pipeOf } = given;
  return tableOf({ rows: given.rows, name: given.name, placement, pipeOf, shares }, grammar);
}

/** Cells of a CSV, whose cells hold no commas of their own. */
export function rowsOf(text) {
  const rows = text.split("\n").map((line) =>
    line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1")));
  while (rows.length && rows[rows.length - 1].every((cell) => !cell)) rows.pop();
  return rows;
}

/** Read cells, and find out where stages live. */
export function tableOf({ rows, name, placement, pipeOf, shares }, grammar) {
  const cells = rows.flatMap((row, worker) =>
    row.map((text, slot) => ({ worker, slot, ops: cellOf(text, grammar, worker, slot) }))
      .filter(({ ops }) => ops.length > 0));
  const found = placement ? { placement, pipeOf } : placed(cells, rows.length, grammar);
  const table = {
    name,
    workers: rows.length,
    stages: found.placement[0].length,
    microbatches: found.pipeOf.length,
    pipes: found.placement.length,
    placement: found.placement,
    pipeOf: found.pipeOf,
    shares: shares ?? new Array(found.placement[0].length).fill(1),
    cells: cells.filter(({ ops }) => !grammar.messages.includes(ops[0].phase)),
    transfers: cells.filter(({ ops }) => grammar.messages.includes(ops[0].phase)),
  };
  check(table, grammar);
  return table;
}

function cellOf(text, grammar, worker, slot) {
  const plain = text.trim();
  if (!plain) return [];
  const pair = PAIR.exec(plain);
  const ops = (pair ? pair.slice(1) : [plain]).map((one) => opOf(one.trim(), grammar));
  const { F, B, I } = grammar.codes;
  const isPair = ops.length === 2 && ops[0]?.phase === F && [B, I].includes(ops[1]?.phase);
  if (ops.some((op) => !op) || (pair && !isPair)) {
    throw new Error(`worker ${worker}, slot ${slot}: ${JSON.stringify(plain)} is no op, as 2F0 is one`);
  }
  return ops;
}

function opOf(text, { codes, sharding, refused }) {
  const [, stage, letter, microbatch] = /^(\d{1,9})([A-Z_]+?)(\d{0,9})$/.exec(text) ?? [];
  const phase = codes[letter];
  if (phase === undefined || sharding.includes(phase) !== (microbatch === "")) return null;
  if (refused.includes(phase)) {
    throw new Error(`${text}: this page runs no offloads; pipejax evaluate does`);
  }
  return { phase, stage: Number(stage), microbatch: microbatch === "" ? -1 : Number(microbatch) };
}

/** Where stages live: one worker each, or pipes that run against each other. */
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
  const pipeOf = [];
  for (let m = 0; m < microbatches; m++) {
    const row = Array.from({ length: stages }, (_, stage) => home.get(`${stage} ${m}`));
    const key = row.join();
    if (!kinds.has(key)) kinds.set(key, { pipe: kinds.size, row });
    pipeOf.push(kinds.get(key).pipe);
  }
  const placement = [...kinds.values()].map(({ row }) => row);
  if (placement.length > 1) checkPipes(placement, workers);
  return { placement, pipeOf };
}

/** Several pipes mirror each other, or are couples of such, shifted round the workers. */
function checkPipes(placement, workers) {
  const isEven = placement.length % 2 === 0 && workers % placement.length === 0;
  const couples = isEven ? placement.length / 2 : 1;
  const legal = new Set();
  for (let couple = 0; couple < couples; couple++) {
    const shift = (couple * workers) / couples;
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
function check({ cells, placement, pipeOf, stages, microbatches }, grammar) {
  const { F, B, I, W } = grammar.codes;
  const seen = new Set();
  for (const { worker, ops } of cells) {
    for (const { phase, stage, microbatch } of ops) {
      const name = `${stage}${grammar.letters[phase]}${microbatch < 0 ? "" : microbatch}`;
      if (stage >= stages || microbatch >= microbatches) throw new Error(`${name} is out of range`);
      if (microbatch < 0) continue; // gathering and reducing stand as often as they are needed
      if (placement[pipeOf[microbatch]][stage] !== worker) {
        throw new Error(`${name} is on worker ${worker}, and its stage is not`);
      }
      if (seen.has(name)) throw new Error(`${name} stands twice`);
      seen.add(name);
    }
  }
  const has = (stage, phase, microbatch) => seen.has(`${stage}${grammar.letters[phase]}${microbatch}`);
  for (let stage = 0; stage < stages; stage++) {
    for (let m = 0; m < microbatches; m++) {
      const isWhole = has(stage, B, m);
      const isSplit = has(stage, I, m) && has(stage, W, m);
      const isMixed = isWhole && (has(stage, I, m) || has(stage, W, m));
      if (!has(stage, F, m) || isMixed || !(isWhole || isSplit)) {
        throw new Error(`stage ${stage}, microbatch ${m} needs F, and B or both I and W`);
      }
    }
  }
}
