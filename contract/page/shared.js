// Of every page: its first state, elements that are made, what comes, and what changes something. All text goes in as text.
"use strict";

const first = JSON.parse(document.getElementById("first").textContent);

const at = (id) => document.getElementById(id);

function made(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function said(text) {
  at("said").textContent = text;
}

// Each event of the server's goes to `take`. `address` names where to ask, anew each time; `alone` is shown while nobody answers.
function listen(address, take) {
  const events = new EventSource(address());
  events.onopen = () => { at("alone").hidden = true; };
  events.onmessage = (event) => take(JSON.parse(event.data));
  events.onerror = () => {
    at("alone").hidden = false;
    if (events.readyState === EventSource.CLOSED) setTimeout(again, 5_000, address, take);
  };
}

// After a refusal: there are too many pages; or another process serves this one and does not know us, so it is loaded again.
async function again(address, take) {
  const answer = await fetch("/known").catch(() => null); // there is no such thing, but for who is not known
  if (answer?.status === 403) location.reload();
  else listen(address, take);
}

async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST", body: JSON.stringify(body), headers: { "X-Protofleet-Token": first.token },
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
