"use strict";
// Decode the maps of a page, and draw them like the package: cubic interpolation, divided by the largest value, and more
// transparent where there is less evidence.

const READ = { int8: Int8Array, int16: Int16Array };

function readBytes(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < characters.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

function readRows({ type, shape, data, scales }) { // whole numbers in rows, each with its scale
  return { values: new READ[type](readBytes(data).buffer), scales: new Float32Array(readBytes(scales).buffer), width: shape[1], count: shape[0] };
}

class MapSet { // by one method at one layer
  constructor(data, total) {
    Object.assign(this, { layer: data.layer, method: data.method, evidence: data.evidence, grid: data.grid, strongest: data.strongest });
    [this.rows, this.columns] = data.grid;
    this.targets = data.targets; // positions, or null for all of them
    this.row = data.targets && new Map(data.targets.map((target, row) => [target, row]));
    this.maps = data.maps ? readRows(data.maps) : null;
    this.weights = data.weights ? readRows(data.weights) : null;
    this.channels = data.channels ? readRows(data.channels) : null;
    this.count = data.targets ? data.targets.length : total;
  }

  has(target) {
    return !this.row || this.row.has(target);
  }

  map(target) { // signed values of all cells
    const row = this.row ? this.row.get(target) : target;
    const cells = this.rows * this.columns;
    const result = new Float32Array(cells);
    if (this.maps) {
      const { values, scales } = this.maps;
      for (let i = 0, at = row * cells; i < cells; i++) result[i] = values[at + i] * scales[row];
      return result;
    }
    const { values, scales, width } = this.weights;
    for (let c = 0; c < width; c++) {
      const weight = values[row * width + c] * scales[row] * this.channels.scales[c];
      for (let i = 0, at = c * cells; i < cells; i++) result[i] += weight * this.channels.values[at + i];
    }
    return result;
  }

  at(cell) { // the values of all targets in one cell
    const result = new Float32Array(this.count);
    const cells = this.rows * this.columns;
    if (this.maps) {
      const { values, scales } = this.maps;
      for (let k = 0, at = cell; k < result.length; k++, at += cells) result[k] = values[at] * scales[k];
      return result;
    }
    const { values, scales, width } = this.weights;
    const here = Float32Array.from({ length: width }, (_, c) => this.channels.values[c * cells + cell] * this.channels.scales[c]);
    for (let k = 0, at = 0; k < result.length; k++) {
      let sum = 0;
      for (let c = 0; c < width; c++, at++) sum += values[at] * here[c];
      result[k] = sum * scales[k];
    }
    return result;
  }
}

const taps = new Map(); // by cells and pixels: four cells and their weights for each pixel

function findTaps(cells, pixels) {
  const key = cells * 65536 + pixels;
  if (!taps.has(key)) {
    const at = new Int32Array(4 * pixels), weights = new Float32Array(4 * pixels);
    const a = -0.75; // of the cubic, as PyTorch's has it
    const near = (x) => ((a + 2) * x - (a + 3)) * x * x + 1;
    const far = (x) => ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    for (let i = 0; i < pixels; i++) {
      const place = ((i + 0.5) * cells) / pixels - 0.5;
      const first = Math.floor(place), x = place - first;
      const own = [far(x + 1), near(x), near(1 - x), far(2 - x)];
      for (let t = 0; t < 4; t++) {
        at[4 * i + t] = Math.min(Math.max(first - 1 + t, 0), cells - 1);
        weights[4 * i + t] = own[t];
      }
    }
    taps.set(key, { at, weights });
  }
  return taps.get(key);
}

function enlarge(values, rows, columns, height, width) { // of values that are not negative; clamped at zero
  const down = findTaps(rows, height), across = findTaps(columns, width);
  const wide = new Float32Array(rows * width), large = new Float32Array(height * width);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < width; x++) {
      let sum = 0;
      for (let t = 4 * x; t < 4 * x + 4; t++) sum += values[y * columns + across.at[t]] * across.weights[t];
      wide[y * width + x] = sum;
    }
  }
  for (let y = 0; y < height; y++) {
    const [p, q, r, s] = down.at.subarray(4 * y, 4 * y + 4), [a, b, c, d] = down.weights.subarray(4 * y, 4 * y + 4);
    for (let x = 0; x < width; x++) {
      const sum = a * wide[p * width + x] + b * wide[q * width + x] + c * wide[r * width + x] + d * wide[s * width + x];
      large[y * width + x] = sum > 0 ? sum : 0;
    }
  }
  return large;
}

function choose(values, evidence) { // what is shown of signed values
  if (evidence === "signed") return values;
  return values.map(evidence === "negative" ? (value) => (value < 0 ? -value : 0) : (value) => (value > 0 ? value : 0));
}

function toHeatmap(values, set, evidence, height, width) { // from 0 to 1, or from -1 to 1; null if all values are 0
  let heatmap = choose(values, evidence);
  if (height !== set.rows || width !== set.columns) {
    const grow = (part) => enlarge(part, set.rows, set.columns, height, width);
    if (evidence === "signed") {
      const above = grow(choose(heatmap, "positive")), below = grow(choose(heatmap, "negative"));
      heatmap = above.map((value, i) => value - below[i]);
    } else {
      heatmap = grow(heatmap);
    }
  }
  let largest = 0;
  for (let i = 0; i < heatmap.length; i++) largest = Math.max(largest, Math.abs(heatmap[i]));
  if (!(largest > 0)) return null;
  for (let i = 0; i < heatmap.length; i++) heatmap[i] /= largest;
  return heatmap;
}

// Signed evidence, from a little to the most: warm for it, cold against it. As images/draw.py has them.
const FOR = [[255, 205, 70], [225, 0, 35]], AGAINST = [[90, 225, 255], [25, 25, 205]];

function makePalette(table, alpha, isSigned) { // 256 colours as RGBA in whole numbers
  const palette = new Uint8ClampedArray(1024);
  const zero = isSigned ? 128 : 0, steps = isSigned ? 127 : 255;
  for (let level = 0; level < 256; level++) {
    const strength = Math.min(Math.abs(level - zero) / steps, 1);
    const [little, most] = level < zero ? AGAINST : FOR;
    for (let c = 0; c < 3; c++) palette[4 * level + c] = isSigned ? little[c] * (1 - strength) + most[c] * strength : table[3 * level + c];
    palette[4 * level + 3] = 255 * alpha * Math.min(1, 2 * strength);
  }
  return new Uint32Array(palette.buffer);
}

function paint(canvas, heatmap, height, width, palette, isSigned) {
  canvas.height = height;
  canvas.width = width;
  if (!heatmap) return;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const zero = isSigned ? 128.5 : 0.5, steps = isSigned ? 127 : 255;
  for (let i = 0; i < pixels.length; i++) pixels[i] = palette[Math.max(0, Math.floor(heatmap[i] * steps + zero))];
  context.putImageData(image, 0, 0);
}
