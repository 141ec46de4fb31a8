"use strict";
// The page of one picture. What it shows follows from `state` alone; every text from outside goes in as text.

const element = (id) => document.getElementById(id);
const tables = Object.fromEntries(Object.entries(JSON.parse(element("tables").textContent)).map(([name, text]) => [name, readBytes(text)]));
let data, things, picture, region, model, total, sets; // of the page that is shown; see `show`
let edits = []; // what was taken away from the picture, as gradcam run is told
const SIDE = 256; // pixels of a smooth heatmap's longer side; the browser stretches it over the picture
const LISTED = 8;
const WORDS = { positive: "for", negative: "against", signed: "for and against" };

const state = {
  a: 0, b: null, side: "a", set: 0, evidence: "positive", cells: "smooth", colours: "turbo", opacity: 0.5,
  kept: null, hovered: null, beside: false, outline: true,
};

const name = (thing) => things.names[thing];
const twin = new Map(); // names that several things have, which are then told apart by their numbers
const label = (thing) => (twin.get(name(thing)) > 1 && things.indices[thing] !== null ? `${name(thing)} (${things.indices[thing]})` : name(thing));

// ---- What is shown

function current() {
  return sets[state.set];
}

function isPair() {
  return state.b !== null;
}

function evidence() { // of what is drawn: a difference has both signs, and some methods have one only
  return isPair() ? "signed" : current().evidence === "signed" ? state.evidence : "positive";
}

let live = null; // a map that is newer than the page's, while something is changed

function values() { // of the cells; null where there is no map
  const set = current();
  if (live && !isPair()) return live.map(0);
  if (!set.has(state.a) || (isPair() && !set.has(state.b))) return null;
  const found = set.map(state.a);
  if (isPair()) set.map(state.b).forEach((value, i) => { found[i] -= value; });
  return found;
}

function draw() {
  const set = current(), canvas = element("heatmap");
  const found = values(), kind = evidence(), isSigned = kind === "signed";
  const isRaw = state.cells === "raw";
  const scale = SIDE / Math.max(region[2], region[3]);
  const [height, width] = isRaw ? set.grid : [Math.max(1, Math.round(region[2] * scale)), Math.max(1, Math.round(region[3] * scale))];
  const heatmap = found && toHeatmap(found, set, kind, height, width);
  paint(canvas, heatmap, height, width, makePalette(tables[state.colours], state.opacity, isSigned), isSigned);
  canvas.classList.toggle("raw", isRaw);
  canvas.dataset.blank = !heatmap;
  const blank = element("blank");
  blank.hidden = Boolean(heatmap);
  blank.textContent = found
    ? isPair() ? "The two heatmaps are equal." : `No evidence ${WORDS[kind]} ${name(state.a)} at this layer.`
    : `This page has no heatmap of ${isPair() && set.has(state.a) ? name(state.b) : name(state.a)} by ${set.method} at ${set.layer}.`;
}

function drawLegend() {
  const kind = evidence(), isSigned = kind === "signed";
  const ramp = Float32Array.from({ length: 256 }, (_, i) => (isSigned ? (i - 127.5) / 127.5 : i / 255));
  paint(element("legend"), ramp, 1, 256, makePalette(tables[state.colours], 1, isSigned), isSigned);
  const [low, high] = isPair()
    ? [`for ${name(state.b)}`, `for ${name(state.a)}`]
    : { positive: ["no positive evidence", "strongest"], negative: ["no negative evidence", "strongest"], signed: ["evidence against", "evidence for"] }[kind];
  element("legend-low").textContent = low;
  element("legend-high").textContent = high;
}

function say() {
  const set = current(), share = things.shares[state.a];
  element("shown-name").textContent = isPair() ? `${name(state.a)} against ${name(state.b)}` : name(state.a);
  const facts = [
    isPair() || share === null ? null : percent(share),
    isPair() ? "difference of the two heatmaps" : `evidence ${WORDS[evidence()]}`,
    `${set.method} at ${set.layer}`,
    `${set.rows} × ${set.columns} cells`,
  ];
  element("shown-facts").textContent = facts.filter(Boolean).join(" · ");
  element("said").textContent = `${element("shown").textContent}${element("blank").hidden ? "" : `. ${element("blank").textContent}`}`;
}

