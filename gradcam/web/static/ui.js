"use strict";
// The local page. A question is made of what is chosen; its answer is shown as a page of one picture is.

// What the next question is of, and what the answer that is shown is of: the same, but while one is waited for. `edits` of
// page.js are those that are shown. `first`: the class that somebody chose.
let wanted = { picture: null, edits: [], first: null };
let shown = { of: wanted, by: null, found: null };
const strip = new Map(); // by the picture's number: its button
let whole = new Map(); // by class: its probability in the whole picture
let isStale = false; // a quick answer was shown, whose page is to come

function question(more = {}) {
  const value = (id) => element(id).value.trim() || null;
  const texts = element("texts").value.split("\n").filter((line) => line.trim());
  const other = element("is-compared").checked ? { model: value("other-model") ?? value("model"), weights: value("other-weights") } : null;
  return { model: value("model"), weights: value("weights"), layer: value("layer"), method: value("method"), texts, other, ...more };
}

async function explain(changed = {}) { // all of it; what is changed stands once the answer is there
  const of = wanted = { ...wanted, ...changed };
  if (of.picture === null) return;
  const all = question(of), by = JSON.stringify([all.picture, all.model, all.weights, all.texts]);
  tell(takings ? { answer: null } : { files: [], answer: null });
  wholes++;
  try {
    const found = await ask(all);
    if (found) showAnswer({ of, by, found });
  } catch (error) {
    if (wanted === of) giveUp(error.message);
  }
  wholes--;
  goOn();
}

function giveUp(why) { // what was shown before stays, with what belongs to it
  wanted = shown.of;
  if (isStale && shown.found) {
    const thing = state.a;
    showAnswer(shown);
    select(thing);
  }
  tell({ answer: why });
}

function showAnswer(answer) {
  const { found } = answer;
  isStale = false;
  if (answer.by !== shown.by) whole = new Map(); // of another picture or model
  shown = answer;
  edits = shown.of.edits;
  const had = { evidence: state.evidence, search: element("search").value };
  element("explorer").hidden = false;
  second = null;
  show(found.page);
  if (!edits.length) whole = new Map(things.indices.map((index, thing) => [index, things.shares[thing]]));
  Object.assign(state, { evidence: had.evidence });
  showEvidence();
  refresh();
  drawCover();
  element("title").textContent = picture.name;
  element("stages").replaceChildren(...found.layers.map((each) => make("option", { value: each })));
  const chosen = element("method").value;
  if (element("method").options.length < 2) element("method").append(...found.methods.map((each) => make("option", { value: each, text: each })));
  element("method").value = chosen;
  const notes = [...new Set([...found.notes, ...found.page.notes])];
  element("notes").textContent = notes.join(" ");
  element("notes").hidden = !notes.length;
  element("undo").disabled = element("restore").disabled = !edits.length;
  for (const [number, button] of strip) button.setAttribute("aria-pressed", String(number === shown.of.picture));
  showSecond(found.other);
}

// ---- Under the brush

let isAsking = false, isWaiting = false;
let wholes = 0; // questions for all of it, which no quick one takes the place of

function goOn() {
  if (!isWaiting || isAsking || wholes) return;
  isWaiting = false;
  if (pending().length) explainQuickly();
}

async function explainQuickly() { // one question at a time; the newest state is what the next one asks
  if (isAsking || wholes) {
    isWaiting = true;
    return;
  }
  isAsking = true;
  const before = shown, number = shown.of.picture, first = things.indices[state.a];
  try {
    const found = await ask(question({ picture: number, edits: [...edits, ...pending()], quick: true, first, other: null }));
    if (found?.quick && shown === before) showQuick(found.quick);
    tell({ answer: null });
  } catch (error) {
    tell({ answer: error.message });
  }
  isAsking = false;
  goOn();
}

function showQuick({ shares, map }) {
  isStale = true;
  things = { ...things, shares: things.indices.map((index) => shares[index]) };
  things.shares.forEach((share, thing) => {
    const row = options[thing].firstChild, text = percent(share);
    if (row.children[1].textContent === text) return; // most are next to nothing, and stay so: drawing them all takes long
    row.children[1].textContent = text;
    row.children[2].style.setProperty("--share", share);
  });
  live = new MapSet(map, 1);
  draw();
  say();
  sayBrushed();
}

const HINT = element("brushed").textContent;

function sayBrushed() {
  if (!isClasses() || !(edits.length || isStale)) {
    element("brushed").textContent = HINT;
    return;
  }
  const best = things.shares.indexOf(Math.max(...things.shares));
  const before = whole.get(things.indices[state.a]);
  const was = before === undefined ? "" : `, ${percent(before)} in the unedited image`;
  element("brushed").textContent = `${name(state.a)}: ${percent(things.shares[state.a])}${was}. Top class: ${name(best)}, ${percent(things.shares[best])}.`;
}

