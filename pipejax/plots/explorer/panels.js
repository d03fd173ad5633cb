// Texts: of one op beside the pointer and at length, and of the side panel.

import {
  byId, digits, make, writeChange, writeHeld, writePercent, writeTime,
} from "./text.js";

/** Value of every sum of a closed form at the factors of the sliders, and the index of the largest: the first of equals. */
export function sums(form, factors) {
  const values = form.parameters.map((key, k) => form.units[k] * factors.get(key));
  const sums = form.facets.map((facet) =>
    facet.reduce((sum, count, k) => sum + count * values[k], 0));
  return { sums, active: sums.indexOf(Math.max(...sums)) };
}

/** Terms of a sum as texts: [count, symbol] of those whose count is not 0. */
export function terms(form, facet, factors, writeTime) {
  const hasLatency = factors.has("latency");
  return facet.flatMap((count, k) => {
    if (count === 0) return [];
    const key = form.parameters[k];
    const symbol = key === "transmit" && !hasLatency ? "c" : key;
    // where costs differ by stage the parameter is the factor, and counts are times
    if (!form.isTime[k]) return [[writeTime(count), `×${symbol}`]];
    return [[count === 1 ? "" : String(+count.toFixed(4)), symbol]];
  });
}

/** A few lines about an op, beside the pointer and for screen readers. */
export function opTip(schedule, op, unit) {
  const time = (value) => writeTime(value, unit);
  const lines = [make("div", {}, make("b", {}, schedule.label(op)), ` ${phaseName(schedule, op)}`)];
  const addLine = (text) => lines.push(make("div", {}, text));
  addLine(`${time(schedule.opStart[op])} to ${time(schedule.opFinish[op])}, ` +
    `takes ${time(schedule.opFinish[op] - schedule.opStart[op])}`);
  for (const [name, text] of residualFacts(schedule, op, time)) addLine(`${name} ${text}`);
  const last = schedule.waits(op).find((wait) => wait.isLast);
  addLine(last ? `waited for ${waitName(schedule, last, op)}` : "waited for nothing");
  addLine(slackOrStall(schedule, op, time).join(" "));
  return lines;
}

/** Starts of an op in a recorded run and in its replay, and their difference. */
function residualFacts({ residuals }, op, time) {
  if (!residuals?.isThere) return [];
  const [ran, again] = residuals.runs.map((run) => time(run.opStart[op]));
  return [["start as it ran", ran], ["start replayed", again], ["residual", time(residuals.late[op])]];
}

/** Slack of an op; of a recorded op its stall, the time from the last arrival to its start. */
function slackOrStall(schedule, op, time) {
  if (schedule.starts) return ["stall", time(rounded(schedule.stall(op), schedule))];
  const isCritical = schedule.isCritical[schedule.program.op[op]];
  return ["slack", isCritical ? `${time(0)}, on the critical path` : time(rounded(schedule.slack(op), schedule))];
}

/** All facts of an op; `choose` is called with an op that is clicked. */
export function opDetails(schedule, op, unit, choose) {
  const time = (value) => writeTime(value, unit);
  const { ops } = schedule;
  const facts = [
    ["worker", ops.worker[op] < 0 ? schedule.participants(ops.stage[op]).join(", ") : ops.worker[op]],
    ...(ops.stage[op] >= 0 ? [["stage", ops.stage[op]]] : []),
    ...(ops.microbatch[op] >= 0 ? [["microbatch", schedule.number(ops.microbatch[op])]] : []),
    ...(schedule.pipes > 1 ? [["pipe", ops.pipe[op]]] : []),
    ["start", time(schedule.opStart[op])],
    ["end", time(schedule.opFinish[op])],
    ["takes", time(schedule.opFinish[op] - schedule.opStart[op])],
    ...residualFacts(schedule, op, time),
    slackOrStall(schedule, op, time),
  ];
  const link = (wait) => wait.op < 0
    ? waitName(schedule, wait, op)
    : make("button", { type: "button", class: "plain", onclick: () => choose(wait.op) },
      waitName(schedule, wait, op));
  const waits = schedule.waits(op).map((wait) =>
    make("li", { class: wait.isLast ? "last" : null }, make("span", {}, link(wait)),
      make("span", {}, time(wait.at))));
  return [
    make("p", {}, make("span", { class: "op-name" }, schedule.label(op)), ` ${phaseName(schedule, op)}`),
    make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) =>
      [make("dt", {}, name), make("dd", {}, String(value))])),
    make("p", { class: "quiet" }, waits.length ? "waits for, the last arrival first" : "waits for nothing"),
    make("ul", { class: "waits" }, ...waits),
  ];
}

function phaseName(schedule, op) {
  const { phase, with_phase: partner } = schedule.ops;
  const name = schedule.phases[phase[op]].name;
  return partner[op] ? `${name} with ${schedule.phases[partner[op]].name}` : name;
}

