"use strict";
// The records: columns of all images, which the page contains, and details, which are loaded when an image is opened.
// Texts of records reach the page only through textContent.

const PICTURE = 1, OVERLAY = 2, BLANK = 4; // bits of the column "has"

const gradcam = {
  ...JSON.parse(document.getElementById("data").textContent),
  chunks: new Map(),

  receive(chunk, details) { // called by the files of details, because pages from disk must not call fetch()
    this.chunks.get(chunk).resolve(details);
  },

  loadDetails(i) {
    const chunk = Math.floor(i / this.chunk);
    if (!this.chunks.has(chunk)) {
      const entry = {};
      entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
      this.chunks.set(chunk, entry);
      const script = document.createElement("script");
      script.src = `${this.details}/${chunk}.js`;
      script.onload = () => script.remove();
      script.onerror = () => {
        this.chunks.delete(chunk);
        script.remove();
        entry.reject(new Error(`${this.details}/${chunk}.js cannot be loaded. If you have written the report again, reload the page.`));
      };
      document.head.append(script);
    }
    return this.chunks.get(chunk).promise.then((details) => details[i % this.chunk]);
  },

  view(i, kind) { // the URL of a view, if there is one
    if (!(this.has[i] & (kind === "0" ? OVERLAY : PICTURE))) return null;
    const name = this.names[i];
    const dot = name.lastIndexOf(".");
    const stem = this.stems[i] === 1 ? `report/views/${dot > 0 ? name.slice(0, dot) : name}` : this.stems[i];
    return `${stem}.${kind}.jpg`;
  },

  label(i) {
    return this.top[i] < 0 ? "" : this.classes[this.top[i]][1];
  },

  isWrong(i) { // whether the label differs from the predicted class
    this.wrongSet ??= new Set(this.wrong);
    return this.wrongSet.has(i);
  },

  isFailed(i) {
    return Object.hasOwn(this.errors, i);
  },
};

// Ranks are cached: comparing a hundred thousand names takes too long for every keystroke.
const ranks = {};

function rankBy(key, texts) {
  if (!ranks[key]) {
    const order = texts.map((_, i) => i).sort((a, b) => collator.compare(texts[a], texts[b]) || a - b);
    ranks[key] = new Uint32Array(texts.length);
    order.forEach((i, place) => { ranks[key][i] = place; });
  }
  return ranks[key];
}

const SORTS = {
  input: () => null,
  name: () => {
    const rank = rankBy("name", gradcam.names);
    return (a, b) => rank[a] - rank[b];
  },
  surest: () => (a, b) => failedLast(a, b) || gradcam.confidence[b] - gradcam.confidence[a] || a - b,
  "least-sure": () => (a, b) => failedLast(a, b) || gradcam.confidence[a] - gradcam.confidence[b] || a - b,
  class: () => {
    const rank = rankBy("class", gradcam.classes.map((entry) => entry[1]));
    const place = (i) => rank[gradcam.top[i]];
    return (a, b) => failedLast(a, b) || (gradcam.top[a] < 0 ? a - b : place(a) - place(b) || gradcam.confidence[b] - gradcam.confidence[a] || a - b);
  },
};

function failedLast(a, b) {
  return (gradcam.top[a] < 0) - (gradcam.top[b] < 0);
}

let searched = null; // by record: the file name and the names of its classes, in lower case

function listTexts() {
  const labels = gradcam.classes.map((entry) => entry[1].toLowerCase());
  return gradcam.names.map((name, i) => {
    const classes = gradcam.top[i] < 0 ? [] : [gradcam.top[i], ...(gradcam.others[i] ?? [])];
    return [name.toLowerCase(), ...classes.map((at) => labels[at])].join("\n");
  });
}

function select(state) { // the positions of the records that match, in the chosen order
  searched ??= listTexts();
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const least = state.least === "" ? -Infinity : state.least / 100;
  const most = state.most === "" ? Infinity : state.most / 100;
  const asksConfidence = least > 0 || most < 1;
  const chosen = state.class === "" ? null : gradcam.classes.findIndex((entry) => String(entry[0]) === state.class);
  const matches = [];
  for (let i = 0; i < gradcam.names.length; i++) {
    if (state.which !== "all" && (state.which === "failed") !== gradcam.isFailed(i)) continue;
    if (state.label !== "all" && (gradcam.top[i] < 0 || (state.label === "wrong") !== gradcam.isWrong(i))) continue;
    if (chosen !== null && gradcam.top[i] !== chosen && !gradcam.others[i]?.includes(chosen)) continue;
    if (asksConfidence && (gradcam.top[i] < 0 || gradcam.confidence[i] < least || gradcam.confidence[i] > most)) continue;
    if (!words.every((word) => searched[i].includes(word))) continue;
    matches.push(i);
  }
  const compare = SORTS[state.sort]();
  return compare ? matches.sort(compare) : matches;
}
