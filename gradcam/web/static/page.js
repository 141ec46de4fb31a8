"use strict";
// The page of one image. Everything on it follows from `state`. Text from outside is inserted as text, never as HTML.

const element = (id) => document.getElementById(id);
const tables = Object.fromEntries(Object.entries(JSON.parse(element("tables").textContent)).map(([name, text]) => [name, readBytes(text)]));
let data, targets, image, region, model, total, sets; // of the page on screen; see `show`
let edits = []; // the edits of the image, as arguments of gradcam run --edit
const SIDE = 256; // pixels of a smooth heatmap's longer side; the browser stretches it over the image
const EVIDENCE = { positive: "for", negative: "against", signed: "for and against" };

const state = {
  a: 0, b: null, side: "a", set: 0, evidence: "positive", cells: "smooth", colours: "turbo", opacity: 0.5,
  pinned: null, hovered: null, isBeside: false, isOutlined: true, areObjectsShown: true,
};

const name = (target) => targets.names[target];
let repeated = new Set(); // names of several targets, which are distinguished by their class numbers
const label = (target) => (repeated.has(name(target)) && targets.indices[target] !== null ? `${name(target)} (${targets.indices[target]})` : name(target));

function score(page, target) { // as text, and as a length of the bar from 0 to 1
  const share = page.targets.shares[target], value = page.targets.values?.[target], area = page.targets.areas?.[target];
  if (page.targets.kind === "mask" && area !== null && area !== undefined) return [percent(area), area];
  if (share !== null && share !== undefined) return [percent(share), share];
  if (value !== null && value !== undefined) return [value.toFixed(3), value];
  return area === null || area === undefined ? ["", 0] : [percent(area), area];
}

// ---- The heatmap

const current = () => sets[state.set];
const isPair = () => state.b !== null;

function evidence() { // A difference has both signs, and some methods have only positive evidence.
  return isPair() ? "signed" : current().evidence === "signed" ? state.evidence : "positive";
}

let live = null; // the map of the image that is being edited, which is newer than the page's

function readValues() { // of the cells; null without a map
  const set = current();
  if (live && !isPair()) return live.map(0);
  if (!set.has(state.a) || (isPair() && !set.has(state.b))) return null;
  const values = set.map(state.a);
  if (isPair()) set.map(state.b).forEach((value, cell) => { values[cell] -= value; });
  return values;
}

function paintMap(canvas, values, set, kind, box, isRaw = false) {
  const scale = SIDE / Math.max(box[2], box[3]);
  const [height, width] = isRaw ? set.grid : [Math.max(1, Math.round(box[2] * scale)), Math.max(1, Math.round(box[3] * scale))];
  const heatmap = values && toHeatmap(values, set, kind, height, width);
  paint(canvas, heatmap, height, width, makePalette(tables[state.colours], state.opacity, kind === "signed"), kind === "signed");
  return Boolean(heatmap);
}

function draw() {
  const set = current(), canvas = element("heatmap"), isRaw = state.cells === "raw";
  const values = readValues(), kind = evidence();
  const isPainted = paintMap(canvas, values, set, kind, region, isRaw);
  canvas.classList.toggle("raw", isRaw);
  canvas.dataset.blank = !isPainted;
  canvas.hidden = false;
  const blank = element("blank");
  blank.hidden = isPainted;
  blank.textContent = values
    ? isPair() ? "The two heatmaps are equal." : `No evidence ${EVIDENCE[kind]} ${name(state.a)} at this layer.`
    : `This page has no heatmap of ${isPair() && set.has(state.a) ? name(state.b) : name(state.a)} by ${set.method} at ${set.layer}.`;
}

function drawLegend() {
  const kind = evidence(), isSigned = kind === "signed";
  const ramp = Float32Array.from({ length: 256 }, (_, i) => (isSigned ? (i - 127.5) / 127.5 : i / 255));
  paint(element("legend"), ramp, 1, 256, makePalette(tables[state.colours], 1, isSigned), isSigned);
  const [low, high] = isPair()
    ? [`for ${name(state.b)}`, `for ${name(state.a)}`]
    : { positive: ["no positive evidence", "strongest"], negative: ["no negative evidence", "strongest"], signed: ["evidence against", "evidence for"] }[kind];
  element("colours").disabled = isSigned;
  element("shown").style.setProperty("--strongest", `rgb(${[...tables[state.colours].slice(3 * 230, 3 * 231)].join(" ")})`);
  element("legend-low").textContent = low;
  element("legend-high").textContent = high;
}