function showBox() {
  const box = things.boxes?.[state.a], mark = element("box");
  mark.hidden = !box;
  if (!box) return;
  place(mark, box[1], box[0], box[3] - box[1], box[2] - box[0]);
}

function place(mark, top, left, height, width) { // in pixels of the picture
  Object.assign(mark.style, {
    top: `${(100 * top) / picture.height}%`, left: `${(100 * left) / picture.width}%`,
    height: `${(100 * height) / picture.height}%`, width: `${(100 * width) / picture.width}%`,
  });
}

let follow = () => {}; // what a page with more on it shows of the same

function refresh() {
  draw();
  drawLegend();
  say();
  showBox();
  showPlace();
  writeAgain();
  mark();
  follow();
}

// ---- The list

let options = [];

function makeList() {
  const list = element("things");
  options = [];
  things.names.forEach((_, thing) => {
    const share = things.shares[thing];
    const row = makeVerdict(label(thing), share ?? 0);
    if (share === null) row.querySelector(".number").textContent = "";
    const option = make("li", { id: `thing-${thing}`, role: "option", "aria-selected": "false", "data-thing": thing }, row);
    if (things.indices[thing] !== null) option.title = `class ${things.indices[thing]}`;
    options.push(option);
  });
  list.replaceChildren(...options);
}

let lower = [], fitting = [];

function filter() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  fitting = [];
  const starts = [];
  lower.forEach((text, thing) => {
    const fits = words.every((word) => text.includes(word));
    options[thing].hidden = !fits;
    if (fits) fitting.push(thing);
    if (fits && text.startsWith(words[0] ?? "")) starts.push(thing);
  });
  element("counted").textContent = words.length
    ? fitting.length ? `${integer.format(fitting.length)} of ${integer.format(total)}` : "No matches."
    : sayAll();
  return starts[0] ?? fitting[0];
}

function sayAll() {
  const kinds = { class: ["class", "classes"], box: ["box", "boxes"], missed: ["missed box", "missed boxes"], mask: ["mask", "masks"], text: ["sentence", "sentences"], like: ["similarity", "similarities"], word: ["word", "words"], keypoint: ["keypoint", "keypoints"] };
  const [one, several] = kinds[things.kind] ?? ["score", "scores"];
  const mapped = options.filter((option) => !option.classList.contains("unmapped")).length;
  const all = `${integer.format(total)} ${total === 1 ? one : several}`;
  return mapped < total ? `${all}, ${integer.format(mapped)} with heatmaps` : all;
}

let marked = [null, null];

function mark() { // of the list, no more than what changed
  const [a, b] = marked;
  if (a !== state.a) {
    if (a !== null) options[a].setAttribute("aria-selected", "false");
    options[state.a].setAttribute("aria-selected", "true");
  }
  if (b !== state.b) {
    if (b !== null) options[b].classList.remove("other");
    if (state.b !== null) options[state.b].classList.add("other");
  }
  marked = [state.a, state.b];
  element("things").setAttribute("aria-activedescendant", `thing-${state[state.side]}`);
  element("name-a").textContent = name(state.a);
  element("name-b").textContent = isPair() ? name(state.b) : "";
}

function markMapped() { // which have a map here
  const set = current();
  options.forEach((option, thing) => option.classList.toggle("unmapped", !set.has(thing)));
  if (!element("search").value) element("counted").textContent = sayAll();
}

function select(thing, { scrolls = true } = {}) {
  if (thing === undefined) return;
  state[isPair() ? state.side : "a"] = thing;
  refresh();
  if (scrolls) reveal(thing);
}

function reveal(thing) {
  const list = element("things"), option = options[thing];
  const top = option.offsetTop, bottom = top + option.offsetHeight;
  if (top < list.scrollTop + 4) list.scrollTop = top - 4;
  else if (bottom > list.scrollTop + list.clientHeight - 4) list.scrollTop = bottom - list.clientHeight + 4;
}

