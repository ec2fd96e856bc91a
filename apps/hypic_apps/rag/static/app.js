"use strict";
// The page's only script. All text goes in through textContent, so that no name and no document is ever read as HTML.

const $ = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en");
const plural = (n, one) => `${number(n)} ${one}${n === 1 ? "" : "s"}`;
const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : `${Math.max(1, Math.round(s * 1000))} ms`);
const bytes = (n) => (n < 2 ** 20 ? `${(n / 2 ** 10).toFixed(0)} KiB` : `${(n / 2 ** 20).toFixed(0)} MiB`);
// The program's sentences begin small; names of files stay as they are.
const sentence = (text) => (/^[a-z]+[ ,:]/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);

const page = { state: null, conversation: null, asking: null, working: null, editing: null };

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// ---- talking to the program ----------------------------------------------------------------------------------------

async function call(method, path, body, signal) {
  const isBlob = body instanceof Blob;
  const headers = body === undefined || isBlob ? {} : { "content-type": "application/json" };
  const sent = body === undefined || isBlob ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: sent, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The program cannot be reached; start it again with hypic app.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(sentence(told?.error?.message ?? `the program answered ${response.status}.`));
}

async function* events(method, path, body, signal) {
  const response = await call(method, path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let ended = false; !ended; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The program broke off; try again.");
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") ended = true;
      else if (block.startsWith("data: ")) {
        const event = JSON.parse(block.slice(6));
        if (event.error) throw new Error(sentence(event.error.message));
        yield event;
      }
    }
  }
}

async function refresh() {
  page.state = await (await call("GET", "api/state")).json();
  showState();
}

// ---- documents -----------------------------------------------------------------------------------------------------

function showState() {
  const { model, documents, cache } = page.state;
  $("model").textContent = [model.introduction, model.advice].filter(Boolean).join(" ");
  $("count").textContent = documents.length ? number(documents.length) : "";
  showDocuments(documents);
  $("warm").disabled = !documents.length || page.working !== null;
  const evicted = cache.evictions ? `, ${plural(cache.evictions, "eviction")}` : "";
  $("cache").textContent = `Cache: ${plural(cache.num_entries, "entry").replace("entrys", "entries")}, ${bytes(cache.held_bytes)}${evicted}`;
  const hasSamples = documents.some((d) => d.name === "handbook.md");
  $("offer").hidden = hasSamples;
  $("samples").hidden = !hasSamples;
  if (!$("samples").lastElementChild.children.length) {
    const chip = (text) => el("li", {}, el("button", { type: "button", onclick: () => ask(text) }, text));
    $("samples").lastElementChild.append(...page.state.samples.map(chip));
  }
}

// What did not change keeps its node, so that neither focus nor pointer loses it.
function showDocuments(documents) {
  const known = new Map([...$("documents").children].map((node) => [node.dataset.shown, node]));
  const nodes = documents.map((doc) => known.get(JSON.stringify(doc)) ?? documentItem(doc));
  const kept = new Set(nodes);
  for (const node of known.values()) if (!kept.has(node)) node.remove();
  nodes.forEach((node, n) => $("documents").children[n] === node || $("documents").insertBefore(node, $("documents").children[n] ?? null));
}

function documentItem(doc) {
  const meter = el("span", { class: "meter" }, el("i"));
  meter.firstChild.style.width = `${(100 * doc.num_cached) / Math.max(1, doc.num_passages)}%`;
  const told = `${number(doc.num_cached)} of ${plural(doc.num_passages, "passage")} cached`;
  const tool = (label, action) =>
    el("button", { type: "button", class: "quiet", "aria-label": `${label} ${doc.name}`, onclick: action }, label);
  return el("li", { "data-shown": JSON.stringify(doc) },
    el("span", { class: "name", title: doc.name }, doc.name),
    el("span", { class: "tools" }, tool("Edit", () => openEditor(doc)), tool("Delete", () => remove(doc))),
    el("span", { class: "cached" }, meter, told));
}

function say(note, problem) {
  for (const [id, text] of [["note", note], ["problem", problem]]) {
    $(id).hidden = !text;
    $(id).textContent = text ?? "";
  }
}

