// The page of a device: shows its state, sends taps. All text goes in as text, never as HTML.
"use strict";

const chosen = new Set(); // ids of photos
let active = null; // the class that each tap gives
let state = first.state;
let stillUntil = 0; // photos keep their places while somebody taps
let stillTimer = 0;
let surelySince = 0; // when "Erase" was tapped once, so that the next tap erases; 0 if it was not
const saidOf = new Map(); // by the id of a photo that was tapped a moment ago: what it is now
const STILL_MS = 1500;
const MOVED_MS = 400; // a tap so soon after the photos moved was meant for another one

const justNow = (then) => then !== undefined && performance.now() - then < MOVED_MS;
const holdsStill = () => chosen.size > 0 || performance.now() < stillUntil;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const share = (part) => (part === null ? "" : ` ${Math.round(100 * part)} %`);

function answerOf(photo) {
  if (!photo.answer) return "no answer yet";
  return photo.unknown ? `unknown, nearest ${photo.answer}` : photo.answer + share(photo.probability);
}

function tile(photo) {
  const button = made("button", undefined, { type: "button", "aria-pressed": chosen.has(photo.id), "data-id": photo.id, title: photo.id });
  const label = saidOf.get(photo.id) || photo.label || (photo.aside === "unsure" ? "not sure" : photo.aside ? "none of these" : "");
  button.append(made("img", undefined, { src: `/photo/${photo.id}.jpg`, alt: "Photo", loading: "lazy" }));
  button.append(made("span", answerOf(photo) + (photo.times > 1 ? ` ×${photo.times}` : ""), { class: "answer" }));
  button.append(made("span", label ? `✓ ${label}` : clock(photo.at), { class: label ? "label" : "time" }));
  button.addEventListener("click", (event) => {
    if (event.detail && justNow(button.parentNode.moved)) said("The photos moved just now: tap again.");
    else tapped(photo.id);
  });
  button.photo = photo;
  return button;
}

function still() {
  stillUntil = performance.now() + STILL_MS;
  clearTimeout(stillTimer);
  stillTimer = setTimeout(() => { stillUntil = 0; draw(); }, STILL_MS);
}

// Tiles that have not changed stay as they are. Of a photo that has left, the neighbour gets the focus.
// While photos are chosen, and for a moment after a tap, all stay in their places.
function fill(id, photos) {
  const box = at(id);
  const tiles = [...box.children];
  if (tiles.length && holdsStill()) {
    const now = new Map([...state.newest, ...state.wanted, ...state.unknown].map((photo) => [photo.id, photo]));
    photos = tiles.map((child) => ({ ...child.photo, ...now.get(child.dataset.id) }));
  }
  const place = tiles.indexOf(document.activeElement);
  const before = new Map(tiles.map((child) => [child.dataset.id, child]));
  const after = photos.map((photo) => {
    const look = JSON.stringify([photo, chosen.has(photo.id), saidOf.get(photo.id)]);
    const known = before.get(photo.id);
    if (known && known.look === look) return known;
    const fresh = tile(photo);
    fresh.look = look;
    return fresh;
  });
  if (after.length === tiles.length && after.every((child, index) => tiles[index] === child)) return;
  if (tiles.some((child, index) => child.dataset.id !== after[index]?.dataset.id)) box.moved = performance.now();
  box.replaceChildren(...after);
  if (place < 0) return;
  const same = after.find((child) => child.dataset.id === tiles[place].dataset.id);
  (same || after[Math.min(place, after.length - 1)] || at("title")).focus({ preventScroll: true });
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
  const boxes = ["newest", "wanted", "unknown"].map(at);
  const tops = boxes.map((box) => box.offsetTop);
  if (!holdsStill()) saidOf.clear();
  fill("newest", newest);
  fill("wanted", state.wanted);
  fill("unknown", state.unknown);
  const proposals = Object.entries(state.proposed).map(([name, photos]) => `${name} (${photos === 1 ? "1 photo" : `${photos} photos`})`);
  at("unknown-part").hidden = !at("unknown").children.length && !proposals.length;
  at("nothing").hidden = at("wanted").children.length > 0;
  at("proposals").textContent = (proposals.length ? `Proposed: ${proposals.join(", ")}. ` : "") + (state.tells_proposed
    ? "The fleet’s operator is told the name, and how many photos; no photo."
    : "A proposal stays on this device: its policy does not let the operator be told.");
  at("live").textContent = newest.length ? `${clock(newest[0].at)}: ${answerOf(newest[0])}` : "No picture yet.";
  at("health").textContent = `${health.camera}: ${health.taken} pictures, ${health.kept} kept; ` +
    `${Math.round(health.peak_rss_bytes / 1e6)} MB of memory at most${health.predicted_bytes ? `, ${Math.round(health.predicted_bytes / 1e6)} predicted` : ""}; ${health.basis}`;
  at("refused").hidden = !health.refused || !health.kept;
  at("refused").textContent = `The fleet takes nothing more of this device (${health.refused}). Its photos stay here; ` +
    "protofleet photos --erase at its terminal deletes them.";
  at("helpful").textContent = report.most_helpful ? `Ten more of ${report.most_helpful} would help most.` : "";
  const warnings = at("warnings");
  if (report.warnings.join("\n") !== Array.from(warnings.children, (line) => line.textContent).join("\n")) {
    warnings.replaceChildren(...report.warnings.map((line) => made("li", line)));
  }
  warnings.hidden = !report.warnings.length;
  at("report").replaceChildren(...report.classes.map((one) => {
    const row = made("tr");
    const interval = one.asked ? `${Math.round(100 * one.low)} to ${Math.round(100 * one.high)} %` : "";
    row.append(made("th", one.label, { scope: "row" }), made("td", one.labels),
      made("td", one.asked ? `${one.right} of ${one.asked}` : "–"), made("td", interval));
    return row;
  }));
  const budget = left.epsilon === null ? "" : ` Its owner allows ε = ${left.epsilon} at δ = ${left.delta}.`;
  at("left").textContent = `${left.releases === 1 ? "1 message" : `${left.releases} messages`} made of its photos, ${left.bytes} bytes; no photo.` +
    (left.cost ? ` ${left.cost}.` : " No ε is stated.") + budget;
  at("releases").replaceChildren(
    ...left.last.map((one) => made("li", `${clock(one.at)}: ${one.what}, ${one.bytes} bytes`)),
    ...left.shown.map((one) => made("li", `${clock(one.at)}: shown here: ${one.what}`)));
  at("undo").disabled = !state.undoes;
  at("none").disabled = at("unsure").disabled = at("erase").disabled = !chosen.size;
  if (!chosen.size) surelySince = 0;
  at("erase").textContent = surelySince ? `Erase ${chosen.size} for good?` : "Erase";
  classes();
  boxes.forEach((box, index) => { if (box.offsetTop !== tops[index]) box.moved = performance.now(); });
}

