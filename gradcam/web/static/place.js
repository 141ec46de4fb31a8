"use strict";
// The image: its cells and the evidence in them, its boxes and masks, zoom, and small heatmaps beside each other.

const LISTED = 8; // targets in the list of one cell

function toShareOfImage(event) { // the pointer's position, from 0 to 1
  const box = element("zoomed").getBoundingClientRect();
  return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
}

function cellAt(event) { // of the map under the pointer; null outside of what the network saw
  const [down, across] = toShareOfImage(event), set = current();
  const y = down * image.height - region[0], x = across * image.width - region[1];
  if (y < 0 || x < 0 || y >= region[2] || x >= region[3]) return null;
  return [Math.floor((y / region[2]) * set.rows), Math.floor((x / region[3]) * set.columns)];
}

function toShare([row, column]) { // the centre of a cell, which does not depend on the layer
  return [(row + 0.5) / current().rows, (column + 0.5) / current().columns];
}

function toCell([down, across]) {
  const { rows, columns } = current();
  return [Math.min(Math.floor(down * rows), rows - 1), Math.min(Math.floor(across * columns), columns - 1)];
}

function showPlace() {
  const where = state.pinned ?? state.hovered, square = element("cell"), list = element("place"), set = current();
  square.hidden = !where;
  element("release").hidden = !state.pinned;
  showSecondPlace(where);
  if (!where) {
    element("place-hint").textContent = "Point at a cell of the image, or tap it. Click to pin the cell.";
    list.replaceChildren();
    return;
  }
  const [row, column] = toCell(where), height = region[2] / set.rows, width = region[3] / set.columns;
  setBox(square, region[0] + row * height, region[1] + column * width, height, width);
  square.classList.toggle("kept", Boolean(state.pinned));
  const values = set.at(row * set.columns + column), best = findBest(values, LISTED);
  const positions = (isPair() ? [state.a, state.b] : [state.a]).map((target) => (set.targets ? set.targets.indexOf(target) : target));
  const missing = positions.filter((position) => position >= 0 && !best.includes(position)); // The chosen ones are always listed.
  const strongest = set.strongest ?? values[best[0]];
  element("place-hint").textContent = best.length ? "100 % = the image's strongest cell" : "No positive evidence in this cell.";
  if (best.length) best.splice(Math.min(best.length, LISTED - missing.length), LISTED, ...missing);
  while (list.children.length > best.length) list.lastChild.remove();
  while (list.children.length < best.length) list.append(make("li", {}, make("button", { type: "button", className: "pick" }, makeVerdict("", 0))));
  best.forEach((position, i) => {
    const target = set.targets ? set.targets[position] : position, share = values[position] / strongest;
    const button = list.children[i].firstChild, verdict = button.firstChild;
    button.dataset.target = target;
    button.setAttribute("aria-current", String(positions.includes(position)));
    button.title = label(target);
    verdict.children[0].textContent = label(target);
    verdict.children[1].textContent = share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share) || 0} %`.replace("-", "−");
    verdict.children[2].style.setProperty("--share", Math.min(1, Math.max(0, share)));
  });
}

function findBest(values, count) { // the positions of the largest positive values, in falling order
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (!(values[i] > 0) || (best.length === count && values[i] <= values[best[count - 1]])) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}

function hover(cell) {
  const where = cell && toShare(cell);
  if (String(where) === String(state.hovered)) return;
  state.hovered = where;
  if (!state.pinned) showPlace();
}

function pin(cell) { // pins a cell, or unpins it
  const where = cell && toShare(cell);
  state.pinned = where && String(where) !== String(state.pinned) ? where : null;
  state.hovered = where;
  if (where) chooseSheet("place");
  showPlace();
  sayPlace();
  writeHash();
}

function chooseSheet(sheet) { // the list that a phone shows below the image
  const tab = document.querySelector(`#tabs input[value=${sheet}]`);
  if (tab) tab.checked = true;
  element("explorer").dataset.sheet = sheet;
}

function sayPlace() {
  const names = [...element("place").querySelectorAll(".label")].slice(0, 3).map((text) => text.textContent);
  if (names.length) element("said").textContent = `Strongest evidence in this cell: ${names.join(", ")}`;
}

function moveCell(key) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const set = current(), where = state.hovered ?? state.pinned;
  if (key === "Enter" || key === " ") {
    if (where) pin(toCell(where));
    return Boolean(where);
  }
  if (!(key in steps)) return false;
  const [row, column] = where ? toCell(where) : [set.rows >> 1, set.columns >> 1];
  const by = where ? steps[key] : [0, 0];
  state.pinned = null;
  hover([Math.min(Math.max(row + by[0], 0), set.rows - 1), Math.min(Math.max(column + by[1], 0), set.columns - 1)]);
  sayPlace();
  return true;
}

