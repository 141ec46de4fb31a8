"use strict";
// The local page. A question is made of what is chosen; its answer is shown as a page of one picture is.

const asked = { picture: null, first: null }; // first: the class that somebody chose
const strip = new Map(); // by the picture's number: its button
let whole = new Map(); // by class: its probability in the whole picture
let isStale = false; // a quick answer was shown, whose page is to come

function question(more = {}) {
  const value = (id) => element(id).value.trim() || null;
  const texts = element("texts").value.split("\n").filter((line) => line.trim());
  const other = element("is-compared").checked ? { model: value("other-model") ?? value("model"), weights: value("other-weights") } : null;
  return { picture: asked.picture, model: value("model"), weights: value("weights"), layer: value("layer"), method: value("method"), texts, edits, first: asked.first, other, ...more };
}

async function explain() { // all of it
  if (asked.picture === null) return;
  tell(null);
  wholes++;
  try {
    const found = await ask(question());
    if (found) showAnswer(found);
  } catch (error) {
    tell(error.message);
  }
  wholes--;
  goOn();
}

function showAnswer(found) {
  isStale = false;
  const had = { evidence: state.evidence, search: element("search").value };
  element("explorer").hidden = false;
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
  for (const [number, button] of strip) button.setAttribute("aria-pressed", String(number === asked.picture));
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
  const shown = things.indices[state.a];
  try {
    const found = await ask(question({ edits: [...edits, ...pending()], quick: true, first: shown, other: null }));
    if (found?.quick) showQuick(found.quick);
    tell(null);
  } catch (error) {
    tell(error.message);
  }
  isAsking = false;
  goOn();
}

function showQuick({ shares, map }) {
  isStale = true;
  things.shares = things.indices.map((index) => shares[index]);
  things.shares.forEach((share, thing) => {
    const row = options[thing].firstChild, text = percent(share);
    if (row.children[1].textContent === text) return; // most are next to nothing, and stay so: drawing them all takes long
    row.children[1].textContent = text;
    row.children[2].style.setProperty("--share", share);
  });
  live = new MapSet(map, 1);
  draw();
  say();
  const best = things.shares.indexOf(Math.max(...things.shares));
  const before = whole.get(things.indices[state.a]);
  const was = before === undefined ? "" : `, ${percent(before)} in the whole picture`;
  element("brushed").textContent = `${name(state.a)}: ${percent(things.shares[state.a])}${was}. Surest: ${name(best)}, ${percent(things.shares[best])}.`;
}

const isClasses = () => things.kind === "class";

function change() { // of what a brush or a window covers
  if (isClasses()) explainQuickly();
}

function end(made) {
  edits = [...edits, ...made];
  asked.first = isClasses() ? things.indices[state.a] : null;
  explain();
}

function edit(kept) {
  edits = kept;
  asked.first = isClasses() ? things.indices[state.a] : null;
  explain();
}

// ---- Two models

let second = null;

function showSecond(page) {
  second = page;
  element("second").hidden = !page;
  if (!page) return;
  element("second-picture").src = page.picture.source;
  drawSecond();
  const top = (each) => each.things.names.slice(0, 5).map((text, i) => `${text}${each.things.shares[i] === null ? "" : `, ${percent(each.things.shares[i])}`}`);
  const [first, other] = [top(data), top(page)];
  element("both").replaceChildren(...Array.from({ length: Math.max(first.length, other.length) }, (_, i) => make("tr", {}, make("td", { text: first[i] ?? "" }), make("td", { text: other[i] ?? "" }))));
}

function drawSecond() { // the map of what is shown, where the second model has it
  if (!second) return;
  const names = second.things.names, shown = name(state.a);
  let thing = names.indexOf(shown);
  if (thing < 0) thing = second.first;
  const set = new MapSet(second.maps[0], names.length), box = second.region;
  const kind = set.evidence === "signed" ? state.evidence : "positive", scale = SIDE / Math.max(box[2], box[3]);
  const size = [Math.max(1, Math.round(box[2] * scale)), Math.max(1, Math.round(box[3] * scale))];
  const canvas = element("second-map");
  paint(canvas, set.has(thing) ? toHeatmap(set.map(thing), set, kind, ...size) : null, ...size, makePalette(tables[state.colours], state.opacity, kind === "signed"), kind === "signed");
  place(canvas, ...box);
  element("second-name").textContent = names[thing];
  const share = second.things.shares[thing];
  element("second-facts").textContent = [share === null ? null : percent(share), second.model.name, `${set.method} at ${set.layer}`, set.has(thing) ? null : "no map of it"].filter(Boolean).join(" · ");
  const words = ["gradcam", "run", picture.name, ...second.model.words, ...edits.flatMap((each) => ["--edit", each])];
  if (second.things.kind === "class") words.push("--class", String(second.things.indices[thing]), "--layer", set.layer, "--method", set.method);
  element("second-command").textContent = words.map(quote).join(" ");
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

function openPicture(id) {
  asked.picture = id;
  asked.first = null;
  edits = [];
  return explain();
}

async function take(files) {
  const troubles = [];
  let isFirst = true;
  for (const file of files) {
    try {
      const found = await drop(file);
      addToStrip(found, true);
      if (isFirst) await openPicture(found.id);
      isFirst = false;
    } catch (error) {
      troubles.push(error.message);
      tell(troubles.slice(0, 3).join(" ") + (troubles.length > 3 ? ` And ${troubles.length - 3} more.` : ""));
    }
  }
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
  for (const id of ["model", "weights"]) element(id).addEventListener("change", () => { element("layer").value = ""; asked.first = null; });
  for (const id of ["model", "weights", "layer", "method", "texts", "is-compared", "other-model", "other-weights"]) element(id).addEventListener("change", explain);
  element("undo").addEventListener("click", () => edit(edits.slice(0, -1)));
  element("restore").addEventListener("click", () => edit([]));
  element("copy-second").addEventListener("click", () => copy("second-command", element("copy-second")));
  for (const id of ["things", "evidence", "colours", "opacity", "search"]) {
    for (const kind of ["click", "input", "change"]) element(id).addEventListener(kind, drawSecond);
  }
  element("things").addEventListener("click", () => { if (isStale) { asked.first = things.indices[state.a]; explain(); } });
  try {
    for (const each of await fetchJson("strip")) addToStrip(each);
  } catch (error) {
    tell(error.message);
  }
  if (strip.size) openPicture(strip.keys().next().value);
}

begin();
