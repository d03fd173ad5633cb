// Tables that the page carries: the text of their cells becomes ops, row by row.
//
// The meaning of cells comes with the page (`grammar`), from the records of the library, which has
// checked the tables.

const PAIR = /^\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B$/;
const OP = /^(\d*)([A-Za-z_]+)(\d*)(?:\.(\d+))?$/;

/** Make a table of an entry of the library. */
export function makeTable(entry, grammar) {
  const { rows, placement, microbatchPipes } = entry;
  const cells = rows.split("\n").flatMap((row, worker) =>
    row.split(",").map((text) => ({ worker, ops: cellOps(text, grammar) })));
  return {
    ...entry, grammar, cells,
    stages: placement[0].length,
    microbatches: microbatchPipes.length, // slices count
    pipes: placement.length,
  };
}

/** The ops of a cell: one, or two of a fused pair. */
function cellOps(text, grammar) {
  const pair = PAIR.exec(text);
  return (pair ? pair.slice(1) : [text]).map((op) => readOp(op.trim(), grammar));
}

function readOp(text, { codes, slices }) {
  const [, stage, letters, microbatch, part] = OP.exec(text);
  const number = microbatch === "" ? -1 : Number(microbatch) * slices + Number(part ?? 0);
  return { phase: codes[letters], stage: stage === "" ? -1 : Number(stage), microbatch: number };
}
