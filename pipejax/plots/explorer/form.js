// Closed forms: the makespan as the largest of some sums of counts times parameters.

/** Values of the parameters of a form at the factors of the sliders, by key. */
export function parameterValues(form, factors) {
  return form.parameters.map((key, k) => form.units[k] * factors.get(key));
}

/** Value of every sum, and which is the largest: the first of equals. */
export function sums(form, factors) {
  const values = parameterValues(form, factors);
  const found = form.facets.map((facet) =>
    facet.reduce((sum, count, k) => sum + count * values[k], 0));
  return { sums: found, active: found.indexOf(Math.max(...found)) };
}

/** Terms of a sum for people: [count, symbol] of those that count. */
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
