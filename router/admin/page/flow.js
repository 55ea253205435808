// Draws the flow of requests: clients -> prefill -> decode, as wide as each route's share. Below
// are replicas, if any.

import { duration, find, rate, redraw, say, share, short, svg } from "./dom.js";

const HEIGHT = 208;
const [UPPER, LOWER] = [44, 148]; // middles of the two ways
const [TOP, TALL] = [4, 198]; // of the boxes
const BESIDE = { height: 306, lane: 244, top: 214, tall: 88 }; // of a hybrid's replicas
const WIDEST = 46;
const TIP = 9;

export function drawFlow(state) {
  const { over_s: over, per_s: perS } = state.rates;
  say(find("#flow-over"), `requests a second, last ${duration(over)}`);
  const box = find("#flow .drawing");
  const width = Math.max(640, box.clientWidth); // a narrower page scales the drawing down
  const total = Object.values(perS).reduce((a, b) => a + b, 0);
  const names = new Set([...state.roles, ...state.workers.map((worker) => worker.role)]);
  const roles = Object.fromEntries(
    [...names].map((role) => [role, of(state.workers.filter((w) => w.role === role))]),
  );
  const hybrid = "replica" in roles && "decode" in roles;
  const height = hybrid ? BESIDE.height : HEIGHT;
  redraw(box, [width, perS, roles], () => [
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img" },
      svg("title", {}, `remote ${rate(perS.remote)}, local ${rate(perS.local)}, ` +
        `replica ${rate(perS.replica)} requests a second`),
      "decode" in roles ? apart(width, perS, total, roles) : alone(width, perS, total, roles),
      hybrid ? beside(width, perS, total, roles) : [],
    ),
  ]);
}

function of(workers) {
  const sum = (field) => workers.reduce((all, one) => all + one[field], 0);
  return {
    count: workers.length,
    ready: workers.filter((one) => one.ready).length,
    inFlight: sum("in_flight"),
    backlog: sum("backlog_tokens"),
  };
}

function apart(width, perS, total, roles) {
  const side = Math.min(150, width * 0.2);
  const [middle, half] = [width * 0.5, side / 2];
  const from = side + 3;
  const to = width - side - 3;
  return [
    way("remote", from, middle - half - 3, UPPER, perS.remote, total),
    way("remote", middle + half + 3, to, UPPER, perS.remote, total, "KV transfer"),
    way("local", from, to, LOWER, perS.local, total),
    clients(side, total, "replica" in roles ? BESIDE.height - 2 * TOP : TALL),
    node("prefill", middle - half, TOP, side, 80, roles.prefill, "to prefill"),
    node("decode", width - side, TOP, side, TALL, roles.decode, "reserved"),
  ];
}

function beside(width, perS, total, roles) {
  const side = Math.min(150, width * 0.2);
  const { lane, top, tall } = BESIDE;
  return [
    way("replica", side + 3, width - side - 3, lane, perS.replica, total),
    node("replica", width - side, top, side, tall, roles.replica, "to prefill"),
  ];
}

function alone(width, perS, total, roles) {
  const side = Math.min(150, width * 0.2);
  return [
    way("replica", side + 3, width - side - 3, 90, perS.replica, total),
    clients(side, total, TALL),
    node("replica", width - side, TOP, side, TALL, roles.replica, "to prefill"),
  ];
}

function clients(side, total, height) {
  return svg(
    "g",
    { class: "node" },
    svg("rect", { x: 0.5, y: TOP, width: side - 1, height, rx: 4 }),
    text(12, TOP + 22, "clients", "name"),
    text(12, TOP + 46, `${rate(total)} /s`, "value"),
  );
}

function node(name, x, y, width, height, workers, backlog) {
  const state = workers.ready === workers.count ? "" : workers.ready ? "some" : "none";
  return svg(
    "g",
    { class: `node ${state}` },
    svg("rect", { x: x + 0.5, y, width: width - 1, height, rx: 4 }),
    text(x + 12, y + 22, name, "name"),
    text(x + width - 12, y + 22, `${workers.ready}/${workers.count}`, "ready", "end"),
    text(x + 12, y + 44, `${workers.inFlight} in flight`),
    text(x + 12, y + 62, `${short(workers.backlog)} tok ${backlog}`),
  );
}

// Draw one hop: an arrow as thick as its route's share, or a dashed line without requests.
function way(route, x0, x1, y, perS, total, label = null) {
  const part = total ? perS / total : 0;
  const half = Math.max(1.5, (WIDEST * part) / 2);
  const tip = Math.max(half, 5);
  const arrow =
    `M${x0} ${y - half}H${x1 - TIP}V${y - tip}L${x1} ${y}L${x1 - TIP} ${y + tip}` +
    `V${y + half}H${x0}Z`;
  const caption = label ?? `${route}  ${rate(perS)} /s  ${share(perS, total)}`;
  return svg(
    "g",
    { class: `way ${route}${perS ? "" : " idle"}` },
    perS
      ? svg("path", { d: arrow })
      : svg("line", { x1: x0, x2: x1, y1: y, y2: y }),
    text((x0 + x1) / 2, y + WIDEST / 2 + 18, caption, label ? "" : "caption", "middle"),
  );
}

function text(x, y, content, kind = "", anchor = "start") {
  return svg("text", { x, y, class: kind, "text-anchor": anchor }, content);
}