const VERBS = JSON.parse(element("shown").dataset.verbs);

function describe() { // what one sees, in one sentence; _write_headline in page.py writes the first one
  const kind = evidence(), [text] = score(data, state.a), amount = text && targets.kind === "mask" ? `${text} of the image` : text;
  const [before, after] = isPair() ? ["Warm parts are evidence for ", `, cold parts for ${name(state.b)}.`]
    : kind === "negative" ? ["The network took these parts as evidence against ", amount && ` (${amount})`]
    : kind === "signed" ? ["Warm parts are evidence for ", `${amount && ` (${amount})`}, cold parts against it.`]
    : [`The network looked mostly here ${VERBS[targets.kind] ?? VERBS.score} `, `${amount && ` (${amount})`}.`];
  const [start, end = ""] = before.split(/(?<= here)/); // The strongest colour explains "here".
  element("shown-before").replaceChildren(start, ...(end ? [make("span", { className: "sample" }), end] : []));
  element("shown-name").textContent = targets.texts?.[state.a]?.trim() || name(state.a);
  element("shown-after").textContent = after;
  const set = current();
  const facts = [...nameModel(), isPair() ? "difference of the two heatmaps" : `evidence ${EVIDENCE[kind]}`, `${set.method} at ${set.layer}`, `${set.rows} × ${set.columns} cells`];
  if (live || edits.length) facts.push("edited image");
  const outline = isPart() && state.isOutlined ? " · outline: what the model saw" : "";
  element("shown-facts").replaceChildren(facts.join(" · "), make("span", { className: "wide", text: outline }));
  element("said").textContent = `${element("shown").textContent}${element("blank").hidden ? "" : ` ${element("blank").textContent}`}`;
}

function setBox(mark, top, left, height, width) { // in pixels of the image
  Object.assign(mark.style, {
    top: `${(100 * top) / image.height}%`, left: `${(100 * left) / image.width}%`,
    height: `${(100 * height) / image.height}%`, width: `${(100 * width) / image.width}%`,
  });
}

// The local page redefines these.
let follow = () => {};
let findChange = () => null; // of a target's probability, since the image was edited
let showSecondPlace = () => {};
let nameModel = () => []; // if there are two

function refresh() {
  draw();
  drawLegend();
  describe();
  drawObjects();
  drawMultiples();
  showPlace();
  writeCommands();
  drawRows();
  follow();
  writeHash();
}

// ---- The code that reproduces the heatmap

const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const python = (text) => JSON.stringify(text);

const UNNAMED = "# No single command reproduces this heatmap.";
const isLayer = (set) => !["input", "attention"].includes(set.layer);
const isNamed = (page, target) => page.targets.kind === "class" || Boolean(page.targets.words?.[target]);
const isColoured = (kind) => kind !== "signed" && !["turbo", "grey"].includes(state.colours);
const fileName = () => image.path ?? (/\.\w+$/.test(image.name) ? image.name : "image.png"); // an image without a file was saved first

function writeCommand(page, target, set, kind, more = []) {
  if (!isNamed(page, target)) return UNNAMED;
  const file = fileName();
  const words = ["gradcam", "run", file.startsWith("-") ? `./${file}` : file, ...page.model.words, ...edits.flatMap((edit) => ["--edit", edit])];
  words.push(...(page.targets.kind === "class" ? ["--class", String(page.targets.indices[target])] : page.targets.words[target]), ...more);
  if (isLayer(set)) words.push("--layer", set.layer);
  if (isLayer(set) && page.model.reshape) words.push("--reshape", [page.model.reshape].flat().join("x"));
  words.push("--method", set.method);
  if (kind !== "positive") words.push("--evidence", kind);
  words.push("--base", "color");
  if (isColoured(kind)) words.push("--colormap", state.colours);
  if (state.opacity !== 0.5) words.push("--alpha", String(state.opacity));
  return words.map(quote).join(" ");
}

