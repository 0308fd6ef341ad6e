// Lines and bars as SVG. Everything that somebody else wrote gets into the page as text (textContent), never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Draw lines over time. `series`: arrays of [seconds, value]. Return the largest value. */
function drawLines(svg, series) {
  const width = 600, height = 120, top = 14;
  const points = series.flat();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const shapes = [];
  const most = points.reduce((largest, point) => Math.max(largest, point[1]), 0);
  if (points.length > 0) {
    const first = points.reduce((least, point) => Math.min(least, point[0]), Infinity);
    const last = points.reduce((most, point) => Math.max(most, point[0]), -Infinity);
    const x = (at) => (last > first ? ((at - first) / (last - first)) * width : width);
    const y = (value) => height - 2 - (most > 0 ? (value / most) * (height - top - 2) : 0);
    series.forEach((line, number) => {
      const text = line.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
      shapes.push(shape("polyline", { points: text, class: number > 0 ? "second" : "first" }));
    });
  }
  svg.replaceChildren(...shapes);
  return most;
}

/** Draw spans in rows. `rows`: {name, spans: [[start, length, name], ...]}, in microseconds. */
function drawSpans(svg, rows, total) {
  const width = 1100, left = 220, line = 22;
  svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * line + 4}`);
  const scale = total > 0 ? (width - left) / total : 0;
  const shapes = [];
  rows.forEach((row, number) => {
    const top = number * line;
    shapes.push(shape("text", { x: 0, y: top + 14 }, row.name));
    for (const [start, length, name] of row.spans) {
      const box = shape("rect", {
        x: left + start * scale, y: top + 2, width: Math.max(length * scale, 0.5), height: line - 6,
        class: name.startsWith("wait") ? "span wait" : "span",
      });
      box.append(shape("title", {}, `${name}: ${(length / 1000).toFixed(3)} ms`));
      shapes.push(box);
    }
  });
  svg.replaceChildren(...shapes);
}
