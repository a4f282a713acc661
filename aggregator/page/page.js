// The operator's page: a fleet as it is now. The server says what has changed; this draws it. All text goes in as text.
"use strict";

const ROW = 36; // pixels of a row, as in page.css: only those that are seen are drawn
const DAY = 86400;
const devices = new Map(); // by name: an object with a field for each column
const parts = {};
let columns = [];
let ahead = 0; // seconds of the server's clock before ours
let operator = "";
let chosen = { filter: "all", find: "", sort: "care", down: false };
let shown = []; // the devices that the table has, in order

const clock = (at) => new Date(at * 1000).toLocaleString();
const now = () => Date.now() / 1000 + ahead;
const percent = (share) => (share === null || share === undefined ? "" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
const things = (count, thing) => `${count.toLocaleString()} ${thing}${count === 1 ? "" : "s"}`;
const round = (value, unit = 1) => (value === null ? "" : Math.round(value / unit).toLocaleString());
const link = (text, target, attributes = {}) => made("a", text, { href: `#${target}`, ...attributes });
const deviceLink = (name) => link(name, `device=${encodeURIComponent(name)}`);
const bookLink = (cause) => link(cause, `runbook=${encodeURIComponent(cause)}`, { title: `docs/runbook.md#${cause}` });

function lasts(seconds) {
  if (seconds < -60) return "an unknown time"; // the clock was set back since
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return whole < 2 * DAY ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / DAY)} days`;
}

const ago = (at) => (at === null ? "never" : `${lasts(now() - at)} ago`);

// ── which devices ──────────────────────────────────────────────────────────────────────────────────────────────────

const has = (cause) => (one) => one.causes.includes(cause);
const FILTERS = {
  all: ["all", () => true],
  care: ["need care", (one) => one.causes.length > 0],
  gone: ["gone", (one) => one.presence === "gone"],
  "gone-day": ["gone > 1 day", (one) => one.presence === "gone" && Math.abs(now() - one.since) > DAY],
  certificate: ["certificate expires", has("certificate")],
  disk: ["disk full", has("disk")],
  clock: ["clock wrong", has("clock")],
  apart: ["take no part", has("apart")],
  "old-bundle": ["old bundle", has("old-bundle")],
  drifts: ["drift", has("drifts")],
  refused: ["refused", has("refused")],
  "left-out": ["left out", has("left-out")],
  contradicts: ["contradict the others", has("contradicts")],
  "roll-out": ["roll-out failed", has("roll-out")],
  slow: ["slow", (one) => has("slow")(one) || (one.predicted_ms !== null && one.step_ms > 1.5 * one.predicted_ms)],
  memory: ["near its memory", (one) => has("memory")(one) || (one.most_bytes !== null && one.peak_bytes > 0.9 * one.most_bytes)
    || (one.profiled_bytes !== null && one.peak_bytes > 1.2 * one.profiled_bytes)],
  unknown: ["much unknown", (one) => one.unknown > 0.2],
  gateway: ["gateways", (one) => one.members > 0],
};

const HEADS = [ // key, heading, class, text of a device, what is sorted by
  ["name", "Device", "", (one) => one.name, (one) => one.name],
  ["presence", "State", "", state, (one) => `${one.presence}${one.since}`],
  ["care", "Care", "", (one) => one.causes.join(", "), (one) => `${one.causes.length ? 0 : 1}${one.presence}${one.name}`],
  ["heard", "Heard", "", (one) => ago(one.heard), (one) => -(one.heard ?? 0)],
  ["bundle", "Bundle", "wide", (one) => one.bundle, (one) => one.bundle],
  ["board", "Board", "wide", (one) => one.board, (one) => one.board],
  ["accuracy", "Accuracy", "wide number", (one) => percent(one.accuracy), (one) => one.accuracy ?? -1],
  ["step_ms", "Step ms", "wide number", (one) => one.step_ms ?? "", (one) => one.step_ms ?? -1],
  ["profiled_ms", "profiled", "wide number", (one) => one.profiled_ms ?? "", (one) => one.profiled_ms ?? -1],
  ["predicted_ms", "predicted", "wide number", (one) => one.predicted_ms ?? "", (one) => one.predicted_ms ?? -1],
  ["peak_bytes", "MB", "wide number", (one) => round(one.peak_bytes, 1e6), (one) => one.peak_bytes ?? -1],
  ["profiled_bytes", "profiled MB", "wide number", (one) => round(one.profiled_bytes, 1e6), (one) => one.profiled_bytes ?? -1],
  ["most_bytes", "predicted MB", "wide number", (one) => round(one.most_bytes, 1e6), (one) => one.most_bytes ?? -1],
  ["unknown", "Unknown", "wide number", (one) => percent(one.unknown), (one) => one.unknown ?? -1],
  ["new", "New photos", "wide number", (one) => round(one.new), (one) => one.new ?? -1],
  ["up", "Up kB", "wide number", (one) => round(one.up, 1e3), (one) => one.up],
  ["down", "Down kB", "wide number", (one) => round(one.down, 1e3), (one) => one.down],
  ["refused", "Refused", "wide number", (one) => one.refused || "", (one) => one.refused],
  ["members", "Behind it", "wide number", (one) => one.members || "", (one) => one.members],
];

function state(one) {
  if (one.presence === "gone") return `gone ${lasts(now() - one.since)}`;
  return one.presence === "out" ? "not taken" : one.presence;
}

function choose() {
  const words = chosen.find.toLowerCase();
  const fits = (FILTERS[chosen.filter] || FILTERS.all)[1];
  shown = [];
  for (const one of devices.values()) {
    if (fits(one) && (!words || `${one.name} ${one.board} ${one.bundle}`.toLowerCase().includes(words))) shown.push(one);
  }
  const key = (HEADS.find((head) => head[0] === chosen.sort) || HEADS[2])[4];
  const keys = new Map(shown.map((one) => [one, key(one)]));
  const order = chosen.down ? -1 : 1;
  shown.sort((a, b) => {
    const [first, second] = [keys.get(a), keys.get(b)];
    return order * (first < second ? -1 : first > second ? 1 : 0);
  });
  at("count").textContent = `${shown.length.toLocaleString()} of ${devices.size.toLocaleString()} devices`;
}

function address(changes) {
  const next = { ...chosen, ...changes };
  const words = [];
  if (next.filter !== "all") words.push(`filter=${encodeURIComponent(next.filter)}`);
  if (next.find) words.push(`find=${encodeURIComponent(next.find)}`);
  if (next.sort !== "care" || next.down) words.push(`sort=${next.down ? "-" : ""}${encodeURIComponent(next.sort)}`);
  return words.join("&");
}

// ── the table ──────────────────────────────────────────────────────────────────────────────────────────────────────

function drawFilters() {
  const links = Object.entries(FILTERS).map(([name, [words, fits]]) => {
    let count = 0;
    for (const one of devices.values()) count += fits(one);
    if (!count && name !== chosen.filter && name !== "all") return null;
    return link(`${words} ${count.toLocaleString()}`, address({ filter: name }),
      name === chosen.filter ? { "aria-current": "true" } : {});
  });
  replace(at("filters"), links.filter(Boolean));
}

// New children, unless they say what those say that are there. The link that had the focus keeps it, whatever row or
// line of the box is now its own; else what stands in its place gets it, or `otherwise`.
function replace(box, children, otherwise) {
  const look = children.map((child) => child.outerHTML).join("");
  if (box.look === look) return;
  box.look = look;
  const stops = () => [...box.querySelectorAll("a, button")];
  const mark = (stop) => stop.closest("tr, li")?.querySelector("a")?.hash + stop.getAttribute("href");
  const place = stops().indexOf(document.activeElement);
  const its = place < 0 || !document.activeElement.hash ? null : mark(document.activeElement);
  box.replaceChildren(...children);
  if (place < 0) return;
  const same = its && stops().find((stop) => mark(stop) === its);
  (same || otherwise || stops()[place])?.focus({ preventScroll: true });
}

function drawHeads() {
  replace(at("heads"), HEADS.map(([name, words, kind]) => {
    const isChosen = name === chosen.sort;
    const head = made("th", undefined, { scope: "col", class: kind, "data-sort": name,
      ...(isChosen ? { "aria-sort": chosen.down ? "descending" : "ascending" } : {}) });
    head.append(made("button", words + (isChosen ? (chosen.down ? " ↓" : " ↑") : ""), { type: "button" }));
    return head;
  }));
}

at("heads").addEventListener("click", (event) => {
  const name = event.target.closest("th")?.dataset.sort;
  if (name) location.hash = address({ sort: name, down: name === chosen.sort && !chosen.down });
});

function tableRow(one, place) {
  const row = made("tr", undefined, { "aria-rowindex": place + 2, ...(one.presence === "online" ? {} : { class: "quiet" }) });
  for (const [name, , kind, text] of HEADS) {
    const cell = made(name === "name" ? "th" : "td", undefined, name === "name" ? { scope: "row" } : { class: kind });
    if (name === "name") cell.append(deviceLink(one.name));
    else if (name === "care") {
      cell.className = "bad";
      one.causes.forEach((cause, index) => cell.append(index ? ", " : "", bookLink(cause)));
    } else cell.textContent = text(one);
    row.append(cell);
  }
  return row;
}

function gap(rows) {
  const row = made("tr", undefined, { class: "gap", "aria-hidden": "true" });
  const cell = made("td", undefined, { colspan: HEADS.length });
  cell.style.height = `${rows * ROW}px`;
  row.append(cell);
  return row;
}

function drawRows() {
  const view = at("view");
  const beyond = Math.ceil(view.clientHeight / ROW); // rows on either side, for a key that goes there before they are drawn
  const first = Math.max(0, Math.min(shown.length - 3 * beyond, Math.floor(view.scrollTop / ROW) - beyond));
  const last = Math.min(shown.length, first + 3 * beyond);
  at("devices").setAttribute("aria-rowcount", shown.length + 1);
  const rows = shown.slice(first, last).map((one, index) => tableRow(one, first + index));
  replace(at("rows"), [...(first ? [gap(first)] : []), ...rows, ...(last < shown.length ? [gap(shown.length - last)] : [])], view);
}

let drawing = false;
at("view").addEventListener("scroll", () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawRows();
  });
});

// ── the parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

function listed(id, items, otherwise) {
  replace(at(id), items.length ? items : [made("li", otherwise, { class: "hint" })]);
}

function item(...children) {
  const line = made("li");
  line.append(...children);
  return line;
}

function drawTop() {
  const top = parts.top;
  if (!top) return;
  at("sentence").textContent = top.sentence;
  at("sentence").className = top.well ? "good" : "bad";
  document.title = `${top.well ? "✓" : "!"} ${parts.fleet} – fleet`;
  at("cares-part").hidden = top.well && !top.leaving.length;
  const lines = [];
  top.cares.forEach(([device, cause, reason], index) => {
    const line = item(...(device ? [deviceLink(device), ": "] : []), `${reason} (`, bookLink(cause), ")");
    line.className = "bad";
    lines.push(line);
    const isLast = index + 1 === top.cares.length || top.cares[index + 1][1] !== cause;
    const more = top.counts[cause] - top.cares.filter((care) => care[1] === cause).length;
    if (isLast && more > 0) lines.push(item(link(`and ${more.toLocaleString()} more: ${cause}`, `filter=${cause}`)));
  });
  for (const [device, since] of top.leaving) {
    lines.push(item(deviceLink(device), `: gone for ${lasts(now() - since)}, and needs care after 10 min (`, bookLink("gone"), ")"));
  }
  if (top.away > top.leaving.length) lines.push(item(link(`and ${(top.away - top.leaving.length).toLocaleString()} more: gone`, "filter=gone")));
  listed("cares", lines, "");
}

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function chartOf(points, label) { // [x, mean, low, high, least, most] from left to right
  const [width, height, left, bottom] = [Math.max(280, Math.min(900, innerWidth - 48)), 220, 44, 24];
  const [from, to] = [points[0][0], points[points.length - 1][0]];
  const x = (value) => left + (to === from ? 0.5 : (value - from) / (to - from)) * (width - left - 10);
  const y = (value) => 8 + (1 - value) * (height - bottom - 8);
  const along = (index) => points.map((point) => `${x(point[0]).toFixed(1)},${y(point[index]).toFixed(1)}`);
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    box.append(svg("line", { class: "axis", x1: left, x2: width - 10, y1: y(share), y2: y(share) }));
    box.append(svg("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`));
  }
  if (points[0].length > 2) {
    box.append(svg("polygon", { class: "band", points: [...along(2), ...along(3).reverse()].join(" ") }));
    for (const index of [4, 5]) box.append(svg("polyline", { class: "edge", points: along(index).join(" ") }));
  }
  box.append(svg("polyline", { class: "line", points: along(1).join(" ") }));
  for (const point of points) box.append(svg("circle", { class: "dot", cx: x(point[0]), cy: y(point[1]), r: 3 }));
  box.append(svg("text", { x: left, y: height - 6 }, `round ${from}`));
  if (to !== from) box.append(svg("text", { x: width - 10, y: height - 6, "text-anchor": "end" }, `round ${to}`));
  return box;
}