/** Name of a predecessor of the op `waiting`: an op, a message or a collective. */
function waitName(schedule, { op, message }, waiting) {
  if (message >= 0) {
    const { producer, stage, phase, microbatch } = schedule.messages;
    const from = schedule.ops.worker[producer[message]];
    const kind = schedule.phases[phase[message]].letter.replace("SEND_", "");
    const name = `message ${stage[message]}${kind}${schedule.number(microbatch[message])}`;
    // under blocking links, and at a WAIT_SEND, an op waits for a message of its own worker
    return from === schedule.ops.worker[waiting] ? `${name} to be sent` : `${name} from worker ${from}`;
  }
  if (op < 0) return "what is beside the rows";
  const isOwn = schedule.ops.worker[op] === schedule.ops.worker[waiting];
  return `${schedule.label(op)}${isOwn ? ", same worker" : ""}`;
}

/** A time, or 0 if it is below 0 or a rounding error. */
function rounded(seconds, { makespan }) {
  return seconds > 1e-12 * makespan ? seconds : 0;
}

/** Show the choice of schedules and sizes; `choose` is called with another choice. */
export function showChosen(library, chosen, choose) {
  const select = (label, options, value, change) => make("label", {}, `${label} `,
    make("select", { "aria-label": label, onchange: (event) => change(event.target.value) },
      ...options.map(({ text, isThere = true, label = text }) => make("option",
        { value: text, selected: String(text) === String(value), disabled: !isThere }, String(label)))));
  const plain = (values) => values.map((text) => ({ text }));
  const hasChoice = library.scene.choices.length > 0;
  byId("sizes").hidden = byId("add").hidden = !hasChoice;
  byId("sizes").replaceChildren(
    select("workers", plain(library.sizes("workers")), chosen.workers, (value) =>
      choose({ ...chosen, workers: Number(value) })),
    select("microbatches", plain(library.sizes("microbatches")), chosen.microbatches, (value) =>
      choose({ ...chosen, microbatches: Number(value) })));
  const names = library.names.map((text) => ({ text, isThere: library.isThere(text, chosen) }));
  const rows = chosen.schedules.map((choice, k) => {
    const replaced = (other) => choose({ ...chosen, schedules: chosen.schedules.with(k, other) });
    const without = { ...chosen, schedules: chosen.schedules.filter((_, place) => place !== k) };
    const counts = library.choices(choice.name);
    return make("div", { class: "chosen" },
      select(`schedule ${k + 1}`, names, choice.name, (name) =>
        replaced({ name, stagesPerWorker: library.choices(name)[0] ?? 1 })),
      ...(counts.length > 1
        ? [select(`stages per worker ${k + 1}`, counts.map((text) => ({ text, label: `V = ${text}` })), choice.stagesPerWorker, (value) =>
          replaced({ ...choice, stagesPerWorker: Number(value) }))]
        : []),
      ...(chosen.schedules.length > 1
        ? [make("button", { type: "button", "aria-label": `leave out ${choice.name}`, onclick: () => choose(without) }, "\u00d7")]
        : []));
  });
  byId("chosen").replaceChildren(...(hasChoice ? rows : []));
}

/** Show the results: of one schedule as a list, of several as a table. */
export function showResults(schedules, state, unit, choose) {
  const alone = schedules.length === 1;
  const chosen = schedules[state.focus];
  byId("results").replaceChildren(...(alone
    ? resultList(chosen, state, unit)
    : [resultTable(schedules, state, unit, choose), ...scheduleFacts(chosen, state, unit)]));
}

function resultList(schedule, state, unit) {
  if (schedule.error) return [make("p", { class: "quiet" }, "does not run under this link model")];
  const peak = Math.max(...schedule.peakInFlight);
  const change = state.isGiven ? "" : ` ${writeChange(schedule.makespan, schedule.givenMakespan)}`;
  return [
    make("p", { class: "big", id: "makespan", "data-value": schedule.makespan },
      writeTime(schedule.makespan, unit)),
    make("p", { class: "quiet" }, change ? `makespan,${change} to what is given` : "makespan"),
    ...scheduleFacts(schedule, state, unit, [
      ...fact("idle (bubble ratio)", writePercent(schedule.bubbleRatio)),
      ...fact("most in flight", `${peak} on worker ${schedule.peakInFlight.indexOf(peak)}`)]),
  ];
}

/** Facts of the schedule in focus: `facts` of its run, its step, worker and critical path. */
function scheduleFacts(schedule, state, unit, facts = []) {
  if (schedule.error) return [];
  const others = [...stepFacts(schedule), ...workerFacts(schedule, state.worker, unit)];
  return [make("dl", { class: "facts" }, ...facts, ...others), ...shareBar(schedule)];
}

