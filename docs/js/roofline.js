// The roofline explorer of docs/roofline.md: what a layer costs, and what the hardware allows, for any layer.
//
// The first half is mega_moe/roofline.py once more, by the same names, as functions of plain numbers, and
// tests/test_viewer.py runs them beside it. What is no formula there (devices, layers, passes through memory) comes as
// ROOFLINE from docs/roofline_data.py. The second half draws.
//
// A layer is {T, H, I, E, K, dtype}, a direction "forward" or "backward", a cost {flops, bytes}.

"use strict";

// The ledgers.

const cost = (flops, bytes) => ({ flops, bytes });
const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);

/** Bytes of each tensor, and one product's multiply-adds. */
function sizesOf({ T, H, I, E, K, dtype }) {
  const R = T * K, b = ROOFLINE.bytes_of[dtype], live = Math.min(E, R);
  return {
    x: T * H * b,
    rows: R * H * b,
    pre: R * 2 * I * b,
    act: R * I * b,
    topk_ids: R * 8,
    topk_weights: R * 4,
    w_gate_up: live * 2 * I * H * b,
    w_down: live * H * I * b,
    dw_gate_up: E * 2 * I * H * b,
    dw_down: E * H * I * b,
    product: R * H * I,
  };
}

/** The cost of each step when every intermediate is written to memory. */
function stepsOf(layer, direction) {
  const s = sizesOf(layer);
  if (direction === "forward") {
    return {
      dispatch: cost(0, s.topk_ids + s.x + s.rows),
      gate_up: cost(4 * s.product, s.rows + s.w_gate_up + s.pre),
      swiglu: cost(0, s.pre + s.act),
      down: cost(2 * s.product, s.act + s.w_down + s.rows),
      combine: cost(0, s.rows + s.topk_weights + s.x),
    };
  }
  return {
    combine: cost(0, s.topk_ids + s.x + s.rows),
    down: cost(4 * s.product, s.rows + s.w_down + s.act + s.rows + s.act + s.dw_down),
    swiglu: cost(0, s.pre + s.act + s.pre + s.act + s.topk_weights),
    gate_up: cost(8 * s.product, s.pre + s.w_gate_up + s.rows + s.x + s.rows + s.pre + s.rows + s.dw_gate_up),
    dispatch: cost(0, s.rows + s.x),
  };
}

/** The bill of a rung that gathers and fuses, by the result of each of its kernels, of one direction. */
function tilesOf(layer, direction) {
  const s = sizesOf(layer);
  if (direction === "forward") {
    return {
      gate_up: cost(4 * s.product, s.x + s.w_gate_up + s.pre + s.act),
      down: cost(2 * s.product, s.act + s.w_down + s.rows),
      y: cost(0, s.rows + s.topk_weights + s.x),
    };
  }
  return {
    dact: cost(2 * s.product, s.x + s.w_down + s.pre + s.pre + s.act),
    drows: cost(4 * s.product, s.pre + s.w_gate_up + s.rows),
    dx: cost(0, s.rows + s.x),
    dw_gate_up: cost(4 * s.product, s.pre + s.x + s.dw_gate_up),
    dw_down: cost(2 * s.product, s.act + s.x + s.dw_down),
  };
}

/** The least that any rung pays. */
function fusedOf(layer, direction) {
  const s = sizesOf(layer), inputs = s.x + s.topk_ids + s.topk_weights + s.w_gate_up + s.w_down;
  if (direction === "forward") return cost(6 * s.product, inputs + s.pre + s.x);
  return cost(12 * s.product, s.x + inputs + s.pre + s.x + s.topk_weights + s.dw_gate_up + s.dw_down);
}

/** Bytes by tensor, of each rung that has a bill of its own. */
function billsOf(layer, direction) {
  const sizes = sizesOf(layer);
  return Object.fromEntries(ROOFLINE.billed.map((rung, n) => [
    rung,
    Object.fromEntries(Object.entries(ROOFLINE.passes[direction]).map(([tensor, times]) =>
      [tensor, times[n] * sizes[ROOFLINE.sized_as[tensor] || tensor]])),
  ]));
}

