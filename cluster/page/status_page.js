"use strict";
/* The status page. It polls /v1/overview and draws what changed.

   poll -> answer -> draw: each section builds its elements again, and `morph` applies the differences
   to the page. So the focus, a selection and the scroll position stay.

   Text from the cluster (names, keys, reasons) becomes text nodes only. There is no HTML from data. */

const POLL_MS = 2000, POLL_MS_MAX = 30000, ANSWER_MS = 4000, POINTS = 60;
const LATE_MS = 1000;  /* a timer counts as late from this age on; timers due now are always overdue */
const FOLDED = 5;  /* rows of a folded table */
const DEAD_LETTERS = "dead-letters";  /* the group that keeps dead letters; the name is reserved */
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

/* ---- elements */

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === "") continue;
    element.append(typeof child === "string" ? plain(child) : child);
  }
  return element;
}

/* A text with control and format characters escaped: they would reorder or hide the text around. */
function plain(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u${two(c.codePointAt(0).toString(16), 4)}`);
}

function show(id, ...children) {
  const place = $(id), fresh = place.cloneNode(false);
  fill(fresh, null, children);
  morph(place, fresh);
}

/* Change `old` into `fresh`, keeping the elements that are of the same kind. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, at) => (at < before.length ? morph(before[at], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}

/* A table with roles, as the cards on a phone are no table for a browser. Columns: {label, num, cls}.
   A row: cells, or {cells, cls}. */
function table(label, columns, rows, cls) {
  const head = columns.map((c) => h("th", { role: "columnheader", scope: "col", class: c.num ? "num" : c.cls }, c.label));
  const body = rows.map((row) => {
    const cells = (row.cells || row).map((cell, at) => {
      const c = columns[at], names = [c.num && "num", c.cls].filter(Boolean).join(" ");
      return h("td", { role: "cell", class: names || null, "data-label": c.label }, cell);
    });
    return h("tr", { role: "row", class: row.cls }, cells);
  });
  return h("table", { role: "table", "aria-label": label, class: cls },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, body));
}

const unfolded = new Set();  /* labels of the tables with all rows */

/* A table with its first rows, and a button for the others. */
function folded(label, columns, rows) {
  const all = unfolded.has(label), rest = rows.length - FOLDED;
  return [table(label, columns, all ? rows : rows.slice(0, FOLDED), "cards"), rest <= 0 ? "" : h("div", { class: "more" },
    h("button", { type: "button", "data-fold": label, "aria-expanded": String(all) }, all ? "Show fewer" : `Show ${rest} more`))];
}

document.addEventListener("click", (event) => {
  const label = event.target.closest("[data-fold]")?.dataset.fold;
  if (!label) return;
  if (!unfolded.delete(label)) unfolded.add(label);
  drawLags(last);
});

const note = (text, cls) => h("p", { class: cls ? `note ${cls}` : "note" }, text);
const pill = (text, cls) => h("span", { class: cls ? `pill ${cls}` : "pill" }, text);

/* ---- numbers and times */

const grouped = new Intl.NumberFormat("en-US");
const count = (n) => (n === null || n === undefined ? "–" : grouped.format(n));

function rate(n) {
  if (n === null || n === undefined) return "–";
  return n >= 100 || Number.isInteger(n) ? grouped.format(Math.round(n)) : n.toFixed(1);
}

function bytes(n) {
  if (n === null || n === undefined) return "–";
  let at = 0;
  for (; n >= 1024 && at < 4; at++) n /= 1024;
  return `${n >= 100 || at === 0 ? Math.round(n) : n.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10000) return `${(ms / 1000).toFixed(1)} s`;
  const s = Math.round(ms / 1000);
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)}m ${two(s % 60)}s`;
  if (s < 172800) return `${Math.floor(s / 3600)}h ${two(Math.floor((s % 3600) / 60))}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

const two = (n, width = 2) => String(n).padStart(width, "0");

/* A time in the viewer's zone; its title is UTC. Without the day if that is today. */
function time(ms, { millis = false } = {}) {
  const at = new Date(ms);
  if (!ms || Number.isNaN(at.getTime())) return h("span", {}, ms ? String(ms) : "–");
  const utc = at.toISOString(), day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const today = at.toDateString() === new Date().toDateString();
  let clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  if (millis) clock += `.${two(at.getMilliseconds(), 3)}`;
  const title = `${utc.replace("T", " ").replace("Z", "")} UTC`;
  return h("time", { datetime: utc, title }, today ? clock : `${day} ${clock}`);
}

