// The value of every curve at the pointer. Without this script the page is the same, less these.
"use strict";
const tip = document.getElementById("tip");

function nearest(points, x) {
  return points.reduce((best, point) => (Math.abs(point[1] - x) < Math.abs(best[1] - x) ? point : best));
}

function row(label, number, text) {
  const line = document.createElement("div");
  const swatch = document.createElement("i");
  swatch.className = `swatch s${number % 6}`;
  line.append(swatch, `${label}: ${text}`);
  return line;
}

for (const svg of document.querySelectorAll("svg[data-lines]")) {
  const lines = JSON.parse(svg.dataset.lines).filter(([, , points]) => points.length);
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", 10);
  cross.setAttribute("y2", 204);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const found = lines.map(([label, number, points]) => [label, number, nearest(points, x)]);
    const closest = nearest(found.map(([, , point]) => point), x);
    cross.setAttribute("x1", closest[1]);
    cross.setAttribute("x2", closest[1]);
    svg.append(cross);
    tip.replaceChildren(`step ${closest[0].toLocaleString("en")}`);
    for (const [label, number, point] of found) tip.append(row(label, number, point[3]));
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
  });
  svg.addEventListener("pointerleave", () => {
    cross.remove();
    tip.hidden = true;
  });
}