/** Teraflops a second of a device in a dtype. */
const tflopsOf = (ceiling, dtype) => (dtype === "fp32" ? ceiling.tflops_32 : ceiling.tflops_16);

/** Milliseconds that flops take at the full matrix rate, and bytes at the full bandwidth. */
function timesOf({ flops, bytes }, { tflops, gb_per_s }) {
  return { flops: flops / (tflops * 1e9), bytes: bytes / (gb_per_s * 1e6) };
}

/** Milliseconds below which the hardware cannot go. */
function allowedMs(layer, direction, device) {
  const { flops, bytes } = timesOf(fusedOf(layer, direction), device);
  return Math.max(flops, bytes);
}

/** The least T from which on the least bill's flops take longer than its bytes; null where that never happens. */
function boundByFlopsFrom(layer, direction, device) {
  const bound = (T) => {
    const { flops, bytes } = timesOf(fusedOf({ ...layer, T }, direction), device);
    return flops >= bytes;
  };
  let low = 0, high = 2 ** 24; // not bound, bound
  if (!bound(high)) return null;
  while (high - low > 1) {
    const middle = (low + high) / 2 | 0;
    if (bound(middle)) high = middle;
    else low = middle;
  }
  return high;
}

// The page.

const SIZES = { T: 2 ** 22, H: 2 ** 17, I: 2 ** 17, E: 4096, K: 4096 }; // the most of each
const RATES = { least: 1e-3, most: 1e6 }; // of a device, either one: beyond, the roof is no picture

