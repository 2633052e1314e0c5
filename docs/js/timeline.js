// The timeline viewer of docs/timeline.md: one or two timelines, one above the other, over one time axis.
//
// It shows the examples of TIMELINES, which docs/timeline_data.py writes when the site is built, and any file that
// `mega-moe trace --perfetto` has written, which it reads in the browser: nothing is sent anywhere. Everything is drawn
// on one canvas, as much of it as can be seen. Lanes are programs, colours the five steps; waiting is hatched.
//
// A timeline here is an object:
//
//   name, made   what ran, and how its times were found
//   unit         what time is counted in
//   names        of each lane that is drawn
//   lanes        the tiles of each lane in their order
//   launches     [name, start, end] of each launch
//   summary      total, lanes, shares, overlap, hidden, kinds: as mega_moe.trace.Trace.as_json says, of all lanes
//
// and a tile is one too: lane, kind, step, rank, expert, block, row, rows, column, arrivals, ticket, and the times
// taken (from here on it waits), start (works), moving (moves rows over links) and end.

"use strict";

const EXCHANGE = ["dispatch", "combine"]; // the steps that multiply nothing
const AXIS = 30; // pixels below the lanes
const HEAD = 40; // above the lanes of a timeline: its name, and its launches
const LANES = 264; // of a timeline's lanes, where they fit
const TALL = 20; // of a lane, for whoever wants to read them
const LETTER = 6.1; // of a label
const OVERVIEW = 24; // of a timeline in the overview
const NARROW = 560; // below it a picture is a phone's
const CLOSE = 28; // pixels that a chosen tile has there at least
const PIECES = 400; // of time, in the overview
const SIZES = [..."THIEKW"]; // of the layer that a file is of
const LATEST = 1e12; // that a tile of a file may end: of microseconds, eleven days
const SHORTEST = 1e-3; // that a file's launch may last, unless its clock did not move at all

// From a file, or from the page's data, to a timeline.

/** What the text of a file that `mega-moe trace --perfetto` wrote has: facts, the events of tiles at work, when each
 *  ticket's wait began, and the events that name a lane. All that is ever checked of a file is checked here, so that
 *  what comes back can be drawn. Throws an Error that names the file and says what is wrong.
 */
function checked(text, file) {
  const refuse = (words) => {
    throw new Error(`${file}${words}`);
  };
  const right = "Open what “mega-moe trace --perfetto FILE.json” writes.";
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
  const isText = (value) => typeof value === "string";
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    refuse(` is not JSON. ${right}`);
  }
  if (isObject(data) && data.kinds && data.shares) {
    refuse(` is the summary that “mega-moe trace --json” prints, without tiles. ${right}`);
  }
  if (!isObject(data) || !Array.isArray(data.traceEvents)) refuse(` is no trace: it has no traceEvents. ${right}`);
  const withArgs = data.traceEvents.filter((event) => isObject(event) && isObject(event.args));
  const events = withArgs.filter((event) => event.ph === "X" && Number.isInteger(event.args.ticket));
  const works = events.filter((event) => event.name !== "waiting");
  if (!works.length) refuse(` is a trace of something else: none of its events is a tile with a ticket. ${right}`);

  const facts = data.otherData === undefined ? {} : data.otherData;
  if (!isObject(facts)) refuse(`: its otherData must be an object, not ${JSON.stringify(facts)}.`);
  for (const name of ["direction", "unit", "device", "date"]) {
    if (name in facts && !isText(facts[name])) refuse(`: ${name} in its otherData must be text.`);
  }
  for (const name of [...SIZES, "lanes"]) {
    if (name in facts && !isCount(facts[name])) refuse(`: ${name} in its otherData must be a whole number from 0 on.`);
  }

  const waits = events.filter((event) => event.name === "waiting");
  const taken = new Map(waits.map((event) => [event.args.ticket, event.ts]));
  let last = 0;
  for (const { args, pid, tid, ts, dur } of works) {
    const { ticket, kind, step } = args, numbers = { tid, pid, ticket };
    for (const name of ["expert", "block", "row", "rows", "column", "arrivals"]) numbers[name] = args[name];
    for (const [name, value] of Object.entries(numbers)) {
      if (!isCount(value)) refuse(`: ${name} of tile ${ticket} is missing, or no whole number from 0 on.`);
    }
    if (!isText(kind) || !isText(step)) refuse(`: kind or step of tile ${ticket} is missing.`);
    if (!(step in TIMELINES.colours) || TIMELINES.step_of_kind[kind] !== step) {
      refuse(`: tile ${ticket} is of kind “${kind}”, step “${step}”, which this page does not know.`);
    }
    const since = taken.has(ticket) ? taken.get(ticket) : ts;
    if (![since, ts, dur].every(Number.isFinite) || since > ts || dur < 0) {
      refuse(`: the times of tile ${ticket} are missing, or run backwards.`);
    }
    if (since < 0 || ts + dur > LATEST) {
      refuse(`: tile ${ticket} lasts from ${since} to ${ts + dur}; this page draws times from 0 to ${plain(LATEST)}.`);
    }
    last = Math.max(last, ts + dur);
  }
  if (last > 0 && last < SHORTEST) {
    refuse(`: its last tile ends at ${last}; this page draws what lasts at least ${plain(SHORTEST, 3)}.`);
  }

  const numbered = new Set(works.map((event) => event.tid));
  const named = withArgs.filter((event) => event.name === "thread_name" && numbered.has(event.tid));
  for (const { tid, args } of named) {
    if (!isText(args.name)) refuse(`: the name of thread ${tid} must be text.`);
  }
  return { facts, works, taken, named };
}

