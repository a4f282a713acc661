// Of every page: its first state, elements that are made, and what changes something. All text goes in as text.
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

async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST", body: JSON.stringify(body), headers: { "X-Protofleet-Token": first.token },
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
