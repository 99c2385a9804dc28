// The interactive plot of a page. window.bnrnnPlot is made by bnrnn/report/site/curves.py.
"use strict";

(function () {
  // Colors and lines of the figures (bnrnn/report/style.py), and more for plots with many rows.
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", "#882255", "#7a9a01", "#5c4bc2"];
  const DASHES = ["solid", "6px,2px", "6px,2px,2px,2px", "3px,2px"];
  const MOST_MEMBERS = 12; // with more, there is no switch for each of them
  const plot = window.bnrnnPlot;
  const place = document.getElementById("curves");
  if (!plot || !place) return;

  const unique = (values) => [...new Set(values)];
  const rows = unique([...plot.lines, ...plot.points].map((line) => line.row));
  const panels = unique([...plot.lines, ...plot.points].map((line) => line.panel));
  const members = unique(plot.lines.map((line) => line.member)).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const metrics = Object.keys(plot.metrics);
  const state = { metric: metrics[0], axis: plot.axes[0], logX: false, logY: plot.log_y, mean: true, whole: plot.lines.length === 0, hidden: new Set() };

  // The controls

  function element(tag, attributes, ...children) {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  }

  function choice(name, options, titles) {
    const select = element("select", { name }, ...options.map((o) => element("option", { value: o }, titles(o))));
    select.addEventListener("change", () => { state[name] = select.value; draw(); });
    return options.length > 1 ? [element("label", {}, `${name} `, select)] : [];
  }

  function box(text, name, checked, set) {
    const input = element("input", { type: "checkbox", name, checked });
    input.addEventListener("change", () => { set(input.checked); draw(); });
    return element("label", {}, input, ` ${text}`);
  }

  const controls = element("div", { className: "curves-controls" },
    ...choice("metric", metrics, (m) => plot.metrics[m]),
    ...choice("axis", plot.axes, (a) => a),
    box("log x", "logX", state.logX, (on) => { state.logX = on; }),
    box("log y", "logY", state.logY, (on) => { state.logY = on; }));
  if (plot.lines.length && plot.points.length) {
    controls.append(box("the paper's whole curve", "whole", state.whole, (on) => { state.whole = on; }));
  }
  if (members.length > 1) {
    controls.append(box("means", "mean", true, (on) => { state.mean = on; }));
    if (members.length <= MOST_MEMBERS) {
      const boxes = members.map((m) => box(`${plot.members} ${m}`, `member-${m}`, true,
        (on) => { if (on) state.hidden.delete(m); else state.hidden.add(m); }));
      controls.append(element("span", { className: "curves-members" }, ...boxes));
    }
  }
  place.replaceChildren(controls);
  const figures = panels.map((panel) => {
    const figure = element("div", { className: "curves-panel" });
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", `Plot of ${panel || "the curves"}`);
    return figure;
  });
  place.append(element("div", { className: `curves-panels${panels.length > 1 ? " several" : ""}` }, ...figures));

  // The traces

  // The mean of the lines shown, at the places where all of them have a value.
  function meanOf(shown) {
    const lines = shown.filter((line) => line.y.length); // others diverged before their first value
    if (!lines.length) return { x: [], y: [] };
    const maps = lines.map((line) => new Map(line.x[plot.axes[0]].map((x, i) => [x, i])));
    const shared = [...maps[0].keys()].filter((x) => maps.every((map, k) => map.has(x) && lines[k].y[map.get(x)] !== null));
    const average = (value) => shared.map((x) => lines.reduce((sum, line, k) => sum + value(line, maps[k].get(x)), 0) / lines.length);
    return { x: average((line, i) => line.x[state.axis][i]), y: average((line, i) => line.y[i]) };
  }

  function drawnLines(row, panel) {
    return plot.lines.filter((l) => l.row === row && l.panel === panel && l.metric === state.metric
      && !state.hidden.has(l.member) && state.axis in l.x);
  }

  function traces(panel) {
    const found = [];
    rows.forEach((row, k) => {
      const color = plot.colors[row] || COLORS[k % COLORS.length];
      const dash = DASHES[k % DASHES.length];
      const lines = drawnLines(row, panel);
      const withMean = state.mean && lines.length > 1;
      const lost = lines.filter((line) => line.diverged).length;
      const counted = [...(members.length > 1 ? [`n=${lines.length}`] : []), ...(lost ? [`${lost} diverged`] : [])].join(", ");
      const name = counted ? `${row} (${counted})` : row;
      lines.forEach((line, i) => found.push({
        type: "scatter", x: line.x[state.axis], y: line.y, name, legendgroup: row, showlegend: !withMean && i === 0,
        mode: line.y.length < 13 ? "lines+markers" : "lines", opacity: withMean ? 0.4 : 1, customdata: line.y.map(() => line.page),
        line: { color, dash, width: withMean ? 1 : 1.8 }, marker: { color, size: 5 },
        hovertemplate: `%{y:.5g}<br>%{x:,.6~g} ${state.axis}<br>${line.name || row}<extra></extra>`,
      }));
      if (withMean) {
        const mean = meanOf(lines);
        found.push({ type: "scatter", ...mean, name, legendgroup: row, mode: mean.x.length < 13 ? "lines+markers" : "lines",
          line: { color, dash, width: 2.5 }, marker: { color, size: 6 },
          hovertemplate: `%{y:.5g}<br>%{x:,.6~g} ${state.axis}<br>mean of ${row}<extra></extra>` });
      }
      const ends = lines.filter((line) => line.diverged).map((line) => {
        const last = line.y.findLastIndex((y) => y !== null);
        return { x: line.x[state.axis][last], y: line.y[last] };
      }).filter((end) => end.x !== undefined);
      if (ends.length) {
        found.push({ type: "scatter", mode: "markers", x: ends.map((e) => e.x), y: ends.map((e) => e.y), legendgroup: row,
          showlegend: false, marker: { color, symbol: "x", size: 9 }, hovertemplate: `diverged: last finite value<br>${row}<extra></extra>` });
      }
      plot.points.filter((p) => p.row === row && p.panel === panel && p.metric === state.metric && state.axis in p.x).forEach((p) => found.push({
        type: "scatter", meta: "paper", mode: p.y.length > 25 ? "lines" : "markers", x: p.x[state.axis], y: p.y,
        name: `${row}, paper`, legendgroup: `${row}, paper`, line: { color, dash: "dot", width: 1.2 },
        marker: { color, symbol: "circle-open", size: 9, line: { width: 2 } },
        hovertemplate: `%{y:.5g}<br>%{x:,.6~g} ${state.axis}<br>${row}, the paper's curve<extra></extra>`,
      }));
    });
    return found;
  }

  function draw() {
    const style = getComputedStyle(document.body);
    const color = style.getPropertyValue("--color-foreground-primary").trim() || "#222";
    const grid = style.getPropertyValue("--color-background-border").trim() || "#ddd";
    panels.forEach((panel, k) => {
      const drawn = traces(panel);
      const narrow = figures[k].clientWidth < 500;
      const axis = (title, log, more) => ({ title: { text: title }, type: log ? "log" : "linear", gridcolor: grid, zeroline: false,
        automargin: true, exponentformat: "power", ...more });
      // As in the figures, the paper's curve is shown up to the length of our runs.
      const ours = Math.max(...drawn.filter((t) => t.meta !== "paper").flatMap((t) => t.x));
      const cut = !state.whole && !state.logX && Number.isFinite(ours) ? { range: [0, 1.05 * ours] } : { rangemode: state.logX ? "normal" : "tozero" };
      if (cut.range) drawn.filter((t) => t.meta === "paper").forEach((t) => { t.y = t.y.map((y, i) => (t.x[i] <= cut.range[1] ? y : null)); });
      Plotly.react(figures[k], drawn, {
        title: panels.length > 1 ? { text: panel, font: { size: 15 } } : undefined,
        xaxis: axis(state.axis, state.logX, { tickformat: ",.7~g", ...cut }), yaxis: axis(plot.metrics[state.metric], state.logY),
        height: narrow ? 440 : 460, margin: { l: 60, r: 12, t: panels.length > 1 ? 44 : 16, b: 50 },
        legend: { orientation: "h", y: -0.22, yanchor: "top" }, hovermode: "closest",
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color, family: "inherit" },
      }, { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover" });
      figures[k].classList.toggle("empty", drawn.length === 0);
    });
  }

  draw();
  figures.forEach((figure) => figure.on("plotly_click", (event) => {
    const page = event.points[0].customdata;
    if (page) window.location.href = document.documentElement.dataset.content_root + page;
  }));
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
})();
