// Search: words that an op must all meet.
//
//   3F12   that op          F    its phase       m12   its microbatch
//   w3     its worker       s3   its stage       critical   on the critical path

const WORDS = [
  [/^m(\d+)$/i, (number) => (ops, op) => ops.microbatch[op] === number || ops.with_microbatch[op] === number && ops.with_phase[op] > 0],
  [/^s(\d+)$/i, (number) => (ops, op) => ops.stage[op] === number],
  [/^w(\d+)$/i, (number) => (ops, op) => ops.worker[op] === number],
];

/** Which ops of a schedule are found: an array of 0 and 1, or null where nothing is asked. */
export function search(schedule, text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  if (words.length === 0) return null;
  const tests = words.map((word) => testOf(schedule, word));
  const found = new Uint8Array(schedule.ops.phase.length);
  for (let op = 0; op < found.length; op++) {
    found[op] = tests.every((test) => test(schedule.ops, op)) ? 1 : 0;
  }
  return found;
}

function testOf(schedule, word) {
  for (const [form, make] of WORDS) {
    const match = form.exec(word);
    if (match) return make(Number(match[1]));
  }
  if (/^crit/i.test(word)) return (ops, op) => schedule.isCritical[schedule.program.op[op]] === 1;
  const letters = word.toUpperCase();
  return (ops, op) =>
    schedule.letter(op) === letters ||
    (ops.with_phase[op] > 0 && schedule.phases[ops.with_phase[op]].letter === letters) ||
    schedule.label(op).split("+").includes(letters);
}
