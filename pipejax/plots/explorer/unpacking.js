// Arrays of the page, packed by `pack` of payload.py: deflated, in base64.

const KINDS = { int8: Int8Array, int16: Int16Array, int32: Int32Array, float64: Float64Array };

/** Decode base64 and inflate the bytes. */
export async function inflate(data) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Unpack arrays by name; an array that was stored as steps between entries is summed up. */
export async function unpack(packed) {
  const content = await inflate(packed.data);
  const unpacked = {};
  let place = 0;
  for (const [name, kind, size, isSteps] of packed.arrays) {
    const array = new KINDS[kind](content, place, size);
    place += array.byteLength;
    unpacked[name] = isSteps ? summed(array) : array;
  }
  return unpacked;
}

/** Entries from their steps, where 0 stands for the entry 0 and 1, 2, .. for the steps 0, 1, .. */
function summed(steps) {
  const values = new Int32Array(steps.length);
  let sum = 0;
  for (let k = 0; k < steps.length; k++) {
    if (steps[k] === 0) continue;
    values[k] = sum += steps[k] > 0 ? steps[k] - 1 : steps[k];
  }
  return values;
}
