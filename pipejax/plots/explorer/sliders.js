// Sliders: one factor for each kind of cost, which can be typed, too.

import { byId, digits, make, writeRange } from "./text.js";

const STEPS = 400; // of a slider

/** Sliders: one factor for each kind of cost; `change` is called with a kind and its factor. */
export function makeSliders(scene, schedulesNow, change) {
  const letters = Object.values(scene.phases).map(({ letter }) => letter);
  const rows = scene.factors.map(({ key, name, largest }) => {
    const id = `factor-${key}`;
    const symbol = letters.includes(key) && name !== key ? `${key}, ${name}` : name;
    const range = make("input", {
      type: "range", id, min: 0, max: largest, step: largest / STEPS,
      oninput: (event) => change(key, Number(event.target.value)),
    });
    const exact = make("input", {
      type: "text", inputmode: "decimal", "aria-label": `factor of ${name}`, "data-factor": key,
      onchange: ({ target }) => {
        const times = factorTimes(schedulesNow(), scene, key);
        const factor = readFactor(target.value, times);
        const isWrong = !(Number.isFinite(factor) && factor >= 0);
        target.setAttribute("aria-invalid", isWrong);
        wrong.hidden = !isWrong;
        const hint = hasOneTime(times) ? " or a time, as 3 ms" : "; a time fits only what is one for all";
        wrong.textContent = `${JSON.stringify(target.value)} is not a factor of at least 0, as 1.5${hint}`;
        if (!isWrong) change(key, factor);
      },
    });
    const wrong = make("p", { class: "wrong", role: "alert", hidden: true, "data-wrong": key });
    return make("div", { class: "slider" }, make("label", { for: id }, symbol),
      make("output", { for: id, id: `time-${key}` }), exact, range, wrong);
  });
  byId("sliders").replaceChildren(...rows);
}

const hasOneTime = (times) => times.length === 1 && times[0] > 0;
const UNITS = { s: 1, ms: 1e-3, us: 1e-6, ns: 1e-9 };

/** Read a factor, as 1.5 or ×1.5, or a time, as 3 ms, that becomes a factor of the given time. */
function readFactor(text, times) {
  const [, number, unit] = /^\s*[×x*]?\s*([\d.,e+-]+)\s*(\w*)\s*$/.exec(text) ?? [];
  const value = Number((number ?? "none").replace(",", "."));
  if (!unit) return value;
  return hasOneTime(times) ? (value * (UNITS[unit] ?? NaN)) / times[0] : NaN;
}

/** Set the sliders to the factors, and write the times that result. */
export function showSliders(scene, schedules, state) {
  for (const { key } of scene.factors) {
    const factor = state.factors.get(key);
    const times = factorTimes(schedules, scene, key);
    // hide the slider of a cost that no shown schedule has
    byId(`factor-${key}`).closest(".slider").hidden = !schedules.some((schedule) => schedule.has(key));
    byId(`factor-${key}`).value = factor;
    byId(`factor-${key}`).setAttribute("aria-valuetext", `times ${digits(factor, 4)}`);
    const exact = document.querySelector(`[data-factor="${key}"]`);
    if (exact.getAttribute("aria-invalid") !== "true" || document.activeElement !== exact) {
      exact.value = `×${digits(factor, 6)}`;
      exact.setAttribute("aria-invalid", false);
      document.querySelector(`[data-wrong="${key}"]`).hidden = true;
    }
    byId(`time-${key}`).textContent = writeRange(times.map((time) => factor * time), scene.unit);
  }
  byId("reset").disabled = state.isGiven;
}

/** The least and the largest cost of a kind among the schedules, or one number if they are equal. */
function factorTimes(schedules, scene, key) {
  const kind = 1 + scene.factors.findIndex((factor) => factor.key === key);
  let least = Infinity;
  let largest = 0;
  for (const { costs, isRead } of schedules) {
    for (let k = 0; k < costs.base.length; k++) {
      if (costs.kind[k] !== kind || !isRead[k]) continue;
      least = Math.min(least, costs.base[k]);
      largest = Math.max(largest, costs.base[k]);
    }
  }
  return least === largest ? [largest] : [least, largest];
}
