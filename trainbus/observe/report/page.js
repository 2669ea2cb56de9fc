"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const tools = document.getElementById("tools");
  const charts = [];
  let printing = false;
  const view = { axis: "iter", smoothing: 0, log: false };
  const several = data.runs.length > 1, many = data.runs.length > 8;
  const LETTERS = { c: "series", r: "fifth" };
  const colourOf = (run) => `--${LETTERS[data.colours[run][0]]}-${data.colours[run].slice(1)}`;
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
      const c = several ? colourOf(one.run) : `--series-${index % 8 + 1}`, dash = one.dashed || (!several && index >= 8) ? [6, 4] : undefined;
      const smooths = view.smoothing > 0 && chart.unit === "" && !isState(chart.title);
      if (smooths) {
        tables.push([x, y]);
        lines.push({ label: one.name, run: one.run, colour: c, faint: true });
      }
      tables.push([x, smooths ? smoothed(y, view.smoothing) : y]);
      lines.push({ label: one.name, run: one.run, colour: c, dash, paths: isState(chart.title) ? uPlot.paths.stepped({ align: 1 }) : undefined });
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
      cursor: {
        sync: { key: view.axis, setSeries: false }, y: false, points: { size: 6, show: many ? false : undefined }, drag: { x: true, y: false },
        ...(several ? { focus: { prox: 20 } } : {}),
      },
      focus: { alpha: 1 },
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
        stroke: () => colour(line.colour) + (line.faint ? "55" : ""), width: line.faint || many ? 1 : 1.75, dash: line.dash, paths: line.paths,
        points: { show: line.faint ? false : undefined, size: 5, fill: () => colour(line.colour) }, spanGaps: false,
      }))],
      hooks: {
        setCursor: [() => showValues(chart, lines, value)],
        setSeries: [(u, index, options) => {
          if (!several || options.focus !== true) return;
          point(index === null ? null : lines[index - 1].run);
        }],
      },
    }, table, chart.place);
    chart.table = table;
    chart.lines = lines;
    chart.value = value;
    chart.drawn = true;
    if (several && (chosen.pointed !== null || chosen.marked.size || chosen.hidden.size)) emphasize(chart);
  };

  // Several runs: those marked in the table, and the one under the pointer, stand out; those that the box leaves out are hidden.
  const chosen = { marked: new Set(), pointed: null, hidden: new Set() };
  const standsOut = (run) => (chosen.pointed === null ? !chosen.marked.size || chosen.marked.has(run) : chosen.pointed === run || chosen.marked.has(run));
  const emphasize = (chart) => {
    const some = chosen.pointed !== null || chosen.marked.size > 0;
    chart.lines.forEach((line, i) => {
      const one = chart.plot.series[i + 1], out = standsOut(line.run);
      one.alpha = chosen.hidden.has(line.run) ? 0 : out ? 1 : 0.12;
      one.width = (line.faint || many ? 1 : 1.75) * (some && out ? 2 : 1);
      line.points ??= one.points.show;
      one.points.show = chosen.hidden.has(line.run) || (some && !out) ? () => false : line.points;
    });
    chart.plot.redraw(false);
    showValues(chart, chart.lines, chart.value);
  };
  const emphasizeAll = () => {
    for (const chart of charts) if (chart.drawn && chart.visible) emphasize(chart); else chart.drawn = false;
    for (const way of document.querySelectorAll(".way")) {
      const run = Number(way.dataset.run);
      way.classList.toggle("out", (chosen.pointed !== null || chosen.marked.size > 0) && standsOut(run));
      way.classList.toggle("back", !standsOut(run));
      way.classList.toggle("gone", chosen.hidden.has(run));
      if (standsOut(run)) way.parentElement.insertBefore(way, way.parentElement.querySelector(".axis"));
    }
    for (const row of document.querySelectorAll("#table tbody tr")) row.classList.toggle("pointed", Number(row.dataset.run) === chosen.pointed);
    const named = document.getElementById("way");
    if (named) named.textContent = chosen.pointed === null ? "" : data.runs[chosen.pointed];
  };
  const point = (run) => {
    if (run === chosen.pointed) return;
    chosen.pointed = run;
    emphasizeAll();
  };

  const nearest = (values, index) => {
    for (let step = 0; step < values.length; step++)
      for (const i of [index - step, index + step]) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  };
  const labelOf = (line) => (chosen.pointed === null ? line.label : line.label.replace(`${data.runs[line.run]}, `, ""));
  const showValues = (chart, lines, value) => {
    const index = chart.plot?.cursor.idx;
    if (index === null || index === undefined) {
      chart.readout.textContent = "";
      return;
    }
    const shown = lines.flatMap((line, i) => {
      if (line.faint || chosen.hidden.has(line.run) || (chosen.pointed === null ? many : line.run !== chosen.pointed)) return [];
      const here = nearest(chart.table[i + 1], index);
      return here === null ? [] : [lines.length > 1 ? `${labelOf(line)} ${value(here)}` : value(here)];
    });
    const run = chosen.pointed === null || lines.every((line) => line.label === data.runs[line.run]) ? "" : `${data.runs[chosen.pointed]}, `;
    if (shown.length) chart.readout.textContent = `${run}${AXES[view.axis]} ${number(chart.table[0][index])}: ${shown.slice(0, 4).join(" · ")}`;
    else chart.readout.textContent = "";
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

  // The table of several runs
  const table = document.getElementById("table");
  if (table) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    const keyOf = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
    };
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    const sort = (column, down) => {
      const [full, empty] = [[], []];
      for (const row of rows) (keyOf(row, column) === "" ? empty : full).push(row);
      full.sort((a, b) => compare(keyOf(a, column), keyOf(b, column)) * (down ? -1 : 1));
      body.append(...full, ...empty);
      heads.forEach((head, i) => (i === column ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    };
    heads.forEach((head, column) => {
      const button = element("button", head.textContent, { type: "button" });
      button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending"));
      head.replaceChildren(button);
    });
    for (const row of rows) {
      const run = Number(row.dataset.run), name = row.cells[0], label = element("label"), box = element("input", undefined, { type: "checkbox" });
      label.append(box, ...name.childNodes);
      name.append(label);
      box.addEventListener("change", () => {
        chosen.marked[box.checked ? "add" : "delete"](run);
        emphasizeAll();
      });
      row.addEventListener("pointerenter", () => point(run));
      row.addEventListener("pointerleave", () => point(null));
    }
    const only = document.getElementById("only"), shown = document.getElementById("number");
    const choose = () => {
      const words = only.value.toLowerCase().split(/\s+/).filter(Boolean);
      chosen.hidden.clear();
      for (const row of rows) {
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        if (row.hidden) chosen.hidden.add(Number(row.dataset.run));
      }
      shown.textContent = `${rows.length - chosen.hidden.size} of ${rows.length} runs`;
    };
    only.addEventListener("input", () => { choose(); emphasizeAll(); });
    document.getElementById("unmark").addEventListener("click", () => {
      chosen.marked.clear();
      for (const box of body.querySelectorAll("input")) box.checked = false;
      emphasizeAll();
    });
    const choice = document.getElementById("choice");
    choice.hidden = false;
    choice.addEventListener("submit", (event) => event.preventDefault());
    choose();
    for (const way of document.querySelectorAll(".way")) {
      way.addEventListener("pointerenter", () => point(Number(way.dataset.run)));
      way.addEventListener("pointerleave", () => point(null));
    }
  }

  // Sections that fold; the tab remembers which are open
  const folds = [...document.querySelectorAll("details.fold")];
  const key = `trainbus report ${location.pathname}`;
  try {
    const open = JSON.parse(sessionStorage.getItem(key) || "{}");
    for (const fold of folds) fold.open = open[fold.dataset.fold] ?? fold.open;
  } catch { /* a browser without storage for files */ }
  const remember = () => {
    try {
      sessionStorage.setItem(key, JSON.stringify(Object.fromEntries(folds.map((fold) => [fold.dataset.fold, fold.open]))));
    } catch { /* see above */ }
  };
  const foldAll = document.getElementById("fold");
  const nameFold = () => { foldAll.textContent = folds.every((fold) => fold.open) ? "Close all" : "Open all"; };
  foldAll.addEventListener("click", () => {
    const open = !folds.every((fold) => fold.open);
    for (const fold of folds) fold.open = open;
  });
  for (const fold of folds) fold.addEventListener("toggle", () => { if (!printing) remember(); nameFold(); });
  foldAll.hidden = false;
  nameFold();

  const list = document.querySelector("nav ul");
  for (const heading of document.querySelectorAll("main h2")) {
    const item = element("li"), link = element("a", heading.textContent, { href: `#${heading.id}` });
    link.addEventListener("click", () => { heading.closest("details").open = true; });
    item.append(link);
    list.append(item);
  }
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) for (let one = target.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;

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

  // On paper: all sections open, all charts drawn in the width of a column, light colours
  let closed = [], before = [];
  addEventListener("beforeprint", () => {
    printing = true;
    closed = [...document.querySelectorAll("details.fold:not([open]), details.run:not([open])")];
    for (const one of closed) one.open = true;
    before = rules.map((rule) => rule.media.mediaText);
    for (const rule of rules) rule.media.mediaText = "not all";
    for (const chart of charts) {
      draw(chart);
      chart.plot.setSize({ width: 310, height: 210 });
    }
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
    rules.forEach((rule, i) => { rule.media.mediaText = before[i]; });
    setTimeout(() => { printing = false; });
    redraw();
  });
})();
