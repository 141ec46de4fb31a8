"use strict";
// The brush and the window, which edit the image. Positions are in pixels of the image.

const cover = { tool: "look", kind: "blur", stroke: null, at: null, changed: null, ended: null };

const sizeOf = () => Math.max(1, Math.round((Number(element("size").value) / 200) * Math.max(image.width, image.height))); // a radius
const round = (value) => Math.round(10 * value) / 10;

function pointAt(event) {
  const box = element("zoomed").getBoundingClientRect();
  return [round(((event.clientX - box.left) / box.width) * image.width), round(((event.clientY - box.top) / box.height) * image.height)];
}

function writeStroke(points) {
  return `${cover.kind}:${sizeOf()}:${points.map(([x, y]) => `${x},${y}`).join("+")}`;
}

function writeWindow([x, y]) {
  const side = sizeOf();
  const left = Math.min(Math.max(0, Math.round(x - side)), image.width - 1), top = Math.min(Math.max(0, Math.round(y - side)), image.height - 1);
  return `${cover.kind}:${left},${top},${Math.max(left + 1, Math.min(image.width, Math.round(x + side)))},${Math.max(top + 1, Math.min(image.height, Math.round(y + side)))}`;
}

function pending() { // the edits that are not applied yet
  if (cover.stroke) return [writeStroke(cover.stroke)];
  return cover.tool === "window" && cover.at ? [writeWindow(cover.at)] : [];
}

function drawCover() {
  const canvas = element("cover"), scale = 600 / Math.max(image.width, image.height);
  [canvas.width, canvas.height] = [image.width * scale, image.height * scale];
  const context = canvas.getContext("2d"), side = sizeOf() * scale;
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = context.fillStyle = "rgb(255 255 255 / 55%)";
  if (cover.stroke) {
    context.lineWidth = 2 * side;
    context.beginPath();
    context.moveTo(...cover.stroke[0].map((length) => length * scale));
    for (const point of cover.stroke) context.lineTo(...point.map((length) => length * scale));
    context.stroke();
  }
  if (!cover.at || cover.tool === "look") return;
  const [x, y] = cover.at.map((length) => length * scale);
  context.lineWidth = 2;
  for (const colour of ["#000", "#fff"]) {
    context.strokeStyle = colour;
    context.setLineDash(colour === "#fff" ? [5, 5] : []);
    context.beginPath();
    if (cover.tool === "brush") context.arc(x, y, side, 0, 7);
    else context.rect(x - side, y - side, 2 * side, 2 * side);
    context.stroke();
  }
}

function applyPending() {
  const applied = pending();
  cover.stroke = null;
  if (applied.length) cover.ended(applied);
}

function moveTo(point) {
  cover.at = point;
  if (cover.stroke) cover.stroke.push(point);
  drawCover();
  if (cover.stroke || cover.tool === "window") cover.changed();
}

function pressCover(event) { // before the page's other keys
  const steps = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
  if (cover.tool === "look" || event.target !== element("stage") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in steps) {
    const from = cover.at ?? [image.width / 2, image.height / 2];
    moveTo(from.map((length, i) => round(Math.min(Math.max(length + steps[event.key][i] * sizeOf(), 0), i ? image.height : image.width))));
  } else if (event.key === "Enter" || event.key === " ") {
    cover.at ??= [image.width / 2, image.height / 2];
    if (cover.tool === "brush") cover.stroke = [cover.at];
    applyPending();
  } else return;
  event.preventDefault();
  event.stopImmediatePropagation();
}

function bindCover({ changed, ended, left }) {
  Object.assign(cover, { changed, ended });
  const canvas = element("cover");
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    hover(null);
    canvas.setPointerCapture(event.pointerId);
    cover.at = pointAt(event);
    if (cover.tool === "brush") cover.stroke = [cover.at];
    drawCover();
    changed();
  });
  canvas.addEventListener("pointermove", (event) => {
    event.stopPropagation(); // Otherwise the page would list the evidence in this cell.
    moveTo(pointAt(event));
  });
  canvas.addEventListener("pointerup", applyPending);
  canvas.addEventListener("pointercancel", () => { cover.stroke = null; left(); });
  canvas.addEventListener("pointerleave", () => {
    if (cover.stroke) return;
    cover.at = null;
    drawCover();
    if (cover.tool === "window") left();
  });
  canvas.addEventListener("click", (event) => { event.stopPropagation(); element("stage").focus({ preventScroll: true }); });
  document.addEventListener("keydown", pressCover, true);
  element("tools").addEventListener("change", (event) => {
    cover.tool = event.target.value;
    [cover.at, cover.stroke] = [null, null];
    canvas.classList.toggle("active", cover.tool !== "look");
    element("kinds").disabled = element("size").disabled = cover.tool === "look";
    drawCover();
    left();
  });
  element("kinds").addEventListener("change", (event) => { cover.kind = event.target.value; });
}
