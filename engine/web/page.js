// A chat with the engine that serves this page, and what the engine is doing meanwhile. No library, no build step.
"use strict";

const at = (id) => document.getElementById(id);
const turns = [];
let running = null; // the AbortController of the answer in the making
let before = null; // the last reading of the numbers

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (answer.ok) return answer;
  if (answer.status === 401) at("key-form").hidden = false;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // the status has to do
  }
  throw new Error(message);
}

// ------------------------------------------------------------------------------------------- the chat

function show(kind, text) {
  const article = document.createElement("article");
  article.className = kind;
  const body = document.createElement("div");
  body.textContent = text;
  article.append(body);
  at("turns").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function showReasoning(article, text) {
  let details = article.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "reasoning";
    details.append(summary, document.createElement("div"));
    article.prepend(details);
  }
  details.lastChild.textContent += text;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request() {
  const body = { messages: turns, stream: true, stream_options: { include_usage: true } };
  if (at("temperature").value) body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value) body.max_tokens = Number(at("max-tokens").value);
  return { method: "POST", body: JSON.stringify(body), signal: running.signal };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function content(text, files) {
  if (!files.length) return text;
  const urls = await Promise.all(files.map(dataUrl));
  return [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

async function answerTurn(text, files) {
  show("user", [...files.map((file) => `[${file.name}]`), text].join(" "));
  const article = show("assistant", "");
  const body = article.lastChild;
  const began = performance.now();
  let first = null;
  let note = "";
  running = new AbortController();
  busy(true);
  const turn = { role: "user", content: text };
  turns.push(turn);
  try {
    turn.content = await content(text, files);
    for await (const chunk of events(await ask("v1/chat/completions", request()))) {
      if (chunk.error) throw new Error(chunk.error.message);
      first ??= performance.now();
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.reasoning_content) showReasoning(article, delta.reasoning_content);
      if (delta.content) body.textContent += delta.content;
      if (chunk.usage) note = summary(chunk.usage, first - began, performance.now() - first);
      article.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else {
      article.classList.add("error");
      note = error.message;
    }
  }
  const footer = document.createElement("footer");
  footer.textContent = note;
  article.append(footer);
  if (body.textContent) turns.push({ role: "assistant", content: body.textContent });
  else turns.pop();
  running = null;
  busy(false);
}

function summary(usage, toFirst, decoding) {
  const rate = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / (decoding / 1000) : 0;
  return `${usage.completion_tokens} tokens · first after ${toFirst.toFixed(0)} ms · ${rate.toFixed(0)} tokens/s`;
}

function busy(is) {
  at("stop").disabled = !is;
  at("send").disabled = is;
  at("forget").disabled = is;
}

// ---------------------------------------------------------------------------------------- the numbers

function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^tercet:(\w+)\{[^}]*\} (\S+)$/.exec(line);
    if (match && !(match[1] in found)) found[match[1]] = Number(match[2]);
  }
  return found;
}

async function refresh() {
  try {
    const now = parse(await (await ask("metrics")).text());
    now.time = performance.now();
    at("running").textContent = now.num_requests_running ?? "?";
    at("waiting").textContent = now.num_requests_waiting ?? "?";
    at("cache").textContent = `${(100 * (now.kv_cache_usage_perc ?? 0)).toFixed(1)} %`;
    const asked = now.prefix_cache_queries_total;
    at("hits").textContent = asked ? `${((100 * now.prefix_cache_hits_total) / asked).toFixed(0)} %` : "–";
    if (before) {
      const tokens = now.generation_tokens_total - before.generation_tokens_total;
      at("rate").textContent = ((1000 * tokens) / (now.time - before.time)).toFixed(0);
    }
    before = now;
  } catch {
    at("running").textContent = "?";
  }
}

async function begin() {
  try {
    at("model").textContent = (await (await ask("v1/models")).json()).data[0].id;
    at("key-form").hidden = true;
  } catch (error) {
    at("model").textContent = error.message;
  }
  refresh();
}

// -------------------------------------------------------------------------------------------- the form

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || running) return;
  const files = [...at("pictures").files];
  at("prompt").value = "";
  at("pictures").value = "";
  answerTurn(text, files);
});
at("prompt").addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  at("pictures").files = files;
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("forget").addEventListener("click", () => {
  turns.length = 0;
  at("turns").replaceChildren();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  begin();
});
setInterval(() => document.hidden || refresh(), 1000);
begin();