function writeCommands() {
  const set = current(), kind = evidence(), isClass = targets.kind === "class";
  const isLinear = ["gradcam", "hirescam"].includes(set.method);
  element("no-file").hidden = fileName() === (image.path ?? image.name);
  if (!isNamed(data, state.a) || (isPair() && !(isClass && isLinear))) {
    element("command").textContent = element("python").textContent = isPair() ? "# This difference needs two heatmaps: reproduce each heatmap separately." : UNNAMED;
    return;
  }
  element("command").textContent = writeCommand(data, state.a, set, kind, isPair() ? ["--score", "contrast", "--against", String(targets.indices[state.b])] : []);
  const target = isPair()
    ? `gradcam.targets.ClassTarget(${targets.indices[state.a]}, score="contrast", against=[${targets.indices[state.b]}])`
    : isClass ? targets.indices[state.a] : targets.code[state.a];
  const file = python(fileName()), reshape = isLayer(set) && model.reshape;
  const source = edits.length ? "image" : file;
  const more = (kind === "positive" ? "" : `, evidence="${kind}"`) + (reshape ? `, reshape=${Array.isArray(reshape) ? `(${reshape.join(", ")})` : python(reshape)}` : "");
  const style = ['base="color"', isColoured(kind) ? `colormap="${state.colours}"` : "", state.opacity === 0.5 ? "" : `alpha=${state.opacity}`];
  element("python").textContent = [
    "import gradcam",
    "",
    `model = ${model.code}`,
    ...(edits.length ? [`image = gradcam.images.edit.edit_image(gradcam.read_image(${file}), ${JSON.stringify(edits)})`] : []),
    `explanation = model.explain(${source}, ${isLayer(set) ? `${python(set.layer)}, ` : ""}method=${python(set.method)}, target=${target}${more})`,
    `explanation.save(${["\"map.png\"", ...style.filter(Boolean)].join(", ")})`,
  ].join("\n");
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // A page inside another one has no access to the clipboard.
    const area = make("textarea", { "aria-hidden": "true" });
    area.value = text;
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = button.innerHTML;
  button.textContent = "Copied";
  element("said").textContent = "Copied";
  setTimeout(() => { button.innerHTML = before; }, 1500);
}

function download() {
  const photo = element("image"), canvas = document.createElement("canvas");
  canvas.width = photo.naturalWidth;
  canvas.height = photo.naturalHeight;
  const context = canvas.getContext("2d"), scale = canvas.width / image.width;
  context.drawImage(photo, 0, 0);
  context.imageSmoothingEnabled = state.cells === "smooth";
  context.imageSmoothingQuality = "high";
  const [top, left, height, width] = region.map((side) => side * scale);
  if (element("heatmap").dataset.blank === "false") context.drawImage(element("heatmap"), left, top, width, height);
  if (state.isOutlined && isPart()) {
    context.strokeStyle = "rgb(255 255 255 / 75%)";
    context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
  }
  const plain = (text) => text.replace(/[^\p{L}\p{N}.-]+/gu, "_").slice(0, 60);
  const stem = image.name.replace(/^.*[\\/]/, "").replace(/\.[^.]*$/, "");
  const parts = [stem, current().method, name(state.a), ...(isPair() ? ["against", name(state.b)] : []), current().layer];
  make("a", { href: canvas.toDataURL("image/png"), download: `${parts.map(plain).join("-")}.png` }).click();
}

// ---- Controls

const isPart = () => region[2] < image.height || region[3] < image.width; // whether the model saw only a part of the image

function makeTabs(id, key) {
  const names = [...new Set(sets.map((set) => set[key]))];
  element(id).hidden = names.length < 2;
  for (const tab of element(id).querySelectorAll("label")) tab.remove();
  for (const value of names) element(id).append(make("label", {}, make("input", { type: "radio", name: id, value }), make("span", { text: value })));
}

function chooseSet(key, value) { // by layer or method; the other one stays if there is such a map
  const other = key === "layer" ? "method" : "layer";
  const index = sets.findIndex((set) => set[key] === value && set[other] === current()[other]);
  state.set = index >= 0 ? index : sets.findIndex((set) => set[key] === value);
  showSet();
  refresh();
}