function step(by) {
  const here = fitting.indexOf(state[isPair() ? state.side : "a"]);
  select(fitting[Math.min(Math.max(here < 0 ? 0 : here + by, 0), fitting.length - 1)]);
}

// ---- A place in the picture

function cellAt(event) { // of the map under the pointer; null outside of what the network saw
  const box = element("stage").getBoundingClientRect(), set = current();
  const y = ((event.clientY - box.top) / box.height) * picture.height - region[0];
  const x = ((event.clientX - box.left) / box.width) * picture.width - region[1];
  if (y < 0 || x < 0 || y >= region[2] || x >= region[3]) return null;
  return [Math.floor((y / region[2]) * set.rows), Math.floor((x / region[3]) * set.columns)];
}

function toShare([row, column]) { // where a cell's middle is, whatever the layer
  return [(row + 0.5) / current().rows, (column + 0.5) / current().columns];
}

function toCell([down, across]) {
  return [Math.min(Math.floor(down * current().rows), current().rows - 1), Math.min(Math.floor(across * current().columns), current().columns - 1)];
}

function showPlace() {
  const where = state.kept ?? state.hovered, square = element("cell"), list = element("place"), set = current();
  square.hidden = !where;
  element("release").hidden = !state.kept;
  element("place-hint").textContent = state.kept ? "This cell is pinned." : where ? "Click to pin this cell." : "Move over the image, or tap it. Click to pin a cell.";
  if (!where) {
    list.replaceChildren();
    return;
  }
  const [row, column] = toCell(where);
  place(square, region[0] + (row * region[2]) / set.rows, region[1] + (column * region[3]) / set.columns, region[2] / set.rows, region[3] / set.columns);
  square.classList.toggle("kept", Boolean(state.kept));
  const found = set.at(row * set.columns + column);
  const best = findBest(found, LISTED);
  if (!best.length) {
    element("place-hint").textContent = "No positive evidence in this cell.";
    list.replaceChildren();
    return;
  }
  const most = found[best[0]];
  while (list.children.length > best.length) list.lastChild.remove();
  while (list.children.length < best.length) {
    const row = makeVerdict("", 0);
    list.append(make("li", {}, make("button", { type: "button", className: "pick" }, row)));
  }
  best.forEach((at, i) => {
    const thing = set.targets ? set.targets[at] : at;
    const button = list.children[i].firstChild, row = button.firstChild;
    button.dataset.thing = thing;
    row.children[0].textContent = label(thing);
    row.children[1].textContent = `${Math.round((100 * found[at]) / most)}`;
    row.children[2].style.setProperty("--share", found[at] / most);
  });
}

