// The page: choices of the user, and their effects on the screen.

import { Bars, GUTTER } from "./bars.js";
import { Library } from "./choice.js";
import { Axis, Curves } from "./curves.js";
import { listen, listenToAxis, listenToKeys, nextMatch, search } from "./input.js";
import { readPalette } from "./palette.js";
import {
  opDetails, opHeading, makeChoices, refusals, showChoices, showChosen, showForm, showLegend,
  showResults, summary, opTip,
} from "./panels.js";
import { Residuals, withRecorded } from "./residuals.js";
import { Schedule } from "./schedule.js";
import { makeSliders, showSliders } from "./sliders.js";
import { State, View } from "./state.js";
import { byId, make, placeBeside } from "./text.js";

// heights [pixels]
const ROW = { least: 4, largest: 64, several: 18, largestOfSeveral: 44 };
const HEADING = 38; // of one of several schedules, with the gap between them
const CURVES = { alone: 130, largest: 420, several: 84, margin: 4 };
const QUIET = 400; // milliseconds until screen readers get a change

export class Explorer {
  /** Unpack the page's data, and show it. */
  static async open(scene) {
    const explorer = new Explorer();
    scene.schedules = withRecorded(scene.schedules);
    explorer.scene = scene;
    explorer.state = new State(scene);
    explorer.view = new View();
    explorer.pageSchedules = await Promise.all(scene.schedules.map((data) =>
      Schedule.load(data, scene.phases)));
    explorer.pageSchedules.forEach((schedule, k, all) => { // a recorded run stands before its replay
      if (schedule.starts) new Residuals(schedule, all[k + 1], scene);
    });
    explorer.library = new Library(scene, explorer.pageSchedules);
    explorer.schedules = explorer.pageSchedules;
    await explorer.evaluateAsGiven();
    explorer.build();
    await explorer.readAddress();
    return explorer;
  }

  get focused() {
    return this.schedules[this.state.focus];
  }

  /** Compute makespans at the given times and link model, against which changes are shown. */
  async evaluateAsGiven() {
    const factors = this.scene.factors.map(({ initial }) => initial);
    const keys = this.scene.factors.map(({ key }) => key);
    for (const schedule of this.schedules) {
      if (schedule.givenMakespan !== undefined) continue;
      schedule.keys = keys;
      await schedule.evaluate(this.scene.link, factors);
      schedule.givenMakespan = schedule.makespan;
    }
  }

  build() {
    const { scene, state } = this;
    byId("scope").textContent = scene.scope;
    this.palette = readPalette(scene);
    this.axis = new Axis(byId("axis"), { unit: this.scene.unit });
    this.buildPanes();
    makeSliders(scene, () => this.schedules, (key, factor) => this.setFactor(key, factor));
    makeChoices("links", "radio", scene.links.map((name) => [name, name]), (event) =>
      this.setLink(event.target.value));
    makeChoices("shown", "checkbox",
      [["critical", "critical path"], ["messages", "messages"], ["memory", "memory"],
        ...(this.pageSchedules.some((schedule) => schedule.residuals) ? [["residuals", "residuals"]] : [])],
      (event) => this.show(event.target.value, event.target.checked));
    const held = scene.schedules[0].memory.unit === "bytes" ? "bytes" : "by size";
    makeChoices("curve", "radio", [["flight", "in flight"], ["memory", held]], (event) => {
      state.curve = event.target.value;
      this.changed();
    });
    this.listen();
  }

  /** Write the title of the page, and make a pane for each schedule. */
  buildPanes() {
    const { scene, schedules, pageSchedules } = this;
    const isGiven = schedules === pageSchedules;
    const names = schedules.length === 1 ? schedules[0].name : `${schedules.length} schedules`;
    const sizes = new Set(schedules.map((schedule) => `${schedule.workers} workers, ${schedule.microbatches} microbatches`));
    byId("title").textContent = isGiven ? scene.title : names;
    byId("subtitle").textContent = sizes.size === 1 ? [...sizes][0] : "under one time axis";
    this.panes = schedules.map((schedule, index) => this.buildPane(schedule, index));
    byId("schedules").replaceChildren(...this.panes.map((pane) => pane.element));
  }

  buildPane(schedule, index) {
    const several = this.schedules.length > 1;
    const canvas = make("canvas", { class: "bars", role: "img", tabindex: "0" });
    const held = make("canvas", { class: "held", role: "img" });
    const heading = make("h2", { onclick: () => this.focusOn(index) });
    const refused = make("p", { class: "refused", hidden: true });
    const element = make("div", { class: several ? "schedule" : "schedule alone" },
      heading, canvas, refused, held);
    const pane = {
      element, heading, refused, schedule,
      bars: new Bars(canvas, { schedule, palette: this.palette }),
      curves: new Curves(held, { schedule, palette: this.palette }),
    };
    listen(this, pane, index);
    return pane;
  }

