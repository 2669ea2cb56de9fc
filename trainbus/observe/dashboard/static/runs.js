// The list of runs, and the curves of the chosen ones over one another.

import { $, ask, clock, make, show, whole } from "./common.js";
import { Overlay, paint } from "./several.js";

const asked = new URLSearchParams(location.search).has("all");
const FIRST = 8;  // runs that are drawn without a choice
const chosen = new Map();  // by the number of the run: whether the visitor wants its curves
const seen = new Map();  // by the number of the run: the last message that its curves have
const overlay = new Overlay($("charts"), Number($("smoothing").value));

const value = one => one === undefined ? "" : one === null ? "none" : typeof one === "number" ? show(one) : Array.isArray(one) ? one.join(",") : String(one);
const isDrawn = (run, index) => chosen.get(run.number) ?? index < FIRST;

async function look() {
  const { ok, body, error } = await ask("runs.json");
  const runs = ok ? [...body.runs].reverse() : [];
  if (runs.length === 1 && !asked) return location.replace(`runs/${runs[0].number}/`);
  $("notice").hidden = runs.length > 0;
  $("notice").textContent = ok ? "No run has begun yet. This page shows it as soon as it begins." : error;
  $("found").hidden = $("several").hidden = runs.length === 0;
  if (ok && runs.length) {
    list(runs, body.settings);
    await draw(runs.filter(isDrawn));
  }
  setTimeout(look, 2000);
}

function list(runs, settings) {
  const names = Object.keys(settings);
  const ends = names.map(name => name.slice(name.lastIndexOf(".") + 1));
  const head = (text, className = "", title = "") => make("th", { scope: "col", className, title }, text);
  $("heads").replaceChildren(head("run"), head("state"), head("epoch", "number"), head("iteration", "number"),
    ...names.map((name, index) => head(ends.indexOf(ends[index]) === ends.lastIndexOf(ends[index]) ? ends[index] : name, "number", name)), head("began"));
  const focused = document.activeElement?.dataset?.run;
  $("runs").replaceChildren(...runs.map((run, index) => {
    const box = make("input", { type: "checkbox", checked: isDrawn(run, index), ariaLabel: `curves of ${run.name}` });
    box.dataset.run = run.number;
    box.onchange = () => { chosen.set(run.number, box.checked); draw(runs.filter(isDrawn)); };
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = `var(${paint(run.number)})`;
    const row = make("tr", {},
      make("td", {}, box, " ", swatch, make("a", { href: `runs/${run.number}/` }, run.name)),
      make("td", {}, run.state),
      make("td", { className: "number" }, whole(run.epoch)),
      make("td", { className: "number" }, whole(run.iter)),
      ...names.map(name => make("td", { className: "number" }, value(settings[name][run.number]))),
      make("td", {}, run.began ? clock(run.began) : ""));
    row.onpointerenter = () => overlay.highlight(run.number);
    row.onpointerleave = () => overlay.highlight(0);
    box.onfocus = row.onpointerenter;
    box.onblur = row.onpointerleave;
    return row;
  }));
  if (focused) $("runs").querySelector(`[data-run="${focused}"]`)?.focus();
}

async function draw(runs) {
  overlay.show(runs);
  if (!runs.length) return;
  const { ok, body } = await ask(`curves.json?runs=${runs.map(run => `${run.number}:${seen.get(run.number) ?? 0}`).join(",")}`);
  for (const [number, news] of Object.entries(ok ? body : {})) {
    seen.set(Number(number), news.seen);
    overlay.take(Number(number), news.curves);
  }
  overlay.draw();
}

$("smoothing").oninput = () => overlay.smooth(Number($("smoothing").value));
$("log").onchange = () => overlay.logarithmic($("log").checked);
look();