/* ---- sections */

const asking = (o) => o.nodes.some((node) => node.role === "asked");

/* Why the cluster does not serve; empty: it serves. */
function trouble(o) {
  const why = leaderTrouble(o), voters = o.nodes.filter((node) => node.role !== "learner"), all = voters.length;
  const most = Math.floor(all / 2) + 1, voting = voters.filter((node) => node.reachable).length;
  if (!why || voting >= most) return why && `Does not serve: ${why}`;
  const votes = voting === 1 ? "answers and votes" : "answer and vote", missing = most - voting;
  return `No majority: ${voting} of ${all} nodes ${votes}. Nothing fires until ${missing} more ${missing === 1 ? "does" : "do"}.`;
}

function leaderTrouble(o) {
  if (!o.leader) return "no node leads";
  const leader = o.nodes.find((node) => node.name === o.leader);
  if (leader && leader.role === "asked") return `${o.leader} has not answered yet`;
  if (!leader || !leader.reachable) return `${o.leader} is appointed and does not answer`;
  if (leader.role !== "leader" || leader.epoch !== o.epoch) return `${o.leader} is appointed for epoch ${o.epoch} and does not lead yet`;
  return leader.serving ? "" : `${o.leader} leads and does not serve yet`;
}

/* Whether the leader rejects new timers: its disk is low, or too few voters have room (disk_reserve.py). */
function rejects(o) {
  const voters = o.nodes.filter((node) => node.role !== "learner"), low = voters.filter((node) => node.disk_low);
  const roomy = voters.filter((node) => node.reachable && !node.disk_low);
  return low.some((node) => node.name === o.leader) || (low.length > 0 && 2 * roomy.length <= voters.length);
}