const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];

/** Tokens per second and MFU of a model's step, and the memory of its fullest worker. */
function stepFacts(schedule) {
  const { step, makespan, memory } = schedule;
  const facts = step
    ? [...fact("tokens", `${digits(step.tokens / makespan, 4)} per second`),
      ...fact("MFU", writePercent(step.mfu_seconds / makespan))]
    : [];
  if (!memory.static) return facts;
  const steps = schedule.memorySteps("memory");
  const needs = steps.map(({ peak }, worker) => peak + memory.static[worker]);
  const fullest = needs.indexOf(Math.max(...needs));
  const text = writeHeld(needs[fullest], memory.unit);
  if (!memory.limits) return [...facts, ...fact(`memory of worker ${fullest}`, text)];
  const available = memory.static[fullest] + memory.limits[fullest];
  const isOver = needs.some((need, worker) => need > memory.static[worker] + memory.limits[worker]);
  const of = `${text.split(" ")[0]} of ${writeHeld(available, memory.unit)}${isOver ? ": does not fit" : ""}`;
  return [...facts, make("dt", {}, `memory of worker ${fullest}`),
    make("dd", { class: isOver ? "over" : null }, of)];
}

/** Facts of the chosen worker. */
function workerFacts(schedule, worker, unit) {
  if (worker < 0) return [];
  const idle = writePercent(1 - schedule.busy[worker] / (schedule.makespan || 1));
  const held = schedule.peakInFlight[worker];
  return fact(`worker ${worker}`, `busy ${writeTime(schedule.busy[worker], unit)}, idle ${idle}, peak ${held}`);
}

/** Shares of costs on the critical path, as a bar and a line. */
function shareBar(schedule) {
  const shares = [...schedule.shares].sort((one, other) => other[1] - one[1]);
  const total = shares.reduce((sum, [, value]) => sum + value, 0);
  if (total === 0) return [];
  const text = shares.map(([key, value]) => `${key} ${digits((100 * value) / total, 3)} %`).join(", ");
  const colour = (key) => key === "message"
    ? "var(--message)"
    : Object.values(schedule.phases).find(({ letter }) => letter === key)?.fill ?? "var(--quiet)";
  return [
    make("div", { class: "shares", "aria-hidden": "true" }, ...shares.map(([key, value]) =>
      make("span", { style: `flex:${value / total};background:${colour(key)}` }))),
    make("p", { class: "quiet", id: "shares" }, `critical path: ${text}`),
  ];
}