// ---- Boxes and masks

let masks = []; // by target: height, width and one byte for each pixel; null without a mask

function readMask(mask) { // from the lengths of runs, of which the first is outside the mask
  if (!mask) return null;
  const [height, width] = mask.shape, pixels = new Uint8Array(height * width);
  let at = 0;
  mask.runs.forEach((length, i) => {
    if (i % 2) pixels.fill(1, at, at + length);
    at += length;
  });
  return { height, width, pixels };
}

const colourOf = (target) => `hsl(${Math.round(137.5 * target) % 360} 90% 60%)`; // The golden angle keeps neighbours apart.

const hasObject = (target) => Boolean(masks[target] ?? targets.boxes?.[target]);

function showObjects() {
  masks = (targets.masks ?? []).map(readMask);
  const hasObjects = targets.names.some((_, target) => hasObject(target));
  element("objects-row").hidden = !hasObjects;
  element("objects").hidden = !hasObjects || !state.areObjectsShown;
}

function drawObjects() { // the outlines of all boxes and masks, and of the chosen one on top
  const canvas = element("objects"), scale = 1200 / Math.max(image.width, image.height);
  if (canvas.hidden) return;
  [canvas.width, canvas.height] = [Math.round(image.width * scale), Math.round(image.height * scale)];
  const context = canvas.getContext("2d");
  for (let target = 0; target < total; target++) if (target !== state.a) drawObject(context, target, scale, 1.5);
  drawObject(context, state.a, scale, 4);
}

function drawObject(context, target, scale, thickness) {
  const box = targets.boxes?.[target], mask = masks[target];
  const strokes = [["rgb(0 0 0 / 70%)", thickness + 1.5], [colourOf(target), thickness]];
  if (mask) drawMask(context, mask, strokes);
  else if (box) {
    for (const [style, width] of strokes) {
      [context.strokeStyle, context.lineWidth] = [style, width];
      context.strokeRect(box[0] * scale, box[1] * scale, (box[2] - box[0]) * scale, (box[3] - box[1]) * scale);
    }
  }
}

function drawMask(context, mask, strokes) { // the edges between the pixels inside and outside
  const { height, width, pixels } = mask, [across, down] = [context.canvas.width / width, context.canvas.height / height];
  const path = new Path2D(), isInside = (y, x) => y >= 0 && x >= 0 && y < height && x < width && pixels[y * width + x];
  for (let y = 0; y <= height; y++) {
    for (let x = 0; x <= width; x++) {
      const inside = isInside(y, x);
      if (x < width && Boolean(inside) !== Boolean(isInside(y - 1, x))) { path.moveTo(x * across, y * down); path.lineTo((x + 1) * across, y * down); }
      if (y < height && Boolean(inside) !== Boolean(isInside(y, x - 1))) { path.moveTo(x * across, y * down); path.lineTo(x * across, (y + 1) * down); }
    }
  }
  context.lineCap = "square";
  for (const [style, thickness] of strokes) {
    [context.strokeStyle, context.lineWidth] = [style, thickness];
    context.stroke(path);
  }
}

function objectAt([down, across]) { // the smallest box or mask at this place; undefined without one
  const sizes = new Map();
  for (let target = 0; target < total; target++) {
    const mask = masks[target], box = targets.boxes?.[target];
    if (mask) {
      const at = Math.floor(down * mask.height) * mask.width + Math.floor(across * mask.width);
      if (mask.pixels[at]) sizes.set(target, mask.pixels.reduce((sum, pixel) => sum + pixel, 0) / mask.pixels.length);
    } else if (box) {
      const y = down * image.height, x = across * image.width;
      if (x >= box[0] && x < box[2] && y >= box[1] && y < box[3]) sizes.set(target, ((box[2] - box[0]) * (box[3] - box[1])) / (image.width * image.height));
    }
  }
  return [...sizes.keys()].sort((first, second) => sizes.get(first) - sizes.get(second))[0];
}

function clickImage(event) {
  const target = element("objects").hidden ? undefined : objectAt(toShareOfImage(event));
  if (target !== undefined && target !== state.a) select(target);
  else pin(cellAt(event));
}

// ---- Zoom

const view = { scale: 1, left: 0, top: 0, drag: null, hasMoved: false }; // left and top: in shares of the frame