function showSet() {
  const set = current();
  for (const [id, key] of [["layers", "layer"], ["methods", "method"]]) {
    for (const input of element(id).querySelectorAll("input")) input.checked = input.value === set[key];
  }
  if (!element("search").value) element("counted").textContent = countTargets();
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
  const index = inputs.findIndex((input) => input.checked);
  inputs[(index + by + inputs.length) % inputs.length].click();
}

function pair(target) { // compares with a target; null ends the comparison
  state.b = target;
  state.side = target === null ? "a" : "b";
  element("against").checked = isPair();
  element("sides").hidden = element("chosen").hidden = !isPair();
  document.querySelector(`input[name=side][value=${state.side}]`).checked = true;
  showEvidence();
  refresh();
}

const findOther = () => [...Array(total).keys()].find((target) => target !== state.a && current().has(target)) ?? (state.a ? 0 : 1);

function showBeside() {
  element("frames").classList.toggle("beside", state.isBeside);
  element("plain").hidden = !state.isBeside;
}

function showOutline() {
  element("outline-row").hidden = !isPart();
  element("seen").hidden = !isPart() || !state.isOutlined;
}

// ---- Keys

let hasLetters = true; // whether single letters are shortcuts; some people use voice control, which types letters

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || element("help").open) return;
  const at = event.target, isSearch = at === element("search"), isList = at === element("targets");
  const isControl = at.matches?.("input, select, textarea") && !isSearch;
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "Escape") {
    if (isSearch && at.value) {
      at.value = "";
      filter();
    }
    state.pinned = state.hovered = null;
    showPlace();
  } else if (isControl) return;
  else if (at === element("stage") && moveCell(key)) { /* the cell has moved */ }
  else if (key in steps && (isList || isSearch)) step(steps[key]);
  else if (isSearch) return;
  else if (key === "Home" && isList) select(fitting[0]);
  else if (key === "End" && isList) select(fitting[fitting.length - 1]);
  else if (!hasLetters) return;
  else if (key === "/") element("search").focus();
  else if (key === "?") openHelp();
  else if (key === "[" || key === "]") cycle("layers", key === "]" ? 1 : -1);
  else if (isList && /^[\p{L}\p{N}]$/u.test(key)) { // The rest of the word goes to the search.
    element("search").value = "";
    element("search").focus();
    return;
  }
  else if (key === "e") cycle("evidence", 1);
  else if (key === "s") element("beside").click();
  else return;
  event.preventDefault();
}

function openHelp() {
  element("help").showModal();
  element("help-title").focus();
}

function bind() {
  const on = (id, kind, act) => element(id).addEventListener(kind, act);
  bindList(on);
  bindPlace(on);
  on("layers", "change", (event) => chooseSet("layer", event.target.value));
  on("methods", "change", (event) => chooseSet("method", event.target.value));
  on("evidence", "change", (event) => { state.evidence = event.target.value; refresh(); });
  on("cells", "change", (event) => { state.cells = event.target.value; refresh(); });
  on("colours", "change", (event) => { state.colours = event.target.value; refresh(); });
  on("opacity", "input", (event) => { state.opacity = Number(event.target.value) / 100; draw(); writeCommands(); follow(); writeHash(); });
  on("beside", "change", (event) => { state.isBeside = event.target.checked; showBeside(); });
  on("outline", "change", (event) => { state.isOutlined = event.target.checked; showOutline(); describe(); });
  on("against", "change", (event) => pair(event.target.checked && total > 1 ? findOther() : null));
  on("sides", "change", (event) => { state.side = event.target.value; reveal(state[state.side]); });
  on("swap", "click", () => { [state.a, state.b] = [state.b, state.a]; refresh(); });
  on("copy-command", "click", () => copy(element("command").textContent, element("copy-command")));
  on("copy-python", "click", () => copy(element("python").textContent, element("copy-python")));
  on("copy-this", "click", () => copy(element("command").textContent, element("copy-this")));
  on("copy-link", "click", () => copy(location.href, element("copy-link")));
  on("download", "click", download);
  on("help-button", "click", openHelp);
  on("letters", "change", (event) => { hasLetters = event.target.checked; store("gradcam-letters", hasLetters ? "" : "off"); });
  on("tabs", "change", (event) => { element("explorer").dataset.sheet = event.target.value; drawRows(); });
  element("letters").checked = hasLetters = recall("gradcam-letters") !== "off";
  element("copy-link").hidden = !location.protocol.startsWith("http") || /^(127\.|localhost$|\[::1\]$)/.test(location.hostname);
  addEventListener("keydown", press);
  addEventListener("hashchange", readHash);
  new ResizeObserver(drawRows).observe(element("targets"));
  bindTheme(element("theme-button"));
}

