// Draws the latest decisions, one a row. An open row shows all details and stops updates.

import { age, count, el, find, ms, percent, say, terms } from "./dom.js";
import { HOPS, REASONS } from "./words.js";

const rows = new Map(); // number -> row of a decision
const open = new Set(); // numbers
let latest = null;

export function drawDecisions(state) {
  const restarted = latest !== null && state.up_s < latest.up_s; // it counts from 1 again
  latest = state;
  const body = find("#decisions tbody");
  const shown = state.decisions;
  const byNumber = new Map(shown.map((one) => [one.decided.number, one]));
  if (restarted) {
    rows.clear();
    open.clear();
    body.replaceChildren();
  }
  const newest = Math.max(0, ...rows.keys());
  const fresh = shown.filter((one) => one.decided.number > newest);
  if (open.size === 0 || rows.size === 0) {
    for (const one of fresh.toReversed()) {
      const row = new Row(one);
      rows.set(one.decided.number, row);
      body.prepend(row.line);
    }
    for (const [number, row] of rows) {
      if (byNumber.has(number)) continue;
      row.line.remove();
      rows.delete(number);
    }
  }
  for (const [number, row] of rows) {
    const one = byNumber.get(number);
    if (one) row.update(one);
    else row.growOlder();
  }
  const held = open.size > 0;
  find("#resume").hidden = !held;
  const more = fresh.length === shown.length ? "or more " : "";
  say(find("#resume"), fresh.length ? `held: show ${fresh.length} ${more}newer` : "close");
  find("#no-decisions").hidden = rows.size > 0;
  find("#decisions .scroll").hidden = rows.size === 0;
}

export function closeAll() {
  for (const number of [...open]) rows.get(number)?.toggle();
}

class Row {
  constructor(one) {
    this.number = one.decided.number;
    this.ended = null; // whether the open decision has ended; null: none is open
    this.button = el("button", { "aria-expanded": "false" }, `${this.number}`);
    this.line = el("tr", { "data-number": this.number });
    this.detail = null;
    this.line.addEventListener("click", () => {
      if (!getSelection().isCollapsed) return; // somebody is copying
      this.toggle();
      drawDecisions(latest);
    });
    this.update(one);
  }

  update(one) {
    this.one = one;
    this.decidedAt = latest.at_s - one.age_s;
    const ended = one.finished !== null;
    if (this.ended !== ended) this.fill();
    this.ended = ended;
    this.growOlder();
  }

  growOlder() {
    say(this.line.children[1], age(performance.now() / 1e3 - this.decidedAt));
  }

  fill() {
    const { decided, finished } = this.one;
    const { features } = decided;
    const { route, reason } = finished ?? decided.decision;
    const n = (value) => el("td", { class: "n" }, value === null || value === undefined ? "–" : `${value}`);
    const tokens = (value) => n(value === null || value === undefined ? null : count(value));
    const outcome = finished?.outcome ?? "under way";
    const kind = !finished ? "busy" : outcome === "answered" ? "" : "bad";
    const cells = [
      el("td", {}, this.button),
      n(""),
      el("td", { class: "id" }, features?.session ?? "–"),
      n(features?.turn ?? 1),
      el("td", {}, el("span", { class: `route ${route}` }, route)),
      el("td", {}, reason),
      tokens(features?.context_tokens ?? 0),
      tokens(features?.new_tokens ?? finished?.prompt_tokens),
      tokens(finished?.cached_tokens),
      n(ms(finished?.ttft_ms)),
      n(ms(finished?.tpot_ms)),
      el("td", { class: `outcome ${kind}` }, outcome),
    ];
    const focused = document.activeElement === this.button;
    this.line.replaceChildren(...cells);
    if (focused) this.button.focus();
    if (this.detail) this.showDetail();
  }

  toggle() {
    if (this.detail) {
      this.detail.remove();
      this.detail = null;
      open.delete(this.number);
    } else {
      this.detail = el("tr", { class: "detail" });
      this.line.after(this.detail);
      open.add(this.number);
      this.showDetail();
    }
    this.line.classList.toggle("open", this.detail !== null);
    this.button.setAttribute("aria-expanded", String(this.detail !== null));
  }