const isClasses = () => things.kind === "class";

function change() { // of what a brush or a window covers
  if (isClasses()) explainQuickly();
}

function edit(change) { // of the picture that is shown, whatever else was asked for meanwhile
  const number = shown.of.picture, before = wanted.picture === number ? wanted.edits : edits;
  explain({ picture: number, edits: change(before), first: isClasses() ? things.indices[state.a] : null });
}

const end = (made) => edit((before) => [...before, ...made]);

// ---- Two models

let second = null;

function showSecond(page) {
  second = page;
  element("second").hidden = !page;
  if (!page) return;
  element("second-picture").src = page.image.source;
  drawSecond();
  const top = (each) => each.targets.names.slice(0, 5).map((text, i) => `${text}${each.targets.shares[i] === null ? "" : `, ${percent(each.targets.shares[i])}`}`);
  const [first, other] = [top(data), top(page)];
  element("both").replaceChildren(...Array.from({ length: Math.max(first.length, other.length) }, (_, i) => make("tr", {}, make("td", { text: first[i] ?? "" }), make("td", { text: other[i] ?? "" }))));
}

function drawSecond() { // the map of what is shown, where the second model has it
  if (!second) return;
  const names = second.targets.names, same = second.targets.indices.indexOf(things.indices[state.a]);
  let thing = names[same] === name(state.a) ? same : names.indexOf(name(state.a)); // several classes may have one name
  if (thing < 0) thing = second.first;
  const set = new MapSet(second.maps[0], names.length), box = second.region;
  const kind = set.evidence === "signed" ? state.evidence : "positive", scale = SIDE / Math.max(box[2], box[3]);
  const size = [Math.max(1, Math.round(box[2] * scale)), Math.max(1, Math.round(box[3] * scale))];
  const canvas = element("second-map");
  paint(canvas, set.has(thing) ? toHeatmap(set.map(thing), set, kind, ...size) : null, ...size, makePalette(tables[state.colours], state.opacity, kind === "signed"), kind === "signed");
  place(canvas, ...box);
  element("second-name").textContent = names[thing];
  const share = second.targets.shares[thing];
  element("second-facts").textContent = [share === null ? null : percent(share), second.model.name, `${set.method} at ${set.layer}`, set.has(thing) ? null : "no heatmap"].filter(Boolean).join(" · ");
  element("second-command").textContent = writeCommand(second, thing, set, kind);
}

// ---- Pictures

function addToStrip({ id, name: text }, isFirst = false) {
  const image = make("img", { src: `view/${id}?token=${opened.token}`, alt: "", loading: "lazy" });
  image.addEventListener("error", () => image.remove());
  const button = make("button", { type: "button", "aria-pressed": "false", title: text }, image, make("span", { text }));
  button.addEventListener("click", () => openPicture(id));
  strip.set(id, button);
  const item = make("li", {}, button);
  if (isFirst) element("strip").prepend(item);
  else element("strip").append(item);
}

const openPicture = (id) => explain({ picture: id, edits: [], first: null });

let takings = 0; // drops whose files are being taken: what they tell stays until the next drop or question after them

async function take(files) {
  if (!takings++) tell({ files: [] });
  let isFirst = true;
  for (const file of files) {
    try {
      const found = await drop(file);
      addToStrip(found, true);
      if (isFirst) await openPicture(found.id);
      isFirst = false;
    } catch (error) {
      tell({ files: [...troubles.files, error.message] });
    }
  }
  takings--;
}

function bindPictures() {
  const over = (isOver) => document.body.classList.toggle("over", isOver);
  addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(false); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    over(false);
    take([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) take(files);
  });
  element("file").addEventListener("change", (event) => {
    take([...event.target.files]);
    event.target.value = "";
  });
}

async function begin() {
  element("explorer").hidden = true;
  bindPictures();
  bindCover({ changed: change, ended: end, left: () => { if (isStale) explain(); } });
  element("asking").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
  for (const id of ["model", "weights"]) element(id).addEventListener("change", () => { element("layer").value = ""; wanted = { ...wanted, first: null }; });
  for (const id of ["model", "weights", "layer", "method", "texts", "is-compared", "other-model", "other-weights"]) element(id).addEventListener("change", () => explain());
  element("undo").addEventListener("click", () => edit((before) => before.slice(0, -1)));
  element("restore").addEventListener("click", () => edit(() => []));
  element("copy-second").addEventListener("click", () => copy("second-command", element("copy-second")));
  follow = () => { drawSecond(); if (shown.found) sayBrushed(); };
  element("things").addEventListener("click", () => { if (isStale) explain({ first: things.indices[state.a] }); });
  try {
    for (const each of await fetchJson("strip")) addToStrip(each);
  } catch (error) {
    tell({ answer: error.message });
  }
  if (strip.size) openPicture(strip.keys().next().value);
}

begin();