function drawRounds() {
  const rounds = parts.rounds || [];
  const told = rounds.filter((one) => one.accuracy.devices).reverse();
  at("rounds-part").hidden = !rounds.length;
  at("chart-words").textContent = told.length
    ? "Accuracy on the devices' own test photos: the mean, half of the devices (band), the least and the most (dashed)." : "No device has told its accuracy.";
  const points = told.map(({ round: number, accuracy: a }) => [number, a.mean, a.low, a.high, a.least, a.most]);
  replace(at("chart"), points.length ? [chartOf(points, "Accuracy by round")] : []);
  replace(at("rounds"), rounds.slice(0, 12).map((one) => {
    const a = one.accuracy;
    const row = made("tr");
    row.append(made("th", `${one.round} (${one.method})${one.closed ? "" : ", open"}`, { scope: "row" }),
      made("td", clock(one.opened)), made("td", one.contributions, { class: "number" }),
      made("td", one.left_out || "", { class: "number" }), made("td", a.devices ? percent(a.mean) : "", { class: "number" }),
      made("td", a.devices ? `${percent(a.low)} to ${percent(a.high)}` : "", { class: "number" }),
      made("td", a.devices ? `${percent(a.least)} to ${percent(a.most)}` : "", { class: "number" }));
    return row;
  }));
}

