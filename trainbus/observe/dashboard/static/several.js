// Curves of several runs over one another: one chart for each name, with training and validation of each run in it.

import { make, show, whole } from "./common.js";

const HEIGHT = 230;
const LAST = ["lr", "momentum", "time", "data_time", "eta", "epoch"];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return the colour of a run, by its number: eight colours, again and again. */
export const paint = number => `--series-${((number - 1) % 8) + 1}`;

class Chart {
  constructor(name, owner) {
    this.name = name;
    this.owner = owner;
    this.at = make("span", { className: "at" });
    this.place = make("div", { className: "plot" });
    this.place.setAttribute("role", "img");
    this.element = make("figure", { className: name === "loss" ? "wide" : "" }, make("figcaption", {}, make("b", {}, name), this.at), this.place);
  }

  drop() { this.plot?.destroy(); this.plot = null; }

  draw() {
    const lines = this.owner.lines(this.name);
    this.element.hidden = lines.length === 0;
    const width = this.place.clientWidth;
    if (!lines.length || !width) return;
    const log = this.owner.log && lines.every(line => line.values.every(value => value === null || value > 0));
    const key = `${log} ${lines.map(line => `${line.run.number}${line.stage}`).join()}`;
    if (key !== this.key) { this.key = key; this.drop(); }
    const tables = lines.map(line => [line.iter, line.stage === "train" && !isState(this.name) ? smoothed(line.values, this.owner.weight) : line.values]);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    if (this.plot) this.plot.setData(data, !this.zoomed);
    else this.plot = new uPlot(this.options(width, lines, log), data, this.place);
    const last = lines.map(line => `${line.label} ${show(line.values.at(-1))}`);
    this.place.setAttribute("aria-label", `Curves of ${this.name}: ${last.slice(0, 20).join(", ")}`);
  }

  options(width, lines, log) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const series = lines.map(line => {
      const colour = css(paint(line.run.number)), dots = line.stage !== "train";
      return {
        label: line.label, run: line.run.number, stroke: colour, width: dots ? 2.5 : 1.5, dash: line.stage === "test" ? [4, 4] : undefined, spanGaps: true,
        points: dots ? { show: true, size: 6, fill: colour, stroke: colour } : { show: false },
        ...(isState(this.name) ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
      };
    });
    return {
      width, height: HEIGHT, series: [{}, ...series], legend: { show: false }, cursor: { y: false, points: { size: 7 } }, focus: { alpha: 0.2 },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...axis, size: 32, values: (_, splits) => splits.map(value => whole(value)) }, { ...axis, size: 64, values: (_, splits) => splits.map(value => value === null ? "" : show(value)) }],
      hooks: {
        setCursor: [plot => this.showValues(plot)],
        setSelect: [() => { this.zoomed = true; }],
        ready: [plot => plot.over.addEventListener("dblclick", () => { this.zoomed = false; this.draw(); })],
      },
    };
  }

  highlight(number) {
    if (!this.plot) return;
    this.plot.series.forEach((series, index) => { if (index) series.alpha = !number || series.run === number ? 1 : 0.15; });
    this.plot.redraw(false);
  }

  showValues(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) { this.at.textContent = ""; return; }
    const values = plot.series.slice(1).map((series, place) => [series.label, plot.data[place + 1][index]]).filter(([, value]) => value !== null && value !== undefined);
    this.at.textContent = `at ${whole(plot.data[0][index])}: ${values.slice(0, 12).map(([label, value]) => `${label} ${show(value)}`).join(", ")}`;
  }
}

export class Overlay {
  constructor(place, weight) {
    this.place = place;
    this.weight = weight;
    this.log = false;
    this.runs = [];  // those that are shown
    this.curves = new Map();  // by the number of the run
    this.charts = new Map();  // by name
    new ResizeObserver(() => this.each(chart => { if (chart.plot && chart.place.clientWidth) chart.plot.setSize({ width: chart.place.clientWidth, height: HEIGHT }); })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.each(chart => chart.drop()); this.draw(); });
  }

  each(act) { for (const chart of this.charts.values()) act(chart); }
  show(runs) { this.runs = runs; this.draw(); }
  take(number, curves) { this.curves.set(number, curves); }
  smooth(weight) { this.weight = weight; this.draw(); }
  logarithmic(on) { this.log = on; this.draw(); }
  highlight(number) { this.each(chart => chart.highlight(number)); }

  /** Return the lines of a chart: training below validation, one run after the other. */
  lines(name) {
    const found = this.runs.flatMap(run => (this.curves.get(run.number) ?? []).filter(curve => curve.name === name)
      .map(curve => ({ ...curve, run, label: curve.stage === "train" ? run.name : `${run.name} ${curve.stage}` })));
    return found.sort((a, b) => (a.stage !== "train") - (b.stage !== "train"));
  }

  draw() {
    const stages = new Map();
    for (const run of this.runs) for (const { name, stage } of this.curves.get(run.number) ?? []) stages.set(name, (stages.get(name) ?? "") + stage);
    for (const name of stages.keys()) if (!this.charts.has(name)) this.charts.set(name, new Chart(name, this));
    const rank = name => name.startsWith("loss") ? 0 : LAST.includes(name) ? 3 : /val|test/.test(stages.get(name)) ? 1 : 2;
    const sorted = [...this.charts.keys()].sort((a, b) => rank(a) - rank(b)).map(name => this.charts.get(name).element);
    if (sorted.length && sorted.some((element, index) => element !== this.place.children[index])) this.place.replaceChildren(...sorted);
    this.each(chart => chart.draw());
  }
}
