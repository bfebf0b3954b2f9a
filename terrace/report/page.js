// Hover, and zoom of the time axis. The page is complete without it.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const charts = [...document.querySelectorAll("svg.chart")];
  const whole = [0, data.plot];
  charts.forEach((chart, index) => { chart.facts = data.charts[index]; chart.view = whole; });
  const words = (s) => {
    const a = Math.abs(s);
    if (a >= 1) return s.toFixed(3) + " s";
    return a >= 1e-3 ? (s * 1e3).toFixed(3) + " ms" : (s * 1e6).toFixed(2) + " us";
  };
  const size = (b) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (b >= 1000 && i < 4) { b /= 1000; i += 1; }
    return (i ? b.toPrecision(3) : b) + " " + units[i];
  };
  const NS = "http://www.w3.org/2000/svg";
  const add = (parent, name, attributes, text = "") => {
    const element = document.createElementNS(NS, name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    element.textContent = text;
    parent.append(element);
  };
  const say = (event, text) => {
    tip.style.display = text ? "block" : "none";
    tip.textContent = text;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, window.innerWidth - 260))}px`;
    tip.style.top = `${event.clientY + 16}px`;
  };
  const hush = () => { tip.style.display = "none"; };
  const time = (chart, x) => chart.facts.start_s + (x / data.plot) * chart.facts.length_s;

  function ticks(chart) {
    const [from, to] = chart.view;
    const axis = chart.querySelector("g.axis");
    const first = time(chart, from);
    const last = time(chart, to);
    const rough = (last - first) / 6;
    if (!(rough > 0)) return;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
    const [factor, unit] = last >= 1 ? [1, "s"] : last >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    const decimals = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
    const y = Number(axis.dataset.y);
    axis.replaceChildren();
    for (let k = Math.ceil(first / step - 1e-9); k * step <= last + 1e-9 * step; k += 1) {
      const x = data.gutter + (k * step - first) / (last - first) * data.plot;
      const anchor = x > data.gutter + data.plot - 40 ? "end" : "middle";
      add(axis, "path", { class: "tick", d: `M${x} ${y}v5` });
      add(axis, "text", { x, y: y + 20, "text-anchor": anchor }, `${(k * step * factor).toFixed(decimals)} ${unit}`);
    }
  }

  // The charts of the whole step move together; a close-up moves alone.
  function show(chart, from, to) {
    const least = data.plot / 5000;
    const middle = (from + to) / 2;
    const half = Math.min(data.plot, Math.max(least, to - from)) / 2;
    const left = Math.max(0, Math.min(data.plot - 2 * half, middle - half));
    for (const other of charts) {
      if (other !== chart && !(other.facts.zooms && chart.facts.zooms)) continue;
      other.view = [left, left + 2 * half];
      const plot = other.querySelector("svg.plot");
      plot.setAttribute("viewBox", `${left} 0 ${2 * half} ${plot.viewBox.baseVal.height}`);
      ticks(other);
    }
  }

  function place(chart, event) {
    const box = chart.getBoundingClientRect();
    const scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale - data.gutter;
    const [from, to] = chart.view;
    return [from + x / data.plot * (to - from), (event.clientY - box.top) * scale, x >= 0 && x <= data.plot];
  }

  function found(chart, x, y) {
    const facts = chart.facts;
    const memory = (values) => {
      const column = Math.min(values.length - 1, Math.max(0, Math.floor(x / data.plot * values.length)));
      return `${size(values[column])} at ${words(time(chart, x))}`;
    };
    if (facts.memory) return memory(facts.memory);
    const row = facts.rows.findIndex(([top, height]) => y >= top && y <= top + height + 8);
    if (row < 0) return "";
    if (facts.memories) return `stage ${row}: ${memory(facts.memories[row])}`;
    // A narrow bar is found from beside it, too.
    const near = (chart.view[1] - chart.view[0]) / 500;
    const within = (gap) => facts.bars[row].find(([start, end]) => x >= start - gap && x <= end + gap);
    const bar = within(0) || within(near);
    return bar ? `${bar[2]}: ${words(time(chart, bar[1]) - time(chart, bar[0]))} from ${words(time(chart, bar[0]))}` : "";
  }

  let pressed = null;
  for (const chart of charts) {
    chart.addEventListener("pointermove", (event) => {
      const [x, y, inside] = place(chart, event);
      say(event, inside ? found(chart, x, y) : "");
    });
    chart.addEventListener("pointerleave", hush);
    chart.addEventListener("pointerdown", (event) => {
      const [x, , inside] = place(chart, event);
      pressed = inside ? x : null;
      event.preventDefault();
    });
    chart.addEventListener("pointerup", (event) => {
      const [x] = place(chart, event);
      if (pressed !== null && Math.abs(x - pressed) > (chart.view[1] - chart.view[0]) / 200) {
        show(chart, Math.max(0, Math.min(x, pressed)), Math.min(data.plot, Math.max(x, pressed)));
      }
      pressed = null;
    });
    chart.addEventListener("dblclick", () => show(chart, ...whole));
  }
  const act = {
    in: (from, wide) => [from + wide / 4, from + 3 * wide / 4],
    out: (from, wide) => [from - wide / 2, from + 3 * wide / 2],
    left: (from, wide) => [from - wide / 2, from + wide / 2],
    right: (from, wide) => [from + wide / 2, from + 3 * wide / 2],
    all: () => whole,
  };
  for (const button of document.querySelectorAll("button[data-act]")) {
    button.addEventListener("click", () => {
      const [from, to] = charts[0].view;
      show(charts[0], ...act[button.dataset.act](from, to - from));
    });
  }
  // Curves over steps: the values at the step under the pointer.
  [...document.querySelectorAll("svg.curve")].forEach((curve, index) => {
    const facts = data.curves[index];
    const short = (v) => (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(4))));
    curve.addEventListener("pointermove", (event) => {
      const box = curve.getBoundingClientRect();
      const x = (event.clientX - box.left) * curve.viewBox.baseVal.width / box.width;
      const step = facts.first + (x - facts.left) / (facts.right - facts.left) * (facts.last - facts.first);
      const parts = Object.entries(facts.lines).filter(([, points]) => points.length).map(([name, points]) => {
        const near = points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
        return `${name} ${short(near[1])} at step ${near[0]}`;
      });
      say(event, parts.join(", "));
    });
    curve.addEventListener("pointerleave", hush);
  });
  // Samples: one step at a time.
  const steps = [...document.querySelectorAll("details.step")];
  const chosen = document.querySelector(".picks select");
  const pick = () => steps.forEach((step) => { step.open = step.dataset.step === chosen.value; });
  for (const button of document.querySelectorAll("button[data-pick]")) {
    button.addEventListener("click", () => {
      const last = chosen.options.length - 1;
      chosen.selectedIndex = Math.max(0, Math.min(last, chosen.selectedIndex + Number(button.dataset.pick)));
      pick();
    });
  }
  if (chosen) chosen.addEventListener("change", pick);
  window.addEventListener("beforeprint", () => charts.forEach((chart) => show(chart, ...whole)));
  document.body.classList.add("live");
})();
