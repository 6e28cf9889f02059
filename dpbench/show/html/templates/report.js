"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("theme");
  let chosen = null; // "light" or "dark" once somebody has pressed the button
  let printing = false;

  const isDark = () => !printing && (chosen ? chosen === "dark" : system.matches);

  // The settings that all charts share. The colours are read from the page, so that the style sheet
  // alone defines the colours of the light page and of the dark page.
  const template = () => {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      automargin: true,
      title: { standoff: 8 },
      gridcolor: colour("--grid"),
      linecolor: colour("--line"),
      zerolinecolor: colour("--line"),
      tickcolor: colour("--line"),
      ticklabelstandoff: 4,
    };
    return {
      layout: {
        margin: { l: 10, r: 16, t: 6, b: 46 },
        showlegend: false,
        dragmode: false,
        hovermode: "closest",
        paper_bgcolor: colour("--page"),
        plot_bgcolor: colour("--page"),
        font: { color: colour("--text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
        xaxis: axis,
        yaxis: axis,
        hoverlabel: {
          bgcolor: colour("--raised"),
          bordercolor: colour("--line"),
          font: { color: colour("--text") },
          align: "left",
        },
      },
    };
  };

  const draw = () => {
    root.dataset.theme = isDark() ? "dark" : "light";
    toggle.textContent = isDark() ? "Light colours" : "Dark colours";
    const shared = template();
    const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
    return Promise.all(
      [...document.querySelectorAll(".plot")].map((place) => {
        const { data, layout } = figures[place.id];
        return Plotly.react(place, data, { ...layout, template: shared }, config);
      }),
    );
  };

  toggle.addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    draw();
  });
  system.addEventListener("change", draw);
  for (const event of ["beforeprint", "afterprint"]) {
    window.addEventListener(event, () => {
      printing = event === "beforeprint";
      draw();
    });
  }

  // Sort lines by the exact values in a column, numbers by size. Cells without a value come last.
  const valueOf = (cell) => cell.dataset.value ?? cell.textContent;
  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  const sort = (heading) => {
    const table = heading.closest("table");
    const body = table.tBodies[0];
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [valueOf(row.cells[heading.cellIndex]), row]);
    rows.sort(([a], [b]) => (a === "") - (b === "") || (a === "" ? 0 : sign * compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(button.parentElement));
  }

  draw().then(() => {
    root.dataset.drawn = "true";
  });
})();
