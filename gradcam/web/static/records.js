"use strict";
// The records: columns of all pictures, which come with the page, and details, which are fetched as they are looked at.
// Every text of theirs reaches the page through textContent alone.

const PICTURE = 1, OVERLAY = 2, BLANK = 4; // bits of the column "has"

const gradcam = {
  ...JSON.parse(document.getElementById("data").textContent),
  chunks: new Map(),

  receive(chunk, details) { // called by the files of details; fetch() is forbidden on pages from disk
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

  isFailed(i) {
    return Object.hasOwn(this.errors, i);
  },
};

// Ranks are worked out once: a hundred thousand names are compared in a moment, but not at every stroke of a key.
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

let lowerNames = null;

function select(state) { // positions of the records that fit, in the order that is asked for
  lowerNames ??= gradcam.names.map((name) => name.toLowerCase());
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const least = state.least === "" ? -Infinity : state.least / 100;
  const most = state.most === "" ? Infinity : state.most / 100;
  const asksConfidence = least > 0 || most < 1;
  const wanted = state.class === "" ? null : gradcam.classes.findIndex((entry) => String(entry[0]) === state.class);
  const found = [];
  for (let i = 0; i < gradcam.names.length; i++) {
    if (state.which !== "all" && (state.which === "failed") !== gradcam.isFailed(i)) continue;
    if (wanted !== null && gradcam.top[i] !== wanted && !gradcam.others[i]?.includes(wanted)) continue;
    if (asksConfidence && (gradcam.top[i] < 0 || gradcam.confidence[i] < least || gradcam.confidence[i] > most)) continue;
    if (!words.every((word) => lowerNames[i].includes(word))) continue;
    found.push(i);
  }
  const compare = SORTS[state.sort]();
  return compare ? found.sort(compare) : found;
}
