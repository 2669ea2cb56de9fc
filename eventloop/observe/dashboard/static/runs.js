import { $, ask, clock, make, whole } from "./common.js";

const asked = new URLSearchParams(location.search).has("all");

async function look() {
  const { ok, body, error } = await ask("runs.json");
  const runs = ok ? body.runs : [];
  if (runs.length === 1 && !asked) return location.replace(`runs/${runs[0].number}/`);
  $("notice").hidden = runs.length > 0;
  $("notice").textContent = ok ? "No run has begun yet. This page shows it as soon as it begins." : error;
  $("found").hidden = runs.length === 0;
  if (ok) $("runs").replaceChildren(...runs.reverse().map(run => make("tr", {},
    make("td", {}, make("a", { href: `runs/${run.number}/` }, run.name)),
    make("td", {}, run.state),
    make("td", { className: "number" }, whole(run.epoch)),
    make("td", { className: "number" }, whole(run.iter)),
    make("td", {}, clock(run.began)))));
  setTimeout(look, 2000);
}

look();
