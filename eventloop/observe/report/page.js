"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const tools = document.getElementById("tools");
  const charts = [];
  const view = { axis: "iter", smoothing: 0, log: false };
  const several = new Set(data.charts.flatMap((chart) => chart.series.map((one) => one.run))).size > 1;
  const AXES = { iter: "iteration", time: "time", epoch: "epoch" };

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // Numbers
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return size >= 1e5 ? compact.format(value) : plain.format(value);
  };
  const duration = (seconds) => {
    const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, size]) => Math.abs(seconds) >= size) || ["s", 1];
    return `${plain.format(Number((seconds / size).toPrecision(3)))} ${unit}`;
  };
  const unitOfTime = (most) => (most >= 7200 ? ["h", 3600] : most >= 240 ? ["min", 60] : ["s", 1]);

  // Data of a chart in the present view
  const hasAxis = (name) => data.axes.some((axis) => axis[name].some((value) => value !== null));

  const prepared = (chart) => {
    const most = Math.max(...chart.series.flatMap((one) => data.axes[one.axis][view.axis].slice(-1)), 0);
    const [unit, size] = view.axis === "time" ? unitOfTime(most) : ["", 1];
    const positive = chart.series.some((one) => one.values.some((value) => value > 0));
    const log = view.log && positive;
    const tables = [], lines = [];
    chart.series.forEach((one, index) => {
      const places = data.axes[one.axis][view.axis];
      const values = one.values.map((value) => (log && value !== null && value <= 0 ? null : value));
      const kept = places.map((place, i) => [place, values[i]]).filter(([place]) => place !== null);
      // Positions of a resumed run may repeat; uPlot wants them to rise.
      const rising = kept.filter(([place], i) => i === kept.length - 1 || place < kept[i + 1][0]);
      const x = rising.map(([place]) => place / size), y = rising.map(([, value]) => value);
      const c = (several ? one.run : index) % 8 + 1, dash = (several ? one.run : index) >= 8 ? [6, 4] : undefined;
      const smooths = view.smoothing > 0 && chart.unit === "" && !isState(chart.title);
      if (smooths) {
        tables.push([x, y]);
        lines.push({ label: one.name, colour: c, faint: true });
      }
      tables.push([x, smooths ? smoothed(y, view.smoothing) : y]);
      lines.push({ label: one.name, colour: c, dash, paths: isState(chart.title) ? uPlot.paths.stepped({ align: 1 }) : undefined });
    });
    return { table: tables.length > 1 ? uPlot.join(tables) : tables[0], lines, log, unit };
  };

  // Drawing
  const grid = () => ({ stroke: () => colour("--line"), width: 1 });
  const axisOf = (extra) => ({
    stroke: () => colour("--soft"), grid: grid(), ticks: { show: false }, font: "12px system-ui, sans-serif", gap: 6, ...extra,
  });

  const draw = (chart) => {
    chart.plot?.destroy();
    const { table, lines, log, unit } = prepared(chart);
    const value = chart.unit === "s" ? duration : number;
    const label = { iter: "iteration", time: `time in ${unit}`, epoch: "epoch" }[view.axis];
    chart.plot = new uPlot({
      width: Math.max(chart.place.clientWidth, 120), height: 210, padding: [8, 12, 0, 4], legend: { show: false },
      cursor: { sync: { key: view.axis, setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: (u, least, most) => (least === null ? [0, 1] : least === most ? [least - 0.5, most + 0.5] : [least, most]) },
        y: { distr: log ? 3 : 1 },
      },
      axes: [
        axisOf({ values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))), label, labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0, size: 26, space: 64 }),
        axisOf({
          values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : value(tick))), space: 34,
          size: (u, shown) => Math.max(34, 14 + 7 * Math.max(0, ...(shown || []).map((one) => one.length))),
        }),
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: () => colour(`--series-${line.colour}`) + (line.faint ? "55" : ""), width: line.faint ? 1 : 1.75, dash: line.dash, paths: line.paths,
        points: { show: line.faint ? false : undefined, size: 5, fill: () => colour(`--series-${line.colour}`) }, spanGaps: false,
      }))],
      hooks: { setCursor: [() => showValues(chart, lines, value)] },
    }, table, chart.place);
    chart.table = table;
    chart.lines = lines;
    chart.value = value;
    chart.drawn = true;
  };

  const nearest = (values, index) => {
    for (let step = 0; step < values.length; step++)
      for (const i of [index - step, index + step]) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  };
  const showValues = (chart, lines, value) => {
    const index = chart.plot?.cursor.idx;
    if (index === null || index === undefined) {
      chart.readout.textContent = "";
      return;
    }
    const shown = lines.flatMap((line, i) => {
      if (line.faint) return [];
      const here = nearest(chart.table[i + 1], index);
      return here === null ? [] : [lines.filter((one) => !one.faint).length > 1 ? `${line.label} ${value(here)}` : value(here)];
    });
    chart.readout.textContent = `${AXES[view.axis]} ${number(chart.table[0][index])}: ${shown.slice(0, 4).join(" · ")}`;
  };

  const zoom = (chart, factor, shift) => {
    const { min, max } = chart.plot.scales.x, x = chart.plot.data[0];
    const middle = (min + max) / 2 + shift * (max - min), half = ((max - min) / 2) * factor;
    const least = x[0], most = x[x.length - 1];
    if (half * 2 >= most - least) return all(chart);
    const begin = Math.min(Math.max(least, middle - half), most - 2 * half);
    chart.plot.setScale("x", { min: begin, max: begin + 2 * half });
  };
  const all = (chart) => {
    const x = chart.plot.data[0];
    chart.plot.setScale("x", { min: x[0], max: x[x.length - 1] });
  };
  const KEYS = {
    "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], "−": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25],
  };

  // The figures behind a chart
  const figures = (chart, details) => {
    if (details.children.length > 1 || !details.open) return;
    const box = element("div", undefined, { class: "scroll", role: "group", tabindex: "0", "aria-label": `Figures of ${chart.title}` });
    const made = element("table"), head = element("tr"), body = element("tbody");
    const names = ["iter", "epoch", "time"].filter((name) => chart.series.some((one) => data.axes[one.axis][name].some((value) => value !== null)));
    for (const name of [...(chart.series.length > 1 ? ["line"] : []), ...names.map((name) => AXES[name]), "value"])
      head.append(element("th", name, { scope: "col", ...(name === "line" ? {} : { class: "n" }) }));
    for (const one of chart.series)
      one.values.forEach((value, i) => {
        const row = element("tr");
        if (chart.series.length > 1) row.append(element("td", one.name));
        for (const name of names) {
          const place = data.axes[one.axis][name][i];
          row.append(element("td", place === null ? "" : name === "time" ? `${plain.format(place)} s` : plain.format(place), { class: "n" }));
        }
        row.append(element("td", value === null ? "not finite" : chart.value ? chart.value(value) : number(value), { class: "n" }));
        body.append(row);
      });
    const top = element("thead");
    top.append(head);
    made.append(top, body);
    box.append(made);
    details.append(box);
  };

  // The page
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.figure === entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible && !chart.drawn) draw(chart);
    }
  }, { rootMargin: "300px" });

  const redraw = () => {
    for (const chart of charts) {
      chart.drawn = false;
      if (chart.visible) draw(chart);
    }
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = { ...data.charts[Number(figure.dataset.chart)], figure, place: figure.querySelector(".plot"), readout: figure.querySelector(".readout") };
    charts.push(chart);
    chart.place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !chart.plot) return;
      if (event.key === "0") all(chart);
      else if (event.key in KEYS) zoom(chart, ...KEYS[event.key]);
      else return;
      event.preventDefault();
    });
    figure.querySelector(".figures").addEventListener("toggle", (event) => figures(chart, event.target));
    seen.observe(figure);
  }

  let width = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    for (const chart of charts) chart.plot?.setSize({ width: Math.max(chart.place.clientWidth, 120), height: 210 });
  });

  if (tools) {
    tools.hidden = false;
    tools.addEventListener("submit", (event) => event.preventDefault());
    for (const radio of tools.elements.axis) {
      if (!hasAxis(radio.value)) radio.disabled = true;
      radio.addEventListener("change", () => { view.axis = radio.value; redraw(); });
    }
    const slider = document.getElementById("smoothing");
    slider.addEventListener("input", () => {
      view.smoothing = Number(slider.value);
      document.getElementById("smoothed").textContent = slider.value;
      redraw();
    });
    document.getElementById("log").addEventListener("change", (event) => { view.log = event.target.checked; redraw(); });
    document.getElementById("all").addEventListener("click", () => { for (const chart of charts) if (chart.plot) all(chart); });
    document.getElementById("filter")?.addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const chart of charts) if (chart.figure.parentElement.matches("#curves ~ .charts")) chart.figure.hidden = !chart.title.toLowerCase().includes(wanted);
    });
  }

  const list = document.querySelector("nav ul");
  for (const heading of document.querySelectorAll("main h2")) {
    const item = element("li");
    item.append(element("a", heading.textContent, { href: `#${heading.id}` }));
    list.append(item);
  }

  // Light and dark: the rules of the colours for a dark screen apply always, never, or as the browser says.
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).filter((rule) => rule instanceof CSSMediaRule && rule.conditionText.includes("prefers-color-scheme: dark"));
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let dark = preferred.matches;
  const name = () => { button.textContent = dark ? "Light colours" : "Dark colours"; };
  button.addEventListener("click", () => {
    dark = !dark;
    for (const rule of rules) rule.media.mediaText = dark ? "all" : "not all";
    root.style.colorScheme = dark ? "dark" : "light";
    name();
    for (const chart of charts) chart.plot?.redraw(false);
  });
  preferred.addEventListener("change", () => {
    dark = preferred.matches;
    if (!root.style.colorScheme) for (const chart of charts) chart.plot?.redraw(false);
    name();
  });
  button.hidden = false;
  name();
})();