// One piece of work on documents at a time in this tab, with its bar; its last event comes back, or null if stopped.
async function work(what, method, path, body) {
  if (page.working) throw new Error("Something is still being done here; wait for it, or stop it.");
  page.working = new AbortController();
  $("work").hidden = false;
  $("work-text").textContent = what;
  $("work-bar").removeAttribute("value");
  $("warm").disabled = true;
  try {
    let last = null;
    for await (const event of events(method, path, body, page.working.signal)) {
      if (event.type !== "progress") last = event;
      else {
        $("work-text").textContent = `${what}: ${number(event.done)} of ${plural(event.total, "passage")}`;
        $("work-bar").max = event.total;
        $("work-bar").value = event.done;
      }
    }
    return last;
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  } finally {
    page.working = null;
    $("work").hidden = true;
  }
}

async function attempt(action) {
  say();
  try {
    await action();
  } catch (error) {
    say(null, error.message);
  }
  await refresh().catch((error) => say(null, error.message));
}

function changeNote(change) {
  if (!change) return "Stopped.";
  const name = change.names.length === 1 ? change.names[0] : plural(change.names.length, "document");
  if (!change.is_edit) return `${name}: ${plural(change.num_new, "passage")}. Each is computed when it is first used.`;
  if (!change.num_new) return `${name}: ${change.num_gone ? `${plural(change.num_gone, "passage")} gone` : "nothing changed"}; nothing is computed again.`;
  const which = change.new.slice(0, 3).join(", ") + (change.num_new > 3 ? ", ..." : "");
  return `${name}: ${plural(change.num_new, "passage")} changed (${which}) and will be computed; ${number(change.num_unchanged)} unchanged.`;
}

async function addFiles(files) {
  await attempt(async () => {
    const notes = [], problems = [];
    for (const file of files) {
      try {
        const most = page.state.limits.file_bytes;
        if (file.size > most) throw new Error(`${file.name} has ${number(file.size)} bytes and the limit is ${number(most)}; split it.`);
        const path = `api/files?name=${encodeURIComponent(file.name)}`;
        notes.push(changeNote(await work(`Indexing ${file.name}`, "POST", path, file)));
      } catch (error) {
        problems.push(error.message);
      }
    }
    say(notes.join(" "));
    if (problems.length) {
      $("problem").hidden = false;
      $("problem").textContent = problems.join(" ");
    }
  });
}

const remove = (doc) => attempt(async () => {
  const gone = await (await call("DELETE", `api/documents/${doc.id}`)).json();
  const dropped = plural(gone.num_dropped, "cached passage");
  say(`${gone.name} is deleted, with ${dropped}. The other documents stay as they are.`);
});

function openEditor(doc) {
  page.editing = doc;
  $("editor-title").textContent = doc ? `Edit ${doc.name}` : "Paste text";
  $("name-label").hidden = Boolean(doc);
  $("name").value = doc ? doc.name : "";
  $("text").value = "";
  $("editor-problem").hidden = true;
  const open = async () => {
    if (doc) $("text").value = (await (await call("GET", `api/documents/${doc.id}`)).json()).text;
    $("editor").showModal();
    (doc ? $("text") : $("name")).focus();
    $("text").setSelectionRange(0, 0);
    $("text").scrollTop = 0;
  };
  open().catch((error) => say(null, error.message));
}

async function save(event) {
  event.preventDefault();
  const doc = page.editing, text = $("text").value;
  const name = doc ? doc.name : $("name").value.trim() || "Pasted text";
  say();
  try {
    const change = doc
      ? await work(`Indexing ${name}`, "PUT", `api/documents/${doc.id}`, { text })
      : await work(`Indexing ${name}`, "POST", "api/documents", { name, text });
    say(changeNote(change));
    $("editor").close();
    await refresh();
  } catch (error) {
    $("editor-problem").hidden = false;
    $("editor-problem").textContent = error.message;
  }
}

const loadSample = () => attempt(async () => {
  say(changeNote(await work("Indexing the sample documents", "POST", "api/corpus")));
});

const warm = () => attempt(async () => {
  const told = await work("Encoding", "POST", "api/warm", {});
  if (!told) return say("Stopped; what was encoded stays.");
  const short = told.num_short ? `, ${number(told.num_short)} too short to be worth it` : "";
  say(`${plural(told.num_encoded, "passage")} encoded, ${number(told.num_hits)} were cached already${short}.`);
});