function resultTable(schedules, state, unit, choose) {
  const best = Math.min(...schedules.filter((schedule) => !schedule.error).map((schedule) => schedule.makespan));
  const rows = schedules.map((schedule, k) => {
    const name = make("button", { type: "button", class: "plain", onclick: () => choose(k) }, schedule.name);
    const cells = schedule.error
      ? [make("td", { colspan: 3, class: "quiet" }, "does not run")]
      : [
        make("td", { class: "makespan", "data-value": schedule.makespan }, writeTime(schedule.makespan, unit)),
        make("td", {}, `${digits(100 * schedule.bubbleRatio, 3)} %`),
        make("td", {}, String(Math.max(...schedule.peakInFlight))),
      ];
    const isBest = !schedule.error && schedule.makespan <= best * (1 + 1e-12);
    return make("tr", { class: isBest ? "best" : null, "aria-current": k === state.focus },
      make("td", {}, name), ...cells);
  });
  const head = ["schedule", "makespan", "idle", "peak"].map((text) =>
    make("th", { scope: "col" }, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

/** Make inputs for [value, text] options: radio buttons or checkboxes. */
export function makeChoices(id, type, options, change) {
  byId(id).replaceChildren(...options.map(([value, text]) =>
    make("label", {}, make("input", { type, name: id, value, onchange: change }), text)));
}

/** Set which inputs are on, and the reasons of those that have no effect. */
export function showChoices(id, isOn, reasons = {}) {
  for (const input of byId(id).querySelectorAll("input")) {
    input.checked = isOn(input.value);
    const reason = reasons[input.value];
    input.parentElement.classList.toggle("off", Boolean(reason));
    input.parentElement.title = reason ?? "";
  }
}

/** Link models under which no schedule runs, with the reason. */
export function refusals(schedules, links) {
  const errorByModel = {};
  for (const name of links) {
    const errors = schedules.map((schedule) => schedule.programs[name].error);
    if (errors.every(Boolean)) errorByModel[name] = errors[0];
  }
  return errorByModel;
}

/** Show the closed form of a schedule, with the current largest sum. */
export function showForm(schedule, state, unit, isAlone) {
  // a page has no forms of recorded runs, in which every op has its own time
  byId("form").parentElement.hidden = Boolean(schedule.residuals);
  byId("form-title").textContent = isAlone ? "Closed form" : `Closed form of ${schedule.name}`;
  byId("form").replaceChildren(...formList(schedule, state, unit));
}

function formList(schedule, state, unit) {
  const form = schedule.forms[state.link];
  if (schedule.error) return [];
  if (!form) {
    return [make("p", { class: "quiet" },
      "Not looked for here: pipejax formula finds it.")];
  }
  const time = (value) => writeTime(value, unit);
  const evaluated = sums(form, state.factors);
  const largest = evaluated.sums[evaluated.active];
  const lines = form.facets.map((facet, k) => {
    const sum = make("span", { class: "sum" });
    terms(form, facet, state.factors, time).forEach(([count, symbol], place) => {
      if (place > 0) sum.append(" + ");
      sum.append(count, make("var", {}, symbol));
    });
    const value = k === evaluated.active ? time(largest) : writeChange(evaluated.sums[k], largest);
    return make("li", { "aria-current": k === evaluated.active }, sum, make("span", { class: "value" }, value));
  });
  if (!form.exact) {
    return [make("p", { class: "quiet" },
      "No few sums are exact here. pipejax formula gives bounds.")];
  }
  const factorNote = form.isTime.every(Boolean) ? "" : "; ×F is the factor of F";
  const head = form.facets.length > 1 ? `the largest of ${form.facets.length} sums, exact` : "exact";
  return [make("p", { class: "quiet" }, head + factorNote), make("ul", { class: "form" }, ...lines)];
}

/** Show the meaning of colours and lines. */
export function showLegend(schedules, shown) {
  const used = new Map();
  let mostPipes = 1;
  const withPhases = schedules.filter((schedule) => schedule.colours(shown).isByPhase);
  for (const { ops, phases, pipes, lanes } of withPhases) {
    mostPipes = Math.max(mostPipes, pipes);
    for (const lane of lanes.flat()) {
      for (const op of lane) {
        used.set(ops.phase[op], phases[ops.phase[op]]);
        if (ops.with_phase[op]) used.set(ops.with_phase[op], phases[ops.with_phase[op]]);
      }
    }
  }
  const entry = (text, name, style = "") => make("span", {}, make("i", { class: name, style }), text);
  const entries = [...used.keys()].sort((one, other) => one - other).map((code) => {
    const { letter, name, fill } = used.get(code);
    return entry(name === letter ? name : `${letter} ${name}`, null, `background:${fill}`);
  });
  if (withPhases.some(({ depth }) => depth.some(Boolean))) entries.push(entry("darker: first stages", "deep"));
  if (mostPipes > 1) entries.push(entry(mostPipes > 2 ? "every second pipe" : "second pipe", "second"));
  const below = [...new Set(schedules.flatMap(({ lanesBeside }) => lanesBeside))];
  if (below.length) entries.push(make("span", {}, `thin rows: ${below.join(", ")}`));
  if (withPhases.length < schedules.length) entries.push(entry("residual: started later than replayed", "seconds"));
  if (shown.critical) entries.push(entry("critical path", "frame"));
  if (shown.messages) entries.push(entry("message", "line"));
  byId("legend").replaceChildren(...entries);
}

/** Scale of the colours of residuals, from the least to the largest, with a stroke at 0. */
function residualScale({ low, high }, unit) {
  if (low === high) return make("span", { class: "quiet" }, "every op started as replayed");
  const [lowText, highText] = [low, high].map((time) => writeTime(Number(time.toPrecision(3)), unit));
  const zero = `--zero:${(-100 * low) / (high - low)}%`;
  return make("span", { class: "quiet" }, `residual ${lowText}`, make("i", { class: "seconds", style: zero }), highText);
}

/** The heading of one of several schedules; of a recorded run with the scale of its colours. */
export function opHeading(schedule, unit, best, shown) {
  if (schedule.error) return [make("b", {}, schedule.name)];
  const colours = schedule.colours(shown);
  const lag = schedule.makespan > best * (1 + 1e-12) ? ` ${writeChange(schedule.makespan, best)}` : "";
  return [
    make("b", {}, schedule.name),
    make("span", {}, `${writeTime(schedule.makespan, unit)}${lag}`),
    make("span", { class: "quiet" }, `idle ${writePercent(schedule.bubbleRatio)}`),
    ...(schedule.starts && !colours.isByPhase ? [residualScale(colours, unit)] : []),
  ];
}

/** One sentence for each schedule, for screen readers. */
export function summary(schedules, unit) {
  return schedules.map((schedule) => schedule.error
    ? `${schedule.name} does not run.`
    : `${schedule.name}: ${writeTime(schedule.makespan, unit)}, idle ${writePercent(schedule.bubbleRatio)}.`).join(" ");
}
