// The page: what is shown and what is sent. The conversation lives here, in this tab; the server keeps only its cache.
import { blocksOf, bytesAsText, eventsOf, spansOf } from "./stream.js";

const $ = (id) => document.getElementById(id);
const STORE = { messages: "edgekv.messages", key: "edgekv.key", system: "edgekv.system", session: "edgekv.session" };
const STATE_EVERY_MS = 1000;

let messages = JSON.parse(sessionStorage.getItem(STORE.messages) ?? "[]");
let model = "";
let running = null; // the AbortController of the answer that is being made

/** A request with the key; asks for the key when the server wants one. Throws an Error with the server's sentence. */
async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORE.key);
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const reply = await fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not answer: is it still running?");
    });
    if (reply.ok) return reply;
    if (reply.status === 401) {
      await askForKey(key);
      continue;
    }
    const told = await reply.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered with status ${reply.status}.`);
  }
}

/** Resolves when a key has been given. Several requests at once share one dialog. */
let asking = null;
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (refused) $("key-note").textContent = "That key was not accepted. Try again.";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(STORE.key, $("key").value);
      $("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

function sessionId() {
  let id = sessionStorage.getItem(STORE.session);
  if (!id) {
    id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem(STORE.session, id);
  }
  return id;
}

// --- what is shown ---------------------------------------------------------------------------------------------------

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function turn(role, text) {
  const item = element("li", role);
  item.append(element("p", "who", role === "user" ? "You" : model || "Model"), element("div", "body"));
  const atEnd = isAtEnd();
  $("log").append(item);
  if (text) fill(item, text);
  if (atEnd || role === "user") scrollToEnd();
  $("empty").hidden = true;
  return item;
}

function fill(item, text) {
  const body = item.querySelector(".body");
  if (item.classList.contains("user")) {
    body.textContent = text;
    return;
  }
  body.replaceChildren(...blocksOf(text).map((block) => {
    if (block.kind === "code") {
      const pre = element("pre");
      pre.tabIndex = 0;
      pre.append(element("code", "", block.text));
      return pre;
    }
    const paragraph = element("p");
    const tags = { plain: null, code: "code", strong: "strong" };
    paragraph.append(...spansOf(block.text).map((s) => (tags[s.kind] ? element(tags[s.kind], "", s.text) : s.text)));
    return paragraph;
  }));
}

const isAtEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const scrollToEnd = () => { $("log").scrollTop = $("log").scrollHeight; };
const say = (text) => { $("status").textContent = text; };

/** The line below an answer: what it took, and the button that makes it again. Only the last answer has the button. */
function describe(item, text, onRetry = retry) {
  document.querySelectorAll(".meta button").forEach((button) => button.remove());
  item.querySelector(".meta")?.remove();
  const line = element("div", "meta");
  if (text) line.append(element("span", "", text));
  const again = element("button", "", "Retry");
  again.type = "button";
  again.addEventListener("click", onRetry);
  line.append(again);
  const atEnd = isAtEnd();
  item.append(line);
  if (atEnd) scrollToEnd();
}

function draw() {
  $("log").replaceChildren();
  $("empty").hidden = messages.length > 0;
  messages.forEach((message) => turn(message.role, message.content));
  const last = $("log").lastElementChild;
  if (last) describe(last, "");
  scrollToEnd();
}

async function showState() {
  const state = await (await request("/v1/state")).json();
  model = state.model;
  $("model").textContent = model;
  const { cache_tokens: used, cache_capacity_tokens: capacity, cache_evicted_tokens: evicted } = state;
  $("context").value = used / capacity;
  $("context-text").value = `${used} / ${capacity} tokens${evicted ? `, ${evicted} evicted` : ""}`;
  $("memory").value = state.resident_bytes / Math.max(state.planned_bytes, state.resident_bytes);
  $("memory-text").value = `${bytesAsText(state.resident_bytes)} / ${bytesAsText(state.planned_bytes)}`;
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null));
}

// --- what is done ----------------------------------------------------------------------------------------------------

function remember(changed) {
  messages = changed;
  sessionStorage.setItem(STORE.messages, JSON.stringify(messages));
}

function body() {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return JSON.stringify({
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    session_id: sessionId(),
    stream: true,
    stream_options: { include_usage: true },
  });
}

async function answer() {
  const controller = new AbortController();
  const asked = messages; // another array as soon as it is another conversation
  busy(controller);
  const item = turn("assistant");
  item.classList.add("busy");
  const timer = setInterval(() => showState().catch(() => {}), STATE_EVERY_MS);
  const made = { text: "", usage: null, reason: null, began: null };
  say("Waiting for its turn.");
  try {
    const reply = await request("/v1/chat/completions", { method: "POST", body: body(), signal: controller.signal });
    say("Reading.");
    for await (const event of eventsOf(reply.body)) take(event, made, item);
    done(item, made);
  } catch (error) {
    if (messages !== asked) return;
    const onRetry = made.text ? retry : send;
    if (!made.text) takeBack(item, asked);
    if (controller.signal.aborted) stopped(item, made, onRetry);
    else failed(item, error, onRetry);
  } finally {
    clearInterval(timer);
    item.classList.remove("busy");
    busy(null);
    const answered = made.text || made.reason;
    if (answered && messages === asked) remember([...asked, { role: "assistant", content: made.text }]);
    showState().catch(() => {});
  }
}

/** One event of an answer's stream. */
function take(event, made, item) {
  if (event.comment !== undefined) {
    say(`${event.comment[0].toUpperCase()}${event.comment.slice(1)} tokens.`);
    return;
  }
  if (event.data === "[DONE]") return;
  const chunk = JSON.parse(event.data);
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) made.usage = chunk.usage;
  const choice = chunk.choices[0];
  made.reason = choice?.finish_reason ?? made.reason;
  const text = choice?.delta.content;
  if (!text) return;
  if (made.began === null) {
    made.began = performance.now();
    say("Answering.");
  }
  made.text += text;
  const atEnd = isAtEnd();
  fill(item, made.text);
  if (atEnd) scrollToEnd();
}

function done(item, made) {
  const usage = made.usage ?? {};
  const seconds = (performance.now() - (made.began ?? performance.now())) / 1000;
  const parts = [`${usage.completion_tokens ?? 0} tokens`];
  if (seconds > 0 && usage.completion_tokens > 1) parts.push(`${Math.round(usage.completion_tokens / seconds)} a second`);
  parts.push(`${usage.reused_tokens ?? 0} of ${usage.prompt_tokens ?? 0} prompt tokens reused`);
  if (usage.evicted_tokens) parts.push(`${usage.evicted_tokens} evicted`);
  if (made.reason === "length") parts.push("ended at the longest length");
  describe(item, parts.join(" · "));
  say("The answer is complete.");
}

function stopped(item, made, onRetry) {
  if (!made.text) fill(item, "…");
  describe(item, "stopped", onRetry);
  say("Stopped.");
}

function failed(item, error, onRetry) {
  const note = element("p", "failed", error.message);
  note.setAttribute("role", "alert");
  item.append(note);
  scrollToEnd();
  describe(item, "", onRetry);
  say("There is no answer.");
}

/** A message that got no answer leaves the conversation, or it would be refused with every later one: its text is in
 * the box again, to be changed or sent as it is. */
function takeBack(item, asked) {
  const box = $("text");
  remember(asked.slice(0, -1));
  box.value = [asked.at(-1).content, box.value].filter(Boolean).join("\n\n");
  fit();
  item.previousElementSibling?.remove();
  item.classList.add("unanswered");
  box.focus();
}

function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  fit();
  document.querySelectorAll("#log > .unanswered").forEach((item) => item.remove());
  remember([...messages, { role: "user", content: text }]);
  turn("user", text);
  answer();
}

function retry() {
  if (running) return;
  const last = messages.findLastIndex((message) => message.role === "user");
  if (last < 0) return;
  remember(messages.slice(0, last + 1));
  draw();
  answer();
  $("text").focus();
}

function fresh() {
  running?.abort();
  remember([]);
  draw();
  say("A new conversation.");
  $("text").focus();
}

/** The message box grows with its text. */
function fit() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("input", fit);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("text").focus();
});
$("fresh").addEventListener("click", fresh);
$("options").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => sessionStorage.setItem(STORE.system, $("system").value));

$("system").value = sessionStorage.getItem(STORE.system) ?? "";
draw();
showState().then(draw, (error) => say(error.message));
