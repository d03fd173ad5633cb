// The recurrence of the engine, on a program that Python lowered:
//
//   finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])
//
// Nodes stand in topological order, node 0 is the source, which ends at 0. Sums are added up in the
// same order as in the engine and the first of equals wins, so results are equal to the last bit.

/** Lay out the edges of a program by node: those of `node` are first[node] to first[node + 1]. */
export function layOut({ degree, back, lag, lasts, op, carrier, arrives }) {
  const nodes = degree.length;
  const first = new Int32Array(nodes + 1);
  const pred = new Int32Array(back.length);
  const isAwaited = new Uint8Array(nodes);
  for (let node = 0, edge = 0; node < nodes; node++) {
    first[node + 1] = first[node] + degree[node];
    if (degree[node] === 0) isAwaited[0] = 1;
    for (; edge < first[node + 1]; edge++) {
      pred[edge] = node - back[edge];
      isAwaited[pred[edge]] = 1;
    }
  }
  return {
    nodes, first, pred, lag, lasts, op, carrier, arrives, isAwaited,
    start: new Float64Array(nodes),
    finish: new Float64Array(nodes),
    lastEdge: new Int32Array(nodes), // the edge on which the last arrival comes, -1 without any
    tail: new Float64Array(nodes),
  };
}

/** Costs by position: what is given times the factor of its kind; a message is a sum, a pair the
 * longer of its ops and a part of the shorter one. */
export function costVector(costs, factors) {
  const { base, kind, pair, overlap, firstPair, firstLink } = costs;
  const vector = new Float64Array(base.length);
  for (let k = 0; k < base.length; k++) {
    vector[k] = kind[k] === 0 ? base[k] : base[k] * factors[kind[k] - 1];
  }
  if (firstPair >= 0) {
    for (let k = 0; 2 * k < pair.length; k++) {
      const both = [vector[pair[2 * k]], vector[pair[2 * k + 1]]];
      vector[firstPair + k] = Math.max(...both) + overlap[k] * Math.min(...both);
    }
  }
  const links = (base.length - firstLink) / 3; // latencies, transmit times, and their sums
  for (let k = firstLink; k < firstLink + links; k++) {
    vector[k + 2 * links] = vector[k] + vector[k + links];
  }
  return vector;
}

/** Fill in start, finish and lastEdge of a program; return the makespan. */
export function runProgram(program, vector) {
  const { nodes, first, pred, lag, lasts, start, finish, lastEdge } = program;
  let makespan = 0;
  for (let node = 0, edge = 0; node < nodes; node++) {
    let latest = 0;
    let last = -1;
    for (const end = first[node + 1]; edge < end; edge++) {
      const arrival = finish[pred[edge]] + vector[lag[edge]];
      if (last < 0 || arrival > latest) {
        latest = arrival;
        last = edge;
      }
    }
    start[node] = latest;
    lastEdge[node] = last;
    finish[node] = latest + vector[lasts[node]];
    if (finish[node] > makespan) makespan = finish[node];
  }
  return makespan;
}

/** Fill in the tails: the longest time from the end of each node to the makespan. */
export function findTails(program, vector) {
  const { nodes, first, pred, lag, lasts, tail } = program;
  tail.fill(0);
  for (let node = nodes - 1; node > 0; node--) {
    const after = tail[node] + vector[lasts[node]];
    for (let edge = first[node]; edge < first[node + 1]; edge++) {
      const value = after + vector[lag[edge]];
      if (value > tail[pred[edge]]) tail[pred[edge]] = value;
    }
  }
}

/** Nodes of the critical path, from its end back to its beginning; the first of equals wins. */
export function criticalPath(program) {
  const { nodes, finish, isAwaited, lastEdge, pred } = program;
  let node = 0;
  let latest = -1;
  for (let k = 0; k < nodes; k++) {
    if (!isAwaited[k] && finish[k] > latest) {
      latest = finish[k];
      node = k;
    }
  }
  const path = [];
  while (node > 0) {
    path.push(node);
    node = lastEdge[node] < 0 ? 0 : pred[lastEdge[node]];
  }
  return path;
}
