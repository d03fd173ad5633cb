// Input: steps from op to op, search, mouse, pen and touch, keys.

import { GUTTER } from "./bars.js";
import { TRACK } from "./curves.js";

/** The op of the last arrival at an op, or the first op to which this op is the last arrival, or -1. */
export function along(schedule, op, direction) {
  if (op < 0) return -1;
  if (direction > 0) return schedule.awaiting(op);
  return schedule.waits(op).find((wait) => wait.isLast && wait.op >= 0)?.op ?? -1;
}

/** The op before or after in the row; without an op the first of all. */
export function inRow(schedule, op, direction) {
  const worker = op < 0 ? 0 : schedule.ops.worker[op];
  if (worker < 0) return -1;
  const lane = schedule.lanes[worker][op >= 0 ? schedule.opLane(op) : 0];
  return lane[op < 0 ? 0 : lane.indexOf(op) + direction] ?? -1;
}

/** The next op in time that matches the search, or without a search the next critical one. */
export function nextMatch(schedule, op, direction) {
  const { op: opNodes } = schedule.program;
  const isTarget = (candidate) =>
    opNodes[candidate] > 0 && (schedule.matches ? schedule.matches[candidate] : schedule.isCritical[opNodes[candidate]]);
  const targets = [...schedule.ops.phase.keys()].filter(isTarget);
  targets.sort((first, second) => schedule.opStart[first] - schedule.opStart[second] || first - second);
  if (targets.length === 0) return -1;
  const place = targets.indexOf(op);
  if (place < 0) return targets.at(direction > 0 ? 0 : -1);
  return targets.at((place + direction) % targets.length);
}

// Search: an op matches if it matches all words.
//
//   3F12   that op          F    its phase       m12   its microbatch
//   w3     its worker       s3   its stage       critical   on the critical path

const WORDS = [
  [/^m(\d+)$/i, (number, slices) => (ops, op) => {
    const isNumber = (microbatch) => Math.floor(microbatch / slices) === number;
    return isNumber(ops.microbatch[op]) || isNumber(ops.with_microbatch[op]) && ops.with_phase[op] > 0;
  }],
  [/^s(\d+)$/i, (number) => (ops, op) => ops.stage[op] === number],
  [/^w(\d+)$/i, (number) => (ops, op) => ops.worker[op] === number],
];

/** Ops of a schedule that match: an array of 0 and 1, or null without a search. */
export function search(schedule, text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  if (words.length === 0) return null;
  const tests = words.map((word) => searchTest(schedule, word));
  const matches = new Uint8Array(schedule.ops.phase.length);
  for (let op = 0; op < matches.length; op++) {
    matches[op] = tests.every((test) => test(schedule.ops, op)) ? 1 : 0;
  }
  return matches;
}

/** The test of an op for a word. */
function searchTest(schedule, word) {
  for (const [form, make] of WORDS) {
    const match = form.exec(word);
    if (match) return either(make(Number(match[1]), schedule.slices), hasLabel(schedule, word));
  }
  if (/^crit/i.test(word)) return (ops, op) => schedule.isCritical[schedule.program.op[op]] === 1;
  const { phases } = schedule;
  return either(hasLabel(schedule, word), (ops, op) => isSame(schedule.letter(op), word) ||
    (ops.with_phase[op] > 0 && isSame(phases[ops.with_phase[op]].letter, word)));
}

const isSame = (one, other) => one.toUpperCase() === other.toUpperCase();
const either = (one, other) => (ops, op) => one(ops, op) || other(ops, op);

/** The test for an op, or an op of a fused pair, with this label. */
function hasLabel(schedule, word) {
  return (ops, op) => schedule.label(op).split("+").some((part) => isSame(part, word));
}

const MIN_DRAG = 3; // pixels beyond which a press is a drag
const PIXEL_ZOOM = 1.0015; // zoom for a pixel of the wheel