function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch { /* Without storage, the setting is lost when the page is closed. */ }
}

function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

// ---- The view in the address, so that a link opens it again

let hashTimer = null;

function writeHash() {
  clearTimeout(hashTimer);
  hashTimer = setTimeout(() => {
    const view = new URLSearchParams();
    const number = (target) => targets.indices[target] ?? target;
    const add = (key, value, start) => { if (value !== start) view.set(key, value); };
    const isFirst = state.a === data.first && !isPair();
    if (!isFirst) view.set("target", targets.kind === "class" ? number(state.a) : state.a);
    if (isPair()) view.set("against", targets.kind === "class" ? number(state.b) : state.b);
    add("layer", current().layer, sets[0].layer);
    add("method", current().method, sets[0].method);
    add("evidence", state.evidence, "positive");
    add("cells", state.cells, "smooth");
    add("colours", state.colours, "turbo");
    add("opacity", Math.round(100 * state.opacity), 50);
    if (state.pinned) view.set("place", state.pinned.map((share) => share.toFixed(4)).join(","));
    const hash = view.toString().replaceAll("%2C", ",");
    try {
      if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    } catch { /* A page inside another one has no address of its own. */ }
  }, 250);
}

function readHash() {
  const view = new URLSearchParams(location.hash.slice(1));
  const find = (key) => {
    if (!view.has(key)) return null;
    const number = Number(view.get(key));
    const target = targets.kind === "class" ? targets.indices.indexOf(number) : number;
    return Number.isInteger(target) && target >= 0 && target < total ? target : null;
  };
  const among = (key, values, start) => (values.includes(view.get(key)) ? view.get(key) : start);
  const set = sets.findIndex((entry) => entry.layer === (view.get("layer") ?? sets[0].layer) && entry.method === (view.get("method") ?? sets[0].method));
  const place = (view.get("place") ?? "").split(",").map(Number);
  const opacity = view.has("opacity") ? Number(view.get("opacity")) : 50;
  Object.assign(state, {
    a: find("target") ?? data.first, set: Math.max(set, 0),
    evidence: among("evidence", Object.keys(EVIDENCE), "positive"), cells: among("cells", ["smooth", "raw"], "smooth"),
    colours: among("colours", Object.keys(tables), "turbo"), opacity: opacity >= 0 && opacity <= 100 ? opacity / 100 : 0.5,
    pinned: place.length === 2 && place.every((share) => share > 0 && share < 1) ? place : null,
  });
  element("colours").value = state.colours;
  element("opacity").value = 100 * state.opacity;
  document.querySelector(`input[name=cells][value=${state.cells}]`).checked = true;
  const other = find("against");
  showSet();
  pair(other === state.a ? null : other);
  reveal(state.a);
}

function show(page) { // the data of a page
  data = page;
  ({ targets, image, region, model } = data);
  edits = data.edits ?? [];
  total = targets.names.length;
  sets = data.maps.map((entry) => new MapSet(entry, total));
  live = null;
  const seen = new Set();
  repeated = new Set(targets.names.filter((text) => seen.has(text) || !seen.add(text)));
  const hasPair = total > 1;
  Object.assign(state, { a: data.first, b: null, side: "a", set: 0, pinned: null, hovered: null });
  document.documentElement.style.setProperty("--ratio", image.width / image.height);
  for (const id of ["heatmap", "seen"]) setBox(element(id), ...region);
  const source = image.source ?? element("image").src;
  for (const photo of document.querySelectorAll(".frame img")) if (photo.src !== source) photo.src = source;
  showOutline();
  makeTabs("layers", "layer");
  makeTabs("methods", "method");
  element("pair").hidden = !hasPair;
  showObjects();
  makeList();
  makeMultiples();
  showSet();
  pair(null);
  reveal(state.a);
}

element("needs").remove();
element("first-map")?.remove();
bind();
if (element("data")) {
  show(JSON.parse(element("data").textContent));
  if (location.hash) readHash();
}
