// Fetches the state once a second and draws it, or shows why it is not available.

import { drawAlerts } from "./alerts.js";
import { drawFigures, drawReasons, drawWorkers } from "./cards.js";
import { drawCharts } from "./charts.js";
import { closeAll, drawDecisions } from "./decisions.js";
import { duration, find, redraw, say, terms } from "./dom.js";
import { drawFlow } from "./flow.js";
import { REASONS } from "./words.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const KEY = "ppd-admin-token";

const root = document.documentElement;
let last = null; // the state shown
let lastAt = null; // when it came
let timer = 0;

async function ask() {
  clearTimeout(timer);
  try {
    await look();
  } finally {
    again();
  }
}

function again() {
  clearTimeout(timer);
  if (!document.hidden && root.dataset.state !== "locked") timer = setTimeout(ask, EVERY_MS);
}

async function look() {
  const token = sessionStorage.getItem(KEY);
  let response, content;
  try {
    response = await fetch("dashboard/state", {
      cache: "no-store",
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    content = response.ok ? await response.json() : await reasonOf(response);
  } catch {
    return trouble("The router cannot be reached.");
  }
  if (response.status === 401) return lock(token !== null);
  if (!response.ok) return trouble(content);
  Object.assign(REASONS, content.reasons);
  last = { ...content, at_s: performance.now() / 1e3 };
  lastAt = new Date();
  show("live");
}

async function reasonOf(response) {
  try {
    return `The router answers ${response.status}: ${(await response.json()).error.message}.`;
  } catch {
    return `The router answers ${response.status}.`;
  }
}

function show(state) {
  root.dataset.state = state;
  find("#token-form").hidden = state !== "locked";
  find("#notice").hidden = state !== "trouble";
  find("main").hidden = last === null || state === "locked";
  say(find("#link-text"), { live: "live", trouble: "no state", locked: "locked" }[state]);
  if (state === "live") draw();
}

function trouble(why) {
  const seen = lastAt ? ` What is shown is from ${lastAt.toLocaleTimeString()}.` : "";
  say(find("#notice"), `${why} Trying again every second.${seen}`);
  show("trouble");
}

function lock(refused) {
  sessionStorage.removeItem(KEY);
  say(find("#token-problem"), refused ? "The router refused that token." : "");
  show("locked");
  find("#token").focus();
}

function draw() {
  const facts = [
    ["policy", last.policy],
    ["table", last.table],
    ["model", last.models.join(", ")],
    ["version", last.version],
    ["up", duration(Math.floor(last.up_s))],
  ];
  redraw(find("#facts"), facts, () => terms(facts));
  drawAlerts(last);
  drawFigures(last);
  drawFlow(last);
  drawReasons(last);
  drawWorkers(last);
  drawCharts(last);
  drawDecisions(last);
}

find("#token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("#token").value);
  find("#token").value = "";
  ask();
});
find("#resume").addEventListener("click", () => {
  closeAll();
  drawDecisions(last);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && root.dataset.state !== "locked") ask();
});
// In the next frame: drawing changes the size that is observed.
new ResizeObserver(() => requestAnimationFrame(() => {
  if (root.dataset.state !== "live") return;
  drawFlow(last);
  drawCharts(last);
})).observe(find("main"));
ask();
