// Schedules to choose from: those that the page shows first, and others that it carries.

import { Schedule } from "./schedule.js";

const sortedNumbers = (values) => [...new Set(values)].sort((first, second) => first - second);

/** Number of microbatches; that of a schedule counts their slices. */
function wholeMicrobatches({ microbatches, slices }) {
  return microbatches / slices;
}

export class Library {
  constructor(scene, pageSchedules) {
    Object.assign(this, { scene, pageSchedules, loaded: new Map() });
    this.versions = [...pageSchedules, ...scene.choices];
  }

  /** Names to choose from. */
  get names() {
    return [...new Set(this.versions.map(({ name }) => name))];
  }

  /** Numbers of stages per worker that a schedule has here. */
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
  async find({ name, stagesPerWorker }, workers, microbatches) {
    const isMeant = (version) => version.name === name && version.workers === workers &&
      wholeMicrobatches(version) === microbatches && version.stagesPerWorker === stagesPerWorker;
    const present = this.pageSchedules.find(isMeant);
    if (present) return present;
    const entry = this.scene.choices.find(isMeant);
    if (!entry) return null;
    if (!this.loaded.has(entry)) this.loaded.set(entry, await Schedule.load(entry, this.scene.phases));
    return this.loaded.get(entry);
  }
}
