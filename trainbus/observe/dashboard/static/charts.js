// Curves of scalars: one chart for each name, with validations and tests of the same name in it.

import { make, show, whole } from "./common.js";

const MOST = 8000;  // points of a curve; beyond, its bins become wider
const HEIGHT = 210;
const LAST = ["lr", "momentum", "time", "data_time", "eta", "epoch"];  // of less interest, below the others
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Curve {
  constructor() { this.x = []; this.y = []; this.width = 1; }
  add(x, y) {
    if (this.x.length && x <= this.x.at(-1)) return;
    this.x.push(x);
    this.y.push(y);
    while (this.x.length > MOST) this.thin(2 * this.width);
  }
  /** Thin what has come, by bins of at least this width. All of the curve has the same: else its look would change. */
  thin(width) {
    this.width = Math.max(this.width, width);
    if (this.width > 1) [this.x, this.y] = thin(this.x, this.y, this.width);
  }
}

class Chart {
  constructor(name, owner) {
    this.name = name;
    this.owner = owner;
    this.curves = {};  // by stage
    this.dirty = true;
    this.value = make("span");
    this.at = make("span", { className: "at" });
    this.place = make("div", { className: "plot" });
    this.place.setAttribute("role", "img");
    this.element = make("figure", { className: name === "loss" ? "wide" : "" }, make("figcaption", {}, make("b", {}, name), this.value, this.at), this.place);
  }

  curve(stage) {
    if (!(stage in this.curves)) { this.curves[stage] = new Curve(); this.drop(); }
    this.dirty = true;
    return this.curves[stage];
  }

  drop() { this.plot?.destroy(); this.plot = null; this.dirty = true; }

  data() {
    const log = this.owner.log && Object.values(this.curves).every(curve => curve.y.every(value => value === null || value > 0));
    if (log !== this.isLog) { this.isLog = log; this.drop(); }
    const { train, val, test } = this.curves;
    const tables = [];
    if (train) tables.push(isState(this.name) ? [train.x, train.y] : [train.x, train.y, smoothed(train.y, this.owner.weight)]);
    for (const one of [val, test]) if (one) tables.push([one.x, one.y]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  draw() {
    if (!this.dirty || !this.element.isConnected) return;
    this.dirty = false;
    const data = this.data(), width = this.place.clientWidth;
    if (!width) return;
    if (!this.plot) this.plot = new uPlot(this.options(width), data, this.place);
    else this.plot.setData(data, !this.zoomed);
    const latest = Object.entries(this.curves).map(([stage, curve]) => `${stage === "train" ? "" : `${stage} `}${show(curve.y.at(-1))}`).join(", ");
    this.value.textContent = latest;
    const curve = Object.values(this.curves)[0], finite = curve.y.filter(value => value !== null);
    const range = finite.length ? `, from ${show(finite.reduce((a, b) => Math.min(a, b)))} to ${show(finite.reduce((a, b) => Math.max(a, b)))}` : "";
    this.place.setAttribute("aria-label", `Curve of ${this.name} up to iteration ${whole(curve.x.at(-1))}: ${latest}${range}`);
  }

  options(width) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const dot = colour => ({ show: true, size: 6, fill: colour, stroke: colour });
    const series = [{}];
    if (this.curves.train && isState(this.name)) {
      series.push({ label: "train", stroke: css("--series-1"), width: 2, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
    } else if (this.curves.train) {
      series.push({ label: "train", stroke: `${css("--series-1")}55`, width: 1, points: { show: false } });
      series.push({ label: "smoothed", stroke: css("--series-1"), width: 2, points: { show: false } });
    }
    for (const [stage, colour] of [["val", "--series-2"], ["test", "--series-4"]]) {
      if (this.curves[stage]) series.push({ label: stage, stroke: css(colour), width: 2, points: dot(css(colour)) });
    }
    return {
      width, height: HEIGHT, series, legend: { show: false }, cursor: { y: false, points: { size: 7 } },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [{ ...axis, size: 32, values: (_, splits) => splits.map(value => whole(value)) }, { ...axis, size: 64, values: (_, splits) => splits.map(value => value === null ? "" : show(value)) }],
      hooks: {
        setCursor: [plot => this.showValues(plot)],
        setSelect: [() => { this.zoomed = true; }],
        ready: [plot => plot.over.addEventListener("dblclick", () => { this.zoomed = false; this.dirty = true; })],
      },
    };
  }

  showValues(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) { this.at.textContent = ""; return; }
    const values = plot.series.slice(1).map((series, place) => [series.label, plot.data[place + 1][index]]).filter(([, value]) => value !== null && value !== undefined);
    this.at.textContent = `at ${whole(plot.data[0][index])}: ${values.map(([label, value]) => `${label} ${show(value)}`).join(", ")}`;
  }
}

export class Charts {
  constructor(place, weight) {
    this.place = place;
    this.weight = weight;
    this.log = false;
    this.charts = new Map();
    new ResizeObserver(() => this.each(chart => { if (chart.plot && chart.place.clientWidth) chart.plot.setSize({ width: chart.place.clientWidth, height: HEIGHT }); })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.each(chart => chart.drop()); this.draw(); });
  }

  each(act) { for (const chart of this.charts.values()) act(chart); }

  chart(name) {
    if (!this.charts.has(name)) {
      const chart = new Chart(name, this);
      this.charts.set(name, chart);
    }
    return this.charts.get(name);
  }

  /** Show losses first, then what was validated, and times last. */
  sort() {
    const rank = chart => chart.name.startsWith("loss") ? 0 : LAST.includes(chart.name) ? 3 : chart.curves.val || chart.curves.test ? 1 : 2;
    const sorted = [...this.charts.values()].sort((a, b) => rank(a) - rank(b)).map(chart => chart.element);
    if (sorted.some((element, index) => element !== this.place.children[index])) this.place.replaceChildren(...sorted);
  }

  /** Add columns of values; `at` has the places of a column that has gaps. */
  add(iterations, values, at, width) {
    for (const [name, column] of Object.entries(values)) {
      const [stage, common] = stageAndName(name, "train"), curve = this.chart(common).curve(stage), places = at[name];
      column.forEach((value, index) => curve.add(iterations[places ? places[index] : index], value));
      curve.thin(width);
    }
  }

  addMetrics(stage, iteration, values) {
    for (const [name, value] of Object.entries(values)) {
      const [own, common] = stageAndName(name, stage);
      this.chart(common).curve(own).add(iteration, value);
    }
  }

  /** Return the last smoothed value of a training scalar. */
  latest(name) {
    const curve = this.charts.get(name)?.curves.train;
    return curve ? smoothed(curve.y.slice(-200), this.weight).at(-1) : undefined;
  }

  smooth(weight) { this.weight = weight; this.each(chart => { chart.dirty = true; }); this.draw(); }
  logarithmic(on) { this.log = on; this.each(chart => { chart.dirty = true; }); this.draw(); }

  draw() {
    if (this.charts.size) this.sort();
    this.each(chart => chart.draw());
  }
}