function findBest(found, count) { // the largest positive ones, the largest first
  const best = [];
  for (let i = 0; i < found.length; i++) {
    if (!(found[i] > 0) || (best.length === count && found[i] <= found[best[count - 1]])) continue;
    let at = best.length;
    while (at > 0 && found[best[at - 1]] < found[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}

function hover(cell) {
  const where = cell && toShare(cell);
  if (String(where) === String(state.hovered)) return;
  state.hovered = where;
  if (!state.kept) showPlace();
}

function keep(cell) {
  const where = cell && toShare(cell);
  state.kept = where && String(where) !== String(state.kept) ? where : null;
  state.hovered = where;
  showPlace();
  sayPlace();
}

function sayPlace() {
  const names = [...element("place").querySelectorAll(".label")].slice(0, 3).map((each) => each.textContent);
  if (names.length) element("said").textContent = `Strongest evidence in this cell: ${names.join(", ")}`;
}

// ---- How to make it again

const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const python = (text) => JSON.stringify(text);

const UNNAMED = "# No single command reproduces this heatmap.";
const isLayer = (set) => !["input", "attention"].includes(set.layer);
const isNamed = (page, thing) => page.targets.kind === "class" || Boolean(page.targets.words?.[thing]);
const isColoured = (kind) => kind !== "signed" && !["turbo", "grey"].includes(state.colours);

function writeCommand(page, thing, set, kind, more = []) { // of this page's model, for the picture that is shown
  if (!isNamed(page, thing)) return UNNAMED;
  const file = picture.path ?? picture.name;
  const words = ["gradcam", "run", file.startsWith("-") ? `./${file}` : file, ...page.model.words, ...edits.flatMap((each) => ["--edit", each])];
  words.push(...(page.targets.kind === "class" ? ["--class", String(page.targets.indices[thing])] : page.targets.words[thing]), ...more);
  if (isLayer(set)) words.push("--layer", set.layer);
  if (isLayer(set) && page.model.reshape) words.push("--reshape", [page.model.reshape].flat().join("x"));
  words.push("--method", set.method);
  if (kind !== "positive") words.push("--evidence", kind);
  if (isColoured(kind)) words.push("--colormap", state.colours);
  if (state.opacity !== 0.5) words.push("--alpha", String(state.opacity));
  return words.map(quote).join(" ");
}

function writeAgain() {
  const set = current(), kind = evidence(), isClass = things.kind === "class";
  const isLinear = ["gradcam", "hirescam"].includes(set.method);
  if (!isNamed(data, state.a) || (isPair() && !(isClass && isLinear))) {
    element("command").textContent = element("python").textContent = isPair() ? "# This difference needs two heatmaps: reproduce each one separately." : UNNAMED;
    return;
  }
  element("command").textContent = writeCommand(data, state.a, set, kind, isPair() ? ["--score", "contrast", "--against", String(things.indices[state.b])] : []);
  const wanted = isPair()
    ? `gradcam.targets.ClassTarget(${things.indices[state.a]}, score="contrast", against=[${things.indices[state.b]}])`
    : isClass ? things.indices[state.a] : things.code[state.a];
  const file = python(picture.path ?? picture.name), reshape = isLayer(set) && model.reshape;
  const source = edits.length ? "image" : file;
  const more = (kind === "positive" ? "" : `, evidence="${kind}"`) + (reshape ? `, reshape=${Array.isArray(reshape) ? `(${reshape.join(", ")})` : python(reshape)}` : "");
  const look = [isColoured(kind) ? `colormap="${state.colours}"` : "", state.opacity === 0.5 ? "" : `alpha=${state.opacity}`];
  element("python").textContent = [
    "import gradcam",
    "",
    `model = ${model.code}`,
    ...(edits.length ? [`image = gradcam.images.edit.edit_image(gradcam.read_image(${file}), ${JSON.stringify(edits)})`] : []),
    `explanation = model.explain(${source}, ${isLayer(set) ? `${python(set.layer)}, ` : ""}method=${python(set.method)}, target=${wanted}${more})`,
    `explanation.save(${["\"map.png\"", ...look.filter(Boolean)].join(", ")})`,
  ].join("\n");
}

async function copy(id, button) {
  const text = element(id).textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page inside another one may not
    getSelection().selectAllChildren(element(id));
    document.execCommand("copy");
  }
  const before = button.innerHTML;
  button.textContent = "Copied";
  element("said").textContent = "Copied";
  setTimeout(() => { button.innerHTML = before; }, 1500);
}

function download() {
  const image = element("picture"), canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d"), scale = canvas.width / picture.width;
  context.drawImage(image, 0, 0);
  context.imageSmoothingEnabled = state.cells === "smooth";
  context.imageSmoothingQuality = "high";
  const [top, left, height, width] = region.map((side) => side * scale);
  if (element("heatmap").dataset.blank === "false") context.drawImage(element("heatmap"), left, top, width, height);
  const isPart = region[2] < picture.height || region[3] < picture.width;
  if (state.outline && isPart) {
    context.strokeStyle = "rgb(255 255 255 / 75%)";
    context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
  }
  const plain = (text) => text.replace(/[^\p{L}\p{N}.-]+/gu, "_").slice(0, 60);
  const stem = picture.name.replace(/^.*[\\/]/, "").replace(/\.[^.]*$/, "");
  const parts = [stem, current().method, name(state.a), ...(isPair() ? ["against", name(state.b)] : []), current().layer];
  const link = make("a", { href: canvas.toDataURL("image/png"), download: `${parts.map(plain).join("-")}.png` });
  link.click();
}

// ---- Controls

const unique = (key) => [...new Set(sets.map((set) => set[key]))];

function makeTabs(id, key) {
  const names = unique(key);
  element(id).hidden = names.length < 2;
  for (const each of element(id).querySelectorAll("label")) each.remove();
  for (const each of names) {
    const input = make("input", { type: "radio", name: id, value: each });
    element(id).append(make("label", {}, input, make("span", { text: each })));
  }
}

function chooseSet(key, value) { // by layer or method; the other stays, where there is such a map
  const other = key === "layer" ? "method" : "layer";
  const found = sets.findIndex((set) => set[key] === value && set[other] === current()[other]);
  state.set = found >= 0 ? found : sets.findIndex((set) => set[key] === value);
  showSet();
  refresh();
}

function showSet() {
  const set = current();
  for (const [id, key] of [["layers", "layer"], ["methods", "method"]]) {
    for (const input of element(id).querySelectorAll("input")) input.checked = input.value === set[key];
  }
  markMapped();
  showEvidence();
}

function showEvidence() {
  for (const input of element("evidence").querySelectorAll("input")) {
    input.checked = input.value === evidence();
    input.disabled = isPair() || (current().evidence !== "signed" && input.value !== "positive");
  }
}

function cycle(id, by) {
  const inputs = [...element(id).querySelectorAll("input:not(:disabled)")];
  if (inputs.length < 2 || element(id).hidden) return;
  const here = inputs.findIndex((input) => input.checked);
  inputs[(here + by + inputs.length) % inputs.length].click();
}

function pair(isOn) {
  if (isOn && total > 1) {
    state.b = [...Array(total).keys()].find((thing) => thing !== state.a && current().has(thing)) ?? (state.a ? 0 : 1);
    state.side = "b";
  } else {
    state.b = null;
    state.side = "a";
  }
  element("sides").hidden = element("chosen").hidden = !isPair();
  document.querySelector(`input[name=side][value=${state.side}]`).checked = true;
  showEvidence();
  refresh();
}

function showBeside() {
  element("frames").classList.toggle("beside", state.beside);
  element("plain").hidden = !state.beside;
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || element("help").open) return;
  const at = event.target, isSearch = at === element("search");
  const isControl = at.matches?.("input, select, textarea") && !isSearch;
  const isStage = at === element("stage");
  if (event.key === "Escape") {
    if (isSearch && at.value) {
      at.value = "";
      filter();
    }
    state.kept = state.hovered = null;
    showPlace();
  } else if (isControl) return;
  else if (isStage && moveCell(event.key)) { /* it moved */ }
  else if (event.key === "ArrowDown") step(1);
  else if (event.key === "ArrowUp") step(-1);
  else if (event.key === "PageDown") step(10);
  else if (event.key === "PageUp") step(-10);
  else if (isSearch) return;
  else if (event.key === "Home" && at === element("things")) select(fitting[0]);
  else if (event.key === "End" && at === element("things")) select(fitting[fitting.length - 1]);
  else if (event.key === "/") element("search").focus();
  else if (event.key === "?") openHelp();
  else if (event.key === "[" || event.key === "]") cycle("layers", event.key === "]" ? 1 : -1);
  else if (at === element("things") && /^[\p{L}\p{N}]$/u.test(event.key)) { // typing in the list goes on in the search
    element("search").value = "";
    element("search").focus();
    return;
  }
  else if (event.key === "e") cycle("evidence", 1);
  else if (event.key === "s") element("beside").click();
  else return;
  event.preventDefault();
}

function moveCell(key) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const set = current(), where = state.hovered ?? state.kept;
  if (key === "Enter" || key === " ") {
    if (where) keep(toCell(where));
    return Boolean(where);
  }
  if (!(key in steps)) return false;
  const [row, column] = where ? toCell(where) : [set.rows >> 1, set.columns >> 1];
  const by = where ? steps[key] : [0, 0];
  state.kept = null;
  hover([Math.min(Math.max(row + by[0], 0), set.rows - 1), Math.min(Math.max(column + by[1], 0), set.columns - 1)]);
  sayPlace();
  return true;
}

