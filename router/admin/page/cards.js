// Draws the figures at the top, the workers, the reasons and outcomes.

import { age, bytes, count, duration, el, find, ms, rate, redraw, say, share, short, terms } from "./dom.js";
import { HOPS, REASONS } from "./words.js";

export function drawFigures(state) {
  const { window, rates, ttft } = state;
  const later = window.turns.filter((one) => one.turn > 1);
  const sum = (list) => list.reduce((all, one) => all + one.count, 0);
  const local = sum(later.filter((one) => one.route === "local"));
  const ended = Object.values(window.outcomes).reduce((a, b) => a + b, 0);
  const failed = ended - (window.outcomes.answered ?? 0);
  const whole = `last ${duration(window.covers_s)}`;
  const perS = Object.values(rates.per_s).reduce((a, b) => a + b, 0);
  const figures = [
    ["requests", rate(perS), `a second, last ${duration(rates.over_s)}`],
    ["in progress", count(window.under_way), `now; ${count(state.waiting)} wait for admission`],
    ["local turns", share(local, sum(later)), `of ${count(sum(later))} later turns`],
    ["cached prompts", share(window.cached_tokens, window.prompt_tokens),
      `of ${short(window.prompt_tokens)} tokens`],
    ["failed", count(failed), `of ${count(ended)} ended, ${whole}`, failed > 0],
    ["transfer avoided", bytes(state.kv_bytes_avoided), "of KV, since the start"],
    ["sessions", count(state.known_turns), "turns in the index"],
  ];
  redraw(find("#figures"), figures, () =>
    figures.map(([name, value, more, bad]) =>
      el("div", { class: bad ? "bad" : null }, el("dt", {}, name),
        el("dd", {}, el("strong", {}, value), el("small", {}, more)))),
  );
}

export function drawWorkers(state) {
  const { workers } = state;
  const ready = workers.filter((worker) => worker.ready).length;
  say(find("#workers-count"), `${ready} of ${workers.length} ready`);
  // The age of the last report is rounded: one redraw a second is enough.
  const shown = workers.map((one) => ({ ...one, announced_ago_s: Math.round(one.announced_ago_s ?? -1) }));
  redraw(find("#workers .cards"), shown, () =>
    workers.length
      ? workers.map(card)
      : [el("p", { class: "empty" }, "No workers. They are added by PUT /workers, or announce themselves.")],
  );
}

const STATES = {
  down: "it does not answer probes",
  draining: "it gets no new work",
  failing: "it answers probes but fails requests: its circuit breaker is open",
  ready: "it gets work",
};

function card(worker) {
  const state = !worker.alive
    ? "down"
    : worker.draining
      ? "draining"
      : worker.breaker_open
        ? "failing"
        : "ready";
  const announced = worker.announced;
  const decode = worker.role === "decode";
  const running = announced?.running ?? worker.running;
  const total = announced?.kv_total_tokens ?? 0;
  return el(
    "article",
    { class: `card ${state}`, "data-worker": worker.id },
    el("h3", {},
      el("span", { class: "role" }, worker.role),
      el("span", { class: "id", title: worker.url }, worker.id),
      el("span", { class: "pill", title: STATES[state] }, state)),
    el("dl", {}, ...terms(!worker.alive ? [["in flight", count(worker.in_flight)]] : [
      ["model", worker.model || null],
      ["in flight", count(worker.in_flight)],
      [decode ? "reserved" : "to prefill", tokens(worker.backlog_tokens)],
      ["running", decode && running !== null ? count(running) : null],
      ["appends waiting", announced && decode ? `${count(announced.waiting)}, ${tokens(announced.append_tokens)}` : null],
      ["decode step", announced?.decode_step_ms ? `${ms(announced.decode_step_ms)} ms` : null],
      ["KV free", !total && worker.free_tokens !== null ? tokens(worker.free_tokens) : null],
      ["local prefill", decode ? (worker.local_prefill ? "offered" : "not offered") : null,
        { class: worker.local_prefill ? null : "warn" }],
      ["last report", worker.announced_ago_s === null ? null : `${age(worker.announced_ago_s)} ago`],
    ])),
    total && worker.alive ? memory(announced.kv_used_tokens, total) : null,
  );
}

const tokens = (value) => `${short(value)} tok`;

function memory(used, total) {
  const full = used / total;
  return el("p", { class: `memory${full > 0.9 ? " full" : ""}` },
    el("span", {}, "KV"),
    el("meter", { min: 0, max: 1, value: full.toFixed(3) }),
    el("span", {}, `${share(used, total)} of ${short(total)}`));
}

export function drawReasons(state) {
  const { window } = state;
  say(find("#reasons-over"), `of ${count(window.requests)} requests, last ${duration(window.covers_s)}`);
  const byReason = new Map();
  for (const { reason, route, count: n } of window.reasons) {
    if (!byReason.has(reason)) byReason.set(reason, []);
    byReason.get(reason).push([route, n]);
  }
  const sums = [...byReason].map(([reason, routes]) => [
    reason, routes, routes.reduce((all, [, n]) => all + n, 0),
  ]);
  sums.sort((a, b) => b[2] - a[2]);
  const most = Math.max(1, ...sums.map(([, , n]) => n));
  redraw(find("#reasons .bars"), window.reasons, () =>
    sums.length
      ? sums.map(([reason, routes, n]) => bar(reason, routes, n, most, window.requests))
      : [el("p", { class: "empty" }, "No requests yet.")],
  );
  const outcomes = Object.entries(window.outcomes);
  redraw(find("#outcomes"), outcomes, () =>
    outcomes.length
      ? outcomes.map(([name, n]) =>
          el("span", { class: name === "answered" ? "outcome" : "outcome bad" },
            name, " ", el("b", {}, count(n))))
      : [el("span", { class: "empty" }, "none yet")],
  );
}

function bar(reason, routes, n, most, requests) {
  const parts = routes.map(([route, part]) => {
    const piece = el("i", { class: `route ${route}`, title: `${route}: ${HOPS[route] ?? ""}` });
    piece.style.width = `${(100 * part) / most}%`;
    return piece;
  });
  return el("div", { class: "bar", title: REASONS[reason] ?? "" },
    el("span", { class: "reason" }, reason),
    el("span", { class: "track" }, ...parts),
    el("span", { class: "n" }, count(n)),
    el("span", { class: "n" }, share(n, requests)));
}
