// Hover, and zoom of the time axis. The page is complete without it.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const charts = [...document.querySelectorAll("svg.chart")];
  const whole = [0, data.plot];
  let view = whole;
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
  const time = (x) => (x / data.plot) * data.step_s;

  function ticks(axis) {
    const rough = (view[1] - view[0]) / 6 / data.plot * data.step_s;
    if (!(rough > 0)) return;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
    const y = Number(axis.dataset.y);
    axis.replaceChildren();
    for (let k = Math.ceil(time(view[0]) / step - 1e-9); k * step <= time(view[1]) * (1 + 1e-9); k += 1) {
      const x = data.gutter + ((k * step / data.step_s) * data.plot - view[0]) / (view[1] - view[0]) * data.plot;
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
      mark.setAttribute("class", "tick");
      mark.setAttribute("d", `M${x} ${y}v5`);
      const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      text.setAttribute("x", x);
      text.setAttribute("y", y + 20);
      text.setAttribute("text-anchor", x > data.gutter + data.plot - 40 ? "end" : "middle");
      text.textContent = words(k * step);
      axis.append(mark, text);
    }
  }

  function show(from, to) {
    const least = data.plot / 5000;
    const middle = (from + to) / 2;
    const half = Math.min(data.plot, Math.max(least, to - from)) / 2;
    const left = Math.max(0, Math.min(data.plot - 2 * half, middle - half));
    view = [left, left + 2 * half];
    for (const chart of charts) {
      const plot = chart.querySelector("svg.plot");
      const height = plot.viewBox.baseVal.height;
      plot.setAttribute("viewBox", `${view[0]} 0 ${view[1] - view[0]} ${height}`);
      ticks(chart.querySelector("g.axis"));
    }
  }

  function place(chart, event) {
    const box = chart.getBoundingClientRect();
    const scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale - data.gutter;
    return [view[0] + x / data.plot * (view[1] - view[0]), (event.clientY - box.top) * scale, x >= 0 && x <= data.plot];
  }

  function found(chart, x, y) {
    if (chart.dataset.chart === "memory") {
      const column = Math.min(data.memory.length - 1, Math.max(0, Math.floor(x / data.plot * data.memory.length)));
      return `${size(data.memory[column])} at ${words(time(x))}`;
    }
    const row = data.rows.findIndex(([top, height]) => y >= top && y <= top + height + 8);
    if (row < 0) return "";
    const bars = data.bars[row];
    const bar = bars.find(([start, end]) => x >= start - 0.2 && x <= end + 0.2);
    return bar ? `${bar[2]}: ${words(time(bar[1]) - time(bar[0]))} from ${words(time(bar[0]))}` : "";
  }

  let pressed = null;
  for (const chart of charts) {
    chart.addEventListener("pointermove", (event) => {
      const [x, y, inside] = place(chart, event);
      const text = inside ? found(chart, x, y) : "";
      tip.style.display = text ? "block" : "none";
      tip.textContent = text;
      tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 260)}px`;
      tip.style.top = `${event.clientY + 16}px`;
    });
    chart.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    chart.addEventListener("pointerdown", (event) => {
      const [x, , inside] = place(chart, event);
      pressed = inside ? x : null;
      event.preventDefault();
    });
    chart.addEventListener("pointerup", (event) => {
      const [x] = place(chart, event);
      if (pressed !== null && Math.abs(x - pressed) > (view[1] - view[0]) / 200) {
        show(Math.max(0, Math.min(x, pressed)), Math.min(data.plot, Math.max(x, pressed)));
      }
      pressed = null;
    });
    chart.addEventListener("dblclick", () => show(...whole));
  }
  const act = {
    in: () => { const w = view[1] - view[0]; show(view[0] + w / 4, view[1] - w / 4); },
    out: () => { const w = view[1] - view[0]; show(view[0] - w / 2, view[1] + w / 2); },
    left: () => { const w = view[1] - view[0]; show(view[0] - w / 2, view[1] - w / 2); },
    right: () => { const w = view[1] - view[0]; show(view[0] + w / 2, view[1] + w / 2); },
    all: () => show(...whole),
  };
  for (const button of document.querySelectorAll("button[data-act]")) {
    button.addEventListener("click", () => act[button.dataset.act]());
  }
  window.addEventListener("beforeprint", () => show(...whole));
  document.body.classList.add("live");
})();
