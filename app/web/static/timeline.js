// The timeline: a row for each core and cell, grouped by node, drawn on a canvas that shows only the nodes in view. Bars come as
// compact JSON, first all of them, then what has changed. Names are drawn as text or set as text content, never as markup.
"use strict";
(() => {
  const section = document.getElementById("timeline");
  const box = section.querySelector(".timeline");
  const tall = section.querySelector(".tall");
  const canvas = section.querySelector("canvas");
  const tip = section.querySelector(".tip");
  const legend = section.querySelector(".jobs");
  const draw2d = canvas.getContext("2d");
  const JOBS = 8, ROOM = 320, LEAST = 16, MOST = 96, GAP = 6, AXIS = 20;
  const BAD = new Set(["failed", "timed_out", "lost"]);
  let version = 0, origin = 0, windowMs = 120000, skew = 0, nodes = [], bars = new Map(), byNode = new Map();
  let jobs = new Map(), colours = {}, waiting = false, fetching = false;

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    colours = { text: get("--text"), muted: get("--muted"), line: get("--line"), soft: get("--soft"), bad: get("--bad"), theirs: get("--theirs"), ground: get("--panel") };
    colours.jobs = Array.from({ length: JOBS }, (_, at) => get(`--j${at}`));
  }

  function place() {
    let top = 0;
    const all = nodes.reduce((sum, node) => sum + node.lanes.length, 0);
    const lane = Math.min(14, Math.max(7, ROOM / Math.max(1, all)));
    for (const node of nodes) {
      node.height = Math.min(MOST, Math.max(LEAST, node.lanes.length * lane));
      node.top = top;
      top += node.height + GAP;
    }
    tall.style.height = `${top + AXIS}px`;
    box.style.height = `${Math.max(60, Math.min(420, top + AXIS + 2))}px`;
  }

  // The rows of a bar as stretches of neighbouring rows: [first, how many].
  function stretches(bar, node) {
    const rows = bar.lanes.map((lane) => node.index.get(lane)).filter((row) => row !== undefined).sort((a, b) => a - b);
    const found = [];
    for (const row of rows) {
      const last = found[found.length - 1];
      if (last && last[0] + last[1] === row) last[1] += 1;
      else found.push([row, 1]);
    }
    return found;
  }

  function take(said) {
    if (said.whole || said.origin !== origin) {
      bars = new Map();
      version = 0;
    }
    origin = said.origin;
    windowMs = Math.min(said.window_s * 1000, innerWidth < 760 ? 60000 : Infinity);
    nodes = said.nodes.map(([name, cores, cells]) => {
      const lanes = [...cores, ...cells.map((cell) => -1 - cell)];
      return { name, lanes, cores: cores.length, index: new Map(lanes.map((lane, row) => [lane, row])) };
    }).filter((node) => node.lanes.length);
    place();
    const known = new Map(nodes.map((node) => [node.name, node]));
    for (const [id, node, lanes, start, end, job, kind, status, action, sure, fault] of said.bars) {
      const bar = { id, node, lanes, start, end, job, kind, status, action, sure, fault };
      if (known.has(node)) bar.rows = stretches(bar, known.get(node));
      bars.set(id, bar);
    }
    version = said.version;
    const oldest = clock() - said.window_s * 1000;
    byNode = new Map(nodes.map((node) => [node.name, []]));
    const counts = new Map();
    for (const bar of bars.values()) {
      if (bar.end !== null && bar.end < oldest) bars.delete(bar.id);
      else if (bar.rows && byNode.has(bar.node)) {
        byNode.get(bar.node).push(bar);
        counts.set(bar.job, (counts.get(bar.job) || 0) + 1);
      }
    }
    nameJobs(counts);
    canvas.dataset.bars = String(bars.size);
  }

  // The busiest jobs have a colour each, kept as long as they are there; the others share the last one.
  function nameJobs(counts) {
    const order = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, JOBS - 1).map(([job]) => job);
    for (const job of jobs.keys()) if (!order.includes(job)) jobs.delete(job);
    const free = Array.from({ length: JOBS - 1 }, (_, at) => at).filter((at) => ![...jobs.values()].includes(at));
    for (const job of order) if (!jobs.has(job)) jobs.set(job, free.shift());
    const shown = [...jobs].sort((a, b) => a[1] - b[1]);
    const words = JSON.stringify(shown) + (counts.size > jobs.size);
    if (legend.dataset.words === words) return;
    legend.dataset.words = words;
    legend.replaceChildren(...shown.map(([job, at]) => swatch(at, job)), ...(counts.size > jobs.size ? [swatch(JOBS - 1, "other jobs")] : []));
  }

  function swatch(at, words) {
    const span = document.createElement("span");
    span.className = "job";
    const name = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(name, "svg");
    svg.setAttribute("viewBox", "0 0 9 9");
    svg.setAttribute("aria-hidden", "true");
    const rect = document.createElementNS(name, "rect");
    for (const [key, value] of [["width", 9], ["height", 9], ["fill", colours.jobs[at]]]) rect.setAttribute(key, value);
    svg.append(rect);
    const text = document.createElement("bdi");
    text.textContent = words.length > 32 ? `${words.slice(0, 31)}…` : words;
    span.append(svg, text);
    return span;
  }

  function clock() {
    return Date.now() + skew - origin * 1000;
  }

  function left() {
    return innerWidth < 760 ? 70 : 130;
  }

  function draw() {
    waiting = false;
    const began = performance.now();
    const width = box.clientWidth, height = box.clientHeight, scale = devicePixelRatio || 1, x0 = left();
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    draw2d.setTransform(scale, 0, 0, scale, 0, 0);
    draw2d.fillStyle = colours.ground;
    draw2d.fillRect(0, 0, width, height);
    const now = clock(), from = now - windowMs, perMs = (width - x0 - 8) / windowMs, scroll = box.scrollTop;
    draw2d.font = "12px system-ui, sans-serif";
    draw2d.textBaseline = "middle";
    for (const node of nodes) {
      const top = node.top - scroll + 4;
      if (top + node.height < 0 || top > height - AXIS) continue;
      drawNode(node, top, x0, width, from, now, perMs);
    }
    drawAxis(x0, width, height, now, perMs);
    canvas.dataset.drawMs = (performance.now() - began).toFixed(2);
  }

  function drawNode(node, top, x0, width, from, now, perMs) {
    const lane = node.height / node.lanes.length, gap = lane >= 4 ? 1 : 0;
    draw2d.fillStyle = colours.soft;
    draw2d.fillRect(x0, top, width - x0 - 8, node.height);
    for (const bar of byNode.get(node.name) || []) {
      const end = bar.end === null ? now : bar.end;
      if (end < from) continue;
      const x = x0 + Math.max(0, bar.start - from) * perMs, wide = Math.max(1, x0 + (end - from) * perMs - x);
      const thin = Math.min(wide, Math.max(0, x0 + (bar.sure - from) * perMs - x));
      draw2d.globalAlpha = bar.end === null ? 1 : 0.55;
      draw2d.fillStyle = colours.jobs[jobs.get(bar.job) ?? JOBS - 1];
      for (const [row, many] of bar.rows) {
        draw2d.fillRect(x + thin, top + row * lane, wide - thin, many * lane - gap);
        if (thin) for (let one = row; one < row + many; one++) draw2d.fillRect(x, top + (one + 0.4) * lane, thin, Math.max(1, lane * 0.2));
      }
      if (BAD.has(bar.status)) {
        draw2d.globalAlpha = 1;
        draw2d.fillStyle = bar.fault === "infrastructure" ? colours.bad : colours.theirs;
        for (const [row, many] of bar.rows) draw2d.fillRect(x + wide - 2, top + row * lane, 2, many * lane - gap);
      }
    }
    draw2d.globalAlpha = 1;
    draw2d.fillStyle = colours.text;
    draw2d.fillText(short(node.name, x0 - 14), 8, top + Math.min(node.height / 2, 8));
    if (node.height > 30) {
      draw2d.fillStyle = colours.muted;
      const cells = node.lanes.length - node.cores;
      const many = cells || node.cores;
      draw2d.fillText(`${many} ${cells ? "cell" : "core"}${many === 1 ? "" : "s"}`, 8, top + 24);
    }
  }

  function short(name, room) {
    if (draw2d.measureText(name).width <= room) return name;
    let keep = Math.min(name.length, 40);
    while (keep > 1 && draw2d.measureText(`${name.slice(0, keep)}…`).width > room) keep -= 1;
    return `${name.slice(0, keep)}…`;
  }

  function drawAxis(x0, width, height, now, perMs) {
    draw2d.fillStyle = colours.ground;
    draw2d.fillRect(0, height - AXIS, width, AXIS);
    draw2d.fillStyle = colours.muted;
    draw2d.textAlign = "center";
    for (let ago = 0; ago <= windowMs; ago += windowMs / (width < 600 ? 2 : 4)) {
      const x = width - 8 - ago * perMs;
      draw2d.textAlign = ago === 0 ? "right" : ago === windowMs ? "left" : "center";
      draw2d.fillText(ago ? `${ago / 1000} s ago` : "now", x, height - AXIS / 2);
    }
    draw2d.textAlign = "left";
  }

  function soon() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(draw);
    }
  }

  function at(event) {
    const area = canvas.getBoundingClientRect();
    const y = event.clientY - area.top + box.scrollTop - 4, x = event.clientX - area.left;
    const node = nodes.find((one) => y >= one.top && y < one.top + one.height);
    if (!node || x < left() || event.clientY > area.bottom - AXIS) return null;
    const row = Math.floor((y - node.top) / (node.height / node.lanes.length));
    const perMs = (box.clientWidth - left() - 8) / windowMs, time = clock() - windowMs + (x - left()) / perMs;
    return byNode.get(node.name).find((bar) => bar.start - 2 / perMs <= time && time <= (bar.end === null ? clock() : bar.end) + 2 / perMs
      && bar.rows.some(([first, many]) => row >= first && row < first + many)) || null;
  }

  box.addEventListener("scroll", soon, { passive: true });
  addEventListener("resize", () => { place(); soon(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); legend.dataset.words = ""; soon(); });
  box.addEventListener("pointermove", (event) => {
    const bar = at(event);
    tip.hidden = !bar;
    box.style.cursor = bar ? "pointer" : "";
    if (!bar) return;
    const seconds = ((bar.end === null ? clock() : bar.end) - bar.start) / 1000;
    const units = bar.lanes[0] < 0 ? "cell" : "core";
    tip.textContent = `${bar.kind} of ${bar.job}\n${bar.status}, ${bar.lanes.length} ${units}${bar.lanes.length === 1 ? "" : "s"}, ${seconds.toFixed(1)} s\n${bar.action}`;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 340)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  box.addEventListener("click", (event) => {
    const bar = at(event);
    if (bar) location.href = `/actions/${encodeURIComponent(bar.action)}`;
  });

  async function update() {
    if (fetching) return;
    fetching = true;
    try {
      const answer = await fetch(`/api/timeline?since=${version}`);
      if (!answer.ok) return;
      const said = await answer.json();
      skew = said.at * 1000 - Date.now();
      if (!said.whole && origin && said.origin !== origin) {
        version = 0;
        return;
      }
      take(said);
      soon();
    } finally {
      fetching = false;
    }
  }

  readColours();
  update();
  document.addEventListener("tangram-look", update);
})();