  listen() {
    listenToAxis(this);
    listenToKeys(this);
    byId("add").onclick = () =>
      this.chooseSchedules(this.library.another(this.state.chosen ?? this.library.asGiven()));
    const { view } = this;
    const zoom = (factor) => () => { view.zoom(factor, this.middle()); this.viewChanged(); };
    byId("zoom-in").onclick = zoom(1.5);
    byId("zoom-out").onclick = zoom(1 / 1.5);
    byId("fit").onclick = () => this.fit();
    byId("theme").onclick = () => this.switchTheme();
    byId("help").onclick = () => this.help();
    byId("reset").onclick = () => this.resetTimes();
    byId("find").oninput = (event) => this.find(event.target.value);
    byId("find").onkeydown = (event) => { if (event.key === "Enter") this.go(nextMatch, event.shiftKey ? -1 : 1); };
    window.addEventListener("resize", () => this.layOut());
    window.addEventListener("scroll", () => this.draw(), { passive: true });
    window.addEventListener("hashchange", () => this.readAddress());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  /** Read the state from the address. */
  async readAddress() {
    const { state, view } = this;
    state.read(location.hash.slice(1));
    byId("find").value = state.find;
    view.range = state.range;
    this.selected = -1;
    if (!(await this.resolve())) state.chosen = null; // nothing of it is on this page
    await this.evaluate();
    this.selected = state.selected ? this.focused.find(state.selected) : -1;
    this.applyFind();
    this.paint();
    this.changed();
    if (state.focus > 0) this.panes[state.focus].element.scrollIntoView();
  }

  /** Show other schedules, or other sizes; `chosen` has the form of `state.chosen`. */
  async chooseSchedules(chosen) {
    const { state } = this;
    const before = { chosen: state.chosen, focus: state.focus };
    Object.assign(state, { chosen, focus: 0, selected: "", worker: -1 });
    this.selected = -1;
    if (!(await this.resolve())) Object.assign(state, before); // nothing of it is there
    this.view.range = state.range = null;
    await this.evaluate();
    this.applyFind();
    this.paint();
    this.changed();
  }

  /** Find the chosen schedules; return false and change nothing if none is there. */
  async resolve() {
    const { state, library, pageSchedules } = this;
    const { matches, missing } = state.chosen ? await findAll(library, state.chosen) : { matches: pageSchedules, missing: [] };
    byId("choice-notice").hidden = missing.length === 0;
    byId("choice-notice").textContent = missing.join(" ");
    if (matches.length === 0) return false;
    if (matches.length !== this.schedules.length || matches.some((schedule, k) => schedule !== this.schedules[k])) {
      this.schedules = matches;
      await this.evaluateAsGiven();
      this.buildPanes();
      if (state.focus >= matches.length) state.focus = 0;
    }
    return true;
  }

  async setFactor(key, factor) {
    this.state.factors.set(key, factor);
    await this.evaluate();
    this.changed();
  }

  async setLink(name) {
    this.state.link = name;
    await this.evaluate();
    this.changed();
  }

  nextLink() {
    const { links } = this.scene;
    this.setLink(links[(links.indexOf(this.state.link) + 1) % links.length]);
  }

  async resetTimes() {
    for (const { key, initial } of this.scene.factors) this.state.factors.set(key, initial);
    await this.setLink(this.scene.link);
  }

  show(name, isShown) {
    this.state.shown[name] = isShown;
    this.layOut();
    this.changed();
  }

  focusOn(index) {
    const { state } = this;
    if (index !== state.focus) Object.assign(state, { focus: index, worker: -1, selected: "" });
    this.selected = state.selected ? this.selected : -1;
    this.panes[index].element.scrollIntoView({ block: "nearest" });
    this.changed();
  }

  chooseWorker(index, worker) {
    const { state } = this;
    const isSame = index === state.focus && worker === state.worker;
    this.state.focus = index;
    this.state.worker = isSame ? -1 : worker;
    this.changed();
  }

  choose(index, op) {
    const { state } = this;
    if (index !== state.focus) state.worker = -1;
    state.focus = index;
    this.selected = op;
    const { focused } = this;
    state.selected = op < 0 ? "" : focused.label(op);
    window.parent.postMessage({ selectedOp: state.selected }, "*"); // a notebook listens
    if (op >= 0 && !focused.error) {
      if (focused.ops.worker[op] >= 0) state.worker = focused.ops.worker[op];
      this.view.reveal(focused.opStart[op], focused.opFinish[op]);
      state.range = this.view.range;
      this.say(opTip(focused, op, this.scene.unit).map((line) => line.textContent).join(", "));
    }
    this.changed();
  }

  /** Go to another op of the schedule, if `findOp` finds one. */
  go(findOp, direction) {
    const { focused, selected, state } = this;
    const op = focused.error ? -1 : findOp(focused, selected, direction);
    if (op >= 0) this.choose(state.focus, op);
  }

  find(text) {
    this.state.find = text;
    this.applyFind();
    this.changed();
  }

  applyFind() {
    let count = 0;
    for (const schedule of this.schedules) {
      schedule.matches = schedule.error ? null : search(schedule, this.state.find);
      if (schedule.matches) for (const isMatch of schedule.matches) count += isMatch;
    }
    byId("matches").textContent = this.state.find.trim() ? `${count} found` : "";
  }

  fit() {
    this.view.range = null;
    this.viewChanged();
  }

  middle() {
    return (this.view.from + this.view.to) / 2;
  }

  switchTheme() {
    const isDark = document.documentElement.hasAttribute("data-dark");
    this.state.theme = isDark ? "light" : "dark";
    this.paint();
    this.state.keep();
  }

  help() {
    byId("keys").showModal();
  }

  /** Run all schedules with the choices, after earlier runs have ended. */
  evaluate() {
    this.evaluated = (this.evaluated ?? Promise.resolve()).then(() => this.evaluateNow());
    return this.evaluated;
  }

  async evaluateNow() {
    const { scene, state, view } = this;
    const factors = scene.factors.map(({ key }) => state.factors.get(key));
    const shown = new Set(this.schedules.flatMap((schedule) => schedule.residuals?.runs ?? [schedule]));
    for (const schedule of shown) await schedule.evaluate(state.link, factors);
    for (const schedule of shown) if (schedule.starts) schedule.residuals.compare();
    view.whole = Math.max(...this.schedules.map((schedule) => (schedule.error ? 0 : schedule.makespan))) || 1;
    if (view.range) view.show(...view.range);
    if (/\bcrit/i.test(state.find)) this.applyFind();
  }

  /** Show the choices and results. */
  changed() {
    const { schedules, state, scene, scene: { unit }, library } = this;
    showChosen(library, state.chosen ?? library.asGiven(), (chosen) => this.chooseSchedules(chosen));
    showResults(schedules, state, unit, (index) => this.focusOn(index));
    showSliders(scene, schedules, state);
    showChoices("links", (name) => name === state.link, refusals(schedules, scene.links));
    showChoices("shown", (name) => state.shown[name]);
    showChoices("curve", (name) => name === state.curve);
    byId("curve").hidden = !state.shown.memory || !schedules.some((schedule) => schedule.hasSizes);
    showForm(this.focused, state, unit, schedules.length === 1);
    showLegend(schedules, state.shown);
    this.showOp();
    this.showHeadings();
    this.say(summary(schedules, unit));
    state.keep();
    this.draw();
  }

  showOp() {
    const { focused, selected, scene: { unit } } = this;
    const isThere = selected >= 0 && !focused.error && focused.runs(selected);
    byId("op-section").hidden = !isThere;
    if (!isThere) return;
    byId("op").replaceChildren(...opDetails(focused, selected, unit, (op) =>
      this.choose(this.state.focus, op)));
  }

  showHeadings() {
    const best = Math.min(...this.schedules.filter((schedule) => !schedule.error).map((schedule) => schedule.makespan));
    this.panes.forEach(({ element, heading, refused, schedule, bars, curves }, index) => {
      element.classList.toggle("focused", index === this.state.focus);
      heading.replaceChildren(...opHeading(schedule, this.scene.unit, best, this.state.shown));
      refused.hidden = !schedule.error;
      refused.textContent = schedule.error;
      bars.canvas.hidden = Boolean(schedule.error);
      curves.canvas.hidden = Boolean(schedule.error) || !this.state.shown.memory;
      bars.canvas.setAttribute("aria-label", `Timeline of ${summary([schedule], this.scene.unit)}`);
      curves.canvas.setAttribute("aria-label", `Memory of ${schedule.name} over time`);
    });
  }

  /** Give a text to screen readers, once it does not change any more. */
  say(text) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (byId("spoken").textContent !== text) byId("spoken").textContent = text;
    }, QUIET);
  }

  viewChanged() {
    this.state.range = this.view.range;
    this.state.keep();
    this.draw();
  }

  /** Set the colours of the chosen theme, and lay out the page. */
  paint() {
    const { state } = this;
    const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = state.theme === "dark" || (state.theme === "auto" && prefersDark);
    document.documentElement.toggleAttribute("data-dark", isDark);
    this.palette = readPalette(this.scene);
    document.documentElement.style.setProperty("--seconds", this.palette.seconds.join());
    for (const { bars, curves } of this.panes) bars.palette = curves.palette = this.palette;
    this.layOut();
  }

  /** Give all canvases their sizes: rows as high as they fit into the window. */
  layOut() {
    const { panes, state } = this;
    const width = byId("schedules").clientWidth;
    const counts = this.schedules.map((schedule) => schedule.workers);
    const reserved = byId("axis").getBoundingClientRect().top + window.scrollY + 34 + 70;
    const isAlone = panes.length === 1;
    const { memory } = state.shown;
    const all = window.innerHeight - reserved;
    const { height, curve } = isAlone
      ? singleHeight(all, counts[0], memory)
      : { height: severalHeight(all, counts, memory), curve: CURVES.several };
    for (const { bars, curves } of panes) {
      bars.resize(width, height);
      curves.resize(width, curve);
    }
    const head = document.querySelector("header").offsetHeight;
    document.documentElement.style.setProperty("--head", `${head}px`);
    this.axis.resize(width);
    this.showHeadings();
    this.draw();
  }

  /** Draw once before the next frame. */
  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const { panes, view, state, palette } = this;
    this.axis.draw(view, palette, this.pointer ?? null);
    let hidden = 0;
    panes.forEach(({ element, schedule, bars, curves }, index) => {
      const { top, bottom } = element.getBoundingClientRect();
      if (schedule.error || bottom < 0 || top > window.innerHeight) return;
      const isFocused = index === state.focus;
      const worker = isFocused ? state.worker : -1;
      hidden += bars.draw(view, {
        ...state.shown,
        worker,
        matches: schedule.matches,
        selected: isFocused ? this.selected : -1,
        hovered: this.hovered?.index === index ? this.hovered.op : -1,
      });
      if (state.shown.memory) curves.draw(view, { unit: state.curve, worker });
    });
    const notice = hidden > 0 ? `${hidden.toLocaleString("en")} messages in sight: zoom in to see them` : "";
    if (byId("notice").textContent !== notice) byId("notice").textContent = notice;
  }

  pointTo(time) {
    this.pointer = time;
    this.axis.draw(this.view, this.palette, time);
    const cursor = byId("cursor");
    cursor.hidden = time === null || time < this.view.from;
    const { canvas, width } = this.axis;
    cursor.style.left = `${canvas.offsetLeft + this.view.over(GUTTER, width - GUTTER).x(time ?? 0)}px`;
  }

  hover(index, op, event) {
    const tip = byId("tip");
    const schedule = this.schedules[index];
    const isNew = this.hovered?.index !== index || this.hovered?.op !== op;
    this.hovered = { index, op };
    tip.hidden = op < 0;
    if (isNew) this.draw();
    if (op < 0) return;
    if (isNew) tip.replaceChildren(...opTip(schedule, op, this.scene.unit));
    placeBeside(tip, event);
  }

  /** Mark a range of the axis while it is drawn with the mouse, or null. */
  mark(from, to) {
    this.axis.marked = from === null ? null : [from, to];
    this.axis.draw(this.view, this.palette, this.pointer);
  }
}

