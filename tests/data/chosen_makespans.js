async (names) => {
  const { library, scene } = explorer;
  const out = [];
  for (const entry of scene.choices.filter(({ name }) => !names || names.includes(name))) {
    const { name, stagesPerWorker, workers } = entry;
    const microbatches = entry.microbatches / entry.slices;
    const schedule = await library.find(entry, workers, microbatches);
    schedule.keys = scene.factors.map(({ key }) => key);
    for (const link of scene.links) {
      await schedule.evaluate(link, scene.factors.map(({ initial }) => initial));
      const found = schedule.error || schedule.makespan;
      out.push([name, stagesPerWorker, workers, microbatches, link, found, schedule.bubbleRatio,
        schedule.peakInFlight]);
    }
  }
  return out;
}