function tapped(id) {
  if (active !== null) {
    send("/name", { photos: [id], label: active }, `named ${active}`, active);
    return;
  }
  if (!chosen.delete(id)) chosen.add(id);
  surelySince = 0;
  said(chosen.size === 1 ? `1 chosen: photo ${[...chosen][0]}` : chosen.size ? `${chosen.size} chosen` : "");
  draw();
}

function classTapped(label) {
  if (chosen.size) {
    send("/name", { photos: [...chosen], label }, `named ${label}`, label);
    return;
  }
  active = active === label ? null : label;
  said(active === null ? "" : `each tap names ${active}`);
  draw();
}

// `now` is what its photos are from then on.
async function send(path, body, done, now) {
  still();
  try {
    const found = await post(path, body);
    for (const id of body.photos || []) saidOf.set(id, now);
    if (!body.photos) saidOf.clear();
    chosen.clear();
    state = found.state;
    still();
    const gone = (body.photos || []).length - found.count;
    said(`${found.count} ${done}${body.photos && gone ? `; ${gone} had left` : ""}`);
  } catch (error) {
    said(`not kept: ${error.message}`);
  }
  draw();
}

at("none").addEventListener("click", () => send("/aside", { photos: [...chosen], why: "none" }, "set aside", "none of these"));
at("unsure").addEventListener("click", () => send("/aside", { photos: [...chosen], why: "unsure" }, "set aside", "not sure"));
at("undo").addEventListener("click", () => send("/undo", {}, "taken back"));
at("erase").addEventListener("click", (event) => {
  if (surelySince && event.detail && justNow(surelySince)) return; // a tap that was meant as one
  if (surelySince) send("/erase", { photos: [...chosen] }, "erased for good, with what was learned of them", "erased");
  surelySince = surelySince ? 0 : performance.now();
  draw();
});
at("propose").addEventListener("submit", (event) => {
  event.preventDefault();
  const proposed = at("proposed").value.trim();
  if (!proposed || !chosen.size) {
    said("choose photos, and say what they are");
    return;
  }
  send("/aside", { photos: [...chosen], why: "none", proposed }, `proposed as ${proposed}`, `${proposed}, proposed`);
});

draw();
listen(() => "/events", (news) => {
  state = news;
  draw();
});