/** The schedules of a choice, and texts about those that are not there. */
async function findAll(library, { schedules, workers, microbatches }) {
  const matches = [];
  const missing = [];
  for (const choice of schedules) {
    const schedule = await library.find(choice, workers, microbatches);
    if (schedule) matches.push(schedule);
    else missing.push(`No ${choice.name} is here for ${workers} workers and ${microbatches} microbatches.`);
  }
  return { matches, missing };
}

/** Heights of the rows and of the curve of one schedule; the curve gets the height that rows leave. */
function singleHeight(all, rows, hasCurve) {
  const forRows = all - (hasCurve ? CURVES.alone + CURVES.margin : 0);
  const height = Math.round(Math.min(ROW.largest, Math.max(ROW.least, forRows / rows)));
  const forCurve = Math.min(CURVES.largest, all - CURVES.margin - height * rows);
  return { height, curve: Math.max(CURVES.alone, Math.floor(forCurve)) };
}

/** Height of the rows of several schedules, so that all fit into the window if they can. */
function severalHeight(all, counts, hasCurves) {
  const rows = counts.reduce((sum, count) => sum + count, 0);
  const forRows = all - counts.length * (HEADING + (hasCurves ? CURVES.several + CURVES.margin : 0));
  const crowded = Math.min(ROW.several, Math.max(ROW.least, Math.round(all / Math.max(...counts))));
  return Math.max(crowded, Math.min(ROW.largestOfSeveral, Math.floor(forRows / rows)));
}

Explorer.open(JSON.parse(byId("scene").textContent)).then((explorer) => {
  window.explorer = explorer; // for the browser's console, and for tests
  explorer.readyAt = performance.now(); // milliseconds since the page was asked for
  document.documentElement.dataset.ready = "";
}).catch((error) => {
  byId("notice").textContent = `This page cannot be shown: ${error.message}`;
  throw error;
});