// ---- asking --------------------------------------------------------------------------------------------------------

async function ask(question) {
  if (page.asking) return;
  const turn = newTurn(question);
  page.asking = new AbortController();
  $("send").textContent = "Stop";
  try {
    const body = { question, conversation: page.conversation };
    for await (const event of events("POST", "api/ask", body, page.asking.signal)) {
      if (event.type === "prompt") {
        page.conversation = event.conversation;
        showStrip(turn, event.strip);
        follow();
      } else if (event.type === "text") turn.answer.append(event.text);
      else if (event.type === "report") showReport(turn, event);
      follow();
    }
  } catch (error) {
    const text = error.name === "AbortError" ? "Stopped; this question is not kept in the conversation." : error.message;
    turn.node.append(el("p", { class: "problem", role: "alert" }, text));
  } finally {
    page.asking = null;
    $("send").textContent = "Ask";
    turn.node.classList.remove("busy");
    follow();
  }
  await refresh().catch((error) => say(null, error.message));
}

const follow = () => $("scroll").scrollTo({ top: $("scroll").scrollHeight });

function newTurn(question) {
  const answer = el("p", { class: "answer", "aria-live": "polite" });
  const node = el("li", { class: "turn busy" }, el("p", { class: "question" }, question), answer);
  const turn = { node, answer, figure: el("div"), counts: el("p", { class: "counts" }) };
  node.append(turn.counts, turn.figure);
  $("turns").append(node);
  follow();
  return turn;
}

const MEANING = {
  hit: "reused",
  encoded: "computed now and kept",
  live: "computed for this question only",
  pending: "about to be looked up",
};

function showStrip(turn, pieces) {
  const detail = el("p", { class: "detail" });
  const total = pieces.reduce((sum, piece) => sum + piece.tokens, 0);
  const strip = el("div", { class: "strip", role: "toolbar", "aria-label": `The prompt: ${plural(total, "token")}` });
  const usual = () => detail.replaceChildren(`The prompt, ${plural(total, "token")}. Point at a part, or step through them with the arrow keys.`);
  for (const piece of pieces) strip.append(stripPiece(piece, detail, usual));
  strip.firstElementChild?.setAttribute("tabindex", "0");
  strip.addEventListener("keydown", step);
  usual();
  const sums = (outcome) => number(pieces.filter((p) => p.outcome === outcome).length);
  const entry = (outcome, text) => el("span", {}, el("i", { class: outcome }), text);
  const legend = el("div", { class: "legend" },
    entry("hit", `reused (${sums("hit")})`), entry("encoded", `encoded (${sums("encoded")})`), entry("live", "live"));
  turn.figure.replaceChildren(strip, el("div", { class: "below" }, detail, legend));
}

function stripPiece(piece, detail, usual) {
  const place = [piece.source, piece.label].filter(Boolean).join(" › ");
  const meaning = MEANING[piece.outcome] ?? piece.outcome;
  const reason = piece.reason && piece.reason !== "live text" ? ` (${piece.reason})` : "";
  const seamed = piece.outcome === "hit" ? `, but for its first ${piece.seam} tokens` : "";
  const told = `${plural(piece.tokens, "token")}, ${meaning}${seamed}${reason}`;
  const show = () => detail.replaceChildren(el("b", {}, place), `: ${told}.`, piece.excerpt ? ` “${piece.excerpt}…”` : "");
  const node = el("button", { type: "button", class: piece.outcome, tabindex: "-1", "aria-label": `${place}: ${told}`,
    onmouseenter: show, onfocus: show, onclick: show, onmouseleave: usual });
  node.style.flexGrow = piece.tokens;
  if (piece.seam) {
    const seam = el("span", { class: "seam" });
    seam.style.width = `${(100 * piece.seam) / piece.tokens}%`;
    node.append(seam);
  }
  return node;
}

