import { $, ask, clock, duration, listen, make, show, size, whole } from "./common.js";
import { Charts } from "./charts.js";

const run = { state: "connecting", over: false, iter: 0, epoch: 0, refusals: {}, began: 0, ended: 0, changes: "nobody", may: false };
const charts = new Charts($("charts"), Number($("smoothing").value));

// ---------------------------------------------------------------------------------------------------- what happens

const received = {
  hello({ name, work_dir, began, state, refusals, lr }) {
    Object.assign(run, { began, state, refusals });
    document.title = `${name} · trainbus`;
    $("name").textContent = name;
    $("place").textContent = work_dir;
    if (lr) run.lr = lr;
  },
  progress(limits) { Object.assign(run, limits); },
  scalars({ iter, epoch, time, values, at, width }) {
    charts.add(iter, values, at, width);
    run.iter = Math.max(run.iter, iter.at(-1));
    run.epoch = epoch.at(-1);
    speed(iter.at(-1), time.at(-1));
    if (values.lr?.at(-1)) run.lr = values.lr.at(-1);
    for (const [name, column] of Object.entries(values)) {
      const bad = column.findIndex(value => value === null);
      if (bad < 0 || name !== "loss" || run.bad) continue;
      const place = at.loss ? at.loss[bad] : bad;
      run.bad = true;
      note(time[place], iter[place], "the loss is not a finite number", "bad");
    }
  },
  validation: ({ time, iter, metrics }) => evaluated("val", "validation", time, iter, metrics),
  test: ({ time, iter, metrics }) => evaluated("test", "test", time, iter, metrics),
  checkpoint({ time, iter, names, bytes }) {
    if (bytes || !run.saved) run.saved = names[0];
    const more = names[0] !== run.saved;  // further names of the file that was written last
    note(time, iter, more ? `checkpoint ${run.saved} is also called ${names.join(", ")}` : `checkpoint ${names.join(", ")} is on disk`);
  },
  files: showFiles,
  checkpoint_failed: ({ time, iter, names, reason }) => note(time, iter, `checkpoint ${names.join(", ")} failed: ${reason}`, "bad"),
  checkpoint_skipped: ({ time, iter, names, reason }) => note(time, iter, `checkpoint ${names.join(", ")} was skipped: ${reason}`),
  resume: ({ time, iter, path }) => note(time, iter, `resumes from ${path}`),
  lr({ time, iter, lr }) { run.lr = lr; note(time, iter, `the learning rate is ${show(lr)} now`); },
  asked: ({ time, iter, what }) => note(time, iter, `${what} was asked for`),
  state({ time, iter, state, over: ended, reason }) {
    Object.assign(run, { state, over: ended });
    if (ended) run.ended = time;
    note(time, iter, `${state === "running" ? "the run goes on" : state}${reason ? `: ${reason}` : ""}`, state === "failed" ? "bad" : "");
  },
  costs(costs) { if (costs.lr) run.lr = costs.lr; showCosts(costs); },
};

function evaluated(stage, what, time, iter, metrics) {
  charts.addMetrics(stage, iter, metrics);
  note(time, iter, `${what}: ${Object.entries(metrics).map(([name, value]) => `${name} ${show(value)}`).join(", ")}`);
}

listen("events", (kind, data) => {
  received[kind]?.(data);
  due();
  return run.over ? "last" : "";
}, (status, error) => {
  run.lost = status === "connected" ? "" : status;
  notice(status === "refused" ? error : status === "lost" && !run.over ? "The connection is lost; trying again. Has the program ended?" : "");
  if (status === "connected") learnAccess();
  due();
});