function setView(scale, left, top) {
  view.scale = Math.min(Math.max(scale, 1), 8);
  const least = 1 - view.scale;
  view.left = Math.min(Math.max(left, least), 0);
  view.top = Math.min(Math.max(top, least), 0);
  element("frames").style.setProperty("--view", `translate(${100 * view.left}%, ${100 * view.top}%) scale(${view.scale})`);
  element("zoom-reset").disabled = element("zoom-out").disabled = view.scale === 1;
  element("zoom-reset").textContent = `${Math.round(100 * view.scale)} %`;
  element("stage").classList.toggle("can-pan", view.scale > 1);
}

function zoom(factor, at = [0.5, 0.5]) { // around a point of the frame
  const scale = Math.min(Math.max(view.scale * factor, 1), 8), ratio = scale / view.scale;
  setView(scale, at[1] - (at[1] - view.left) * ratio, at[0] - (at[0] - view.top) * ratio);
}

function dragView(event) {
  if (!view.drag) return;
  const box = element("stage").getBoundingClientRect();
  const [across, down] = [(event.clientX - view.drag.x) / box.width, (event.clientY - view.drag.y) / box.height];
  if (Math.hypot(event.clientX - view.drag.x, event.clientY - view.drag.y) > 4) view.hasMoved = true;
  if (view.hasMoved) setView(view.scale, view.drag.left + across, view.drag.top + down);
}

// ---- Small heatmaps: the most probable targets at this layer, and this target at all layers

const MULTIPLES = 5;
let multiples = [];

function makeMultiples() {
  const first = [...Array(total).keys()].filter((target) => sets[0].has(target)).slice(0, MULTIPLES);
  multiples = [...first.map((target) => ({ target })), ...sets.map((_, set) => ({ set }))].map((entry) => {
    const canvas = make("canvas", { "aria-hidden": "true" }), photo = make("img", { src: element("image").src, alt: "" });
    setBox(canvas, ...region);
    const button = make("button", { type: "button", className: "multiple" }, make("span", { className: "thumb" }, photo, canvas), make("span", { className: "label" }));
    button.addEventListener("click", () => {
      if (entry.target !== undefined) select(entry.target);
      else {
        state.set = entry.set;
        showSet();
        refresh();
      }
    });
    return { ...entry, canvas, button };
  });
  element("multiples").replaceChildren(...multiples.map(({ button }) => button));
  element("multiples-row").hidden = multiples.length < 3;
}

function drawMultiples() {
  if (element("multiples").hidden) return;
  const hasMethods = sets.some((set) => set.method !== sets[0].method);
  for (const { target = state.a, set: at = state.set, canvas, button, set: layer } of multiples) {
    const set = sets[at], kind = set.evidence === "signed" ? state.evidence : "positive";
    paintMap(canvas, set.has(target) ? set.map(target) : null, set, kind, region);
    button.lastChild.textContent = layer === undefined ? label(target) : hasMethods ? `${set.method} at ${set.layer}` : set.layer;
    button.setAttribute("aria-pressed", String(layer === undefined ? target === state.a : at === state.set));
  }
}

function bindPlace(on) {
  on("stage", "pointermove", (event) => { dragView(event); hover(cellAt(event)); });
  on("stage", "pointerleave", () => hover(null));
  on("stage", "pointerdown", (event) => {
    view.hasMoved = false;
    if (view.scale > 1 && event.button === 0) view.drag = { x: event.clientX, y: event.clientY, left: view.left, top: view.top };
  });
  addEventListener("pointerup", () => { view.drag = null; });
  on("stage", "click", (event) => { if (!view.hasMoved) clickImage(event); });
  element("stage").addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // The plain wheel scrolls the page.
    event.preventDefault();
    const box = element("stage").getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 200), [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width]);
  }, { passive: false });
  on("zoom-in", "click", () => zoom(1.5));
  on("zoom-out", "click", () => zoom(1 / 1.5));
  on("zoom-reset", "click", () => setView(1, 0, 0));
  on("release", "click", () => {
    state.pinned = null;
    showPlace();
    element("stage").focus();
  });
  on("place", "click", (event) => {
    const pick = event.target.closest(".pick");
    if (pick) select(Number(pick.dataset.target));
  });
  on("objects-shown", "change", (event) => {
    state.areObjectsShown = event.target.checked;
    element("objects").hidden = !state.areObjectsShown;
    drawObjects();
  });
  on("multiples-shown", "change", (event) => {
    element("multiples").hidden = !event.target.checked;
    drawMultiples();
  });
}
