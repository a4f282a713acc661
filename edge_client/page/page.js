// The page of a device: shows its state, sends taps. All text goes in as text, never as HTML.
"use strict";

const chosen = new Set(); // ids of photos
let active = null; // the class that each tap gives
let state = first.state;

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const share = (part) => (part === null ? "" : ` ${Math.round(100 * part)} %`);

function answerOf(photo) {
  if (!photo.answer) return "no answer yet";
  return photo.unknown ? `unknown, nearest ${photo.answer}` : photo.answer + share(photo.probability);
}

function tile(photo) {
  const button = made("button", undefined, { type: "button", "aria-pressed": chosen.has(photo.id), "data-id": photo.id });
  const label = photo.label || (photo.aside === "unsure" ? "not sure" : photo.aside ? "none of these" : "");
  button.append(made("img", undefined, { src: `/photo/${photo.id}.jpg`, alt: "", loading: "lazy" }));
  button.append(made("span", answerOf(photo) + (photo.times > 1 ? ` ×${photo.times}` : ""), { class: "answer" }));
  button.append(made("span", label ? `✓ ${label}` : clock(photo.at), { class: label ? "label" : "time" }));
  button.addEventListener("click", () => tapped(photo.id));
  return button;
}

// Tiles that have not changed stay as they are, so that the focus and the picture do.
function fill(id, photos) {
  const box = at(id);
  const before = new Map([...box.children].map((child) => [child.dataset.id, child]));
  const after = photos.map((photo) => {
    const look = JSON.stringify([photo, chosen.has(photo.id)]);
    const known = before.get(photo.id);
    if (known && known.look === look) return known;
    const fresh = tile(photo);
    fresh.look = look;
    if (known && known === document.activeElement) queueMicrotask(() => fresh.focus());
    return fresh;
  });
  if (after.length !== box.children.length || after.some((child, place) => box.children[place] !== child)) {
    box.replaceChildren(...after);
  }
}

function classes() {
  const box = at("classes");
  const look = JSON.stringify([state.classes, active]);
  if (box.look === look) return;
  box.look = look;
  const focused = document.activeElement && document.activeElement.dataset.label;
  box.replaceChildren(...state.classes.map((label) => {
    const button = made("button", label, { type: "button", "aria-pressed": label === active, "data-label": label });
    button.addEventListener("click", () => classTapped(label));
    if (label === focused) queueMicrotask(() => button.focus());
    return button;
  }));
}

function draw() {
  const { newest, health, left, report } = state;
  fill("newest", newest);
  fill("wanted", state.wanted);
  fill("unknown", state.unknown);
  at("unknown-part").hidden = !state.unknown.length;
  at("live").textContent = newest.length ? `${clock(newest[0].at)}: ${answerOf(newest[0])}` : "No picture yet.";
  at("health").textContent = `${health.camera}: ${health.taken} pictures, ${health.kept} shown or ranked; ` +
    `${Math.round(health.peak_rss_bytes / 1e6)} MB at most; ${health.basis}`;
  at("helpful").textContent = [report.most_helpful ? `Ten more of ${report.most_helpful} would help most.` : "",
    ...report.warnings].join(" ");
  at("report").replaceChildren(...report.classes.map((one) => {
    const row = made("tr");
    const interval = one.asked ? `${Math.round(100 * one.low)} to ${Math.round(100 * one.high)} %` : "";
    row.append(made("th", one.label, { scope: "row" }), made("td", one.labels),
      made("td", one.asked ? `${one.right} of ${one.asked}` : "–"), made("td", interval));
    return row;
  }));
  const budget = left.epsilon === null ? "" : ` Its owner allows ε = ${left.epsilon} at δ = ${left.delta}.`;
  at("left").textContent = `${left.releases} messages made of its photos, ${left.bytes} bytes; no photo.` +
    (left.cost ? ` ${left.cost}.` : " No ε is stated.") + budget;
  at("releases").replaceChildren(
    ...left.last.map((one) => made("li", `${clock(one.at)}: ${one.what} ${one.method}, ${one.bytes} bytes`)),
    ...left.shown.map((one) => made("li", `${clock(one.at)}: shown here: ${one.what}`)));
  at("undo").disabled = !state.undoes;
  at("none").disabled = at("unsure").disabled = !chosen.size;
  classes();
}

function tapped(id) {
  if (active !== null) {
    send("/name", { photos: [id], label: active }, `named ${active}`);
    return;
  }
  if (!chosen.delete(id)) chosen.add(id);
  said(chosen.size ? `${chosen.size} chosen` : "");
  draw();
}

function classTapped(label) {
  if (chosen.size) {
    send("/name", { photos: [...chosen], label }, `named ${label}`);
    return;
  }
  active = active === label ? null : label;
  said(active === null ? "" : `each tap names ${active}`);
  draw();
}

async function send(path, body, done) {
  try {
    const found = await post(path, body);
    chosen.clear();
    state = found.state;
    said(`${found.count} ${done}`);
  } catch (error) {
    said(`not kept: ${error.message}`);
  }
  draw();
}

at("none").addEventListener("click", () => send("/aside", { photos: [...chosen], why: "none" }, "set aside"));
at("unsure").addEventListener("click", () => send("/aside", { photos: [...chosen], why: "unsure" }, "set aside"));
at("undo").addEventListener("click", () => send("/undo", {}, "taken back"));
at("propose").addEventListener("submit", (event) => {
  event.preventDefault();
  const proposed = at("proposed").value.trim();
  if (!proposed || !chosen.size) {
    said("choose photos, and say what they are");
    return;
  }
  send("/aside", { photos: [...chosen], why: "none", proposed }, `proposed as ${proposed}`);
});

draw();
const events = new EventSource("/events");
events.onmessage = (event) => {
  state = JSON.parse(event.data);
  const there = new Set([...state.newest, ...state.wanted, ...state.unknown].map((photo) => photo.id));
  for (const id of chosen) if (!there.has(id)) chosen.delete(id);
  draw();
};
