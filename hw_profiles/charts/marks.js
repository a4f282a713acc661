// What a mark of a chart says: on hover, on a tap, and by keys. A chart is one stop of Tab; arrows, Home and End go
// through its marks, Escape takes the words away. Without this script a mark says it as its <title>, on hover.
"use strict";
(() => {
  const REACH = 24; // pixels around a finger
  const tip = document.body.appendChild(document.createElement("div"));
  Object.assign(tip, { id: "tip", hidden: true });
  tip.setAttribute("role", "status");
  let at = null;

  const charts = [...document.querySelectorAll("svg[role=img]")];
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.says = title.textContent;
    title.remove(); // or a browser shows it a second time
  }
  const marksOf = (chart) => [...chart.querySelectorAll("[data-says]:not([hidden])")];
  const boxOf = (mark) => mark.getBoundingClientRect();
  function alongOf(chart) { // bars from above, points from the left; a bar and its whisker say the same once
    const points = chart.querySelector("circle[data-says]") !== null;
    return marksOf(chart).map((mark) => [mark, boxOf(mark)])
      .sort(([, a], [, b]) => (points ? a.left - b.left || a.top - b.top : a.top - b.top || a.left - b.left))
      .map(([mark]) => mark).filter((mark, i, all) => !i || mark.dataset.says !== all[i - 1].dataset.says);
  }

  function tell(mark) {
    at?.classList.remove("at");
    at = mark;
    at?.classList.add("at");
    tip.hidden = mark === null;
    tip.textContent = mark?.dataset.says ?? "";
    if (mark === null) return;
    const { left, top, bottom, width } = boxOf(mark), [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(8, Math.min(left + width / 2 - wide / 2, document.documentElement.clientWidth - wide - 8))}px`;
    tip.style.top = `${top - tall - 10 > 0 ? top - tall - 10 : bottom + 10}px`;
    mark.dispatchEvent(new CustomEvent("mark", { bubbles: true }));
  }

  function nearest(chart, x, y) {
    const away = (mark) => {
      const box = boxOf(mark);
      return Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
    };
    const [mark, least] = marksOf(chart).map((each) => [each, away(each)])
      .reduce((a, b) => (b[1] < a[1] ? b : a), [null, Infinity]);
    return least <= REACH ? mark : null;
  }

  for (const chart of charts) {
    if (!marksOf(chart).length) continue;
    chart.setAttribute("tabindex", "0");
    chart.setAttribute("role", "application"); // so that a screen reader hands the arrows on
    chart.setAttribute("aria-roledescription", "chart, arrow keys go through its marks");
    chart.addEventListener("pointerover", (event) => {
      const mark = event.target.closest("[data-says]");
      if (mark && event.pointerType !== "touch") tell(mark);
    });
    chart.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") tell(null); });
    chart.addEventListener("pointerup", (event) => {
      if (event.pointerType === "touch") tell(nearest(chart, event.clientX, event.clientY));
    });
    chart.addEventListener("blur", () => tell(null));
    chart.addEventListener("keydown", (event) => {
      const marks = alongOf(chart), now = marks.indexOf(at), last = marks.length - 1;
      const next = {
        ArrowRight: Math.min(now + 1, last), ArrowDown: Math.min(now + 1, last),
        ArrowLeft: Math.max(now - 1, 0), ArrowUp: Math.max(now - 1, 0), Home: 0, End: last,
      }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      tell(marks[next] ?? null);
    });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tell(null); });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest("svg")) tell(null); });
  addEventListener("scroll", () => { if (at && document.activeElement !== at.ownerSVGElement) tell(null); }, { passive: true });
})();