  showDetail() {
    const { decided, finished } = this.one;
    this.detail.replaceChildren(
      el("td", { colspan: 12 }, el("div", { class: "parts" },
        part("Decision", decisionOf(decided, finished)),
        part("Features", featuresOf(decided.features)),
        part("Assessment", assessmentOf(decided.decision.assessment)),
        part("Outcome", outcomeOf(finished)))));
  }
}

const part = (name, content) => el("section", {}, el("h3", {}, name), ...content);
const list = (pairs) => el("dl", {}, ...terms(pairs));
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
const remark = (text) => el("p", { class: "hint" }, text);

function decisionOf(decided, finished) {
  const { route, reason } = decided.decision;
  const { objective } = decided;
  const throughput = objective.throughput ? `, throughput ${objective.throughput}` : "";
  const wanted = objective.type === "weights"
    ? `weights TTFT ${objective.ttft}, TPOT ${objective.tpot}${throughput}`
    : `targets TTFT ${objective.ttft_ms ?? "any"} ms, TPOT ${objective.tpot_ms ?? "any"} ms`;
  const became = finished && (finished.route !== route || finished.reason !== reason);
  return [
    list([
      ["route", el("span", { class: `route ${route}` }, route)],
      ["reason", reason],
      ["became", became ? `${finished.route}, ${finished.reason}` : null],
      ["model", decided.model ?? null],
      ["endpoint", decided.endpoint],
      ["tenant", decided.tenant],
      ["wanted", wanted],
    ]),
    remark(sentence(`${REASONS[reason] ?? reason}: ${HOPS[route] ?? route}`)),
    became ? remark(sentence(`it became ${finished.route}: ${REASONS[finished.reason] ?? finished.reason}`)) : null,
  ].filter((node) => node !== null);
}

function featuresOf(features) {
  if (features === null) return [remark("No earlier request is known to begin it.")];
  return [list(Object.entries(features).map(([name, value]) => [
    name,
    typeof value === "number" ? (Number.isInteger(value) ? count(value) : value.toFixed(2)) : value ?? "unknown",
  ]))];
}

function assessmentOf(seen) {
  if (!seen) return [remark("No table was asked, or it does not reach so far.")];
  const { score } = seen;
  const line = (route) => el("tr", { class: (route === "local") === score.prefers_local ? "chosen" : null },
    el("th", { scope: "row" }, el("span", { class: `route ${route}` }, route)),
    el("td", {}, ms(seen[route].ttft_ms)), el("td", {}, `×${seen[route].ttft_tail.toFixed(1)}`),
    el("td", {}, ms(seen[route].tpot_ms)), el("td", {}, `×${seen[route].tpot_tail.toFixed(1)}`),
    el("td", {}, score[route].toFixed(3)));
  const head = ["", "TTFT", "p99", "TPOT", "p99", "score"];
  return [
    el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, line("remote"), line("local"))),
    list([
      ["local saves TTFT", percent(score.ttft_saved)],
      ["local costs TPOT", percent(score.tpot_lost)],
      ["local adds throughput", score.throughput_gained ? percent(score.throughput_gained) : null],
      ["the table prefers", score.prefers_local ? "local" : "remote"],
      ["cell", seen.cell],
    ]),
  ];
}

function outcomeOf(finished) {
  if (!finished) return [remark("It is under way.")];
  const tokens = (value) => (value === null ? null : count(value));
  return [
    list([
      ["outcome", finished.outcome],
      ["prompt_tokens", tokens(finished.prompt_tokens)],
      ["cached_tokens", tokens(finished.cached_tokens)],
      ["completion_tokens", tokens(finished.completion_tokens)],
      ["ttft_ms", finished.ttft_ms === null ? null : finished.ttft_ms.toFixed(1)],
      ["tpot_ms", finished.tpot_ms === null ? null : finished.tpot_ms.toFixed(2)],
      ["used by the policy", finished.observed ? "yes" : "no"],
    ]),
  ];
}
