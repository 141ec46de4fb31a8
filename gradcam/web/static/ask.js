"use strict";
// The requests of the local page to its server. Only the newest question is answered.

const opened = JSON.parse(element("start").textContent);
const tab = crypto.getRandomValues(new Uint32Array(2)).join("-");
let aborter = null; // of the newest question

async function request(path, settings = {}) {
  try {
    return await fetch(path, { ...settings, headers: { "X-Gradcam-Token": opened.token, ...settings.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Check that gradcam ui is still running.");
  }
}

async function fetchJson(path, settings = {}) {
  const response = await request(path, settings);
  const answer = await response.json().catch(() => ({ error: `The server failed (${response.status}).` }));
  if (answer.error) throw new Error(answer.error);
  return answer;
}

const troubles = { files: [], answer: null }; // errors of dropped files, and of the newest question

function showTroubles(changes) {
  Object.assign(troubles, changes);
  const { files, answer } = troubles;
  const lines = [...files.slice(0, 3), files.length > 3 ? `And ${files.length - 3} more.` : null, answer].filter(Boolean);
  element("trouble").textContent = lines.join("\n");
  element("trouble").hidden = !lines.length;
}

let questions = 0;

async function showProgress(number) { // if the answer takes a while
  await new Promise((resolve) => setTimeout(resolve, 400));
  while (number === questions) {
    const { done, total: count, loading } = await fetchJson(`progress?tab=${tab}`).catch(() => ({ done: 0, total: 0 }));
    if (number !== questions) break;
    const bar = element("progress");
    element("waiting").hidden = false;
    if (count) [bar.max, bar.value] = [count, done];
    else bar.removeAttribute("value");
    element("waited").textContent = count ? `${integer.format(done)} of ${integer.format(count)} passes` : loading ? "Loading the model" : "Computing";
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

async function ask(question) { // null if a newer question replaced it, or if the user cancelled it
  const number = ++questions;
  if (!question.quick) showProgress(number);
  aborter = new AbortController();
  try {
    const answer = await fetchJson("ask", { method: "POST", body: JSON.stringify({ tab, ...question }), signal: aborter.signal });
    return answer.stopped ? null : answer;
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  } finally {
    if (number === questions) {
      questions++;
      element("waiting").hidden = true;
    }
  }
}

async function drop(file) {
  if (file.size > opened.largest) throw new Error(`${file.name} is larger than ${Math.round(opened.largest / 1e6)} MB, the limit for a dropped file. Instead, start gradcam ui with the path of the file.`);
  return fetchJson("drop", { method: "POST", body: file, headers: { "X-Name": encodeURIComponent(file.name) } });
}
