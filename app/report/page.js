"use strict";
// Draws each picture from the figures beside it, in colours that fit the ground, and again in others when the ground changes.

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 600px)");
const LETTERS_OF_A_LABEL = 17;

function ground() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { text: colour("--text"), quiet: colour("--quiet"), line: colour("--line"), raised: colour("--raised") };
}

function shortened(label) {
  // A label is a small HTML: an entity counts as one letter, and is never cut.
  const letters = label.match(/&#?\w+;|[^]/gu) || [];
  return letters.length <= LETTERS_OF_A_LABEL ? label : letters.slice(0, LETTERS_OF_A_LABEL - 1).join("") + "…";
}

function layoutOf(given) {
  const { text, quiet, line, raised } = ground();
  const small = narrow.matches;
  const axis = (own) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: quiet }, ...own });
  const layout = {
    ...given,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: small ? 11 : 12, color: text },
    margin: { l: 8, r: small ? 4 : 12, t: 8, b: 8, pad: 4 },
    xaxis: axis(given.xaxis),
    yaxis: axis(given.yaxis),
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left", font: { color: text }, traceorder: "normal" },
    hoverlabel: { bgcolor: raised, bordercolor: line, font: { color: text }, align: "left" },
    modebar: { color: quiet, activecolor: text, bgcolor: "rgba(0,0,0,0)" },
    dragmode: small ? false : "zoom",
    showlegend: true,
  };
  if (small && layout.yaxis.ticktext) {
    layout.yaxis.ticktext = layout.yaxis.ticktext.map(shortened);
  }
  return layout;
}

const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  doubleClick: "reset",
};

function draw(place) {
  const figure = JSON.parse(document.getElementById(place.id + "-figure").textContent);
  return Plotly.react(place, figure.data, layoutOf(figure.layout), config);
}

const places = [...document.querySelectorAll(".picture")];

async function drawAll() {
  delete document.documentElement.dataset.drawn;
  for (const place of places) {
    await draw(place);
  }
  document.documentElement.dataset.drawn = String(places.length);
}

dark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
drawAll();
