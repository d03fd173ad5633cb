// Schedules to choose from: those that the page was written with, and tables that it carries, which
// are lowered in the page.

import { Schedule } from "./schedule.js";
import { memoryChanges, costLayout, lower, tableMessages, tableOps } from "./lowering.js";
import { inflate } from "./unpacking.js";

// Cells of carried tables: the library has checked them, and says what they mean (`grammar`).

const PAIR = /^\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B$/;
const OP = /^(\d*)([A-Za-z_]+)(\d*)(?:\.(\d+))?$/;

/** Make a table of an entry of the library. */
function makeTable(entry, grammar) {
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

/** The cost vector of a table, and the number of the factor that multiplies each position. */
function tableCosts(table, layout, scene) {
  const base = new Float64Array(layout.size);
  fillGiven(base, table, layout, scene);
  const keys = scene.factors.map(({ key }) => key);
  const number = (letter) => keys.indexOf(letter) + 1;
  const kind = new Int32Array(layout.size);
  for (const [phase, { first, count }] of layout.times.of) {
    kind.fill(number(scene.phases[phase].letter), first, first + count);
  }
  const { firstPair, firstLink, links } = layout;
  kind.fill(number("latency"), firstLink, firstLink + links);
  kind.fill(number("transmit"), firstLink + links, firstLink + 2 * links);
  const overlap = new Float64Array(firstLink - firstPair).fill(1);
  return { base, kind, pair: Int32Array.from(layout.joined), overlap, firstPair, firstLink };
}

/** Fill in times that hold for any table; those of a worker are divided over stages and slices. */
function fillGiven(base, table, layout, { times, factors, phases, mean }) {
  const { grammar, placement: [home] } = table;
  const stagesOnWorker = home.map((worker) => home.filter((other) => other === worker).length); // by stage
  const used = new Set(table.cells.flatMap(({ ops }) => ops.map(({ phase }) => phase)));
  const slices = times.byWorker ? grammar.slices : 1;
  for (const [phase, { first, count }] of layout.times.of) {
    const time = times.ops[phase];
    if (time === undefined) {
      if (used.has(phase)) throw new Error(`${phases[phase].letter} has no time on this page`);
      continue;
    }
    const isPerStage = times.byWorker && !grammar.workerPhases.includes(phase);
    for (let place = 0; place < count; place++) {
      base[first + place] = time / slices * (isPerStage ? table.shares[place] / stagesOnWorker[place] : 1);
    }
  }
  const { firstLink, links } = layout;
  const isFree = factors.some(({ key, initial }) => key === "transmit" && initial === 0);
  base.fill(times.latency, firstLink, firstLink + links);
  base.fill((isFree ? mean : times.transmit) / slices, firstLink + links, firstLink + 2 * links);
}

/** Number of microbatches; that of a schedule counts slices, that of an entry has no slices. */
function wholeMicrobatches({ microbatches, slices = 1 }) {
  return microbatches / slices;
}

/** Make a schedule from a table; each program is lowered when its link model is first chosen. */
function makeSchedule(table, scene) {
  const { links, linkModels, factors } = scene;
  const { grammar } = table;
  const atEnd = factors.find(({ key }) => key === "A" || key === "U");
  if (atEnd) throw new Error(`this page has times of an ${atEnd.name}, which it cannot add to other tables`);
  const layout = costLayout(table, grammar);
  const edges = tableMessages(table, grammar);
  const programs = {};
  for (const model of links) {
    let lowered = null;
    const get = () => {
      try {
        lowered ??= lower(table, linkModels[model], layout, edges, grammar);
      } catch (error) {
        lowered = { error: error.message };
      }
      return lowered;
    };
    Object.defineProperty(programs, model, { enumerable: true, get });
  }
  if (programs[links[0]].error) throw new Error(programs[links[0]].error);
  const { ops, placement } = tableOps(table);
  const sent = (name) => Int32Array.from(edges.sent, (message) => message[name]);
  const { SEND_F, SEND_B } = grammar.codes;
  const schedule = new Schedule();
  Object.assign(schedule, {
    name: table.name,
    workers: table.workers,
    stages: table.stages,
    microbatches: table.microbatches,
    pipes: table.pipes,
    slices: grammar.slices,
    stagesPerWorker: table.stages / new Set(table.placement[0]).size,
    ops,
    placement,
    messages: {
      producer: sent("from"), consumer: sent("to"), stage: sent("stage"), microbatch: sent("microbatch"),
      phase: Int32Array.from(edges.sent, ({ direction }) => (direction ? SEND_B : SEND_F)),
    },
    costs: tableCosts(table, layout, scene),
    held: memoryChanges(table, grammar),
    memory: { unit: "activations", limits: null, static: null },
    step: null,
    programs,
    forms: {},
  });
  schedule.settle(scene.phases);
  return schedule;
}

const sortedNumbers = (values) => [...new Set(values)].sort((first, second) => first - second);

/** Tables that a page can show. */
export class Library {
  static async open(scene, pageSchedules) {
    const library = new Library();
    const entries = scene.library ? JSON.parse(new TextDecoder().decode(await inflate(scene.library))) : [];
    Object.assign(library, { scene, pageSchedules, entries, cache: new Map() });
    library.versions = [...pageSchedules, ...entries];
    return library;
  }

  /** Names to choose from: of the page's schedules, of carried tables. */
  get names() {
    return [...new Set(this.versions.map(({ name }) => name))];
  }

  /** Numbers of stages per worker of the tables of a schedule. */
  choices(name) {
    const versions = this.versions.filter((version) => version.name === name);
    return sortedNumbers(versions.map((version) => version.stagesPerWorker));
  }

  /** The schedules that the page was written with, as a choice. */
  asGiven() {
    const [{ workers }] = this.pageSchedules;
    const schedules = this.pageSchedules.map(({ name, stagesPerWorker }) => ({ name, stagesPerWorker }));
    return { schedules, workers, microbatches: wholeMicrobatches(this.pageSchedules[0]) };
  }

  /** Add to a choice the first schedule that has a table of its size and is not shown. */
  another(chosen) {
    const shown = new Set(chosen.schedules.map(({ name }) => name));
    const name = this.names.find((candidate) => !shown.has(candidate) && this.isThere(candidate, chosen)) ?? this.names[0];
    const added = { name, stagesPerWorker: this.choices(name)[0] ?? 1 };
    return { ...chosen, schedules: [...chosen.schedules, added] };
  }

  /** Whether a schedule has a table for the workers and microbatches of a choice. */
  isThere(name, { workers, microbatches }) {
    return this.versions.some((version) =>
      version.name === name && version.workers === workers && wholeMicrobatches(version) === microbatches);
  }

  sizes(field) {
    const value = field === "microbatches" ? wholeMicrobatches : (version) => version[field];
    return sortedNumbers(this.versions.map(value));
  }

  /** The schedule of a name and a size, or null. */
  find({ name, stagesPerWorker }, workers, microbatches) {
    const isMeant = (version) => version.name === name && version.workers === workers &&
      wholeMicrobatches(version) === microbatches && version.stagesPerWorker === stagesPerWorker;
    const present = this.pageSchedules.find(isMeant);
    if (present) return present;
    const entry = this.entries.find(isMeant);
    if (!entry) return null;
    if (!this.cache.has(entry)) {
      const table = makeTable(entry, this.scene.grammars[entry.grammar]);
      this.cache.set(entry, makeSchedule(table, this.scene));
    }
    return this.cache.get(entry);
  }
}