/** Listen to mouse, pen and touch on a timeline: zoom, pan, mark a range, hover, choose. */
export function listen(explorer, pane, index) {
  const { canvas } = pane.bars;
  let press = null;

  canvas.addEventListener("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const isFramed = window.parent !== window; // the page around it scrolls
    const scrolls = isFramed || document.documentElement.scrollHeight > window.innerHeight + 1;
    if (!isSideways && scrolls && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const delta = event.deltaMode === 1 ? 16 : 1; // lines to pixels
    if (isSideways) {
      explorer.view.pan(((event.deltaX || event.deltaY) * delta) / (pane.bars.width - GUTTER));
    } else {
      explorer.view.zoom(PIXEL_ZOOM ** (-event.deltaY * delta), timeAt(event));
    }
    explorer.viewChanged();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const { from, to } = explorer.view;
    press = { x: event.offsetX, y: event.offsetY, from, to, moved: false, marks: event.shiftKey };
  });

  canvas.addEventListener("pointermove", (event) => {
    explorer.pointTo(timeAt(event));
    if (!press) {
      explorer.hover(index, pane.bars.opAt(explorer.view, event.offsetX, event.offsetY), event);
      return;
    }
    const distance = event.offsetX - press.x;
    press.moved ||= Math.abs(distance) > MIN_DRAG;
    if (!press.moved) return;
    if (press.marks) {
      explorer.mark(press.x, event.offsetX);
    } else {
      canvas.classList.add("moving");
      const scale = (press.to - press.from) / (pane.bars.width - GUTTER);
      const shift = distance * scale;
      if (explorer.view.range) explorer.view.show(press.from - shift, press.to - shift);
      explorer.viewChanged();
    }
  });

  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("moving");
    const lastPress = press;
    press = null;
    if (!lastPress) return;
    explorer.mark(null);
    if (lastPress.moved && lastPress.marks) {
      const ends = [lastPress.x, event.offsetX].map((x) => paneAxis(pane).time(x)).sort((a, b) => a - b);
      explorer.view.show(...ends);
      explorer.viewChanged();
    } else if (!lastPress.moved) {
      if (event.offsetX < GUTTER) explorer.chooseWorker(index, pane.bars.rowAt(event.offsetY));
      else explorer.choose(index, pane.bars.opAt(explorer.view, event.offsetX, event.offsetY));
    }
  });

  canvas.addEventListener("pointercancel", () => { press = null; });
  canvas.addEventListener("pointerleave", () => {
    explorer.pointTo(null);
    explorer.hover(index, -1);
  });
  canvas.addEventListener("dblclick", (event) => {
    explorer.view.zoom(3, timeAt(event));
    explorer.viewChanged();
  });

  const paneAxis = ({ bars }) => explorer.view.over(GUTTER, bars.width - GUTTER);
  const timeAt = (event) => paneAxis(pane).time(Math.max(GUTTER, event.offsetX));
}

/** Listen on the axis: the bar above it scrolls. */
export function listenToAxis(explorer) {
  const { axis } = explorer;
  let grip = null; // time from the beginning of the thumb to the pointer, while it is dragged
  axis.canvas.addEventListener("pointerdown", (event) => {
    if (!explorer.view.range || event.offsetY >= TRACK + 2) return;
    axis.canvas.setPointerCapture(event.pointerId);
    const time = axis.trackTime(explorer.view, event.offsetX);
    const { from, to } = explorer.view;
    grip = time >= from && time <= to ? time - from : (to - from) / 2;
    move(event);
  });
  axis.canvas.addEventListener("pointermove", (event) => { if (grip !== null) move(event); });
  axis.canvas.addEventListener("pointerup", () => { grip = null; });

  function move(event) {
    const { view } = explorer;
    const begin = axis.trackTime(view, event.offsetX) - grip;
    view.show(begin, begin + view.to - view.from);
    explorer.viewChanged();
  }
}

const SHARE = 0.15; // share of the visible time that an arrow moves
const ZOOM = 1.5;

/** Listen to keys, unless a field has the focus. */
export function listenToKeys(explorer) {
  const { view, state } = explorer;
  const moved = (act) => () => { act(); explorer.viewChanged(); };
  const flip = (name) => () => explorer.show(name, !state.shown[name]);
  const keys = {
    "ArrowLeft": moved(() => view.pan(-SHARE)),
    "ArrowRight": moved(() => view.pan(SHARE)),
    "+": moved(() => view.zoom(ZOOM, explorer.middle())),
    "=": moved(() => view.zoom(ZOOM, explorer.middle())),
    "-": moved(() => view.zoom(1 / ZOOM, explorer.middle())),
    "0": () => explorer.fit(),
    "Home": () => explorer.fit(),
    "/": () => document.getElementById("find").focus(),
    "n": () => explorer.go(nextMatch, 1),
    "p": () => explorer.go(nextMatch, -1),
    "[": () => explorer.go(along, -1),
    "]": () => explorer.go(along, 1),
    ",": () => explorer.go(inRow, -1),
    ".": () => explorer.go(inRow, 1),
    "c": flip("critical"),
    "m": flip("messages"),
    "g": flip("memory"),
    "e": flip("residuals"),
    "l": () => explorer.nextLink(),
    "r": () => explorer.resetTimes(),
    "d": () => explorer.switchTheme(),
    "?": () => explorer.help(),
    "Escape": () => explorer.choose(state.focus, -1),
  };
  document.addEventListener("keydown", (event) => {
    const isField = event.target.matches("input[type=text], input[type=search]");
    if (isField && event.key === "Escape") event.target.blur();
    // arrows move a slider that has the focus, and choose among alternatives
    const isInput = event.target.matches("select, input") &&
      (event.target.matches("select") || event.key.startsWith("Arrow"));
    if (isField || isInput || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.getElementById("keys").open || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}
