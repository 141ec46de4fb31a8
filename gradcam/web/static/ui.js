"use strict";
// The local page. Each question to the server consists of an image, its edits, a model and a target. The answer is shown
// like the page of one image.

// `wanted` belongs to the newest question, and `shown` to the answer on screen. `edits` of page.js belong to `shown`.
let wanted = { image: null, edits: [], first: null };
let shown = { wanted, source: null, answer: null, form: null };
const buttons = new Map(); // of the strip, by the image's number
let unedited = new Map(); // the probability of each class in the unedited image
let isStale = false; // whether the heatmap is newer than the rest of the page, because the user is brushing

const FIELDS = ["model", "weights", "layer", "method", "texts", "is-compared", "other-model", "other-weights"];
const property = (id) => (element(id).type === "checkbox" ? "checked" : "value");
const readForm = () => FIELDS.map((id) => [id, element(id)[property(id)]]);

function makeQuestion(more = {}) {
  const value = (id) => element(id).value.trim() || null;
  const texts = element("texts").value.split("\n").filter((line) => line.trim());
  const other = element("is-compared").checked ? { model: value("other-model") ?? value("model"), weights: value("other-weights") } : null;
  const { image: picture, ...rest } = wanted; // The server calls the image "picture".
  return { picture, ...rest, model: value("model"), weights: value("weights"), layer: value("layer"), method: value("method"), texts, other, ...more };
}

async function explain(changes = {}) { // The changes become part of `shown` with the answer.
  const request = wanted = { ...wanted, ...changes };
  if (request.image === null) return;
  const question = makeQuestion(), form = readForm(), source = JSON.stringify([question.picture, question.model, question.weights, question.texts]);
  showTroubles(drops ? { answer: null } : { files: [], answer: null });
  pages++;
  try {
    const answer = await ask(question);
    if (answer) showAnswer({ wanted: request, source, answer, form });
    else if (wanted === request) goBack();
  } catch (error) {
    if (wanted === request) giveUp(error.message);
  }
  pages--;
  goOn();
}

function goBack() { // to the last answer, which stays on screen when the user cancels
  wanted = shown.wanted;
  for (const [id, value] of shown.form ?? []) element(id)[property(id)] = value;
  showLast();
}

function giveUp(reason) { // The last answer stays on screen, and the form stays as it is, to be corrected.
  wanted = shown.wanted;
  showLast();
  showTroubles({ answer: reason });
}

function showLast() { // instead of the heatmap of an edit that is not applied
  if (isStale && shown.answer) {
    const target = state.a;
    showAnswer(shown);
    select(target);
  }
}

function showAnswer(result) {
  const { answer } = result;
  isStale = false;
  if (result.source !== shown.source) unedited = new Map();
  const isFirst = !shown.answer;
  shown = result;
  const { evidence: lastEvidence } = state;
  element("explorer").hidden = element("strip-bar").hidden = false;
  element("start-screen").hidden = true;
  second = null;
  show(answer.page);
  if (!edits.length) unedited = new Map(targets.indices.map((index, target) => [index, targets.shares[target]]));
  state.evidence = lastEvidence;
  showEvidence();
  if (isFirst && location.hash) readHash();
  else refresh();
  drawCover();
  element("title").textContent = element("title").title = image.name;
  element("stages").replaceChildren(...answer.layers.map((layer) => make("option", { value: layer })));
  const method = element("method").value, names = answer.methods.includes(method) || !method ? answer.methods : [method, ...answer.methods];
  element("method").replaceChildren(make("option", { value: "", text: "default" }), ...names.map((value) => make("option", { value, text: value })));
  element("method").value = method;
  const notes = [...new Set([...answer.notes, ...answer.page.notes])];
  element("notes-text").textContent = notes.join("\n");
  element("notes").hidden = !notes.length;
  element("undo").disabled = element("restore").disabled = !edits.length;
  for (const [number, button] of buttons) button.setAttribute("aria-pressed", String(number === shown.wanted.image));
  showSecond(answer.other);
  for (const id of ["model", "weights"]) addRecent(id);
}

// ---- While the user brushes

let isAsking = false, isWaiting = false;
let pages = 0; // unanswered questions for the whole page, which questions for one heatmap must not replace

function goOn() {
  if (!isWaiting || isAsking || pages) return;
  isWaiting = false;
  if (pending().length) explainQuickly();
}

