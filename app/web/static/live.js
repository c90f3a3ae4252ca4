// Keeps a page up to date. The server sends an event for each look; the page is then fetched again, and what differs in <main> is
// changed in place, so that focus, scrolling and selection stay. What has `data-keep` looks after itself.
"use strict";
(() => {
  const dot = document.getElementById("live-dot");
  const text = document.getElementById("live-text");
  const pause = document.getElementById("live-pause");
  const said = document.getElementById("said");
  const OLD_S = 4; // A look that is older than a few intervals of the server says so.
  let paused = false, busy = false, source = null, lookAge = 0, askedAt = 0, live = false;

  function show(on, words) {
    live = on;
    dot.classList.toggle("on", on);
    if (text.textContent !== words) text.textContent = words;
  }

  // The age of what is shown: by the server's clock when it was fetched, and by this one since then.
  function tellAge() {
    const age = lookAge + (performance.now() - askedAt) / 1000;
    if (!live) return;
    dot.classList.toggle("on", age <= OLD_S);
    const words = age <= OLD_S ? "live" : `as of ${Math.round(age)} s ago`;
    if (text.textContent !== words) text.textContent = words;
  }

  function same(a, b) {
    return a.nodeType === b.nodeType && a.nodeName === b.nodeName && key(a) === key(b);
  }

  function key(node) {
    return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key || node.id : "";
  }

  function change(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    if (old.hasAttribute("data-keep")) return;
    for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    changeChildren(old, fresh);
  }

  function changeChildren(old, fresh) {
    const keyed = new Map([...old.children].filter(key).map((child) => [key(child), child]));
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      const known = key(wanted) ? keyed.get(key(wanted)) : undefined;
      if (known && known !== at && known.nodeName === wanted.nodeName) {
        old.insertBefore(known, at);
        change(known, wanted);
      } else if (at && same(at, wanted)) {
        change(at, wanted);
        at = at.nextSibling;
      } else {
        old.insertBefore(document.importNode(wanted, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  async function refresh() {
    if (busy || paused) return;
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
      if (paused) return;
      const failed = answer.status >= 500;
      // The page of a problem has taken the place of what scripts hold, so the page that comes back after it begins anew.
      if (!failed && document.getElementById("problem")) return location.reload();
      if (fresh) change(document.getElementById("main"), fresh);
      if (failed) return show(false, "cannot be read");
      document.dispatchEvent(new Event("tangram-look"));
      lookAge = fresh ? Math.max(0, Date.parse(answer.headers.get("Date")) / 1000 - Number(fresh.dataset.at)) || 0 : 0;
      askedAt = performance.now();
      show(true, "live");
      tellAge();
    } catch {
      show(false, "no answer");
    } finally {
      busy = false;
    }
  }

  // A hidden tab holds no connection: a browser has six for one server, and a seventh tab would wait for ever.
  function listen() {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource("/events");
    source.addEventListener("look", refresh);
    source.addEventListener("open", () => paused && show(false, "paused")); // else the first look follows at once
    source.addEventListener("error", () => show(false, "connecting again"));
  }

  listen();
  setInterval(tellAge, 1000);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => event.persisted && location.reload());
  document.addEventListener("visibilitychange", () => {
    listen();
    if (!document.hidden) refresh();
  });

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    show(false, paused ? "paused" : "connecting again");
    if (!paused) refresh();
  });

  // What was said is shown for a while, from the latest of it on.
  let clearing = 0;
  function say(words) {
    said.textContent = words;
    clearTimeout(clearing);
    clearing = setTimeout(() => { said.textContent = ""; }, 6000);
  }

  // What was acknowledged in this browser is not shown again until it happens once more. Times are the server's.
  function acknowledged() {
    try {
      return JSON.parse(localStorage.getItem("tangram-acknowledged")) || {};
    } catch {
      return {}; // a browser may keep nothing for a page
    }
  }

  function foldNotices() {
    const known = acknowledged();
    for (const list of document.querySelectorAll(".notices")) {
      const under = list.nextElementSibling;
      const hidden = [...list.children].filter((item) => known[item.dataset.key] >= Number(item.dataset.changed));
      const others = [...list.children].filter((item) => !hidden.includes(item));
      const shown = others.slice(0, Number(list.dataset.most) || others.length);
      for (const item of list.children) item.classList.toggle("folded", !shown.includes(item));
      under.hidden = !hidden.length;
      under.firstElementChild.textContent = `${hidden.length} acknowledged in this browser.`;
    }
  }

  function acknowledge(event) {
    const item = event.target.closest("button.acknowledge")?.closest("li");
    if (!item && !event.target.closest(".acknowledged button")) return;
    const known = item ? acknowledged() : {};
    if (item) known[item.dataset.key] = Number(document.getElementById("main").dataset.at);
    try {
      localStorage.setItem("tangram-acknowledged", JSON.stringify(known));
    } catch {
      say("this browser keeps nothing for this page");
    }
    foldNotices();
  }

  foldNotices();
  document.addEventListener("tangram-look", foldNotices);
  document.addEventListener("click", acknowledge);

  // Acting: a POST with the token in a header, which no form of another site can send.
  const dialog = document.getElementById("act");
  const field = document.getElementById("token-text");
  document.getElementById("act-back").addEventListener("click", () => dialog.close());

  // Asks whether that is meant, where the button names what it ends, and for the token, unless it is known; returns the token, or "".
  function ask(button) {
    const kept = sessionStorage.getItem("tangram-token") || "";
    if (kept && !button.dataset.ask) return Promise.resolve(kept);
    return new Promise((done) => {
      document.getElementById("act-title").textContent = `${button.textContent}?`;
      document.querySelector("#act-name bdi").textContent = button.dataset.ask;
      document.getElementById("act-token").hidden = field.disabled = Boolean(kept);
      field.value = "";
      dialog.returnValue = "";
      dialog.showModal();
      dialog.addEventListener("close", () => done(dialog.returnValue === "go" ? kept || field.value : ""), { once: true });
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-post]");
    if (!button) return;
    const token = await ask(button);
    if (!token) return;
    button.disabled = true;
    try {
      // A browser sends no other letters in a header, so no server can have such a token.
      if (/[^\u0000-\u00ff]/.test(token)) throw new RangeError("the token is wrong");
      const answer = await fetch(button.dataset.post, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
      const body = await answer.json();
      if (answer.status === 401) sessionStorage.removeItem("tangram-token");
      else sessionStorage.setItem("tangram-token", token);
      say(body.done || body.error);
    } catch (error) {
      say(error instanceof RangeError ? error.message : "the server gave no answer");
    }
    button.disabled = false;
  });
})();