/** The timeline in the text of a file that `mega-moe trace --perfetto` wrote. Throws what `checked` throws. */
function readTrace(text, file) {
  const { facts, works, taken, named } = checked(text, file);
  const numbers = [...new Set(works.map((event) => event.tid))].sort((one, other) => one - other);
  const laneOf = new Map(numbers.map((number, lane) => [number, lane]));
  const names = numbers.map((number) => `program ${number}`);
  for (const { tid, args } of named) names[laneOf.get(tid)] = args.name;

  const tiles = works.map((event) => {
    const { ticket } = event.args, start = event.ts, end = event.ts + event.dur;
    const times = { taken: taken.has(ticket) ? taken.get(ticket) : start, start, moving: end, end };
    return { ...event.args, lane: laneOf.get(event.tid), rank: event.pid, ...times };
  });
  const lanes = names.map(() => []);
  for (const tile of tiles) lanes[tile.lane].push(tile);
  for (const lane of lanes) lane.sort((one, other) => one.taken - other.taken || one.ticket - other.ticket);

  const sizes = SIZES.filter((letter) => letter in facts).map((letter) => `${letter} = ${facts[letter]}`);
  const day = (facts.date || "").slice(0, 10);
  const total = tiles.reduce((last, tile) => Math.max(last, tile.end), 0);
  return {
    name: `${file}: ${facts.direction || "a launch"}${sizes.length ? `, ${sizes.join(", ")}` : ""}`,
    made: ["traced", facts.device && `on ${facts.device}`, day].filter(Boolean).join(" "),
    unit: facts.unit || "µs",
    names,
    lanes,
    launches: [["mega", 0, total]],
    summary: summaryOf(lanes, total, Math.max(facts.lanes || 0, names.length)),
  };
}

/** The timeline in the page's data: TIMELINES says which columns a tile has. */
function unpack(packed) {
  const lanes = packed.lanes.map((tiles, lane) => {
    let now = 0;
    return tiles.map((columns) => {
      const [number, rank, expert, block, row, rows, column, arrivals, ticket, ...between] = columns;
      const [taken, start, moving, end] = between.map((time) => (now += time) / packed.parts);
      const kind = TIMELINES.kinds[number], step = TIMELINES.step_of_kind[kind];
      return { lane, kind, step, rank, expert, block, row, rows, column, arrivals, ticket, taken, start, moving, end };
    });
  });
  return { ...packed, lanes };
}

/** What became of the lanes' time, as mega_moe.trace.Trace has it. number: of lanes, with those that had no tile. */
function summaryOf(lanes, total, number) {
  const all = total * number || 1, kinds = {};
  const spent = { busy: 0, waiting: 0, between: 0, tail: (number - lanes.length) * total };
  for (const tiles of lanes) {
    let free = 0;
    for (const tile of tiles) {
      const busy = tile.end - tile.start, waiting = tile.start - tile.taken;
      spent.busy += busy;
      spent.waiting += waiting;
      spent.between += tile.taken - free;
      free = tile.end;
      const of = (kinds[tile.kind] = kinds[tile.kind] || { times: [], waiting: 0, first: tile.ticket });
      of.times.push(busy);
      of.waiting += waiting;
      of.first = Math.min(of.first, tile.ticket);
    }
    spent.tail += total - free;
  }
  const inOrder = Object.entries(kinds).sort(([, one], [, other]) => one.first - other.first);
  return {
    total,
    lanes: number,
    shares: Object.fromEntries(Object.entries(spent).map(([name, time]) => [name, time / all])),
    ...atOnce(lanes, total),
    kinds: Object.fromEntries(inOrder.map(([kind, { times, waiting }]) => {
      times.sort((one, other) => one - other);
      const half = times.length >> 1;
      return [kind, {
        tiles: times.length,
        median: times.length % 2 ? times[half] : (times[half - 1] + times[half]) / 2,
        longest: times[times.length - 1],
        busy: times.reduce((sum, time) => sum + time, 0) / all,
        waiting: waiting / all,
      }];
    })),
  };
}

