// Draws TTFT by turn and route: p50 as a line, up to p90 as a band, on one logarithmic scale.

import { age, count, duration, el, find, ms, redraw, say, svg } from "./dom.js";

const TURNS = [[1, "Turn 1"], [2, "Turn 2"], [3, "Turn 3 and later"]];
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [132, 44, 8, 8, 20];

export function drawCharts(state) {
  const { step_s: step, points, groups } = state.ttft;
  const window = duration(state.window.covers_s);
  say(find("#ttft-over"), `p50 and p90 in ms, logarithmic; last ${window}, by ${duration(step)}`);
  const box = find("#ttft .charts");
  const scale = scaleOf(groups);
  redraw(box, [box.clientWidth, step, groups], () =>
    TURNS.map(([turn, name]) => {
      const own = groups.filter((group) => group.turn === turn);
      const columns = box.clientWidth > 670 ? TURNS.length : 1;
      const width = Math.max(200, (box.clientWidth - 16 * (columns - 1)) / columns);
      return el(
        "figure",
        {},
        el("figcaption", {}, name),
        own.length
          ? drawn(own, width, scale, points, step)
          : el("p", { class: "empty" }, "none streamed yet"),
        own.length ? numbers(own) : null,
      );
    }),
  );
}

// Return the scale's bounds: the 1 or 3 of a decade below the minimum and above the maximum.
function scaleOf(groups) {
  const values = groups.flatMap((g) => g.points.flatMap((p) => [p.p50_ms, p.p90_ms]));
  const known = values.filter((value) => value > 0);
  if (!known.length) return [1, 10];
  const marks = [];
  for (let decade = -2; decade < 7; decade += 1) marks.push(10 ** decade, 3 * 10 ** decade);
  const low = marks.filter((mark) => mark <= Math.min(...known)).at(-1) ?? marks[0];
  const high = marks.find((mark) => mark >= Math.max(...known)) ?? marks.at(-1);
  return marks.filter((mark) => mark >= low && mark <= Math.max(high, 3 * low));
}

function drawn(groups, width, marks, points, step) {
  const [low, high] = [Math.log(marks[0]), Math.log(marks.at(-1))];
  const inner = HEIGHT - TOP - BOTTOM;
  const x = (ago) => LEFT + ((width - LEFT - RIGHT) * (points - 1 - ago)) / (points - 1);
  const y = (value) =>
    TOP + inner * (1 - (Math.log(Math.max(value, marks[0])) - low) / (high - low));
  const line = (ago, kind) =>
    svg("line", { x1: x(ago), x2: x(ago), y1: TOP, y2: TOP + inner, class: kind });
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" },
    svg("title", {}, groups.map(summary).join("; ")),
    marks.map((mark) =>
      svg(
        "g",
        { class: "mark" },
        svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
        svg("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, bare(mark)),
      ),
    ),
    line(points - 1, "edge"),
    svg("text", { x: LEFT, y: HEIGHT - 4, class: "when" }, `${age(step * points)} ago`),
    svg("text", { x: width - RIGHT, y: HEIGHT - 4, class: "when", "text-anchor": "end" }, "now"),
    groups.flatMap((group) => runs(group.points).map((run) => course(group.route, run, x, y))),
  );
}

const bare = (value) => (value < 1 ? String(Number(value.toPrecision(1))) : count(value));

// Split points into parts without a gap of more than two steps.
function runs(points) {
  const parts = [];
  for (const point of points) {
    const last = parts.at(-1);
    if (last && last.at(-1).ago - point.ago <= 2) last.push(point);
    else parts.push([point]);
  }
  return parts;
}

function course(route, run, x, y) {
  const [first] = run;
  if (run.length === 1) {
    const at = x(first.ago);
    return svg(
      "g",
      { class: `course ${route}` },
      svg("line", { x1: at, x2: at, y1: y(first.p50_ms), y2: y(first.p90_ms), class: "whisker" }),
      svg("circle", { cx: at, cy: y(first.p50_ms), r: 2.5 }),
    );
  }
  const path = (list, field) => list.map((p) => `${x(p.ago)} ${y(p[field])}`).join("L");
  const above = path(run, "p90_ms");
  const below = path(run.toReversed(), "p50_ms");
  return svg(
    "g",
    { class: `course ${route}` },
    svg("path", { d: `M${above}L${below}Z`, class: "band" }),
    svg("path", { d: `M${path(run, "p50_ms")}`, class: "p50" }),
  );
}

const summary = (group) =>
  `${group.route}: p50 ${ms(group.p50_ms)} ms, p90 ${ms(group.p90_ms)} ms of ${group.n}`;

function numbers(groups) {
  const head = ["", "p50", "p90", "n"].map((name) => el("th", { scope: "col" }, name));
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, head)),
    el(
      "tbody",
      {},
      groups.map((group) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, el("span", { class: `route ${group.route}` }, group.route)),
          [ms(group.p50_ms), ms(group.p90_ms), count(group.n)].map((text) => el("td", {}, text)),
        ),
      ),
    ),
  );
}