function openHelp() {
  element("help").showModal();
  element("help-title").focus();
}

function bind() {
  const on = (id, kind, act) => element(id).addEventListener(kind, act);
  on("things", "click", (event) => {
    const option = event.target.closest("li");
    if (option) select(Number(option.dataset.thing), { scrolls: false });
  });
  on("search", "input", () => {
    const first = filter();
    if (element("search").value.trim()) select(first);
  });
  on("stage", "pointermove", (event) => hover(cellAt(event)));
  on("stage", "pointerleave", () => hover(null));
  on("stage", "click", (event) => keep(cellAt(event)));
  on("release", "click", () => {
    state.kept = null;
    showPlace();
    element("stage").focus();
  });
  on("place", "click", (event) => {
    const pick = event.target.closest(".pick");
    if (pick) select(Number(pick.dataset.thing));
  });
  on("layers", "change", (event) => chooseSet("layer", event.target.value));
  on("methods", "change", (event) => chooseSet("method", event.target.value));
  on("evidence", "change", (event) => { state.evidence = event.target.value; refresh(); });
  on("cells", "change", (event) => { state.cells = event.target.value; refresh(); });
  on("colours", "change", (event) => { state.colours = event.target.value; refresh(); });
  on("opacity", "input", (event) => { state.opacity = Number(event.target.value) / 100; draw(); writeAgain(); follow(); });
  on("beside", "change", (event) => { state.beside = event.target.checked; showBeside(); });
  on("outline", "change", (event) => { state.outline = event.target.checked; element("seen").hidden = !state.outline; });
  on("against", "change", (event) => pair(event.target.checked));
  on("sides", "change", (event) => { state.side = event.target.value; mark(); reveal(state[state.side]); });
  on("swap", "click", () => { [state.a, state.b] = [state.b, state.a]; refresh(); });
  on("copy-command", "click", () => copy("command", element("copy-command")));
  on("copy-python", "click", () => copy("python", element("copy-python")));
  on("download", "click", download);
  on("help-button", "click", openHelp);
  addEventListener("keydown", press);
  bindTheme(element("theme-button"));
}