/** overlap: the share of the time in which two steps were at work at once. hidden: of the time of dispatch and combine,
 *  the share in which a step that multiplies was too; null without either. */
function atOnce(lanes, total) {
  const changes = [], working = {};
  for (const tile of lanes.flat()) changes.push([tile.start, 1, tile.step], [tile.end, -1, tile.step]);
  changes.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  let before = 0, overlap = 0, exchange = 0, hidden = 0;
  for (const [time, change, step] of changes) {
    const steps = Object.keys(working).filter((name) => working[name] > 0);
    if (steps.length > 1) overlap += time - before;
    if (steps.some((name) => EXCHANGE.includes(name))) {
      exchange += time - before;
      if (steps.some((name) => !EXCHANGE.includes(name))) hidden += time - before;
    }
    working[step] = (working[step] || 0) + change;
    before = time;
  }
  return { overlap: overlap / (total || 1), hidden: exchange ? hidden / exchange : null };
}

/** How many lanes are at work on each step, on average over each of PIECES of a time: {step: numbers}. */
function atWork(lanes, until) {
  const found = Object.fromEntries(Object.keys(TIMELINES.colours).map((step) => [step, new Float64Array(PIECES)]));
  const piece = until / PIECES;
  for (const tile of lanes.flat()) {
    const last = Math.min(Math.floor(tile.end / piece), PIECES - 1);
    for (let n = Math.max(Math.floor(tile.start / piece), 0); n <= last; n++) {
      const share = (Math.min(tile.end, (n + 1) * piece) - Math.max(tile.start, n * piece)) / piece;
      found[tile.step][n] += Math.max(share, 0);
    }
  }
  return found;
}

// Words.

const plain = (number, digits = 2) => number.toLocaleString("en-US", { maximumFractionDigits: digits });
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const namesOf = (tile) => (tile.expert < 0 || tile.kind === "combine" ? tile.kind : `${tile.kind} ${tile.expert}`);

/** A tile as a sentence or three. */
function inWords(tile, timeline) {
  const { unit } = timeline, time = (at) => `${plain(at)} ${at === 1 ? unit.replace(/s$/, "") : unit}`;
  const few = (number, word) => `${plain(number)} ${word}${number === 1 ? "" : "s"}`;
  let what = `${tile.kind}, all of its program's part`;
  if (tile.expert >= 0) {
    const whose = tile.kind === "combine" ? "" : ` of expert ${tile.expert}`;
    const rows = few(tile.rows, tile.kind === "combine" ? "token" : "row");
    const which = `column ${tile.column}, ticket ${plain(tile.ticket)}`;
    what = `${tile.kind}${whose}, ${rows} from ${plain(tile.row)} on, ${which}`;
  }
  const waited = tile.start - tile.taken;
  const wait = waited > 0 ? `Waited ${time(waited)} for ${few(tile.arrivals, "arrival")}.` : "Did not wait.";
  const moved = tile.end > tile.moving ? `, of that ${time(tile.end - tile.moving)} moving rows over links` : "";
  const where = `${timeline.names[tile.lane]}${tile.rank ? `, rank ${tile.rank}` : ""}`;
  return `${what}; ${where}. Step ${tile.step}. Taken at ${time(tile.taken)}. ${wait} `
    + `At work from ${time(tile.start)} to ${time(tile.end)}: ${time(tile.end - tile.start)}${moved}.`;
}

// The picture.