async function learnAccess() {
  const { ok, body } = await ask("../../runs.json");
  if (ok) Object.assign(run, { changes: body.changes, may: body.may_change });
  due();
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function note(time, iter, text, className = "") {
  const line = make("li", {}, make("time", {}, clock(time)), make("span", { className: "at" }, iter ? whole(iter) : ""), make("span", { className }, text));
  $("events").prepend(line);
  if ($("events").childElementCount > 500) $("events").lastChild.remove();
}


const pace = [];
function speed(iter, time) {
  pace.push([iter, time]);
  while (pace.length > 2 && time - pace[0][1] > 10) pace.shift();
}

// ------------------------------------------------------------------------------------------------------ what is shown

let waits = false;
function due() {
  if (waits) return;
  waits = true;
  setTimeout(() => { waits = false; draw(); }, 200);
}

function draw() {
  const state = run.over ? run.state : run.lost ? "connection lost" : run.state;
  $("state").textContent = state;
  $("state").className = `state ${run.lost && !run.over ? "lost" : run.state}`;
  const of = (done, most) => [whole(done), ...(most ? [make("small", {}, ` / ${whole(most)}`)] : [])];
  $("epoch").replaceChildren(...of(run.epoch, run.max_epochs));
  $("iter").replaceChildren(...of(run.iter, run.max_iters));
  $("loss").textContent = show(charts.latest("loss"));
  $("rate").textContent = show(run.lr);
  const [first, last] = [pace[0], pace.at(-1)];
  const moves = pace.length > 1 && last[1] > first[1] && run.state === "running";
  $("speed").textContent = moves ? show((last[0] - first[0]) / (last[1] - first[1])) : "–";
  if (run.began) $("time").textContent = duration((run.ended || Date.now() / 1000) - run.began);
  drawControls();
  charts.draw();
}

function drawControls() {
  if (!run.typed && run.lr) $("new-rate").value = Number(run.lr.toPrecision(3));
  const paused = run.state === "paused" || run.state === "pausing";
  if (run.over) disarm();
  $("pause").textContent = run.state === "pausing" ? "Pausing … (resume)" : paused ? "Resume" : "Pause";
  const able = !run.over && !run.lost && run.may && run.state !== "connecting";
  for (const [id, command] of Object.entries({ pause: "pause", checkpoint: "checkpoint", stop: "stop", set: "lr" })) {
    $(id).disabled = !able || command in run.refusals || (run.state === "stopping" && command !== "checkpoint");
    $(id).title = run.refusals[command] ?? "";
  }
  $("new-rate").disabled = $("set").disabled;
  const refused = Object.entries(run.refusals).map(([name, why]) => `${labels[name]}: ${why}.`);
  $("why").textContent = run.over ? "The run has ended."
    : !run.may && run.changes === "nobody" ? "This dashboard only shows the run."
    : !run.may && run.changes === "application" ? "You are not allowed to change the run."
    : !run.may && run.state !== "connecting" ? "To control the run, open the address that was logged at its start: it contains the token."
    : ["Takes effect at the next safe mount point, after the iteration under way.", ...new Set(refused)].join(" ");
}
const labels = { pause: "Pause", resume: "Resume", stop: "Stop", checkpoint: "Checkpoint now", lr: "Learning rate" };

const COLOURS = 8;
function showCosts(costs) {
  $("no-costs").hidden = true;
  $("measured").hidden = false;
  const name = part => part.mount_point && !part.name.endsWith(part.mount_point) ? `${part.name} (${part.mount_point})` : part.name;
  const paint = index => `var(--series-${Math.min(index, COLOURS - 1) + 1})`;
  const swatch = index => { const one = make("span", { className: "swatch" }); one.style.background = paint(index); return one; };
  const thin = costs.parts.filter(part => part.share < 0.004), others = thin.reduce((sum, part) => sum + part.share, 0);
  const pieces = costs.parts.filter(part => part.share >= 0.004).map(part => [name(part), part.share]);
  if (thin.length) pieces.push([`${thin.length} others`, others]);
  $("bar").replaceChildren(...pieces.map(([label, share], index) => {
    const piece = make("span", { title: `${label}: ${percent(share)}` });
    piece.style.width = `${100 * share}%`;
    piece.style.background = paint(index);
    return piece;
  }));
  $("bar").setAttribute("aria-label", costs.parts.slice(0, 5).map(part => `${name(part)} ${percent(part.share)}`).join(", "));
  $("steps").textContent = [
    `Step: median ${duration(costs.steps.p50)}, p90 ${duration(costs.steps.p90)}, p99 ${duration(costs.steps.p99)}`,
    `${duration(costs.wall)} measured`,
    ...(costs.memory ? [`memory ${size(costs.memory)}`] : []),
    ...costs.growth.map(one => `${one.name} ${one.bytes < 0 ? "shrank" : "grew"} by ${size(Math.abs(one.bytes))} in ${duration(one.seconds)}`),
    ...(costs.dropped ? [`${whole(costs.dropped)} spans were lost`] : []),
  ].join(" · ");
  const cell = (text, className = "number") => make("td", { className }, text);
  $("parts").replaceChildren(...costs.parts.slice(0, 15).map((part, index) => make("tr", {},
    make("td", {}, swatch(index), name(part)), cell(percent(part.share)), cell(part.seconds.toFixed(2)), cell(part.calls ? whole(part.calls) : ""),
    cell(part.calls ? duration(part.seconds / part.calls) : ""), cell(part.calls ? duration(part.p99) : ""))));
  $("lanes").hidden = costs.lanes.length === 0;
  const bad = number => cell(whole(number), number ? "number bad" : "number");
  $("lane-rows").replaceChildren(...costs.lanes.map(lane => make("tr", {},
    make("td", {}, lane.name), cell(whole(lane.delivered)), cell(whole(lane.pending)), cell(lane.depth_max ? whole(lane.depth_max) : ""),
    cell(lane.age_mean ? duration(lane.age_mean) : ""), cell(lane.seconds ? lane.seconds.toFixed(2) : ""),
    cell(lane.waited ? duration(lane.waited) : "", lane.waited ? "number bad" : "number"), bad(lane.dropped), bad(lane.failed))));
  if (costs.ranks) showRanks(costs.ranks, cell);
}

function showRanks(ranks, cell) {
  $("ranks").hidden = false;
  const slow = ranks.straggler;
  const at = slow && `${slow.group === "hand-off" ? "handing over to " : ""}${slow.name}`;
  $("straggler").textContent = [
    slow ? `The other ranks wait ${percent(slow.waited / ranks.seconds)} of the time for rank ${slow.rank} (${slow.host}): ` +
      `${at} takes ${duration(slow.seconds)} an iteration there, ${duration(slow.others)} on the others.` : "No rank holds up the others.",
    ...(ranks.missing.length ? [`Not measured: rank ${ranks.missing.join(", ")}.`] : []),
  ].join(" ");
  $("straggler").className = slow ? "bad" : "soft";
  $("rank-rows").replaceChildren(...ranks.times.map(one => make("tr", {},
    make("td", {}, one.name), cell(duration(one.min)), cell(duration(one.median)), cell(duration(one.max)), make("td", {}, `rank ${one.rank} (${one.host})`))));
}

const percent = share => `${(100 * share).toFixed(1)} %`;

function showFiles({ files, written, stall }) {
  $("checkpoints").hidden = false;
  $("saved").textContent = `${whole(written)} written; training waited ${duration(stall)} for them in all. Newest first, without removed files.`;
  $("files").replaceChildren(...files.reverse().map(one => make("tr", {},
    make("td", {}, one.names.join(", ")), ...[whole(one.iter), ...(one.bytes ? [size(one.bytes), duration(one.stall), duration(one.seconds)] : ["", "", ""])].map(text => make("td", { className: "number" }, text)))));
}

// ---------------------------------------------------------------------------------------------------- what is asked for

async function command(name, body) {
  const { ok, error } = await ask(name, { method: "POST", body: body && JSON.stringify(body) });
  if (!ok) note(Date.now() / 1000, run.iter, `${labels[name]}: ${error}`, "bad");
}

let armed = 0;
function disarm() {
  clearTimeout(armed);
  armed = 0;
  $("stop").textContent = "Stop";
}
$("pause").onclick = () => command($("pause").textContent === "Pause" ? "pause" : "resume");
$("checkpoint").onclick = () => command("checkpoint");
$("stop").onclick = () => {
  if (armed) { disarm(); command("stop"); return; }
  $("stop").textContent = "Really stop?";
  armed = setTimeout(disarm, 4000);
};
$("lr").onsubmit = event => {
  event.preventDefault();
  command("lr", { lr: Number($("new-rate").value) });
  run.typed = false;  // the box follows the run's rate again
};
$("new-rate").oninput = () => { run.typed = true; };
$("smoothing").oninput = () => charts.smooth(Number($("smoothing").value));
$("log").onchange = () => charts.logarithmic($("log").checked);
setInterval(() => run.over || due(), 1000);