function drawRollout() {
  const one = parts.rollout;
  if (!one) {
    replace(at("rollout"), [made("p", "Nothing is rolled out.", { class: "hint" })]);
    return;
  }
  const halted = one.state === "halted";
  const head = made("p", `Version ${one.version} (${one.sha256}…, ${one.bytes.toLocaleString()} bytes)` +
    `${one.fleet ? ` to fleet ${one.fleet}` : ""}: ${one.state}${one.reason ? `: ${one.reason}` : ""}`, halted ? { class: "bad" } : {});
  const box = svg("svg", { viewBox: "0 0 900 28", role: "img", "aria-label": `offered to ${percent(one.fraction)}` });
  box.append(svg("rect", { class: "part", x: 0, y: 4, width: 900, height: 12, rx: 6 }));
  box.append(svg("rect", { class: "done", x: 0, y: 4, width: Math.max(12, 900 * one.fraction), height: 12, rx: 6 }));
  for (const stage of one.stages) box.append(svg("line", { class: "axis", x1: 900 * stage, x2: 900 * stage, y1: 0, y2: 22 }));
  const then = one.stages.length ? `, then ${one.stages.map(percent).join(", ")}` : "";
  const tallies = Object.entries(one.counts).map(([word, number]) => `${number} ${word}`).join(", ") || "none known";
  const wrong = made("ul");
  wrong.append(...one.wrong.map(([device, word, reason]) => item(deviceLink(device), `: ${word}${reason ? `: ${reason}` : ""} (`, bookLink("roll-out"), ")")));
  replace(at("rollout"), [head, box,
    made("p", `Offered to ${percent(one.fraction)} since ${clock(one.since)}${then}; a stage needs ${percent(one.healthy)} healthy. Devices: ${tallies}.`), wrong]);
}

