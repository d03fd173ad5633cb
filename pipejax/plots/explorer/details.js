// What is said of one op: beside the pointer, and at length in the side panel.

import { make } from "./dom.js";
import { writeTime } from "./format.js";

/** A few lines beside the pointer. */
export function tipOf(schedule, op, unit) {
  const time = (value) => writeTime(value, unit);
  const lines = [make("div", {}, make("b", {}, schedule.label(op)), ` ${phaseName(schedule, op)}`)];
  const say = (text) => lines.push(make("div", {}, text));
  say(`${time(schedule.start(op))} to ${time(schedule.finish(op))}, ` +
    `takes ${time(schedule.finish(op) - schedule.start(op))}`);
  const last = schedule.waits(op).find((wait) => wait.isLast);
  say(last ? `waited for ${waitName(schedule, last, op)}` : "waited for nothing");
  say(`slack ${slackText(schedule, op, time)}`);
  return lines;
}

/** All of it; `choose` is called with an op that is clicked. */
export function detailsOf(schedule, op, unit, choose) {
  const time = (value) => writeTime(value, unit);
  const { ops } = schedule;
  const facts = [
    ["worker", ops.worker[op] < 0 ? schedule.participants(ops.stage[op]).join(", ") : ops.worker[op]],
    ["stage", ops.stage[op]],
    ...(ops.microbatch[op] >= 0 ? [["microbatch", ops.microbatch[op]]] : []),
    ...(schedule.pipes > 1 ? [["pipe", ops.pipe[op]]] : []),
    ["start", time(schedule.start(op))],
    ["end", time(schedule.finish(op))],
    ["takes", time(schedule.finish(op) - schedule.start(op))],
    ["slack", slackText(schedule, op, time)],
  ];
  const link = (each) => each.op < 0
    ? waitName(schedule, each, op)
    : make("button", { type: "button", class: "plain", onclick: () => choose(each.op) },
      waitName(schedule, each, op));
  const waits = schedule.waits(op).map((each) =>
    make("li", { class: each.isLast ? "last" : null }, make("span", {}, link(each)),
      make("span", {}, time(each.at))));
  return [
    make("p", {}, make("span", { class: "op-name" }, schedule.label(op)), ` ${phaseName(schedule, op)}`),
    make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) =>
      [make("dt", {}, name), make("dd", {}, String(value))])),
    make("p", { class: "quiet" }, waits.length ? "waits for, the last arrival first" : "waits for nothing"),
    make("ul", { class: "waits" }, ...waits),
  ];
}

/** Said aloud when an op is chosen. */
export function spoken(schedule, op, unit) {
  const time = (value) => writeTime(value, unit);
  return `${schedule.label(op)}, ${phaseName(schedule, op)}, ${time(schedule.start(op))} to ` +
    `${time(schedule.finish(op))}, slack ${slackText(schedule, op, time)}`;
}

function phaseName(schedule, op) {
  const { phase, with_phase: partner } = schedule.ops;
  const name = schedule.phases[phase[op]].name;
  return partner[op] ? `${name} with ${schedule.phases[partner[op]].name}` : name;
}

function waitName(schedule, { op, message }, waiting) {
  if (message >= 0) {
    const { producer, stage, phase, microbatch } = schedule.messages;
    const from = schedule.ops.worker[producer[message]];
    const kind = schedule.phases[phase[message]].letter.replace("SEND_", "");
    const name = `message ${stage[message]}${kind}${microbatch[message]}`;
    // under blocking, and where a row waits for a SEND, its own message has to leave
    return from === schedule.ops.worker[waiting] ? `${name} to be sent` : `${name} from worker ${from}`;
  }
  if (op < 0) return "what is beside the rows";
  const isOwn = schedule.ops.worker[op] === schedule.ops.worker[waiting];
  return `${schedule.label(op)}${isOwn ? ", same worker" : ""}`;
}

function slackText(schedule, op, time) {
  const isCritical = schedule.isCritical[schedule.program.op[op]];
  if (isCritical) return `${time(0)}, on the critical path`;
  const slack = schedule.slack(op);
  return time(slack > 1e-12 * schedule.makespan ? slack : 0); // less is rounding
}