/** Three digits, or all of a whole number. */
function digits(number) {
  if (Number.isInteger(number)) return number.toLocaleString("en-US");
  return number.toLocaleString("en-US", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
}

/** Bytes, flops and the like with a unit that suits them. */
function scaled(number, units) {
  const n = number ? Math.min(Math.max(Math.floor(Math.log10(Math.abs(number)) / 3), 0), units.length - 1) : 0;
  return `${digits(number / 1000 ** n)} ${units[n]}`;
}
const asBytes = (number) => scaled(number, ["B", "kB", "MB", "GB", "TB", "PB"]);
const asFlops = (number) => (number ? scaled(number, ["flop", "kflop", "Mflop", "Gflop", "Tflop", "Pflop"]) : "–");
const asMs = (ms) => (ms >= 0.0995 ? `${digits(ms)} ms` : `${digits(1e3 * ms)} µs`);

/** The explorer in an element of the page. */
function startExplorer(root) {
  const find = (name) => root.querySelector(`[data-roofline=${name}]`);
  const letters = Object.keys(SIZES);
  let direction = "forward", ledger = "grouped";

  // What the reader asks for.

  function asked() {
    const layer = { dtype: find("dtype").value };
    for (const letter of letters) {
      const field = find(letter), number = Number(field.value);
      const fits = field.value.trim() !== "" && Number.isInteger(number) && number >= 1 && number <= SIZES[letter];
      field.setAttribute("aria-invalid", !fits);
      if (!fits) throw new Error(`${letter} must be a whole number from 1 to ${digits(SIZES[letter])}.`);
      layer[letter] = number;
    }
    const device = {};
    for (const [name, words] of [["tflops", "The matrix rate"], ["gb_per_s", "The bandwidth"]]) {
      const field = find(name), number = Number(field.value);
      const fits = number >= RATES.least && number <= RATES.most;
      field.setAttribute("aria-invalid", !fits);
      const bounds = [RATES.least, RATES.most].map((rate) => rate.toLocaleString("en-US"));
      if (!fits) throw new Error(`${words} must be a number from ${bounds.join(" to ")}.`);
      device[name] = number;
    }
    return { layer, device };
  }

  function chooseDevice() {
    const ceiling = ROOFLINE.ceilings[find("device").value];
    if (!ceiling) return;
    find("tflops").value = tflopsOf(ceiling, find("dtype").value);
    find("gb_per_s").value = ceiling.gb_per_s;
  }

  function chooseLayer() {
    const layer = ROOFLINE.layers[find("layer").value];
    if (layer) for (const letter of letters) find(letter).value = layer[letter];
  }

  function update() {
    const wrong = find("wrong");
    let now;
    try {
      now = asked();
    } catch (error) {
      wrong.textContent = `${error.message} Shown is what was asked for before.`;
      return;
    }
    wrong.textContent = "";
    const ceiling = ROOFLINE.ceilings[find("device").value];
    find("source").textContent = ceiling ? `${ceiling.source}.` : "Your own figures.";
    show(now.layer, now.device);
  }

  // What comes out.

  function show(layer, device) {
    const least = fusedOf(layer, direction), times = timesOf(least, device);
    const costs = ledger === "grouped" ? stepsOf(layer, direction) : tilesOf(layer, direction);
    const from = boundByFlopsFrom(layer, direction, device), ridge = (1e3 * device.tflops) / device.gb_per_s;
    const longer = times.flops >= times.bytes ? "flops" : "bytes";
    find("said").textContent = [
      `The least that ${direction} pays: ${asFlops(least.flops)} and ${asBytes(least.bytes)},`,
      `${digits(least.flops / least.bytes)} flops a byte. The device's ridge is at ${digits(ridge)},`,
      `so ${longer} take longer: ${asMs(times.flops)} for flops, ${asMs(times.bytes)} for bytes.`,
      `The ceiling is ${asMs(allowedMs(layer, direction, device))}.`,
      from === null ? "Bytes take longer for any T." : `Flops take longer from T = ${digits(from)} on.`,
    ].join(" ");
    drawRoof(layer, device, costs, least);
    drawSteps(costs, device);
    drawBills(billsOf(layer, direction), device);
  }

  const colourOf = (name) => ROOFLINE.colours[ledger === "grouped" ? name : ROOFLINE.step_of_result[name]];

  /** The roof, and on it each product of the ledger and the whole direction at its least. */
  function drawRoof(layer, device, costs, least) {
    const svg = find("roof"), wide = Math.max(svg.clientWidth, 300), tall = 270;
    const box = { left: 46, right: wide - 12, top: 14, bottom: tall - 40 };
    const points = [];
    for (const [name, of] of Object.entries(costs)) {
      if (of.flops) points.push({ name, colour: colourOf(name), at: of.flops / of.bytes });
    }
    points.push({ name: "the least", colour: "currentColor", at: least.flops / least.bytes });
    const ridge = (1e3 * device.tflops) / device.gb_per_s, all = [ridge, ...points.map(({ at }) => at)];
    const low = Math.floor(Math.log10(Math.min(...all) / 8)), high = Math.ceil(Math.log10(Math.max(...all) * 2));
    const rate = (intensity) => Math.min(device.tflops, (intensity * device.gb_per_s) / 1e3);
    const top = Math.log10(device.tflops * 1.8), floor = Math.log10(rate(10 ** low));
    const x = (intensity) => box.left + ((Math.log10(intensity) - low) / (high - low)) * (box.right - box.left);
    const y = (tflops) => box.bottom - ((Math.log10(tflops) - floor) / (top - floor)) * (box.bottom - box.top);

    const parts = [];
    for (let power = low; power <= high; power++) {
      parts.push(drawn("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: box.top, y2: box.bottom }));
      const anchor = power === high ? "end" : "middle";
      parts.push(drawn("text", { x: x(10 ** power), y: box.bottom + 16, "text-anchor": anchor }, digits(10 ** power)));
    }
    for (let power = Math.ceil(floor); power <= top; power++) {
      parts.push(drawn("line", { class: "grid", x1: box.left, x2: box.right, y1: y(10 ** power), y2: y(10 ** power) }));
      parts.push(drawn("text", { x: box.left - 5, y: y(10 ** power) + 4, "text-anchor": "end" }, digits(10 ** power)));
    }
    parts.push(drawn("text", { x: box.right, y: tall - 8, "text-anchor": "end" }, "intensity: flops a byte"));
    parts.push(drawn("text", { x: box.left, y: 10 }, "TFLOP/s"));
    const roof = [10 ** low, ridge, 10 ** high].map((at) => `${x(at).toFixed(1)},${y(rate(at)).toFixed(1)}`).join(" ");
    parts.push(drawn("polyline", { class: "roof", points: roof }));
    const corner = { class: "strong", x: x(10 ** high) - 2, y: y(device.tflops) - 6, "text-anchor": "end" };
    parts.push(drawn("text", corner, `${digits(device.tflops)} TFLOP/s`));

    // Names below the points, each in a row of its own where they would touch.
    const rows = [];
    for (const point of points.sort((one, other) => one.at - other.at)) {
      const words = point.name, half = words.length * 3.4 + 4;
      const middle = Math.min(Math.max(x(point.at), box.left + half), box.right - half);
      let row = rows.findIndex((end) => middle - half > end);
      if (row < 0) row = rows.push(0) - 1;
      rows[row] = middle + half;
      const height = y(rate(point.at)), under = Math.min(height + 22 + 15 * row, box.bottom - 4);
      parts.push(drawn("line", { class: "stem", x1: x(point.at), x2: middle, y1: height, y2: under - 10 }));
      parts.push(drawn("circle", { cx: x(point.at), cy: height, r: 6, fill: point.colour }));
      parts.push(drawn("text", { class: "on", x: middle, y: under, "text-anchor": "middle" }, words));
    }
    svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
    svg.style.height = `${tall}px`;
    const where = points.map(({ name, at }) => `${name} at ${digits(at)} flops a byte`).join(", ");
    svg.setAttribute("aria-label", `Roofline: ${where}; the ridge at ${digits(ridge)}`);
    svg.replaceChildren(...parts);
  }

  /** Of each step, or kernel, two bars: flops and bytes, and the longer of them in full colour. */
  function drawSteps(costs, device) {
    const times = Object.entries(costs).map(([name, of]) => ({ name, of, ...timesOf(of, device) }));
    const longer = times.map((of) => Math.max(of.flops, of.bytes)), most = Math.max(...longer);
    const bar = (ms, colour, long) => {
      const [cell, made, words] = ["td", "i", "span"].map((name) => document.createElement(name));
      cell.className = "bar";
      made.style.width = `${(100 * ms) / most}%`;
      made.style.backgroundColor = colour;
      made.className = long ? "" : "short";
      words.textContent = ms ? asMs(ms) : "–";
      cell.append(words, made);
      return cell;
    };
    const rows = times.map(({ name, of, flops, bytes }) => {
      const made = row([name]), counted = [asFlops(of.flops), asBytes(of.bytes), digits(of.flops / of.bytes)];
      made.append(bar(flops, colourOf(name), flops >= bytes), bar(bytes, colourOf(name), bytes > flops));
      made.append(...[flops >= bytes ? "flops" : "bytes", ...counted].map((text) => cellOf(text)));
      return made;
    });
    const flops = total(times.map(({ of }) => of.flops)), bytes = total(times.map(({ of }) => of.bytes));
    const together = [asFlops(flops), asBytes(bytes), digits(flops / bytes)];
    const last = row(["together", "the longer of each:", asMs(total(longer)), "", ...together]);
    last.className = "sum";
    const first = ledger === "grouped" ? "step" : "result";
    const head = headRow([first, "for flops", "for bytes", "bound by", "flops", "bytes", "flops a byte"]);
    fill(find("steps"), head, [...rows, last]);
  }

  /** Of each rung its bytes by tensor, and what is gone since the rung below. */
  function drawBills(bills, device) {
    const rungs = Object.keys(bills), sums = rungs.map((rung) => total(Object.values(bills[rung])));
    const tensors = Object.keys(bills.grouped);
    const title = (rung) => ({ gather: "gather and up", fused: "the least" })[rung] || rung;
    const lines = tensors.map((tensor) => {
      const made = row([tensor, ...rungs.map((rung) => (bills[rung][tensor] ? asBytes(bills[rung][tensor]) : "–"))]);
      rungs.forEach((rung, n) => {
        if (n && bills[rung][tensor] < bills[rungs[n - 1]][tensor]) {
          const gone = document.createElement("del");
          gone.textContent = `−${asBytes(bills[rungs[n - 1]][tensor] - bills[rung][tensor])}`;
          made.children[n + 1].append(gone);
          made.children[n + 1].className = "less";
        }
      });
      return made;
    });
    const all = row(["all", ...sums.map(asBytes)]);
    const took = row(["at full bandwidth", ...sums.map((bytes) => asMs(timesOf(cost(0, bytes), device).bytes))]);
    all.className = took.className = "sum";
    fill(find("bills"), headRow(["", ...rungs.map(title)]), [...lines, all, took]);

    find("bars").replaceChildren(...rungs.map((rung, n) => {
      const [line, name, bar] = ["div", "span", "div"].map((name) => document.createElement(name));
      name.textContent = `${title(rung)}: ${asBytes(sums[n])}`;
      bar.style.width = `${(100 * sums[n]) / sums[0]}%`;
      for (const tensor of tensors.filter((tensor) => bills[rung][tensor])) {
        const piece = document.createElement("i"), stays = bills.fused[tensor] > 0;
        piece.style.flexGrow = bills[rung][tensor];
        piece.className = stays ? "stays" : "goes";
        piece.title = `${tensor}: ${asBytes(bills[rung][tensor])}`;
        const wide = (bills[rung][tensor] / sums[0]) * find("bars").clientWidth;
        piece.textContent = wide > 5.2 * tensor.length ? tensor : "";
        bar.append(piece);
      }
      line.append(name, bar);
      return line;
    }));
  }

  // Making elements.

  function drawn(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  /** A line of a table: its name, and what follows. */
  function row(texts) {
    const made = document.createElement("tr");
    texts.forEach((text, n) => made.append(cellOf(text, n === 0 ? "row" : null)));
    return made;
  }

  function headRow(texts) {
    const made = document.createElement("tr");
    made.append(...texts.map((text) => cellOf(text, "col")));
    return made;
  }

  function cellOf(text, scope) {
    const made = document.createElement(scope ? "th" : "td");
    if (scope) made.scope = scope;
    made.textContent = text;
    return made;
  }

  function fill(table, head, rows) {
    const top = document.createElement("thead"), body = document.createElement("tbody");
    top.append(head);
    body.append(...rows);
    table.replaceChildren(top, body);
  }

  // Go.

  Object.keys(ROOFLINE.layers).forEach((name) => find("layer").append(new Option(name, name)));
  find("layer").append(new Option("my own", ""));
  Object.keys(ROOFLINE.bytes_of).forEach((name) => find("dtype").append(new Option(name, name)));
  ROOFLINE.ceilings.forEach((ceiling, n) => find("device").append(new Option(ceiling.name, n)));
  find("device").append(new Option("my own", -1));
  find("layer").value = "qwen3-30b-a3b";
  find("dtype").value = "bf16";
  find("device").value = ROOFLINE.ceilings.findIndex(({ name }) => name === "H200 SXM");
  find("layer").addEventListener("change", chooseLayer);
  find("device").addEventListener("change", chooseDevice);
  find("dtype").addEventListener("change", chooseDevice);
  for (const letter of letters) find(letter).addEventListener("input", () => (find("layer").value = ""));
  for (const name of ["tflops", "gb_per_s"]) find(name).addEventListener("input", () => (find("device").value = -1));
  root.addEventListener("input", (event) => {
    if (event.target.name === "direction") direction = event.target.value;
    if (event.target.name === "ledger") ledger = event.target.value;
  });
  root.addEventListener("input", update);
  root.addEventListener("change", update); // a choice has filled other fields by now
  new ResizeObserver(update).observe(find("roof").parentElement);
  chooseLayer();
  chooseDevice();
  update();
}

document.querySelectorAll(".viewer[data-roofline=root]").forEach(startExplorer);