function drawRest() {
  const compared = parts.compared;
  listed("named", [
    ...(compared ? compared.suspects : []).map(([device, isAccused, words]) =>
      item(deviceLink(device), `: ${words}${isAccused ? "" : ", fewer than may lie"} (`, bookLink("contradicts"), ")")),
    ...(parts.named || []).map(([device, words]) => item(deviceLink(device), `: ${words} (`, bookLink("left-out"), ")")),
    ...(parts.intruders || []).map(([device, messages, last, reason]) =>
      item("intruder as ", deviceLink(device), `: ${messages} messages, the last ${ago(last)}: ${reason} (`, bookLink("intruder"), ")")),
  ], compared && (compared.at === null || compared.devices < 3) ? "Nothing is said of a device." : "Nothing speaks against a device.");
  at("compared").hidden = !compared;
  at("compared").textContent = !compared ? "" : compared.at === null ? "The sums that stand were not compared yet." : compared.devices < 3
    ? `Sums of ${things(compared.devices, "device")} stand here: fewer than three say nothing of each other.`
    : `Sums of ${things(compared.devices, "device")} were compared with each other at ${clock(compared.at)}.`;
  const [gateways, behind] = parts.behind || [0, 0];
  at("gateways").hidden = !gateways;
  replace(at("gateways"), !gateways ? [] : [
    made("span", `${things(behind, "more device")} behind ${things(gateways, "gateway")}: `),
    ...parts.gateways.flatMap(([name, members], index) => [made("span", index ? ", " : ""), deviceLink(name), made("span", ` (${members.toLocaleString()})`)]),
    made("span", `${gateways > parts.gateways.length ? ", …" : ""}. Their names stay on their sites; there protofleet fleet list has them, with the gateway's own --store.`)]);
  const classes = parts.classes || { forgotten: [], drifting: [], proposed: [] };
  const strange = [...devices.values()].filter(FILTERS.unknown[1]).length;
  listed("classes", [
    ...classes.proposed.map(([name, photos, count, first]) => item("proposed: ", made("strong", name), `, ${things(photos, "photo")} of ${things(count, "device")}: `,
      ...first.flatMap(([device, of], index) => [index ? ", " : "", deviceLink(device), ` (${of.toLocaleString()})`]), count > first.length ? ", …" : "")),
    ...(strange ? [item("many photos unlike all classes: ", link(things(strange, "device"), "filter=unknown&sort=-unknown"))] : []),
    ...classes.drifting.map((name) => item(`drift suspected of class ${name} (`, bookLink("drifts"), ")")),
    ...(classes.forgotten.length ? [item(`forgotten: ${classes.forgotten.join(", ")}`)] : []),
  ], "Nothing is said of a class.");
  listed("orders", (parts.orders || []).map(([, what, target, who, given, outcome]) =>
    item(`${what}${target ? ` ${target}` : ""}, asked by ${who} at ${clock(given)}: ${outcome === null ? "NOT yet done" : outcome}`)), "None.");
  listed("expiring", (parts.expiring || []).map(([what, name, until, isSoon, help]) => {
    const words = `${what} ${name}: until ${clock(until)}`;
    const line = isSoon ? item(`${words}: ${help} (`, bookLink("expiry"), ")") : item(words);
    if (isSoon) line.className = "bad";
    return line;
  }), parts.sees_certificates ? "The connection has no certificate, and no invitation is out."
    : "No invitation is out. The certificates are seen on the page of aggregate --page.");
  listed("events", (parts.events || []).map(([when, device, what, detail]) =>
    item(`${clock(when)} `, ...(device ? [deviceLink(device), ": "] : []), `${what}${detail ? `: ${detail}` : ""}`)), "Nothing yet.");
  at("wrong").hidden = !parts.wrong;
  at("wrong").textContent = parts.wrong ? `The store cannot be read; what is shown is older. ${parts.wrong}` : "";
}

