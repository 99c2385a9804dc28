// Population statistics: one heat map for each panel of the plot of Fig. 5.
"use strict";

(function () {
  const place = document.getElementById("statistics");
  if (!window.bnrnnPlot || !place) return;
  const plot = window.bnrnnPlot;
  const style = getComputedStyle(document.body);
  const color = style.getPropertyValue("--color-foreground-primary").trim() || "#222";
  const panels = [...new Set(plot.lines.map((line) => line.panel))];
  const figures = panels.map((panel) => {
    const figure = Object.assign(document.createElement("div"), { className: "curves-panel" });
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", `Heat map of the ${panel} of each unit at each time step`);
    place.append(figure);
    return figure;
  });
  panels.forEach((panel, k) => {
    const lines = plot.lines.filter((line) => line.panel === panel);
    // Sorted by the last value, so that the figure shows when the rows settle.
    const rows = lines.map((line) => line.y).sort((a, b) => a[a.length - 1] - b[b.length - 1]);
    Plotly.newPlot(figures[k], [{ type: "heatmap", z: rows, colorscale: "Viridis", hovertemplate: "step %{x}: %{z:.4g}<extra></extra>" }], {
      title: { text: panel, font: { size: 15 } }, height: 360, margin: { l: 50, r: 10, t: 44, b: 44 },
      xaxis: { title: { text: "time step" } }, yaxis: { title: { text: "unit, by its last value" } },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color, family: "inherit" },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  });
})();
