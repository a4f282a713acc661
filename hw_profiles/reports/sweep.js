// Filters, the front of what is left, a point's figures, and the view in the address. Texts come from sweep_page.py.
"use strict";
(() => {
  const points = JSON.parse(document.getElementById("points").textContent);
  const marks = points.map((_, n) => [...document.querySelectorAll(`[data-n="${n}"]`)]);
  const inputs = [...document.querySelectorAll("#filters input")];
  const sections = [...document.querySelectorAll(".of-method")];
  const ROWS = 200; // of a table
  let pinned = null;
  const chosen = (name) => inputs.filter((i) => i.name === name && i.checked).map((i) => i.value);
  const names = [...new Set(inputs.map((i) => i.name))].filter((name) => name !== "method");
  const method = () => chosen("method")[0] ?? points[0].method;

  const says = (n) => points[n].cells.filter((text) => text !== "unknown").join(", ");
  const headsOf = (section) => [...section.querySelectorAll("thead th")].map((head) => head.textContent);

  marks.forEach((each, n) => each.forEach((mark) => { mark.dataset.says = says(n); })); // beaten ones, too

  const beats = (a, b) => a.every((x, i) => x <= b[i]) && a.some((x, i) => x < b[i]);
  function frontOf(left) { // in the order of what is fastest, so that most are beaten early
    const order = [...left].sort((a, b) => points[a].small[0] - points[b].small[0]);
    const front = [];
    for (const n of order) {
      if (front.some((m) => beats(points[m].small, points[n].small))) continue;
      for (let i = front.length - 1; i >= 0; i--) { // of equal time, one that came before may be beaten
        if (beats(points[n].small, points[front[i]].small)) front.splice(i, 1);
      }
      front.push(n);
    }
    return front;
  }

  function show() {
    const now = method(), sets = names.map((name) => [name, new Set(chosen(name))]);
    const batches = names.includes("batch") ? new Set(chosen("batch")) : null;
    const visible = points.map((p) => p.method === now && (p.published
      ? batches === null || batches.has(p.axes.batch)
      : sets.every(([name, values]) => values.has(p.axes[name]))));
    const all = [...points.keys()].filter((n) => visible[n] && !points[n].published), front = frontOf(all), onFront = new Set(front);
    marks.forEach((each, n) => each.forEach((mark) => {
      mark.toggleAttribute("hidden", !visible[n]);
      mark.classList.toggle("front", onFront.has(n));
      if (onFront.has(n)) mark.parentNode.append(mark); // above what is beaten
    }));
    marks.forEach((each, n) => { if (points[n].published) each.forEach((mark) => mark.parentNode.append(mark)); });
    sections.forEach((section) => section.toggleAttribute("hidden", section.dataset.method !== now));
    fill(sections.find((section) => section.dataset.method === now), front);
    document.getElementById("count").textContent = `${all.length} points, ${front.length} that no other beats`;
    if (pinned !== null && !visible[pinned]) pinned = null;
    tell(pinned);
    remember();
  }

  function fill(section, front) {
    const body = section.querySelector("tbody"), heads = headsOf(section);
    body.replaceChildren(...front.slice(0, ROWS).map((n) => {
      const row = document.createElement("tr");
      row.dataset.row = n;
      points[n].cells.forEach((text, i) => {
        const cell = row.appendChild(document.createElement(i ? "td" : "th"));
        if (i < 3) cell.className = "l";
        if (i > 0) { cell.dataset.head = heads[i]; cell.textContent = text; return; }
        cell.scope = "row";
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = text;
        button.addEventListener("click", () => pin(n));
        cell.append(button);
      });
      return row;
    }));
  }

  function tell(n) {
    document.querySelectorAll(".here").forEach((mark) => mark.classList.remove("here"));
    document.querySelectorAll(".here-card").forEach((card) => card.toggleAttribute("hidden", n === null));
    if (n === null) return;
    marks[n].forEach((mark) => mark.classList.add("here"));
    document.querySelectorAll(`tr[data-row="${n}"]`).forEach((row) => row.classList.add("here"));
    const section = sections.find((each) => each.dataset.method === points[n].method);
    section.querySelector(".here-figures").replaceChildren(...headsOf(section).flatMap((head, i) => {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = head;
      text.textContent = points[n].cells[i];
      return [term, text];
    }));
    section.querySelector(".here-command").textContent = points[n].command || "as published; no chip of its own holds it in fp32";
  }

  function pin(n) {
    pinned = pinned === n ? null : n;
    tell(pinned);
    remember();
  }

  function remember() { // only what differs from the whole
    const words = new URLSearchParams();
    if (inputs.some((i) => i.name === "method")) words.set("method", method());
    for (const name of names) {
      const values = chosen(name);
      if (values.length < inputs.filter((i) => i.name === name).length) words.set(name, values.join(","));
    }
    if (pinned !== null) words.set("at", pinned);
    history.replaceState(null, "", "#" + words);
  }

  function recall() {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const input of inputs) {
      const values = words.get(input.name)?.split(",");
      if (input.type === "radio") { if (values) input.checked = values.includes(input.value); }
      else input.checked = !values || values.includes(input.value);
    }
    const radios = inputs.filter((i) => i.type === "radio");
    if (radios.length && !radios.some((i) => i.checked)) radios[0].checked = true;
    const at = Number(words.get("at") ?? NaN);
    pinned = Number.isInteger(at) && at >= 0 && at < points.length ? at : null;
    show();
  }

  const numberOf = (event) => event.target.closest?.("[data-n]")?.dataset.n;
  document.addEventListener("mark", (event) => tell(Number(numberOf(event)))); // hover, tap or arrow: see marks.js
  document.addEventListener("pointerover", (event) => {
    if (numberOf(event) === undefined && event.target.closest?.("svg")) tell(pinned);
  });
  document.addEventListener("click", (event) => {
    const n = numberOf(event);
    if (n !== undefined) pin(Number(n));
  });
  document.addEventListener("keydown", (event) => {
    const n = event.target.closest?.("svg")?.querySelector(".at")?.dataset.n;
    if (event.key === "Enter" && n !== undefined) pin(Number(n));
  });
  document.getElementById("filters").addEventListener("change", show);
  document.getElementById("all").addEventListener("click", () => {
    inputs.forEach((i) => { if (i.type === "checkbox") i.checked = true; });
    pinned = null;
    show();
  });
  addEventListener("hashchange", recall);
  document.getElementById("filters").hidden = false;
  recall();
})();