// ── one device, a part of the runbook ──────────────────────────────────────────────────────────────────────────────

let asked = 0;

async function drawOne(kind, name) {
  const mine = ++asked;
  const isNew = at("one").dataset.of !== `${kind}=${name}`;
  at("one").dataset.of = `${kind}=${name}`;
  if (isNew) {
    at("one-title").textContent = kind === "runbook" ? `Runbook: ${name}` : name;
    at("one-body").replaceChildren();
  }
  const answer = await fetch(kind === "runbook" ? `/runbook?part=${encodeURIComponent(name)}` : `/device?name=${encodeURIComponent(name)}`);
  const found = answer.ok ? await answer.json() : null;
  if (mine !== asked) return;
  const body = at("one-body");
  if (!found) replace(body, [made("p", "Nothing is known of it.")]);
  else replace(body, kind === "runbook" ? bookPage(found) : devicePage(found));
  if (isNew) {
    scrollTo(0, 0);
    at("one-title").focus();
  }
}

// **word**, `code` and [text](target) of a line; anything else is text.
function marked(line) {
  const paragraph = made("p");
  for (const piece of line.split(/(\*\*[^*]+\*\*|`[^`]+`|\[[^\]]+\]\([^)]+\))/)) {
    const words = piece.match(/^\[([^\]]+)\]\(([^)]+)\)$/)?.map((part) => part.replaceAll("`", ""));
    if (piece.startsWith("**")) paragraph.append(made("strong", piece.slice(2, -2)));
    else if (piece.startsWith("`")) paragraph.append(made("code", piece.slice(1, -1)));
    else if (words) paragraph.append(words[2].startsWith("#") ? link(words[1], `runbook=${encodeURIComponent(words[2].slice(1))}`)
      : `${words[1]} (docs/${words[2]})`);
    else paragraph.append(piece);
  }
  return paragraph;
}

const bookPage = (found) => [...found.lines.map(marked), made("p", found.at, { class: "hint" })];

function devicePage(found) {
  const one = devices.get(found.name);
  const list = made("dl");
  const say = (name, text) => text !== "" && list.append(made("dt", name), made("dd", text));
  if (one) {
    say("state", `${state(one)}, since ${clock(one.since)}`);
    say("heard", one.heard === null ? "never" : `${ago(one.heard)}, ${clock(one.heard)}`);
    say("known since", clock(one.first_seen));
    say("board, boot, bundle", [one.board, one.boot, one.bundle].join(", "));
    say("bytes up, down", `${one.up.toLocaleString()}, ${one.down.toLocaleString()}`);
    const took = [[one.step_ms, ""], [one.profiled_ms, "profiled"], [one.predicted_ms, "predicted"]];
    say("training step", took.filter(([ms]) => ms !== null).map(([ms, words]) => `${ms} ms ${words}`.trim()).join(", "));
    const held = [[one.peak_bytes, "at most"], [one.profiled_bytes, "profiled"], [one.most_bytes, "predicted at most"]];
    say("memory", held.filter(([bytes]) => bytes !== null).map(([bytes, words]) => `${round(bytes, 1e6)} MB ${words}`).join(", "));
    say("a gateway for", one.members ? things(one.members, "device") : "");
    say("photos unlike all classes", percent(one.unknown));
  }
  say("software", Object.entries(found.software).map(([name, text]) => `${name} ${text}`).join(", "));
  for (const [name, value] of Object.entries(found.figures)) say(name, value.toLocaleString());
  const points = found.accuracy.map(([number, share]) => [number, share]).reverse();
  const under = (heading, items) => {
    const box = made("ul");
    box.append(...items);
    return items.length ? [made("h3", heading), box] : [];
  };
  return [
    ...under("Needs care", found.cares.map(([cause, reason]) => {
      const line = item(`${reason} (`, bookLink(cause), ")");
      line.className = "bad";
      return line;
    })),
    list,
    ...(operator ? [orderButtons(["forget", "remove", "admit"], found.name)] : []),
    ...found.lines.map((line) => made("p", line)),
    ...(points.length ? [made("h3", "Accuracy"), chartOf(points, `Accuracy of ${found.name} by round`)] : []),
    ...under("What happened", found.events.map(([when, what, detail]) => item(`${clock(when)} ${what}${detail ? `: ${detail}` : ""}`))),
    ...under("Orders", found.orders.map((line) => item(line))),
  ];
}

// ── orders ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const WORDS = { // what an order says that is asked for
  forget: "Take out all that came from this device, for good, and take nothing more of it?",
  remove: "Take nothing more of this device? What it gave stays.",
  admit: "Take this device in again?",
  pause: "Make nothing new of what devices send, until it is resumed?",
  resume: "Go on after the pause?",
  "close-round": "Close the open round with what it has?",
  rollback: "Give devices what they had before the last round, of which nothing is kept?",
  "rollout-halt": "Offer the bundle to nobody any more?",
  "rollout-resume": "Go on with the halted roll-out?",
  "rollout-stage": "Widen the roll-out to its next stage now?",
};
const TYPED = { forget: (device) => device, rollback: () => "rollback" };

