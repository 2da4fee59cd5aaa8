"use strict";
// The state survives a reload: the choices of the reader, the zoom of the plots of runs, and open
// details.
const stateKey = "lm.report " + location.pathname;
const state = JSON.parse(sessionStorage.getItem(stateKey) || "{}");
const property = (element) => ({ SELECT: "value", DETAILS: "open" }[element.tagName] || "checked");
const kept = document.querySelectorAll("[data-key]");
for (const element of kept)
  if (element.dataset.key in state) element[property(element)] = state[element.dataset.key];

function saveState() {
  for (const element of kept) state[element.dataset.key] = element[property(element)];
  document.querySelectorAll(".plot").forEach((plot, index) => {
    const { xaxis, yaxis } = plot.layout || {};
    if (xaxis && yaxis) state["zoom " + index] = [xaxis, yaxis].map((axis) => axis.autorange ? null : axis.range);
  });
  sessionStorage.setItem(stateKey, JSON.stringify(state));
}
addEventListener("pagehide", saveState);

const seconds = Number(document.body.dataset.reload);
if (seconds) setTimeout(() => (document.hidden ? addEventListener("visibilitychange", () => location.reload()) : location.reload()), 1000 * seconds);

// Tables: numbers are aligned to the right, and a click on a header sorts.
const number = (text) => (/^-?[\d.,]+(e[+-]?\d+)?[%*]?$/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN);
for (const table of document.querySelectorAll("table")) {
  const rows = () => [...table.tBodies[0].rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const text = (row) => row.cells[column].textContent;
    if (rows().every((row) => text(row) === "-" || !isNaN(number(text(row)))))
      for (const cell of [head, ...rows().map((row) => row.cells[column])]) cell.classList.add("number");
    head.onclick = () => {
      const order = head.ariaSort === "ascending" ? "descending" : "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = order;
      const sign = order === "ascending" ? 1 : -1;
      const compare = (a, b) => number(a) - number(b) || isNaN(number(a)) - isNaN(number(b)) || a.localeCompare(b, "en", { numeric: true });
      table.tBodies[0].append(...rows().sort((a, b) => sign * compare(text(a), text(b))));
    };
  });
}

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// Gray is readable on a light and on a dark page, and on paper.
const gray = "#7d7d7d", axis = { gridcolor: "rgba(128,128,128,.25)", zeroline: false, automargin: true };
const layoutOf = (plot) => ({
  ...plot.layout, title: { text: plot.title, font: { size: 14 }, x: 0.02, xref: "container", yref: "container", y: 0.97 }, showlegend: plot.layout?.showlegend ?? false,
  font: { color: gray, family: "system-ui, sans-serif", size: 12 }, margin: { l: 52, r: 12, t: 34, b: 42, ...plot.layout?.margin },
  legend: { orientation: "h", y: -0.2, yanchor: "top" }, colorway: ["#1f87d2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
  modebar: { bgcolor: "rgba(0,0,0,0)", color: gray, activecolor: gray },
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, width: undefined, height: undefined,
});

// A plot of a run has `x` in steps, and other axes in `meta`.
function update(section) {
  const choice = section.querySelector(".x").value, boxes = section.querySelectorAll(".run");
  const type = section.querySelector(".log").checked ? "log" : "linear";
  for (const plot of section.querySelectorAll(".plot")) {
    const { unit, data } = plot.report;
    const x = data.map(({ x, meta }) => choice === "steps" ? x : choice === "time" ? meta.time : x.map((step) => step * (meta[choice] ?? NaN)));
    const traces = data.map((trace, index) => ({ ...trace, x: x[index], visible: boxes[trace.meta.run].checked }));
    const title = { text: choice === "time" ? `training time, ${unit}` : choice, standoff: 8 };
    const zoom = plot.zoom || [];
    delete plot.zoom;
    const layout = layoutOf(plot.report);
    layout.xaxis = { ...axis, title, range: zoom[0], rangemode: "tozero" };
    layout.yaxis = { ...axis, type, range: zoom[1], tickformat: "~g" };
    layout.yaxis2 = { overlaying: "y", range: [-1, 55], fixedrange: true, visible: false }; // rows of marks
    layout.uirevision = choice + type; // keeps the zoom while the axes stay the same
    Plotly.react(plot, traces, layout, config);
  }
}

const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
async function draw() {
  const [library, plots] = await Promise.all([unpack("library"), unpack("plots").then(JSON.parse)]);
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  document.querySelectorAll(".plot").forEach((plot, index) => {
    plot.report = plots[index];
    plot.zoom = state["zoom " + index];
  });
  for (const section of document.querySelectorAll("section")) {
    if (section.querySelector(".x")) {
      for (const input of section.querySelectorAll(".x, .log, .run")) input.onchange = () => update(section);
      update(section);
    } else
      for (const plot of section.querySelectorAll(".plot")) {
        const layout = layoutOf(plot.report);
        for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
        Plotly.newPlot(plot, plot.report.data, layout, config);
      }
  }
  document.body.dataset.drawn = "true";
}
if (document.getElementById("plots")) draw();