function drawState(o) {
  const asked = asking(o), why = trouble(o);
  const absent = o.nodes.filter((node) => node.role === "unreachable").map((node) => node.name);
  const voteless = o.nodes.filter((node) => node.role === "learner").map((node) => node.name);
  const full = !why && !asked && rejects(o);
  const cls = asked ? "" : why || full ? "bad" : absent.length || voteless.length ? "warn" : "good";
  let text = asked ? "Asking the nodes." : why || `${o.leader} leads and serves`;
  if (full) text += " · rejects new timers: disks have too little free space";
  if (absent.length && !why && !asked) text += ` · ${absent.join(", ")} unreachable`;
  if (voteless.length && !why && !asked) text += ` · without a vote: ${voteless.join(", ")}`;
  const state = $("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${cls}`;
  document.title = `${cls === "bad" ? "✗" : cls === "warn" ? "!" : "✓"} ${o.cluster_id} · ${o.viewed}`;
  show("cluster", o.cluster_id);
  show("where", `seen from ${o.viewed} · epoch ${o.epoch} · controller ${o.controller || "none"} · `, time(o.clock_ms));
}

/* The address of a node's page. Empty: this page's own node, or not known. */
function pageOf(node, o) {
  if (node.name === o.viewed || !node.http_address) return "";
  return `${location.protocol}//${node.http_address}/`;
}

function nodeName(node, o) {
  const page = pageOf(node, o);
  const name = page ? h("a", { href: page, rel: "noreferrer" }, node.name) : node.name;
  return [name, node.name === o.viewed ? h("span", { class: "here" }, " this page") : ""];
}

function rolePill(node) {
  if (!node.reachable) return pill(node.role, node.role === "asked" ? "" : "bad");
  if (node.role !== "leader") return pill(node.role, node.role === "follower" ? "" : "warn");
  return node.serving ? pill("leader, serves", "good") : pill("leader, not serving", "warn");
}

function drawNodes(o) {
  const columns = [
    { label: "Node", cls: "name" }, { label: "Role" }, { label: "Epoch", num: true },
    { label: "Lag", num: true }, { label: "Applied", num: true }, { label: "Disk", num: true },
    { label: "Free", num: true }, { label: "Memory", num: true }, { label: "Uptime", num: true },
    { label: "Note", cls: "full" },
  ];
  const rows = o.nodes.map((node) => {
    if (!node.reachable) {
      return { cls: "gone", cells: [nodeName(node, o), rolePill(node), "", "", "", "", "", "", "", node.error] };
    }
    const notes = [
      node.role === "learner" && "does not vote; see timerctl members",
      node.unsure && "unsure: may have lost log entries", node.withholds_votes && "its Raft votes do not count yet", node.damage && `damaged: ${node.damage}`,
      node.disk_low && `free disk ${node.disk_free_bytes < node.disk_reserve_bytes ? "below" : "not yet an eighth above"} the reserve of ${bytes(node.disk_reserve_bytes)}`,
      ...node.warnings,
    ].filter(Boolean).join("; ");
    return [
      nodeName(node, o), rolePill(node), count(node.epoch), count(node.lag_entries),
      count(node.applied_index), bytes(node.disk_bytes), bytes(node.disk_free_bytes),
      bytes(node.rss_bytes), duration(node.uptime_ms), notes,
    ];
  });
  show("nodes", table("Nodes", columns, rows, "cards"));
}

function drawCheckpoint(o) {
  const shared = o.shared;
  show("checkpoint-note", shared ? `shared ${duration(shared.age_ms)} ago` : "none is shared yet");
  const columns = [
    { label: "Node", cls: "name" }, { label: "Read time" }, { label: "Applied", num: true },
    { label: "Age", num: true }, { label: "Digest" },
  ];
  const rows = o.nodes.map((node) => {
    const c = node.checkpoint;
    if (!c) return { cls: "gone", cells: [node.name, "–", "–", "–", "–"] };
    const [text, cls] = { equal: ["equal", "good"], differs: ["differs", "bad"], not_applied: ["not yet"] }[c.digest] || ["not known"];
    const digest = fill(pill(text, cls), { title: `at entry ${count(c.digest_index)}` }, []);
    return [node.name, time(c.last_read_time_ms), count(c.applied_index), c.index ? duration(c.age_ms) : "–", shared ? digest : "–"];
  });
  if (shared) {
    rows.unshift([
      "shared", time(shared.last_read_time_ms), count(shared.index), duration(shared.age_ms),
      h("span", { class: "mono", title: shared.digest }, shared.digest.slice(0, 12) || "–"),
    ]);
  }
  show("checkpoint", table("Checkpoint", columns, rows, "cards"));
}

function drawPending(o) {
  const p = o.pending, names = { 60: "1 minute", 600: "10 minutes", 3600: "1 hour", 86400: "1 day", 604800: "1 week" };
  const total = `${count(p.total)} now, in ${count(p.topics)} ${p.topics === 1 ? "topic" : "topics"}`;
  if (!p.counts) {
    show("pending-note", total);
    show("pending", note("The timers are being counted."));
    return;
  }
  show("pending-note", total, ` · ${p.exact ? "counted" : "estimated"} by due time ${duration(p.age_ms)} ago`);
  const most = Math.max(1, ...p.counts), late = p.counts[0] > p.held && (o.lags ? lateTopics(o.lags).length > 0 : !asking(o) && trouble(o));
  const rows = p.counts.map((n, at) => {
    const bound = p.buckets_s[at];
    let label = bound === 0 ? "overdue" : bound === undefined ? "later" : `within ${names[bound] || `${bound} s`}`;
    const width = n ? 2 + (98 * Math.log1p(n)) / Math.log1p(most) : 0;
    const bar = s("svg", { "aria-hidden": "true", viewBox: "0 0 100 10", preserveAspectRatio: "none" },
      s("rect", { width: width.toFixed(2), height: 10 }));
    if (bound === 0 && p.held) label = ["overdue ", h("span", { class: "dim", title: "of paused topics" }, `${count(p.held)} held`)];
    return { cls: bound === 0 && late ? "overdue" : null, cells: [label, bar, `${p.exact ? "" : "≈ "}${count(n)}`] };
  });
  const columns = [{ label: "Due" }, { label: "", cls: "bar" }, { label: "Timers", num: true }];
  show("pending", table("Pending timers by due time", columns, rows, "bars"), note("The bars have a logarithmic scale."));
}

const lateTopics = (lags) => lags.topics.filter((each) => each.overdue_ms > LATE_MS);

function drawLags(o) {
  const lags = o.lags;
  $("dead-letters").hidden = !lags || !lags.groups.some((each) => each.group === DEAD_LETTERS);
  if (!lags) {
    const leader = o.nodes.find((node) => node.name === o.leader), page = leader && leader.reachable ? pageOf(leader, o) : "";
    show("lags-note");
    show("lags", o.figures_error === "" ? note("The lag is being searched.") : h("p", { class: "note" },
      `Only the leader knows lag. Not known: ${o.figures_error}.`, page ? [" See ", h("a", { href: page }, `the page of ${o.leader}`), "."] : ""));
    return;
  }
  const late = lateTopics(lags), letters = lags.groups.filter((each) => each.group === DEAD_LETTERS);
  const waiting = lags.groups.filter((each) => each.group !== DEAD_LETTERS);
  show("lags-note", late.length || waiting.length ? `the worst, ${duration(o.lags_age_ms)} ago` : "");
  const parts = [];
  if (late.length) {
    parts.push(h("h3", {}, "Topics with overdue timers"), folded("Topics with overdue timers",
      [{ label: "Topic", cls: "name" }, { label: "Oldest overdue", num: true }, { label: "Pending", num: true }],
      late.map((t) => [topicLink(t.topic), duration(t.overdue_ms), count(t.pending)])));
  }
  if (waiting.length) {
    parts.push(h("h3", {}, "Groups with waiting messages"), folded("Groups with waiting messages",
      [{ label: "Topic / group", cls: "name" }, { label: "Unacked", num: true }, { label: "Oldest unacked", num: true },
        { label: "Oldest undelivered", num: true, cls: "wide" }],
      waiting.map((g) => [[topicLink(g.topic), " / ", g.group], count(g.unacked), duration(g.unacked_ms), duration(g.undelivered_ms)])));
  }
  show("lags", parts.length ? parts : note("No timer is overdue by more than a second, and no message waits."));
  show("letters", folded("Dead letters",
    [{ label: "Topic", cls: "name" }, { label: "Letters", num: true }, { label: "Oldest", num: true }],
    letters.map((g) => [topicLink(g.topic), count(g.unacked), duration(g.unacked_ms)])));
}

function drawChanges(o) {
  const columns = [{ label: "Time" }, { label: "Epoch", num: true }, { label: "Leader" }, { label: "Reason", cls: "full" }];
  const rows = o.changes.map((c) => [
    c.earlier ? h("span", { class: "dim", title: "before this node started" }, "earlier") : time(c.time_ms),
    count(c.epoch), c.leader || "–", c.reason || h("span", { class: "dim" }, "unknown"),
  ]);
  show("changes", rows.length ? table("Leaders", columns, rows, "cards") : note("No leader was appointed yet."));
}

/* ---- rates */

const series = { scheduled: [], fired: [], delivered: [], acked: [], fired_ms: [], delivered_ms: [] };
let last = null;

function quantile(bounds, before, now, q) {
  const counts = now.map((n, at) => n - before[at]), all = counts.reduce((a, b) => a + b, 0);
  if (all <= 0) return null;
  let seen = 0;
  for (let at = 0; at < counts.length; at++) {
    seen += counts[at];
    if (seen >= q * all) return at < bounds.length ? bounds[at] : Infinity;
  }
  return null;
}

/* Rates come from two answers of one node in one epoch; between others there is a gap. The leader's
   answer may be the one of before, as viewers share it. */
function measure(o) {
  const c = o.counters, was = last && last.counters;
  const same = was && last.viewed === o.viewed && last.figures_of === o.figures_of;
  if (same && c.at_ms === was.at_ms) { last = o; return; }
  const comparable = same && last.epoch === o.epoch && c.at_ms > was.at_ms;
  const seconds = comparable ? (c.at_ms - was.at_ms) / 1000 : 0;
  for (const name of ["scheduled", "fired", "delivered", "acked"]) {
    const known = comparable && c[name] !== null && was[name] !== null && c[name] >= was[name];
    series[name].push(known ? (c[name] - was[name]) / seconds : null);
  }
  for (const name of ["fired", "delivered"]) {
    const l = o.lateness;
    series[`${name}_ms`].push(comparable ? quantile(l.bounds_ms, last.lateness[name], l[name], 0.99) : null);
  }
  for (const points of Object.values(series)) points.splice(0, points.length - POINTS);
  last = o;
}

function spark(points, label) {
  const known = points.filter((p) => p !== null && Number.isFinite(p)), top = Math.max(1e-9, ...known);
  const x = (at) => ((at + POINTS - points.length) * 120) / (POINTS - 1), y = (p) => 31 - (28 * Math.min(p, top)) / top;
  let line = "", area = "", open = null;
  points.forEach((p, at) => {
    if (p === null) { if (open !== null) area += `L${x(at - 1).toFixed(1)} 31Z`; open = null; return; }
    const xy = `${x(at).toFixed(1)} ${y(p).toFixed(1)}`;
    line += open === null ? `M${xy}l0.01 0` : `L${xy}`;
    area += open === null ? `M${x(at).toFixed(1)} 31L${xy}` : `L${xy}`;
    open = at;
  });
  if (open !== null) area += `L${x(open).toFixed(1)} 31Z`;
  return s("svg", { class: "spark", role: "img", "aria-label": label, viewBox: "0 0 120 32", preserveAspectRatio: "none" },
    s("path", { class: "base", d: "M0 31H120" }), s("path", { class: "area", d: area }), s("path", { class: "line", d: line }));
}

function drawRates(o) {
  const leads = o.figures_error === "";
  show("rates-note", leads ? (series.fired.length < POINTS ? "since you opened this page" : "last two minutes") : `as applied on ${o.viewed}; deliveries and acks are not known: ${o.figures_error}`);
  const tile = (label, value, unit, points) => {
    const most = Math.max(0, ...points.filter((p) => p !== null && Number.isFinite(p)));
    return h("div", { class: "tile" }, h("div", { class: "label" }, label),
      h("div", { class: "value" }, value, " ", h("small", {}, unit)),
      spark(points, `${label}: ${value} ${unit}; at most ${rate(most)} in two minutes`));
  };
  const rates = [["Scheduled", "scheduled"], ["Fired", "fired"], ["Delivered", "delivered"], ["Acked", "acked"]]
    .filter(([, name]) => leads || o.counters[name] !== null)
    .map(([label, name]) => tile(label, rate(series[name].at(-1)), "per second", series[name]));
  const lateness = [["Firing late", "fired"], ["Delivery late", "delivered"]].filter(() => leads).map(([label, name]) => {
    const points = series[`${name}_ms`], found = [...points].reverse().find((p) => p !== null);
    const value = found === undefined ? "–" : found === Infinity ? "> 5 min" : `≤ ${duration(found)}`;
    return tile(label, value, "p99", points);
  });
  show("rates", rates, lateness);
}

/* ---- polling */

let waits = POLL_MS, timer = 0, polling = false, polled;
const firstPoll = new Promise((resolve) => { polled = resolve; });

async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" }, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
  const body = await answer.json().catch(() => ({ detail: `status ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(body.detail || `status ${answer.status}`), { reason: body.reason });
  return body;
}

function draw(o) {
  measure(o);
  for (const part of [drawState, drawNodes, drawRates, drawPending, drawCheckpoint, drawLags, drawChanges]) part(o);
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden || polling) return;
  polling = true;
  try {
    const o = await get("/v1/overview");
    draw(o);
    waits = o.pending.counts && !asking(o) ? POLL_MS : POLL_MS / 4;
    document.body.classList.remove("stale");
  } catch (error) {
    waits = Math.min(POLL_MS_MAX, Math.max(POLL_MS, waits) * 2);
    const state = $("state"), text = `This node does not answer (${error.message}). The figures are old.`;
    if (state.textContent !== text) state.textContent = text;
    state.className = "state bad";
    document.body.classList.add("stale");
  } finally {
    polling = false;
    polled();
    timer = setTimeout(poll, waits);
  }
}

document.addEventListener("visibilitychange", () => { waits = POLL_MS; poll(); });

/* ---- topics */

function topicLink(name) {
  return h("a", { href: `#topics=${encodeURIComponent(name)}` }, name);
}

let pages = [""];  /* the names after which the pages so far begin */

const searches = { topics: 0, timer: 0 };  /* numbers of the last ones: answers of earlier ones are not drawn */

async function findTopics() {
  const prefix = $("topics-form").elements.prefix.value, after = pages.at(-1), number = ++searches.topics;
  try {
    const found = await get(`/v1/topics?${new URLSearchParams({ prefix, after })}`);
    if (number === searches.topics) drawTopics(found);
  } catch (error) {
    if (number !== searches.topics) return;
    show("topics-note");
    show("topics", h("div", { class: "result" }, note(failure(error), "bad")));
  }
}

function groupLine(g) {
  const parts = [`${count(g.unacked)} unacked`];
  if (g.leased) parts.push(`${count(g.leased)} leased`);
  if (g.consumers !== null) parts.push(`${count(g.consumers)} ${g.consumers === 1 ? "consumer" : "consumers"}`);
  if (g.unacked_ms) parts.push(`oldest ${duration(g.unacked_ms)}`);
  return h("div", {}, g.name, " ", h("span", { class: "dim" }, `${g.type} · ${parts.join(" · ")}`));
}

function drawTopics(found) {
  const leads = found.topics.every((t) => t.lag_ms !== null);
  const columns = [
    { label: "Topic", cls: "name" }, { label: "Pending", num: true, cls: leads ? "" : "wide" }, { label: "Fired", num: true },
    { label: "Ready", num: true }, leads && { label: "Overdue", num: true }, { label: "Groups", cls: "full" },
  ].filter(Boolean);
  const rows = found.topics.map((t) => [
    [t.name, " ", t.paused ? pill("paused", "warn") : ""], count(t.pending), count(t.fired), count(t.ready), ...(leads ? [duration(t.lag_ms || null)] : []),
    t.groups.length ? h("div", {}, t.groups.map(groupLine),
      t.group_count > t.groups.length ? h("div", { class: "dim" }, `and ${count(t.group_count - t.groups.length)} more`) : "") : "",
  ]);
  const first = pages.length > 1 ? h("button", { type: "button", "data-go": "back" }, "Back") : "";
  const more = found.next_after ? h("button", { type: "button", "data-go": "on", "data-after": found.next_after }, "Next") : "";
  show("topics-note", `${count(found.count)} in all · as of `, time(Date.now()));
  show("topics", h("div", { class: "result" },
    rows.length ? table("Topics", columns, rows, "cards") : note("No topic has such a name."),
    leads ? "" : note("Overdue timers, leases and consumers are known on the leader's page only."),
    first || more ? h("div", { class: "more" }, first, more) : ""));
}

$("topics").addEventListener("click", (event) => {
  const go = event.target.closest("button[data-go]");
  if (!go) return;
  if (go.dataset.go === "on") pages.push(go.dataset.after);
  else pages.pop();
  findTopics();
});

/* ---- one timer */

const sentences = {
  scheduled: (e) => ["Scheduled, for ", time(e.requested_ms, { millis: true })],
  occurrence: (e) => [`Occurrence ${count(e.number)} of series ${e.series}, planned for `, time(e.requested_ms, { millis: true })],
  series_changed: (e) => `Cancelled by a change of series ${e.series}`,
  rescheduled_from: (e) => ["Created by a reschedule", e.other_id ? [" of ", timerLink(e.other_id)] : ""],
  moved_from: (e) => `Created from message ${count(e.queue_offset)} of ${e.topic}${e.group ? `, group ${e.group}` : ""}`,
  cancelled: () => "Cancelled",
  replaced: (e) => ["Replaced by ", e.other_id ? timerLink(e.other_id) : "another timer", " with the same key"],
  rescheduled: (e) => ["Rescheduled: ", e.other_id ? timerLink(e.other_id) : "another timer", " fires instead"],
  fired: (e) => `Fired into ${e.topic}, offset ${count(e.queue_offset)}`,
  nacked: (e) => ["Nacked", inGroup(e), e.until_ms ? [", again after ", time(e.until_ms, { millis: true })] : ""],
  lease_ended: (e) => `Lease ended without an ack${inGroup(e)}`,
  acked: (e) => `Acked${inGroup(e)}`,
  moved: (e) => `Moved to ${e.to_topic}${inGroup(e)}`,
  new_leader: () => "A new leader: messages delivered before may be delivered again",
  recalled: (e) => `Taken back from its consumer${inGroup(e)}`,
  sought: (e) => `Group ${e.group || "of before"} continues at offset ${count(e.queue_offset)}`,
  group_deleted: (e) => `Group ${e.group || "of before"} deleted`,
  topic_deleted: (e) => `Topic ${e.topic} deleted`,
  dropped: () => "Dropped when its topic was resumed",
  expired: (e) => `Expired before it was acked${e.group ? ` in group ${e.group}` : ""}`,
};

const inGroup = (e) => (e.group ? ` by group ${e.group}` : "");

function timerLink(id) {
  return h("a", { class: "mono", href: `#timer=${id}` }, id);
}

function storyEvent(e) {
  const sentence = sentences[e.what] || (() => e.what);
  const meta = [time(e.time_ms, { millis: true }), ` · entry ${count(e.index)} · epoch ${count(e.epoch)}`];
  if (e.attempt) meta.push(` · attempt ${e.attempt} failed`);
  if (e.producer) meta.push(` · producer ${e.producer}, sequence ${e.sequence}`);
  if (e.request_id) meta.push(` · request ${e.request_id}`);
  return h("li", {}, h("div", { class: "text" }, sentence(e)), h("div", { class: "meta" }, meta));
}

function drawTimer(t) {
  const colour = { pending: "", fired: "good", cancelled: "warn", dropped: "warn", unknown: "" };
  const state = t.state === "unknown" ? "unknown, or no longer known" : t.held ? "pending, held by a pause" : t.state;
  const fields = [
    ["Id", h("span", { class: "mono" }, t.timer_id)], ["State", pill(state, colour[t.state])],
    ["Topic", t.topic || (t.story.events.find((e) => e.topic) || {}).topic], ["Key", t.key], ["Due", time(t.due_ms, { millis: true })],
    ["Requested", t.requested_ms && t.requested_ms !== t.due_ms ? time(t.requested_ms, { millis: true }) : ""],
    ["Payload", t.payload_bytes === null ? "" : bytes(t.payload_bytes)],
    ["Goes on as", t.successor_id ? timerLink(t.successor_id) : ""],
  ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const events = t.story.events.map(storyEvent);
  show("timer-note", "as of ", time(Date.now()));
  show("timer", h("div", { class: "result" },
    h("dl", {}, fields.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    events.length ? h("ol", { class: "story", "aria-label": "Story" }, events) : note("The log holds no event of this timer."),
    t.story.gaps.map((gap) => note(`Missing: ${gap}`))));
}

async function findTimer(query) {
  const number = ++searches.timer;
  show("timer-note");
  show("timer", h("div", { class: "result" }, note("Reading the log.")));
  try {
    const found = await get(`/v1/timer?${new URLSearchParams(query)}`);
    if (number === searches.timer) drawTimer(found);
  } catch (error) {
    if (number !== searches.timer) return;
    show("timer", h("div", { class: "result" }, note(failure(error), "bad"), 
      error.reason === "NOT_LEADER" ? note("No leader is known at the moment.") : "",
      error.reason === "NOT_FOUND" && query.key ? note("A key finds pending timers only. Look for others by their ids.") : ""));
  }
}

const failure = (error) => (error.name === "TimeoutError" ? "No answer in time." : `${error.message}.`);

/* ---- addresses: #topics=PREFIX, #timer=ID, #timer=TOPIC&key=KEY */

function go(hash) {
  if (location.hash === hash) follow();
  else location.hash = hash;
}

function follow() {
  const query = new URLSearchParams(location.hash.slice(1));
  if (query.has("topics")) {
    $("topics-form").elements.prefix.value = query.get("topics");
    pages = [""];
    reveal("h-topics", findTopics());
  }
  if (!query.has("timer")) return;
  const fields = $("timer-form").elements, named = query.has("key");
  fields.id.value = named ? "" : query.get("timer");
  fields.topic.value = named ? query.get("timer") : "";
  fields.key.value = named ? query.get("key") : "";
  const asked = named ? { topic: fields.topic.value, key: fields.key.value } : { id: fields.id.value };
  reveal("h-timer", findTimer(asked));
}

/* Scroll to a section once its answer is drawn, and the first overview, which moves the section. */
async function reveal(heading, answer) {
  await Promise.all([answer, firstPoll]);
  $(heading).parentElement.scrollIntoView({ block: "nearest" });
}

$("topics-form").addEventListener("submit", (event) => {
  event.preventDefault();
  go(`#${new URLSearchParams({ topics: event.target.elements.prefix.value })}`);
});

$("timer-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const { id, topic, key } = event.target.elements;
  if (id.value.trim()) go(`#${new URLSearchParams({ timer: id.value.trim() })}`);
  else if (topic.value && key.value) go(`#${new URLSearchParams({ timer: topic.value, key: key.value })}`);
  else show("timer", h("div", { class: "result" }, note("Give an id, or a topic and a key.")));
});

window.addEventListener("hashchange", follow);
poll();
follow();
if (!new URLSearchParams(location.hash.slice(1)).has("topics")) findTopics();