function orderButtons(names, device = "") {
  const box = made("div", undefined, { class: "row", role: "group", "aria-label": "Orders" });
  box.append(...names.map((what) => made("button", what, { type: "button", "data-order": what, "data-device": device })));
  return box;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-order]");
  if (button) ask(button.dataset.order, button.dataset.device);
});

function ask(what, device) {
  const typed = TYPED[what] ? TYPED[what](device) : "";
  at("ask-title").textContent = `${device ? `${device}: ` : ""}${WORDS[what]}`;
  at("ask-typing").hidden = !typed;
  at("ask-label").textContent = typed ? `This cannot be undone. Type ${typed}` : "";
  at("typed").value = "";
  at("ask-yes").textContent = what;
  at("ask-yes").disabled = Boolean(typed);
  at("typed").oninput = () => { at("ask-yes").disabled = at("typed").value !== typed; };
  at("ask").onclose = () => at("ask").returnValue === "yes" && give(what, device, at("typed").value);
  at("ask").returnValue = "";
  at("ask").showModal();
}

at("ask-no").addEventListener("click", () => at("ask").close("no"));

async function give(what, device, typed) {
  const share = what === "rollout-stage" && parts.rollout ? parts.rollout.stages[0] ?? 1 : undefined;
  try {
    said((await post("/order", { what, device, typed, share })).said);
  } catch (error) {
    said(`not recorded: ${error.message}`);
  }
}

