// Lists what is wrong now, the worst first; an operator reads this panel first.

import { count, el, find, redraw, share } from "./dom.js";

const MAX_FAILED = 0.01; // share of the window's requests
const MAX_KV = 0.95; // share of a worker's KV

export function drawAlerts(state) {
  const found = [...roles(state), ...workers(state), ...traffic(state)];
  found.sort((a, b) => Number(b.bad) - Number(a.bad));
  redraw(find("#alerts"), found, () =>
    found.length
      ? found.map(({ bad, text }) => el("li", { class: bad ? "bad" : "warn" }, text))
      : [el("li", { class: "good" }, "All workers are ready, and no problem is known.")],
  );
}

const bad = (text) => ({ bad: true, text });
const warn = (text) => ({ bad: false, text });

function roles(state) {
  if (state.served.length) {
    return state.served.flatMap(({ name, missing }) =>
      missing.map((role) => bad(`No ${role} worker of ${name} is ready.`)));
  }
  return state.roles
    .filter((role) => !state.workers.some((one) => one.role === role && one.ready))
    .map((role) => bad(`No ${role} worker is ready.`));
}

function workers(state) {
  const offers = state.workers.some((one) => one.local_prefill);
  return state.workers.flatMap((worker) => {
    const name = `${worker.role} ${worker.id}`;
    const { kv_used_tokens: used = 0, kv_total_tokens: total = 0 } = worker.announced ?? {};
    if (!worker.alive) return [bad(`${name} is down: it does not answer probes.`)];
    if (worker.draining) return [warn(`${name} is draining: it gets no new work.`)];
    return [
      worker.breaker_open
        ? bad(`${name} fails requests: its circuit breaker is open, one trial request at a time.`)
        : null,
      worker.role === "decode" && !worker.local_prefill && offers
        ? warn(`${name} offers no local prefill: its later turns are remote.`)
        : null,
      worker.lacks_kv_events
        ? warn(`${name} sends no KV events: evictions are found by refused turns.`)
        : null,
      total && used / total > MAX_KV ? warn(`${name} has used ${share(used, total)} of its KV.`) : null,
    ].filter((one) => one !== null);
  });
}

function traffic(state) {
  const { outcomes } = state.window;
  const { fallbacks } = state;
  const ended = Object.values(outcomes).reduce((a, b) => a + b, 0);
  const failed = ended - (outcomes.answered ?? 0);
  const decode = state.workers.filter((one) => one.role === "decode");
  return [
    ended && failed / ended > MAX_FAILED
      ? bad(`${share(failed, ended)} of ${count(ended)} requests had no complete answer.`)
      : null,
    fallbacks.decode_fallback
      ? bad("Decode workers prefill whole prompts, for want of a prefill worker.")
      : null,
    fallbacks.not_shared
      ? warn(`The shared store fails: ${state.store_problems.join(", ")}. Turns of other routers may be remote.`)
      : null,
    state.waiting ? warn(`${count(state.waiting)} requests wait for admission.`) : null,
    fallbacks.unpatched_workers && decode.length && !decode.some((one) => one.local_prefill)
      ? warn("No decode worker offers local prefill: all turns are remote.")
      : null,
    fallbacks.no_table
      ? warn(
          state.served.length
            ? `${count(fallbacks.no_table)} of ${count(state.served.length)} models have no measured decision table: a threshold decides.`
            : state.table === null
            ? "There is no decision table for the model: a threshold decides."
            : "No cell of the decision table was measured: a threshold decides.",
        )
      : null,
  ].filter((one) => one !== null);
}