/** The viewer in an element of the page. */
function startViewer(root) {
  const find = (name) => root.querySelector(`[data-viewer=${name}]`);
  const canvas = find("canvas"), pen = canvas.getContext("2d");
  const known = []; // what can be chosen: {group, partner, timeline}, the page's own timelines packed
  const shown = [null, null]; // above, below
  const view = { from: 0, until: 1, tall: false, follow: false, scrolled: [0, 0] };
  let chosen = null, pointed = null; // {panel, tile}
  let working = []; // of each panel, how many programs are at work on each step
  let asked = false; // whether a frame is

  // What is shown.

  function add(group, timelines) {
    const first = known.length;
    timelines.forEach((timeline, n) => {
      known.push({ group, partner: n === 0 && timelines[1] ? first + 1 : -1, timeline });
    });
    for (const select of [find("above"), find("below")]) {
      const options = document.createElement("optgroup");
      options.label = group;
      timelines.forEach((timeline, n) => options.append(new Option(timeline.name, first + n)));
      select.append(options);
    }
    return first;
  }

  function show(above, below) {
    const timelineOf = ({ timeline }) => (timeline.parts ? unpack(timeline) : timeline);
    shown[0] = timelineOf(known[above]);
    shown[1] = below < 0 ? null : timelineOf(known[below]);
    find("above").value = above;
    find("below").value = below;
    for (const option of find("below").options) {
      option.disabled = option.value >= 0 && known[option.value].timeline.unit !== shown[0].unit;
    }
    chosen = pointed = null;
    view.scrolled = [0, 0];
    find("title").textContent = known[above].group;
    working = panels().map((timeline) => atWork(timeline.lanes, whole()));
    tell();
    all();
    say("");
  }

  const panels = () => shown.filter(Boolean);
  const whole = () => Math.max(...panels().map((timeline) => timeline.summary.total)) || 1;

  // Where things are, in pixels.

  let full = 1, left = 0, width = 1; // of the canvas; of all that has time as its axis. To ask for them takes long
  const x = (time) => left + ((time - view.from) / (view.until - view.from)) * width;
  const timeAt = (pixel) => view.from + ((pixel - left) / width) * (view.until - view.from);

  function measure() {
    full = canvas.clientWidth;
    left = full < NARROW ? 30 : 86;
    width = full - left - 8;
  }

  /** Of each panel: where its lanes begin, how tall they are together and each, and how tall they were unscrolled. */
  function layout() {
    let top = 0;
    return panels().map((timeline) => {
      const number = timeline.lanes.length;
      const fitted = Math.min(Math.max(LANES / number, 1.5), 26);
      const pitch = view.tall ? Math.max(fitted, TALL) : fitted;
      const tall = Math.min(pitch * number, view.tall ? LANES * 1.5 : Infinity);
      const place = { top: top + HEAD, tall, pitch, unscrolled: pitch * number };
      top += HEAD + tall + 14;
      return place;
    });
  }

  function resize() {
    measure();
    const places = layout(), ratio = window.devicePixelRatio || 1;
    const tall = Math.round(overviewTop(places) + OVERVIEW * places.length + 4);
    canvas.style.height = `${tall}px`;
    canvas.width = Math.round(full * ratio);
    canvas.height = Math.round(tall * ratio);
    const overflows = places.some((place) => place.unscrolled > place.tall);
    canvas.style.touchAction = overflows ? "none" : "pan-y";
    places.forEach((_, panel) => scroll(panel, 0));
    draw();
  }

  /** Where the overview of all the time begins, under the lanes and their axis. */
  function overviewTop(places) {
    const last = places[places.length - 1];
    return last.top + last.tall + AXIS + 12;
  }

  function scroll(panel, by) {
    const { unscrolled, tall } = layout()[panel];
    view.scrolled[panel] = Math.min(Math.max(view.scrolled[panel] + by, 0), unscrolled - tall);
  }

  function draw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  }

  function paint() {
    const ratio = window.devicePixelRatio || 1, style = getComputedStyle(root);
    const ink = style.color, paper = style.backgroundColor, places = layout();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, full, canvas.clientHeight);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const hatch = hatching(ink, ratio);
    axis(places, ink);
    panels().forEach((timeline, panel) => {
      heading(timeline, places[panel], ink);
      pen.save();
      pen.beginPath();
      pen.rect(left, places[panel].top, width, places[panel].tall);
      pen.clip();
      lanesOf(timeline, panel, places[panel], ink, paper, hatch);
      pen.restore();
      lanesNames(timeline, panel, places[panel], ink);
    });
    overview(places, ink);
  }

  /** Lines for waiting. */
  function hatching(ink, ratio) {
    const side = 6 * ratio, piece = document.createElement("canvas");
    piece.width = piece.height = side;
    const lines = piece.getContext("2d");
    lines.strokeStyle = ink;
    lines.globalAlpha = 0.75;
    lines.lineWidth = 1.3 * ratio;
    for (const shift of [-side, 0, side]) {
      lines.moveTo(shift, side);
      lines.lineTo(shift + side, 0);
    }
    lines.stroke();
    const pattern = pen.createPattern(piece, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  /** A timeline's name, and the names of its launches where there is room. */
  function heading(timeline, { top, tall }, ink) {
    pen.fillStyle = ink;
    pen.font = "600 12.5px system-ui, sans-serif";
    pen.fillText(timeline.name, 0, top - HEAD + 11, full);
    pen.font = "11px system-ui, sans-serif";
    let free = left;
    for (const [name, start, end] of timeline.launches) {
      const begin = Math.max(x(start), left), finish = Math.min(x(end), left + width);
      if (finish <= left || begin >= left + width) continue;
      pen.globalAlpha = 0.5;
      pen.fillRect(begin, top - 5, Math.max(finish - begin - 1, 0.5), 2);
      pen.globalAlpha = 1;
      const wide = pen.measureText(name).width;
      if (finish - begin > wide + 4 && begin >= free) {
        pen.fillText(name, begin + 1, top - 14);
        free = begin + wide + 6;
      }
    }
  }

  function lanesOf(timeline, panel, place, ink, paper, hatch) {
    const { pitch, top } = place, first = view.scrolled[panel];
    const gap = pitch > 5 ? 1 : pitch > 2.5 ? 0.4 : 0;
    const hasExpert = (tile) => tile.expert >= 0 && tile.kind !== "combine";
    const focus = view.follow && chosen && chosen.panel === panel && hasExpert(chosen.tile);
    pen.fillStyle = ink;
    pen.globalAlpha = 0.06;
    pen.fillRect(Math.max(x(0), left), top, x(timeline.summary.total) - Math.max(x(0), left), place.tall);
    pen.globalAlpha = 1;
    timeline.lanes.forEach((tiles, lane) => {
      const y = top + lane * pitch - first;
      if (y + pitch < top || y > top + place.tall) return;
      let drawn = -Infinity; // up to which pixel
      for (let n = nth(tiles, view.from); n < tiles.length && tiles[n].taken < view.until; n++) {
        const tile = tiles[n], end = x(tile.end);
        if (end - drawn < 0.4) continue; // thousands of tiles in a pixel are one
        const begin = x(tile.taken), start = x(tile.start);
        const wide = end - start - (end - start > 4 ? 0.8 : 0), tall = pitch - gap;
        const faded = focus && !(hasExpert(tile) && tile.expert === chosen.tile.expert), strength = faded ? 0.22 : 1;
        pen.globalAlpha = strength;
        if (start - begin > 0.2) {
          pen.fillStyle = hatch;
          pen.fillRect(begin, y, start - begin, tall);
        }
        pen.fillStyle = TIMELINES.colours[tile.step];
        pen.fillRect(start, y, Math.max(wide, 0.4), tall);
        const moving = x(tile.moving);
        if (end - moving > 0.4) {
          pen.fillStyle = paper;
          pen.globalAlpha = 0.55 * strength;
          pen.fillRect(moving, y + tall * 0.22, end - moving - (wide < end - start ? 0.8 : 0), tall * 0.56);
          pen.globalAlpha = strength;
        }
        if (pitch >= 12 && !faded && tile.expert >= 0) label(tile, start, moving, end, y + tall / 2, ink);
        drawn = end;
      }
      pen.globalAlpha = 1;
    });
    for (const [found, weight] of [[pointed, 1.5], [chosen, 3]]) {
      if (!found || found.panel !== panel) continue;
      const { tile } = found, y = top + tile.lane * pitch - first, tall = Math.max(pitch - gap, 3);
      pen.strokeStyle = ink;
      pen.lineWidth = weight;
      pen.strokeRect(x(tile.taken), y, Math.max(x(tile.end) - x(tile.taken), 2), tall);
    }
  }

  /** In the longer of a tile's two parts. */
  function label(tile, start, moving, end, middle, ink) {
    const works = moving - start >= end - moving;
    const begin = Math.max(works ? start : moving, left), finish = Math.min(works ? moving : end, left + width);
    const text = [namesOf(tile), tile.kind].find((words) => finish - begin > words.length * LETTER + 4);
    if (!text) return;
    pen.fillStyle = !works ? ink : tile.step === "gate_up" ? "#fff" : "#000";
    pen.textAlign = "center";
    pen.fillText(text, (begin + finish) / 2, middle + 0.5);
    pen.textAlign = "left";
  }

  function lanesNames(timeline, panel, { top, tall, pitch }, ink) {
    const every = Math.max(Math.ceil(13 / pitch), 1), short = left < 60;
    pen.fillStyle = ink;
    pen.textAlign = "right";
    for (let lane = 0; lane < timeline.names.length; lane += every) {
      const y = top + (lane + 0.5) * pitch - view.scrolled[panel];
      if (y < top || y > top + tall) continue;
      const name = short ? timeline.names[lane].replace(/^\D+/, "").replace(/ · /, "·") : timeline.names[lane];
      pen.fillText(name, left - 5, y);
    }
    pen.textAlign = "left";
  }

  /** All the time, whatever is seen of it above: how many programs work on which step. What is seen is framed. */
  function overview(places, ink) {
    const top = overviewTop(places), piece = width / PIECES;
    pen.fillStyle = ink;
    pen.fillText("programs at work on each step, all the time", left, top - 8);
    panels().forEach((timeline, panel) => {
      const bottom = top + (panel + 1) * OVERVIEW - 2;
      const tall = (OVERVIEW - 4) / timeline.lanes.length;
      pen.fillStyle = ink;
      pen.globalAlpha = 0.06;
      pen.fillRect(left, bottom - OVERVIEW + 4, width, OVERVIEW - 4);
      pen.globalAlpha = 1;
      for (let n = 0; n < PIECES; n++) {
        const begin = Math.round(left + n * piece), wide = Math.round(left + (n + 1) * piece) - begin;
        let y = bottom;
        for (const [step, colour] of Object.entries(TIMELINES.colours)) {
          const high = working[panel][step][n] * tall;
          if (!high) continue;
          pen.fillStyle = colour;
          pen.fillRect(begin, y - high, wide, high);
          y -= high;
        }
      }
    });
    const most = whole(), begin = left + (view.from / most) * width;
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(begin, top, ((view.until - view.from) / most) * width, OVERVIEW * places.length);
  }

  /** Lines at round times through both timelines. */
  function axis(places, ink) {
    const last = places[places.length - 1], bottom = last.top + last.tall, about = Math.max(Math.floor(width / 80), 2);
    const rough = (view.until - view.from) / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    pen.fillStyle = ink;
    pen.textAlign = "center";
    for (let n = Math.max(Math.ceil(view.from / step - 1e-9), 0); n * step <= view.until * (1 + 1e-9); n++) {
      const time = n * step;
      pen.globalAlpha = 0.3;
      for (const { top, tall } of places) pen.fillRect(x(time), top, 1, tall + 3);
      pen.globalAlpha = 1;
      const text = plain(time, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(x(time), full - half), bottom + 12);
    }
    pen.textAlign = "right";
    pen.fillText(shown[0].unit, full - 2, bottom + 24);
    pen.textAlign = "left";
  }

  /** The first of a lane's tiles that ends after a time. */
  function nth(tiles, time) {
    let low = 0, high = tiles.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tiles[middle].end > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Moving about.

  function look(from, until) {
    const most = whole(), wide = Math.min(Math.max(until - from, most / 1e5), most);
    view.from = Math.min(Math.max(from + (until - from - wide) / 2, 0), most - wide);
    view.until = view.from + wide;
    const share = wide / most;
    const some = `Seen: ${plain(view.from, 1)} to ${plain(view.until, 1)} ${shown[0].unit}.`;
    find("seen").textContent = share > 0.999 ? "All of it is seen." : some;
    draw();
  }

  function all() {
    look(0, whole());
    resize();
  }

  /** Around a time; unless told, that of the chosen tile, if it is seen, or of the middle. */
  function zoom(factor, around = middle()) {
    look(around - (around - view.from) * factor, around + (view.until - around) * factor);
  }

  function middle() {
    const seen = chosen && chosen.tile.end > view.from && chosen.tile.taken < view.until;
    return seen ? (chosen.tile.taken + chosen.tile.end) / 2 : (view.from + view.until) / 2;
  }

  function pan(share) {
    const by = share * (view.until - view.from);
    const fits = Math.min(Math.max(by, -view.from), whole() - view.until);
    look(view.from + fits, view.until + fits);
  }

  // Choosing a tile.

  function say(words) {
    const what = full < NARROW ? "Tap a tile to see it close; “all” shows all again."
      : "Point at a tile, or move the focus to the picture and press an arrow key.";
    find("said").textContent = words || what;
  }

  function choose(panel, tile) {
    chosen = { panel, tile };
    say(inWords(tile, panels()[panel]));
    const wide = view.until - view.from, { pitch, tall } = layout()[panel];
    const close = full < NARROW ? ((tile.end - tile.start) * width) / CLOSE : Infinity;
    if (tile.end > view.until || tile.start < view.from || wide > close) {
      const middle = (tile.start + tile.end) / 2, most = Math.max(Math.min(wide, close), tile.end - tile.taken);
      look(middle - most / 2, middle + most / 2);
    }
    const y = tile.lane * pitch;
    if (y < view.scrolled[panel]) scroll(panel, y - view.scrolled[panel]);
    if (y + pitch > view.scrolled[panel] + tall) scroll(panel, y + pitch - tall - view.scrolled[panel]);
    draw();
  }

  /** The tile nearest to a time in a lane; a lane without any has none. */
  function nearest(tiles, time) {
    const n = nth(tiles, time), candidates = [tiles[n - 1], tiles[n]].filter(Boolean);
    const away = (tile) => Math.max(tile.taken - time, time - tile.end, 0);
    return candidates.sort((one, other) => away(one) - away(other))[0];
  }

  /** From the chosen tile to one before or after it, or in the lane above or below. */
  function step(along, across) {
    const flat = panels().flatMap((timeline, panel) => timeline.lanes.map((tiles, lane) => ({ panel, lane, tiles })));
    const filled = flat.filter(({ tiles }) => tiles.length);
    if (!chosen) {
      const tile = nearest(filled[0].tiles, view.from) || filled[0].tiles[0];
      choose(filled[0].panel, tile);
      return;
    }
    const at = filled.findIndex(({ panel, lane }) => panel === chosen.panel && lane === chosen.tile.lane);
    if (across) {
      const next = filled[Math.min(Math.max(at + across, 0), filled.length - 1)];
      choose(next.panel, nearest(next.tiles, (chosen.tile.start + chosen.tile.end) / 2));
      return;
    }
    const { panel, tiles } = filled[at], n = tiles.indexOf(chosen.tile);
    choose(panel, tiles[Math.min(Math.max(n + along, 0), tiles.length - 1)]);
  }

  /** To the next tile that waited, in time, of the panel of the chosen one. */
  function nextWait() {
    const panel = chosen ? chosen.panel : panels().findIndex((timeline) => timeline.summary.shares.waiting > 0);
    const those = panel < 0 ? [] : panels()[panel].lanes.flat().filter((tile) => tile.start > tile.taken);
    if (!those.length) {
      say("No tile drawn here waited.");
      return;
    }
    those.sort((one, other) => one.taken - other.taken || one.ticket - other.ticket);
    const at = chosen ? those.findIndex((tile) => tile.taken > chosen.tile.taken
      || (tile.taken === chosen.tile.taken && tile.ticket > chosen.tile.ticket)) : 0;
    choose(panel, those[Math.max(at, 0)]);
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(), time = timeAt(event.clientX - box.left), y = event.clientY - box.top;
    const places = layout(), panel = places.findIndex(({ top, tall }) => y >= top && y < top + tall);
    if (panel < 0 || event.clientX - box.left < left) return null;
    const { top, pitch } = places[panel], lane = Math.floor((y - top + view.scrolled[panel]) / pitch);
    const tiles = panels()[panel].lanes[lane];
    const tile = tiles && nearest(tiles, time), slack = (2 / width) * (view.until - view.from);
    return tile && tile.taken - slack <= time && time <= tile.end + slack ? { panel, tile } : null;
  }

  // Buttons, keys, wheel, pointers.

  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => pan(-0.25),
    right: () => pan(0.25),
    all,
    wait: nextWait,
    follow() {
      view.follow = !view.follow;
      find("follow").setAttribute("aria-pressed", view.follow);
      draw();
    },
    tall() {
      view.tall = !view.tall;
      find("tall").setAttribute("aria-pressed", view.tall);
      resize();
    },
  };
  for (const [name, action] of Object.entries(actions)) find(name).addEventListener("click", action);

  const keys = {
    "+": actions.in,
    "=": actions.in,
    "-": actions.out,
    0: all,
    w: nextWait,
    e: actions.follow,
    l: actions.tall,
    ArrowLeft: (event) => (event.shiftKey ? pan(-0.25) : step(-1, 0)),
    ArrowRight: (event) => (event.shiftKey ? pan(0.25) : step(1, 0)),
    ArrowUp: () => step(0, -1),
    ArrowDown: () => step(0, 1),
    Home: () => step(-Infinity, 0),
    End: () => step(Infinity, 0),
    Escape() {
      chosen = null;
      say("");
      draw();
    },
  };
  canvas.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // the theme has keys of its own
    action(event);
  });

  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    if (sideways) pan(event.deltaX / width);
    else zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 300), timeAt(event.offsetX));
  }, { passive: false });

  const held = new Map(); // pointers that are down: where they are
  let dragged = 0, inOverview = false;
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    canvas.setPointerCapture(event.pointerId);
    dragged = 0;
    inOverview = event.offsetY >= overviewTop(layout());
    if (inOverview) lookAround(event.offsetX);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (before && inOverview) {
      lookAround(event.offsetX);
      return;
    }
    if (!before) {
      if (event.pointerType === "mouse") point(under(event), event);
      return;
    }
    const now = { x: event.offsetX, y: event.offsetY };
    const other = [...held].find(([id]) => id !== event.pointerId);
    if (other) {
      const apart = (one) => Math.max(Math.abs(one.x - other[1].x), 10);
      zoom(apart(before) / apart(now), timeAt((now.x + other[1].x) / 2));
    } else {
      pan((before.x - now.x) / width);
      const panel = layout().findIndex(({ top, tall }) => now.y >= top && now.y < top + tall);
      if (panel >= 0) scroll(panel, before.y - now.y);
    }
    dragged += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    held.set(event.pointerId, now);
    point(null, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    const found = held.delete(event.pointerId) && !inOverview && dragged < 5 && under(event);
    if (found) choose(found.panel, found.tile);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => point(null, event));

  /** As much as is seen now, around the time that stands at a place of the overview. */
  function lookAround(pixel) {
    const time = ((pixel - left) / width) * whole(), half = (view.until - view.from) / 2;
    const around = Math.min(Math.max(time, half), whole() - half);
    look(around - half, around + half);
  }

  /** What the pointer is on, beside it. */
  function point(found, event) {
    const tip = find("tip");
    pointed = found;
    tip.hidden = !found;
    if (found) {
      tip.textContent = inWords(found.tile, panels()[found.panel]);
      const room = full - tip.offsetWidth;
      tip.style.left = `${Math.max(Math.min(event.offsetX + 14, room), 0)}px`;
      tip.style.top = `${event.offsetY + 18}px`;
    }
    draw();
  }

  // Files.

  async function open(files) {
    const wrong = find("wrong");
    wrong.textContent = "";
    try {
      const timelines = [];
      for (const file of files) timelines.push(readTrace(await file.text(), file.name));
      const units = new Set(timelines.map((timeline) => timeline.unit));
      const first = add(files.length > 1 ? "opened" : files[0].name, timelines);
      if (units.size > 1) {
        wrong.textContent = `They count time in ${[...units].join(" and ")}, so only the first is shown.`;
      }
      show(first, timelines.length > 1 && units.size === 1 ? first + 1 : -1);
    } catch (error) {
      wrong.textContent = error.message;
    }
  }
  find("file").addEventListener("change", (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // so that the same file can be opened again
    if (files.length) open(files);
  });

  // In numbers, for those who do not see the picture, and for all others.

  function tell() {
    const both = panels();
    const summaries = both.map((timeline) => timeline.summary);
    const line = (name, of) => [name, ...summaries.map(of)];
    const { unit } = shown[0];
    const titles = both.map(({ name }, n) => (both.length === 1 ? name : `${n ? "below" : "above"}: ${name}`));
    table(find("numbers"), ["", ...titles], [
      line("programs", (of) => plain(of.lanes)),
      line(`from the first program to the last tile, ${unit}`, (of) => plain(of.total)),
      line("at work", (of) => percent(of.shares.busy)),
      line("waiting with a tile", (of) => percent(of.shares.waiting)),
      line("between tiles", (of) => percent(of.shares.between)),
      line("after their last tile", (of) => percent(of.shares.tail)),
      line("two steps at work at once", (of) => percent(of.overlap)),
      line("dispatch and combine hidden", (of) => percent(of.hidden)),
    ]);
    find("kinds").replaceChildren(...both.map((timeline) => {
      const made = document.createElement("table");
      made.className = "viewer-table";
      const rows = Object.entries(timeline.summary.kinds).map(([kind, of]) =>
        [kind, plain(of.tiles), plain(of.median), plain(of.longest), percent(of.busy), percent(of.waiting)]);
      table(made, ["", "tiles", `median, ${unit}`, "longest", "at work", "waiting"], rows);
      made.createCaption().textContent = timeline.name;
      return made;
    }));
    const [first, second = first] = both.map((timeline) => {
      const few = timeline.lanes.length < timeline.summary.lanes;
      return `${timeline.made}${few ? `, ${timeline.lanes.length} of ${timeline.summary.lanes} programs drawn` : ""}`;
    });
    find("made").textContent = first === second ? `${first}.` : `Above: ${first}. Below: ${second}.`;
    const ends = both.map((timeline) => `${timeline.name}, ends at ${plain(timeline.summary.total)} ${unit}`);
    canvas.setAttribute("aria-label", `Timeline. ${ends.join("; ")}. The tables below have its numbers.`);
  }

  function table(element, head, rows) {
    element.replaceChildren();
    const cell = (row, text, scope) => {
      const made = document.createElement(scope ? "th" : "td");
      if (scope) made.scope = scope;
      made.textContent = text;
      row.append(made);
    };
    const first = element.createTHead().insertRow();
    head.forEach((text) => cell(first, text, "col"));
    const body = element.createTBody();
    for (const texts of rows) {
      const row = body.insertRow();
      texts.forEach((text, n) => cell(row, text, n === 0 && "row"));
    }
  }

  // Go.

  const legend = find("legend"), hatched = { waiting: "", "moving rows over links": "" };
  for (const [step, colour] of Object.entries({ ...TIMELINES.colours, ...hatched })) {
    const entry = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = colour ? "" : step.split(" ")[0];
    swatch.style.backgroundColor = colour;
    entry.append(swatch, step);
    legend.append(entry);
  }
  find("below").append(new Option("nothing", -1));
  TIMELINES.pairs.forEach((pair) => add(pair.title, pair.timelines));
  find("above").addEventListener("change", (event) => show(+event.target.value, known[event.target.value].partner));
  find("below").addEventListener("change", (event) => show(+find("above").value, +event.target.value));
  new ResizeObserver(resize).observe(root);
  new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  show(0, known[0].partner);
}

document.querySelectorAll(".viewer[data-viewer=root]").forEach(startViewer);