at("enter").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = at("token").value;
  at("token").value = "";
  try {
    operator = (await post("/control", { token })).operator;
    said(`Orders are given as ${operator}.`);
  } catch (error) {
    said(error.message);
  }
  drawControl();
  follow();
});

function drawControl() {
  at("control").hidden = !parts.control;
  at("enter").hidden = Boolean(operator);
  at("buttons").hidden = !operator;
  const names = ["pause", "resume", "close-round", "rollback"];
  if (parts.rollout) names.push("rollout-halt", "rollout-resume", "rollout-stage");
  if (operator) replace(at("buttons"), [...orderButtons(names).children]);
}

// ── what comes ─────────────────────────────────────────────────────────────────────────────────────────────────────

function take(news) {
  if (news.whole) devices.clear();
  if (news.columns) columns = news.columns;
  ahead = news.now - Date.now() / 1000;
  for (const cells of news.rows) {
    const one = {};
    for (let index = 0; index < columns.length; index++) one[columns[index]] = cells[index];
    devices.set(one.name, one);
  }
  const { rows, columns: named, ...rest } = news;
  Object.assign(parts, rest);
}

function drawTable() {
  choose();
  drawFilters();
  drawHeads();
  drawRows();
}

function draw() {
  drawTop();
  drawTable();
  drawRounds();
  drawRollout();
  drawRest();
  drawControl();
}

function follow() {
  const given = new URLSearchParams(location.hash.slice(1));
  const kind = ["device", "runbook"].find((name) => given.has(name));
  at("fleet").hidden = Boolean(kind);
  at("one").hidden = !kind;
  if (kind) {
    drawOne(kind, given.get(kind));
    return;
  }
  const [left, name] = (at("one").dataset.of || "").split(/=(.*)/s);
  at("one").dataset.of = "";
  asked++;
  const sort = given.get("sort") || "care";
  const filter = given.get("filter") || "all";
  chosen = { filter: Object.hasOwn(FILTERS, filter) ? filter : "all", find: given.get("find") || "",
    sort: sort.replace(/^-/, ""), down: sort.startsWith("-") };
  at("view").scrollTop = 0;
  if (at("search").value !== chosen.find) at("search").value = chosen.find;
  drawTable();
  if (!left) return;
  const back = `#${left}=${encodeURIComponent(name)}`; // to the link that led away
  ([...at("fleet").querySelectorAll("a")].find((link) => link.hash === back) || at("view")).focus();
}

at("search").addEventListener("input", () => history.replaceState(null, "", `#${address({ find: at("search").value.trim() })}`) || follow());
at("find").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", follow);
addEventListener("resize", () => {
  drawRows();
  drawRounds();
});

take(first.state);
draw();
follow();
listen(() => `/events?since=${parts.version}`, (news) => {
  take(news);
  draw();
  if (!at("one").hidden && at("one").dataset.of.startsWith("device=")) follow();
});
setInterval(() => at("fleet").hidden || drawRows(), 10_000); // how long ago
requestAnimationFrame(() => setTimeout(() => performance.mark("drawn"))); // for benchmarks/server/fleet_page.py
