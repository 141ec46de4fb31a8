"use strict";
// What the local page asks of its server, of which the newest question alone is answered.

const opened = JSON.parse(element("start").textContent);
const tab = crypto.getRandomValues(new Uint32Array(2)).join("-");

async function fetchJson(path, settings = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...settings, headers: { "X-Gradcam-Token": opened.token, ...settings.headers } });
  } catch {
    throw new Error("The server does not answer. Check that gradcam ui is still running.");
  }
  const found = await answer.json().catch(() => ({ error: `The server failed (${answer.status}).` }));
  if (found.error) throw new Error(found.error);
  return found;
}

const troubles = { files: [], answer: null }; // what was not taken, and why the newest question has no answer

function tell(changed) {
  Object.assign(troubles, changed);
  const { files, answer } = troubles;
  const lines = [...files.slice(0, 3), files.length > 3 ? `And ${files.length - 3} more.` : null, answer].filter(Boolean);
  element("trouble").textContent = lines.join("\n");
  element("trouble").hidden = !lines.length;
}

let waits = 0;

async function watch(number) { // how far it is, where that takes a while
  await new Promise((resolve) => setTimeout(resolve, 400));
  while (number === waits) {
    const { done, total: count } = await fetchJson(`progress?tab=${tab}`).catch(() => ({ done: 0, total: 0 }));
    if (number !== waits) break;
    const bar = element("progress");
    element("waiting").hidden = false;
    if (count) [bar.max, bar.value] = [count, done];
    else bar.removeAttribute("value");
    element("waited").textContent = count ? `${integer.format(done)} of ${integer.format(count)} passes` : "Computing";
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

async function ask(question) { // null where a newer question took its place
  const number = ++waits;
  if (!question.quick) watch(number);
  try {
    const found = await fetchJson("ask", { method: "POST", body: JSON.stringify({ tab, ...question }) });
    return found.stopped ? null : found;
  } finally {
    if (number === waits) {
      waits++;
      element("waiting").hidden = true;
    }
  }
}

async function drop(file) {
  if (file.size > opened.largest) throw new Error(`${file.name} is larger than ${Math.round(opened.largest / 1e6)} MB, the limit for a dropped file. Instead, start gradcam ui with the path of the file.`);
  return fetchJson("drop", { method: "POST", body: file, headers: { "X-Name": encodeURIComponent(file.name) } });
}
