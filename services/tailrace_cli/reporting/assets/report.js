"use strict";
(() => {
  const { panels } = JSON.parse(document.getElementById("data").textContent);
  const place = document.querySelector(".charts");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let axis = 0; // 0: by step, 1: by time
  let charts = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = (value) => (value == null ? "-" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
  const seconds = (value) => (value == null ? "-" : value < 600 ? `${Math.round(value)} s` : `${(value / 60).toFixed(1)} min`);

  function joined(panel) {
    const tables = panel.tables.map((table) => [table.axes[axis], ...table.values]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  function options(panel, columns, width) {
    const colours = css("--curves").split(" ");
    const grid = { stroke: css("--grid"), width: 1 };
    const axes = { stroke: css("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const name = axis ? "time" : "step";
    const series = panel.labels.map((label, index) => ({
      label,
      stroke: colours[index % colours.length],
      dash: index < colours.length ? undefined : [6, 4],
      width: 1.6,
      spanGaps: true,
      points: { size: 5, show: columns[index].filter((value) => value != null).length <= 40 },
      value: (_, value) => shown(value),
    }));
    return {
      width,
      height: 210,
      scales: { x: { time: false } },
      cursor: { sync: { key: "report" }, points: { size: 6 } },
      series: [{ label: name, value: (_, value) => (axis ? seconds(value) : shown(value)) }, ...series],
      axes: [
        { ...axes, size: 32, values: axis ? (_, ticks) => ticks.map(seconds) : undefined },
        { ...axes, size: 58, values: (_, ticks) => ticks.map(shown) },
      ],
    };
  }

  function chartOf(panel, body) {
    const [x, ...columns] = joined(panel);
    return new uPlot(options(panel, columns, body.clientWidth), [x, ...columns], body);
  }

  function draw() {
    charts.forEach(({ chart }) => chart.destroy());
    place.replaceChildren();
    charts = panels.map((panel) => {
      const box = place.appendChild(Object.assign(document.createElement("div"), { className: "chart" }));
      box.appendChild(Object.assign(document.createElement("h3"), { textContent: panel.title }));
      const body = box.appendChild(document.createElement("div"));
      return { body, chart: chartOf(panel, body) };
    });
  }

  // The page of a run that goes on reloads itself; what its reader has opened and chosen stays.
  const parts = [...document.querySelectorAll("details")];
  const name = `kept of ${document.title}`;

  function keep() {
    const zoom = charts.map(({ chart }) => {
      const { min, max } = chart.scales.x;
      const x = chart.data[0];
      return min > x[0] || max < x[x.length - 1] ? { min, max } : null;
    });
    sessionStorage.setItem(name, JSON.stringify({ axis, zoom, open: parts.map((part) => part.open), top: scrollY }));
  }

  function restore(kept) {
    if (kept.axis !== axis) document.querySelector(`[data-axis="${kept.axis}"]`).click();
    kept.zoom.forEach((range, index) => range && charts[index]?.chart.setScale("x", range));
    if (kept.open.length === parts.length) parts.forEach((part, index) => (part.open = kept.open[index]));
    scrollTo(0, kept.top);
  }

  if (!panels.length) document.getElementById("curves").hidden = true;
  draw();
  dark.addEventListener("change", draw);
  new ResizeObserver(() => {
    charts.forEach(({ body, chart }) => {
      if (chart.width !== body.clientWidth) chart.setSize({ width: body.clientWidth, height: 210 });
    });
  }).observe(place);
  document.querySelectorAll(".choice button").forEach((button) =>
    button.addEventListener("click", () => {
      axis = Number(button.dataset.axis);
      document.querySelectorAll(".choice button").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      draw();
    }),
  );
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(name));
    addEventListener("pagehide", keep);
  } catch {} // a browser that keeps nothing for files
  if (kept) restore(kept);
})();