async function explainQuickly() { // one question at a time; the next one has the newest edits
  if (isAsking || pages) {
    isWaiting = true;
    return;
  }
  isAsking = true;
  const before = shown, first = targets.indices[state.a];
  try {
    const answer = await ask(makeQuestion({ picture: shown.wanted.image, edits: [...edits, ...pending()], quick: true, first, other: null }));
    if (answer?.quick && shown === before) showQuick(answer.quick);
    showTroubles({ answer: null });
  } catch (error) {
    showTroubles({ answer: error.message });
  }
  isAsking = false;
  goOn();
}

function showQuick({ shares, map }) {
  isStale = true;
  targets = data.targets = { ...targets, shares: targets.indices.map((index) => shares[index]) };
  live = new MapSet(map, 1);
  draw();
  describe();
  drawRows();
  showScores();
}

const HINT = element("brushed").textContent;

function showScores() {
  if (!isClasses() || !(edits.length || isStale)) {
    element("brushed").textContent = HINT;
    return;
  }
  const best = targets.shares.indexOf(Math.max(...targets.shares));
  const before = unedited.get(targets.indices[state.a]);
  const change = before === undefined ? "" : `, ${percent(before)} before the edit`, top = best === state.a ? "" : ` Top class: ${name(best)}, ${percent(targets.shares[best])}.`;
  element("brushed").textContent = `${name(state.a)}: ${percent(targets.shares[state.a])}${change}.${top}`;
}

findChange = (target) => { // of the probability, since the image was edited
  const before = isClasses() && (edits.length || isStale) ? unedited.get(targets.indices[target]) : undefined;
  return before === undefined ? null : targets.shares[target] - before;
};

const isClasses = () => targets.kind === "class";

function change() { // while a brush or a window moves
  if (isClasses()) explainQuickly();
}

function edit(revise) { // of the image on screen, even if another question is waiting
  const number = shown.wanted.image, before = wanted.image === number ? wanted.edits : edits;
  explain({ image: number, edits: revise(before), first: isClasses() ? targets.indices[state.a] : null });
}

// ---- Two models

let second = null; // the page data of the second model
nameModel = () => (second ? [`First model: ${model.name}`] : []);

function showSecond(page) {
  second = page;
  describe();
  element("second").hidden = element("compared").hidden = !page;
  if (!page) return;
  element("second-image").src = page.image.source;
  drawSecond();
  const list = (entry) => entry.targets.names.slice(0, 5).map((text, target) => [text, score(entry, target)[0]].filter(Boolean).join(", "));
  const [first, other] = [list(data), list(page)];
  element("both").replaceChildren(...Array.from({ length: Math.max(first.length, other.length) }, (_, i) => make("tr", {}, make("td", { text: first[i] ?? "" }), make("td", { text: other[i] ?? "" }))));
}

function drawSecond() { // the second model's heatmap of the same target, if there is one
  if (!second) return;
  const names = second.targets.names, same = second.targets.indices.indexOf(targets.indices[state.a]);
  let target = names[same] === name(state.a) ? same : names.indexOf(name(state.a)); // Several classes may have one name.
  if (target < 0) target = second.first;
  const set = new MapSet(second.maps[0], names.length), box = second.region, canvas = element("second-map");
  const kind = set.evidence === "signed" ? state.evidence : "positive";
  paintMap(canvas, set.has(target) ? set.map(target) : null, set, kind, box, state.cells === "raw");
  setBox(canvas, ...box);
  element("second-name").textContent = names[target];
  element("second-facts").textContent = [score(second, target)[0], second.model.name, `${set.method} at ${set.layer}`, set.has(target) ? null : "no heatmap"].filter(Boolean).join(" · ");
  element("second-command").textContent = writeCommand(second, target, set, kind);
}

showSecondPlace = (where) => { // the same place on the second image
  element("second-cell").hidden = !where || !second;
  if (!where || !second) return;
  const [rows, columns] = second.maps[0].grid, [top, left, height, width] = second.region;
  const row = Math.floor(((region[0] + where[0] * region[2] - top) / height) * rows);
  const column = Math.floor(((region[1] + where[1] * region[3] - left) / width) * columns);
  element("second-cell").hidden = row < 0 || column < 0 || row >= rows || column >= columns; // outside of what this model saw
  setBox(element("second-cell"), top + (row * height) / rows, left + (column * width) / columns, height / rows, width / columns);
};

// ---- Images

function addToStrip({ id, name: text }, isFirst = false) {
  if (buttons.has(id)) return;
  const photo = make("img", { src: `view/${id}?token=${opened.token}`, alt: "", loading: "lazy" });
  photo.addEventListener("error", () => photo.remove());
  const button = make("button", { type: "button", "aria-pressed": "false", title: text }, photo, make("span", { text }));
  button.addEventListener("click", () => openImage(id));
  buttons.set(id, button);
  const item = make("li", {}, button);
  if (isFirst) element("strip").prepend(item);
  else element("strip").append(item);
  element("strip-bar").hidden = false;
}