function step(event) {
  const moves = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
  const ends = { Home: "firstElementChild", End: "lastElementChild" };
  const strip = event.currentTarget;
  const next = moves[event.key] ? event.target[moves[event.key]] : ends[event.key] ? strip[ends[event.key]] : null;
  if (!next) return;
  event.preventDefault();
  strip.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

function showReport(turn, report) {
  showStrip(turn, report.strip);
  const bold = (text) => el("b", {}, text);
  const head = report.head_tokens ? ` (${number(report.head_tokens)} as an exact beginning of an earlier prompt)` : "";
  const cut = report.finish_reason === "length" ? " The answer was cut at its longest length." : "";
  turn.counts.replaceChildren("First token after ", bold(seconds(report.ttft_s)), `: of ${number(report.prompt_tokens)} prompt tokens `,
    bold(number(report.reused_tokens)), ` were reused${head}; `, bold(number(report.computed_tokens)), ` were computed.${cut}`);
  const button = el("button", { type: "button", class: "measure", onclick: () => measure(turn, page.conversation, report.turn, button) },
    "Measure full, cold and warm");
  turn.node.append(button);
}

// ---- measuring -----------------------------------------------------------------------------------------------------

const ARMS = { full: "Full recompute", cold: "Cold: passages encoded first", warm: "Warm: passages found" };

async function measure(turn, conversation, number_, button) {
  button.disabled = true;
  turn.node.querySelectorAll(".bars, .problem").forEach((old) => old.remove());
  try {
    for await (const event of events("POST", "api/measure", { conversation, turn: number_ })) {
      if (event.type === "progress") button.textContent = `Measuring: run ${event.done} of ${event.total}`;
      else button.before(bars(event));
    }
  } catch (error) {
    button.before(el("p", { class: "problem", role: "alert" }, error.message));
  } finally {
    button.disabled = false;
    button.textContent = "Measure again";
  }
}

function bars(measured) {
  const longest = Math.max(...measured.arms.map((arm) => arm.ttft_s));
  const by = Object.fromEntries(measured.arms.map((arm) => [arm.name, arm]));
  const node = el("div", { class: "bars" });
  for (const arm of measured.arms) {
    const fill = el("i");
    fill.style.width = `${(100 * arm.ttft_s) / longest}%`;
    node.append(el("span", {}, ARMS[arm.name]), el("div", { class: `track ${arm.name}` }, fill),
      el("span", { class: "time" }, `${seconds(arm.ttft_s)}, ${number(arm.computed_tokens)} tokens computed`));
  }
  const ratio = (by.full.ttft_s / by.warm.ttft_s).toFixed(1);
  const head = by.warm.head_tokens > 0 ? ` Cold and warm also found ${plural(by.warm.head_tokens, "token")} of earlier turns.` : "";
  node.append(el("p", {}, `With its passages found, the first token comes ${ratio}x sooner than with full recompute (medians of ${plural(measured.rounds, "run")} of this very prompt).${head}`));
  return node;
}

// ---- the page ------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => localStorage.getItem("theme") ?? setTheme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", theme);
    setTheme(theme);
  });
  $("choose").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", async () => {
    const files = [...$("files").files];
    $("files").value = "";
    await addFiles(files);
  });
  $("paste").addEventListener("click", () => openEditor(null));
  $("editor").querySelector("form").addEventListener("submit", save);
  $("cancel").addEventListener("click", () => $("editor").close());
  $("sample").addEventListener("click", loadSample);
  $("warm").addEventListener("click", warm);
  $("work-stop").addEventListener("click", () => page.working?.abort());
  $("fresh").addEventListener("click", () => {
    page.asking?.abort();
    page.conversation = null;
    $("turns").replaceChildren();
    $("question").focus();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (page.asking) return page.asking.abort();
    const question = $("question").value.trim();
    if (!question) return $("question").focus();
    $("question").value = "";
    ask(question);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!page.asking) $("ask").requestSubmit();
  });
  const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].some((type) => type === "Files" || type === "text/plain");
  addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    $("drop").classList.add("over");
  });
  addEventListener("dragleave", () => $("drop").classList.remove("over"));
  addEventListener("drop", async (event) => {
    if (!holdsFiles(event) || event.target.closest("textarea, input")) return;
    event.preventDefault();
    $("drop").classList.remove("over");
    const files = [...event.dataTransfer.files], text = event.dataTransfer.getData("text/plain");
    if (files.length) await addFiles(files);
    else if (text) await addFiles([new File([text], "Dropped text")]);
  });
  addEventListener("visibilitychange", () => document.hidden || refresh().catch(() => {}));
  refresh().catch((error) => say(null, error.message));
}

start();