function show(page) { // a page's data
  data = page;
  ({ targets: things, image: picture, region, model } = data);
  total = things.names.length;
  sets = data.maps.map((each) => new MapSet(each, total));
  live = null;
  marked = [null, null];
  twin.clear();
  for (const each of things.names) twin.set(each, (twin.get(each) ?? 0) + 1);
  lower = things.names.map((each, i) => `${each.toLowerCase()} ${things.indices[i] ?? ""}`);
  Object.assign(state, { a: data.first, b: null, side: "a", set: 0, kept: null, hovered: null });
  document.documentElement.style.setProperty("--ratio", picture.width / picture.height);
  for (const id of ["heatmap", "seen"]) place(element(id), ...region);
  const isPart = region[2] < picture.height || region[3] < picture.width;
  element("outline-row").hidden = element("seen").hidden = !isPart;
  state.outline = isPart && element("outline").checked;
  element("seen").hidden = !state.outline;
  makeTabs("layers", "layer");
  makeTabs("methods", "method");
  makeList();
  element("pair").hidden = total < 2;
  element("against").checked = false;
  element("sides").hidden = element("chosen").hidden = true;
  for (const image of document.querySelectorAll(".frame img")) image.src = picture.source; // once in the file, twice in sight
  filter();
  showSet();
  refresh();
  reveal(state.a);
}

element("needs").remove();
bind();
if (element("data")) show(JSON.parse(element("data").textContent));