const openImage = (id) => explain({ image: id, edits: [], first: null });

let drops = 0; // groups of files that are being sent; their errors stay on screen until all are sent

async function take(files) {
  if (!drops++) showTroubles({ files: [] });
  let isFirst = true;
  for (const file of files) {
    try {
      const entry = await drop(file);
      addToStrip(entry, true);
      if (isFirst) await openImage(entry.id);
      isFirst = false;
    } catch (error) {
      showTroubles({ files: [...troubles.files, error.message] });
    }
  }
  drops--;
}

function bindImages() {
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
  for (const input of document.querySelectorAll("input.file")) {
    input.addEventListener("change", () => {
      take([...input.files]);
      input.value = "";
    });
  }
  element("example").addEventListener("click", async () => {
    try {
      const entry = await fetchJson("example", { method: "POST" });
      addToStrip(entry, true);
      openImage(entry.id);
    } catch (error) {
      showTroubles({ answer: error.message });
    }
  });
  element("starters").addEventListener("change", (event) => { element("model").value = event.target.value; });
  element("model").addEventListener("input", () => {
    const typed = element("model").value.trim();
    for (const input of element("starters").querySelectorAll("input")) input.checked = input.value === (typed === opened.model ? "" : typed);
  });
}

// ---- Models and files used before, and the page as a file

const MAX_RECENT = 8;
const listRecent = (id) => (recall(`gradcam-${id}`) ?? "").split("\n").filter(Boolean);

function addRecent(id) { // id: "model" or "weights"
  const value = element(id).value.trim();
  if (value) store(`gradcam-${id}`, [value, ...listRecent(id).filter((text) => text !== value)].slice(0, MAX_RECENT).join("\n"));
  showRecent(id);
}

function showRecent(id) { // at the top of the suggestions
  const list = element(id).list, values = listRecent(id);
  for (const option of [...list.children]) if (values.includes(option.value)) option.remove();
  list.prepend(...values.map((value) => make("option", { value })));
}

async function savePage() {
  try {
    const response = await request("save", { method: "POST", body: JSON.stringify({ tab: `${tab}-save`, ...makeQuestion({ picture: shown.wanted.image, edits, first: isClasses() ? targets.indices[state.a] : state.a, other: null }) }) });
    if (!response.ok) throw new Error((await response.json()).error);
    const link = make("a", { href: URL.createObjectURL(await response.blob()), download: `${image.name.replace(/\.[^.]*$/, "")}.html` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    showTroubles({ answer: error.message });
  }
}

async function begin() {
  element("explorer").hidden = true;
  element("controls").open = innerWidth <= 640 || (innerWidth >= 1000 && innerHeight >= 880); // where they fit
  for (const id of ["model", "weights"]) showRecent(id);
  bindImages();
  bindCover({ changed: change, ended: (applied) => edit((before) => [...before, ...applied]), left: () => { if (isStale) explain(); } });
  element("asking").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
  for (const id of ["model", "weights"]) element(id).addEventListener("change", () => {
    element("layer").value = "";
    if (!opened.methods.includes(element("method").value)) element("method").value = ""; // Other models may not support it.
    wanted = { ...wanted, first: null };
  });
  for (const id of FIELDS) element(id).addEventListener("change", () => explain());
  addEventListener("pointerdown", (event) => { if (!element("more-asking").contains(event.target)) element("more-asking").open = false; });
  element("undo").addEventListener("click", () => edit((before) => before.slice(0, -1)));
  element("restore").addEventListener("click", () => edit(() => []));
  element("cancel").addEventListener("click", () => aborter?.abort());
  element("save-page").addEventListener("click", savePage);
  element("copy-second").addEventListener("click", () => copy(element("second-command").textContent, element("copy-second")));
  follow = () => { drawSecond(); if (shown.answer) showScores(); };
  element("targets").addEventListener("click", () => { if (isStale) explain({ first: targets.indices[state.a] }); });
  try { // Without the token in the address, it is in no history and no screenshot; a reload finds it here.
    sessionStorage.setItem("gradcam-token", opened.token);
    history.replaceState(null, "", `/${location.hash}`);
  } catch { /* Without storage, the token stays in the address. */ }
  try {
    for (const entry of await fetchJson("strip")) addToStrip(entry);
  } catch (error) {
    showTroubles({ answer: error.message });
  }
  if (buttons.size) openImage(buttons.keys().next().value);
}

begin();
