// The stepper of docs/stepper.md: programs draw the tiles of a schedule by ticket, wait for counters, and signal.
//
// SCHEDULES, in js/schedules.js, is what docs/export_schedules.py took from mega_moe/schedule.py while the site was
// built: the tiles in their order, the counters that they wait for and add to, and which tiles store what a tile reads.
// Here a schedule is only played (`replay`, which does what mega_moe/simulate.py's `play` does) and shown.
//
// A plain script, not a module, and nothing is fetched: the page works when it is opened from disk.

"use strict";

const [KIND, RANK, EXPERT, BLOCK, ROW, ROWS, COLUMN, ARRIVALS] = SCHEDULES.columns.keys();

// Playing a schedule.

/**
 * What every program does with the tiles of a case.
 *
 * order: the numbers of the tiles as they are drawn. The programs of a rank draw that rank's, from one counter.
 * programs: how many on each rank. broken: a Set of tiles that do not wait.
 *
 * Returns spans, {program, tile, drawn, start, end} of each tile in the order in which they end; stuck, {program, tile,
 * drawn} of each program that waits for ever; and end, the time at which the last tile ended.
 */
function replay(one, order, programs, broken) {
  const undrawn = Array.from({ length: one.ranks }, (_, rank) => order.filter((n) => one.tiles[n][RANK] === rank));
  const shown = new Map(); // counter -> what it shows
  const working = []; // spans, in the order in which they began
  const spans = [];
  let waiting = [];

  const arrived = (n) => broken.has(n) || hasArrived(one, n, shown);
  const begin = (program, tile, drawn, now) =>
    working.push({ program, tile, drawn, start: now, end: now + one.length[tile] });

  function draw(program, now) {
    const tile = undrawn[Math.floor(program / programs)].shift();
    if (tile === undefined) return;
    if (arrived(tile)) begin(program, tile, now, now);
    else waiting.push({ program, tile, drawn: now });
  }

  for (let program = 0; program < one.ranks * programs; program++) draw(program, 0);
  while (working.length) {
    const span = working.reduce((first, other) => (other.end < first.end ? other : first));
    working.splice(working.indexOf(span), 1);
    spans.push(span);
    for (const [counter, arrivals] of one.signals[span.tile]) {
      shown.set(counter, (shown.get(counter) ?? 0) + arrivals);
      for (const { program, tile, drawn } of waiting.filter((held) => arrived(held.tile))) {
        begin(program, tile, drawn, span.end);
      }
      waiting = waiting.filter((held) => !arrived(held.tile));
    }
    draw(span.program, span.end);
  }
  return { spans, stuck: waiting, end: Math.max(0, ...spans.map((span) => span.end)) };
}

function hasArrived(one, n, shown) {
  return one.counter[n] === null || (shown.get(one.counter[n]) ?? 0) >= one.tiles[n][ARRIVALS];
}

/**
 * What came of it. All memory is NaN until it is written. A tile loads when it begins and stores when it ends; at the
 * same time, who stores comes before who loads.
 *
 * Returns unwritten, {tile: the tiles whose results it read before they were stored}, and poisoned, the Set of tiles
 * that stored NaN, because they read it.
 */
function judge(one, spans) {
  const ends = new Map(spans.map((span) => [span.tile, span.end]));
  const unwritten = new Map();
  const poisoned = new Set();
  for (const { tile, start } of spans.toSorted((a, b) => a.start - b.start)) {
    const early = one.reads[tile].filter((other) => !(ends.get(other) <= start));
    if (early.length) unwritten.set(tile, early);
    if (early.length || one.reads[tile].some((other) => poisoned.has(other))) poisoned.add(tile);
  }
  return { unwritten, poisoned };
}

/**
 * What happens, one thing after another: [{time, what, span}], what being "draw", "begin" (after a wait), "finish" and,
 * at the end, "deadlock" or "over".
 */
function eventsOf(run, place) {
  const events = [];
  for (const span of [...run.spans, ...run.stuck]) {
    events.push({ time: span.drawn, what: "draw", span });
    if (span.start > span.drawn) events.push({ time: span.start, what: "begin", span });
    if (span.end !== undefined) events.push({ time: span.end, what: "finish", span });
  }
  const turn = { finish: 0, begin: 1, draw: 2 };
  events.sort((a, b) => a.time - b.time || turn[a.what] - turn[b.what] || place(a.span.tile) - place(b.span.tile));
  return [...events, { time: run.end, what: run.stuck.length ? "deadlock" : "over", span: null }];
}

// What is chosen, and what follows from it.

const DEFAULTS = {
  layer: 0, // its number
  direction: "forward",
  ranks: 1,
  tile: "2 rows",
  programs: 2, // on each rank
  order: "", // the first
  waits: "kept", // see `brokenBy`
  at: 0, // how many events have happened
};
const PROGRAMS = [1, 2, 3, 4, 6, 8];

let choice = { ...DEFAULTS };
let view; // all that `build` has made of the choice
let looked = null; // the tile that the reader looks at; null: that of the event
let timer = null;

const $ = (name) => document.querySelector(`#stepper [data-part="${name}"]`);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A choice from the words of an address or a button, "programs=2&waits=down"; what they do not name is as at first. */
function choiceFrom(words) {
  const named = Object.fromEntries(new URLSearchParams(words));
  const wanted = { ...DEFAULTS };
  for (const [key, value] of Object.entries(named)) {
    if (key in DEFAULTS) wanted[key] = typeof DEFAULTS[key] === "number" ? Number(value) : value;
  }
  return wanted;
}

/** The choice for an address, without `at`: browsers refuse an address that changes with each move of a slider. */
function inWords() {
  const usual = { ...DEFAULTS, order: Object.keys(view.one.orders)[0], at: choice.at };
  const named = Object.entries(choice).filter(([key, value]) => value !== usual[key]);
  return new URLSearchParams(named).toString();
}

/** The choice with each part that the layer does not have replaced by one that it has. */
function possible(wanted) {
  const within = (value, values) => (values.includes(value) ? value : values[0]);
  const layer = within(wanted.layer, [...SCHEDULES.layers.keys()]);
  const { cases } = SCHEDULES.layers[layer];
  const direction = within(wanted.direction, Object.keys(cases));
  const ranks = within(wanted.ranks, cases[direction].map((one) => one.ranks));
  const tile = within(wanted.tile, cases[direction].map((one) => one.tile));
  const programs = within(wanted.programs, PROGRAMS);
  const one = cases[direction].find((one) => one.ranks === ranks && one.tile === tile);
  const order = within(wanted.order, Object.keys(one.orders));
  const waits = brokenBy(one, wanted.waits).size ? wanted.waits : "kept";
  const at = Math.max(Math.trunc(wanted.at) || 0, 0);
  return { layer, direction, ranks, tile, programs, order, waits, at };
}

/** The tiles that do not wait: "kept", none; "all"; the name of a kind; or numbers of tiles, "3.4". */
function brokenBy(one, waits) {
  const waiters = waitersOf(one);
  if (waits === "all") return new Set(waiters);
  const numbers = waits.split(".").map(Number);
  return new Set(waiters.filter((n) => kindOf(one, n) === waits || numbers.includes(n)));
}

const waitersOf = (one) => [...one.counter.keys()].filter((n) => one.counter[n] !== null);
const kindOf = (one, n) => SCHEDULES.kinds[one.tiles[n][KIND]];
const stepOf = (one, n) => SCHEDULES.step_of_kind[kindOf(one, n)];
const storesOf = (one, n) => SCHEDULES.stores[choice.direction][kindOf(one, n)];

/** Plays what is chosen, and makes of it all that can be stepped through. tile: the one to look at, if any. */
function build(wanted, tile = null) {
  choice = possible(wanted);
  looked = tile;
  const layer = SCHEDULES.layers[choice.layer];
  const one = layer.cases[choice.direction].find((one) => one.ranks === choice.ranks && one.tile === choice.tile);
  const order = one.orders[choice.order];
  const broken = brokenBy(one, choice.waits);
  const run = replay(one, order, choice.programs, broken);
  const places = new Map(order.map((n, place) => [n, place]));
  // A ticket counts the tiles of a rank. On one rank that is the tile's place in the order.
  const drawn = Array(one.ranks).fill(0);
  const ticket = new Map(order.map((n) => [n, drawn[one.tiles[n][RANK]]++]));
  view = { layer, one, order, broken, run, places, ticket, ...judge(one, run.spans) };
  view.events = eventsOf(run, (n) => places.get(n));
  choice.at = Math.min(choice.at, view.events.length);

  fillChoices();
  layLanes();
  layTiles();
  layCounters();
  layMemory();
  layTable();
  layLog();
  show();
  history.replaceState(null, "", `#${inWords()}`);
}

/** What is so after a number of events: the state of each tile, what each counter shows, the time. */
function stateAt(at) {
  const { one, events } = view;
  const states = Array(one.tiles.length).fill("undrawn");
  const shown = new Map();
  for (const { what, span } of events.slice(0, at)) {
    if (what === "draw") states[span.tile] = span.start === span.drawn ? "works" : "waits";
    if (what === "begin") states[span.tile] = "works";
    if (what === "finish") {
      states[span.tile] = "done";
      for (const [counter, by] of one.signals[span.tile]) shown.set(counter, (shown.get(counter) ?? 0) + by);
    }
  }
  return { states, shown, time: at ? events[at - 1].time : 0, event: at ? events[at - 1] : null };
}

// Words.

const range = (first, count) => (count === 1 ? `${first}` : `${first}–${first + count - 1}`);
const plural = (count, noun) => (count === 1 ? noun : `${noun}s`);
const listed = (items) => (items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`);

/** Which part of its result a tile makes: "rows 0–1", "expert 2", "tokens 0–1". */
function whereOf(n) {
  const { one } = view;
  const tile = one.tiles[n];
  const [, axis] = storesOf(one, n);
  if (axis === "expert") return `expert ${tile[EXPERT]}`;
  const noun = axis === "token" ? "token" : "row";
  return `${plural(tile[ROWS], noun)} ${range(tile[ROW], tile[ROWS])}`;
}

function nameOf(n) {
  const { one } = view;
  const tile = one.tiles[n];
  const [, axis] = storesOf(one, n);
  const whose = axis === "token" || axis === "expert" ? "" : ` of expert ${tile[EXPERT]},`;
  const column = columnsOf(n) > 1 ? `, column tile ${tile[COLUMN]}` : "";
  return `${kindOf(one, n)}${whose || " of"} ${whereOf(n)}${column}`;
}

/** How many tiles stand side by side where this one does. */
function columnsOf(n) {
  const { one } = view;
  const tile = one.tiles[n];
  return one.tiles.filter((other) => [KIND, EXPERT, BLOCK].every((column) => other[column] === tile[column])).length;
}

function ticketOf(n) {
  const whose = view.one.ranks > 1 ? ` of rank ${view.one.tiles[n][RANK]}` : "";
  return `ticket ${view.ticket.get(n)}${whose}`;
}

/** Several tickets: "tickets 0 and 1", over ranks "tickets 0 and 1 of rank 0 and ticket 3 of rank 1". */
function ticketsOf(tiles) {
  const { one, ticket } = view;
  const ofRank = new Map();
  for (const n of tiles) add(ofRank, one.tiles[n][RANK], ticket.get(n));
  const words = [...ofRank].map(([rank, tickets]) => {
    const whose = one.ranks > 1 ? ` of rank ${rank}` : "";
    return `${plural(tickets.size, "ticket")} ${listed([...tickets])}${whose}`;
  });
  return listed(words);
}

function programName(program) {
  if (view.one.ranks === 1) return `program ${program}`;
  return `program ${program % choice.programs} of rank ${Math.floor(program / choice.programs)}`;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

/** What a counter shows of what a tile waits for. */
function countOf(n, shown) {
  const { one } = view;
  return `${one.counters[one.counter[n]]}: ${shown.get(one.counter[n]) ?? 0} of ${one.tiles[n][ARRIVALS]}`;
}

/** The sentence for an event. */
function sentenceOf(event, before) {
  const { one, run, broken, unwritten, poisoned } = view;
  if (!event) {
    return `${one.tiles.length} tiles, ${waitersOf(one).length} of which wait for others. Nothing is drawn yet.`;
  }
  if (event.what === "over") return overInWords();
  if (event.what === "deadlock") {
    const held = run.stuck.map(({ program, tile }) => `${programName(program)} with ${ticketOf(tile)}`);
    const wait = held.length === 1 ? "waits" : "wait";
    const forWhat = "for tiles that are still to be drawn, and nobody is left to draw them";
    return `Deadlock: nobody works. ${capital(listed(held))} ${wait} ${forWhat}.`;
  }

  const { program, tile, start, drawn } = event.span;
  if (event.what === "finish") {
    const [result] = storesOf(one, tile);
    const inside = result === "rows" ? "" : `${result} of `;
    const stored = poisoned.has(tile) ? `NaN in ${inside}${wrongIn(tile)}` : `${inside}${whereOf(tile)}`;
    const adds = one.signals[tile].map(([counter, by]) => `adds ${by} to “${one.counters[counter]}”`);
    const done = `${capital(programName(program))} is done with ${ticketOf(tile)} and has stored ${stored}.`;
    return adds.length ? `${done} It ${listed(adds)}.` : `${done} Nobody waits for it.`;
  }

  const reads = readsInWords(tile);
  if (event.what === "begin") {
    const begins = `${capital(programName(program))} begins ${ticketOf(tile)}, ${nameOf(tile)}`;
    return `The wait is over (${countOf(tile, before.shown)}). ${begins}, ${start - drawn} after drawing it.${reads}`;
  }
  const drew = `${capital(programName(program))} draws ${ticketOf(tile)}: ${nameOf(tile)}.`;
  if (one.counter[tile] === null) return `${drew} It waits for nothing and begins.${reads}`;
  if (broken.has(tile)) {
    const luck = unwritten.has(tile) ? "" : " What it reads is there, by luck.";
    return `${drew} Its wait is taken away (${countOf(tile, before.shown)}), so it begins.${luck}${reads}`;
  }
  if (start !== drawn) return `${drew} It waits (${countOf(tile, before.shown)}).`;
  return `${drew} What it waits for has arrived (${countOf(tile, before.shown)}): it begins.${reads}`;
}

/** What is wrong with what a tile reads. */
function readsInWords(tile) {
  const { one, unwritten, poisoned } = view;
  if (unwritten.has(tile)) {
    const makers = unwritten.get(tile);
    const what = [...new Set(makers.map((n) => storesOf(one, n)[0]))];
    const have = makers.length === 1 ? "has" : "have";
    return ` A wrong read: ${ticketsOf(makers)} ${have} not stored ${listed(what)} yet.`;
  }
  return poisoned.has(tile) ? " It reads NaN that an earlier tile has stored." : "";
}

function overInWords() {
  const { one, run } = view;
  const all = run.end * choice.programs * one.ranks;
  const share = (spent) => `${((100 * spent) / all).toFixed(1)} %`;
  const busy = run.spans.reduce((sum, span) => sum + span.end - span.start, 0);
  const waited = run.spans.reduce((sum, span) => sum + span.start - span.drawn, 0);
  const wrong = wrongResults();
  const outcome = wrong.length ? `Wrong: ${listed(wrong)}.` : "All results are right.";
  const spent = `Programs worked ${share(busy)} of it and waited ${share(waited)}.`;
  return `All tiles are done at time ${run.end}. ${spent} ${outcome}`;
}

/** What a caller gets that is NaN: ["y of tokens 0 and 3 is NaN"]. */
function wrongResults() {
  const { one, poisoned } = view;
  const wrong = new Map();
  for (const n of poisoned) {
    const [result, axis] = storesOf(one, n);
    if (axis !== "token" && axis !== "expert") continue;
    for (const cell of cellsOf(n)) if (isWrong(n, cell)) add(wrong, result, cell);
  }
  return [...wrong].map(([result, cells]) => {
    const noun = result.startsWith("dw_") ? "expert" : "token";
    return `${result} of ${plural(cells.size, noun)} ${listed([...cells].sort((a, b) => a - b))} is NaN`;
  });
}

/** Where in its result a poisoned tile stores NaN: as `whereOf`, but combine does so for some of its tokens only. */
function wrongIn(n) {
  if (kindOf(view.one, n) !== "combine") return whereOf(n);
  const tokens = cellsOf(n).filter((token) => isWrong(n, token));
  return `${plural(tokens.length, "token")} ${listed(tokens)}`;
}

function add(map, key, value) {
  if (!map.has(key)) map.set(key, new Set());
  map.get(key).add(value);
}

/**
 * Whether tile n stores NaN in this cell. A product's tile does so in all its cells; a combine tile for those tokens of
 * whose rows some are NaN, or come too late.
 */
function isWrong(n, cell) {
  const { one, poisoned, unwritten } = view;
  if (!poisoned.has(n) || kindOf(one, n) !== "combine") return poisoned.has(n);
  const wrong = (other) => poisoned.has(other) || (unwritten.get(n) ?? []).includes(other);
  return one.reads[n].some((other) => wrong(other) && rowsOf(other).some((row) => one.token_of_row[row] === cell));
}

// Choices.

function fillChoices() {
  const { one, layer } = view;
  const cases = layer.cases[choice.direction];
  options("layer", [...SCHEDULES.layers.keys()], (n) => SCHEDULES.layers[n].name);
  options("direction", Object.keys(layer.cases));
  options("ranks", [...new Set(cases.map((other) => other.ranks))], (n) => `${n} ${plural(n, "rank")}`);
  options("tile", [...new Set(cases.map((other) => other.tile))]);
  const programs = (n) => (one.ranks > 1 ? `${n} on each rank` : `${n} ${plural(n, "program")}`);
  options("programs", PROGRAMS, programs);
  options("order", Object.keys(one.orders));
  const kinds = [...new Set(waitersOf(one).map((n) => kindOf(one, n)))];
  const named = { kept: "all are kept", all: "no tile waits" };
  const waits = ["kept", ...kinds, "all"];
  if (!waits.includes(choice.waits)) waits.push(choice.waits);
  const unnamed = (of) => (kinds.includes(of) ? `${of} does not wait` : "of chosen tiles taken away");
  options("waits", waits, (of) => named[of] ?? unnamed(of));
}

function options(name, values, words = String) {
  const select = $(name);
  const now = values.map((value) => `${value} ${words(value)}`).join();
  if (select.dataset.options !== now) {
    select.replaceChildren(...values.map((value) => make("option", { value }, words(value))));
    select.dataset.options = now;
  }
  select.value = choice[name];
}

// Laying out. `lay...` makes elements for a run, `show` says what is so after an event.

const css = (n) => stepOf(view.one, n);

function layLanes() {
  const { one, run } = view;
  const { programs } = choice;
  const lanes = [];
  for (let program = 0; program < one.ranks * programs; program++) {
    const whose = one.ranks > 1 ? `rank ${Math.floor(program / programs)} ·` : "program";
    const name = make("span", { class: "name" }, `${whose} ${program % programs}`);
    const bars = [...run.spans, ...run.stuck].filter((span) => span.program === program).flatMap(barsOf);
    const first = program > 0 && program % programs === 0; // of another rank
    lanes.push(make("div", { class: first ? "lane apart" : "lane" }, name, make("div", { class: "time" }, ...bars)));
  }
  lanes.push(make("div", { class: "now" }));
  $("lanes").replaceChildren(...lanes);
}

/** The time at which lanes end: who waits for ever does so until there. */
const endOfLanes = ({ end, stuck }) => (stuck.length ? end + 2 : Math.max(end, 1));

function barsOf(span) {
  const total = endOfLanes(view.run);
  const bar = (kind, from, until, label) => {
    const style = `left: ${(100 * from) / total}%; width: ${(100 * (until - from)) / total}%`;
    return make("span", { class: `bar ${kind}`, style, "data-tile": span.tile }, label);
  };
  const waits = span.start === span.drawn ? [] : [bar("waits", span.drawn, span.start ?? total, "")];
  if (span.start === undefined) return waits;
  return [...waits, bar(`works ${css(span.tile)}`, span.start, span.end, `${view.ticket.get(span.tile)}`)];
}

function layTiles() {
  const { one, order, ticket } = view;
  const buttons = order.map((n) => {
    const tile = one.tiles[n];
    const rank = one.ranks > 1 ? [make("span", { class: "rank" }, `rank ${tile[RANK]}`)] : [];
    const parts = [
      make("span", { class: "number" }, `${ticket.get(n)}`, ...rank),
      make("span", { class: "kind" }, kindOf(one, n)),
      make("span", {}, kindOf(one, n) === "combine" ? whereOf(n) : `expert ${tile[EXPERT]}`),
      make("span", { class: "state" }),
    ];
    return make("button", { type: "button", class: `tile ${css(n)}`, "data-tile": n }, ...parts);
  });
  $("tiles").replaceChildren(...buttons);
}

function layCounters() {
  const { one } = view;
  const awaited = new Map(waitersOf(one).map((n) => [one.counter[n], one.tiles[n][ARRIVALS]]));
  const counters = [...awaited].sort(([a], [b]) => a - b).map(([counter, arrivals]) => {
    const maker = one.signals.findIndex((signals) => signals.some(([other]) => other === counter));
    const parts = [
      make("span", {}, one.counters[counter]),
      make("span", { class: "gauge" }, make("span", { class: `fill ${css(maker)}` })),
      make("span", { class: "count" }),
    ];
    return make("li", { "data-counter": counter, "data-most": arrivals }, ...parts);
  });
  $("counters").replaceChildren(...counters);
}

/** Memory: what tiles store, a cell a row, slot, token or expert, cut where tiles stand side by side. */
function layMemory() {
  const { one } = view;
  const buffers = new Map(); // name -> {axis, cells}, where cells are number -> tiles, by column
  for (const n of one.tiles.keys()) {
    const [name, axis] = storesOf(one, n);
    if (!buffers.has(name)) buffers.set(name, { axis, cells: new Map() });
    for (const cell of cellsOf(n)) add(buffers.get(name).cells, cell, n);
  }
  const K = view.layer.topk_ids[0].length;
  const tokensBefore = (rank) => one.tokens_of_rank.slice(0, rank).reduce((sum, tokens) => sum + tokens, 0);
  const firstTokens = one.tokens_of_rank.map((_, rank) => tokensBefore(rank));
  const startsAnother = {
    row: (row) => one.row_start.includes(row), // expert
    slot: (route) => route % K === 0, // token
    token: (token) => firstTokens.includes(token), // rank
    expert: () => false,
  };
  const counted = { row: "rows", slot: "token, slot", token: "tokens", expert: "experts" };
  const ofCell = (axis, cell, tiles, first) => {
    const piece = (n) => make("span", { class: `piece ${css(n)}`, "data-tile": n, "data-cell": cell });
    const key = axis === "slot" ? `${Math.floor(cell / K)},${cell % K}` : `${cell}`;
    const parts = [
      make("span", { class: "pieces" }, ...[...tiles].map(piece)),
      make("span", { class: "key" }, key),
    ];
    return make("span", { class: !first && startsAnother[axis](cell) ? "cell apart" : "cell" }, ...parts);
  };
  const parts = [...buffers].map(([name, { axis, cells }]) => {
    const sorted = [...cells].sort(([a], [b]) => a - b);
    const key = make("span", { class: "key" }, counted[axis]);
    const title = make("span", { class: "name" }, make("code", {}, name), key);
    const drawn = sorted.map(([cell, tiles], i) => ofCell(axis, cell, tiles, i === 0));
    return make("div", { class: "buffer" }, title, make("span", { class: "cells" }, ...drawn));
  });
  $("memory").replaceChildren(...parts);
}

/** The cells that a tile stores: numbers of rows, of routes t·K + k, of tokens, or of an expert. */
function cellsOf(n) {
  const { one, layer } = view;
  const [, axis] = storesOf(one, n);
  if (axis === "expert") return [one.tiles[n][EXPERT]];
  if (axis !== "slot") return rowsOf(n);
  return rowsOf(n).map((row) => one.token_of_row[row] * layer.topk_ids[0].length + one.slot_of_row[row]);
}

/** The rows of its block; of combine, its tokens. */
const rowsOf = (n) => Array.from({ length: view.one.tiles[n][ROWS] }, (_, i) => view.one.tiles[n][ROW] + i);

function layTable() {
  const { one, order, ticket } = view;
  const heads = ["ticket", ...SCHEDULES.columns, "waits for", "state", "program", "drawn", "begins", "ends"];
  const rows = order.map((n) => {
    const waits = one.counter[n] === null ? "–" : one.counters[one.counter[n]];
    const cells = [ticket.get(n), kindOf(one, n), ...one.tiles[n].slice(1), waits, "", "", "", "", ""];
    return make("tr", { "data-tile": n }, ...cells.map((cell) => make("td", {}, `${cell}`)));
  });
  const head = make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head))));
  $("table").replaceChildren(head, make("tbody", {}, ...rows));
}

function layLog() {
  const lines = view.events.map((event, n) => make("li", {}, `Time ${event.time}. ${sentenceOf(event, stateAt(n))}`));
  $("log").replaceChildren(...lines);
}

/** Says on the page what is so after the event. */
function show() {
  const { one, run, broken, events, poisoned, unwritten } = view;
  const { states, shown, time, event } = stateAt(choice.at);
  const spans = new Map([...run.spans, ...run.stuck].map((span) => [span.tile, span]));
  const current = event?.span?.tile ?? null;
  const focus = looked ?? current ?? (event?.what === "deadlock" ? run.stuck[0].tile : null);
  view.focus = focus;
  const began = (n) => states[n] === "works" || states[n] === "done";
  const wrong = (n) => unwritten.has(n) && began(n);

  // The sentence, the slider, the buttons.
  const status = $("status");
  status.textContent = sentenceOf(event, stateAt(Math.max(choice.at - 1, 0)));
  const badEnd = event && (event.what === "deadlock" || poisoned.size);
  const bad = current === null ? badEnd : began(current) && poisoned.has(current);
  status.className = `status ${current === null ? "" : css(current)} ${bad ? "bad" : ""}`;
  $("slider").max = events.length;
  $("slider").value = choice.at;
  $("slider").setAttribute("aria-valuetext", `event ${choice.at} of ${events.length}, time ${time}`);
  $("where").textContent = `event ${choice.at} of ${events.length} · time ${time}`;
  // Not `disabled`: that would take the focus away from who has just pressed the button.
  for (const name of ["first", "back"]) $(name).setAttribute("aria-disabled", choice.at === 0);
  for (const name of ["on", "last"]) $(name).setAttribute("aria-disabled", choice.at === events.length);

  // Lanes: nothing of the future.
  for (const bar of document.querySelectorAll("#stepper .bar")) {
    const n = Number(bar.dataset.tile);
    const waitsBar = bar.classList.contains("waits");
    bar.hidden = states[n] === "undrawn" || (!waitsBar && !began(n));
    bar.classList.toggle("wrong", !waitsBar && wrong(n));
    bar.classList.toggle("poisoned", !waitsBar && poisoned.has(n));
    bar.classList.toggle("looked", n === focus);
  }
  $("lanes").style.setProperty("--now", event?.what === "deadlock" ? 1 : time / endOfLanes(run));

  // Tiles.
  const awaited = focus === null || one.counter[focus] === null ? null : one.counter[focus];
  for (const button of document.querySelectorAll("#stepper .tile")) {
    const n = Number(button.dataset.tile);
    const state = stateInWords(n, states[n], shown);
    button.dataset.state = states[n];
    button.classList.toggle("wrong", wrong(n));
    button.classList.toggle("poisoned", poisoned.has(n) && states[n] === "done");
    button.classList.toggle("broken", broken.has(n));
    button.classList.toggle("awaited", awaited !== null && one.signals[n].some(([counter]) => counter === awaited));
    button.tabIndex = n === (focus ?? view.order[0]) ? 0 : -1;
    button.setAttribute("aria-pressed", n === focus);
    button.setAttribute("aria-label", `${ticketOf(n)}, ${nameOf(n)}: ${state}`);
    button.querySelector(".state").textContent = state;
  }

  // Counters.
  for (const row of document.querySelectorAll("#stepper [data-counter]")) {
    const value = shown.get(Number(row.dataset.counter)) ?? 0;
    row.querySelector(".fill").style.width = `${(100 * value) / Number(row.dataset.most)}%`;
    row.querySelector(".count").textContent = `${value} of ${row.dataset.most}`;
    row.classList.toggle("looked", Number(row.dataset.counter) === awaited);
  }

  // Memory.
  const read = new Set(focus !== null && states[focus] === "works" ? one.reads[focus] : []);
  for (const piece of document.querySelectorAll("#stepper .piece")) {
    const n = Number(piece.dataset.tile);
    piece.classList.toggle("written", states[n] === "done");
    piece.classList.toggle("poisoned", states[n] === "done" && isWrong(n, Number(piece.dataset.cell)));
    piece.classList.toggle("read", read.has(n));
    piece.classList.toggle("early", read.has(n) && (unwritten.get(focus) ?? []).includes(n));
    piece.classList.toggle("storing", n === focus && states[n] === "works");
  }

  // The tile that is looked at.
  showLooked(focus, states, shown);

  // The table and the log.
  for (const row of $("table").tBodies[0].rows) {
    const n = Number(row.dataset.tile);
    const span = states[n] === "undrawn" ? null : spans.get(n);
    const values = [
      stateInWords(n, states[n], shown),
      span ? programName(span.program) : "",
      span ? span.drawn : "",
      began(n) ? span.start : "",
      states[n] === "done" ? span.end : "",
    ];
    const last = [...row.cells].slice(-values.length);
    values.forEach((value, i) => (last[i].textContent = value));
    row.classList.toggle("looked", n === focus);
  }
  for (const [n, line] of [...$("log").children].entries()) {
    line.hidden = n >= choice.at;
    line.setAttribute("aria-current", n === choice.at - 1);
  }
  $("log").scrollTop = $("log").scrollHeight;
}

function stateInWords(n, state, shown) {
  const { one, poisoned, unwritten } = view;
  if (state === "undrawn") return "not drawn";
  if (state === "waits") return `waits ${shown.get(one.counter[n]) ?? 0}/${one.tiles[n][ARRIVALS]}`;
  if (unwritten.has(n)) return state === "works" ? "wrong read" : "stored NaN";
  if (poisoned.has(n)) return state === "works" ? "reads NaN" : "stored NaN";
  return state === "works" ? "works" : "done";
}

function showLooked(n, states, shown) {
  const { one, broken } = view;
  const button = $("toggle");
  button.hidden = n === null || one.counter[n] === null;
  if (n === null) {
    $("looked").textContent = "Choose a tile to see what it waits for.";
    return;
  }
  const parts = [`${capital(ticketOf(n))}, ${nameOf(n)}.`];
  const reads = one.reads[n];
  if (reads.length) parts.push(`It reads what ${ticketsOf(reads)} ${reads.length === 1 ? "stores" : "store"}.`);
  const counter = one.counters[one.counter[n]];
  if (one.counter[n] === null) parts.push("It waits for nothing.");
  else if (broken.has(n)) parts.push(`Its wait for “${counter}” is taken away.`);
  else {
    const now = shown.get(one.counter[n]) ?? 0;
    parts.push(`It waits until “${counter}” shows ${one.tiles[n][ARRIVALS]}; now it shows ${now}.`);
  }
  const adds = one.signals[n].map(([counter, by]) => `${by} to “${one.counters[counter]}”`);
  parts.push(adds.length ? `When done it adds ${listed(adds)}.` : "Nobody waits for it.");
  $("looked").textContent = parts.join(" ");
  button.textContent = broken.has(n) ? "Give its wait back" : "Take its wait away";
}

// What the reader does.

function goTo(at) {
  choice.at = Math.min(Math.max(at, 0), view.events.length);
  looked = null;
  show();
}

function stop() {
  clearInterval(timer);
  timer = null;
  $("play").textContent = "Play";
}

function play() {
  if (timer) return stop();
  if (choice.at === view.events.length) goTo(0);
  $("play").textContent = "Pause";
  timer = setInterval(() => {
    goTo(choice.at + 1);
    if (choice.at === view.events.length) stop();
  }, 800);
}

/** Takes the wait of a tile away, or gives it back; the clock stays where it is, as near as it can. */
function toggleWait(n) {
  const broken = new Set(view.broken);
  if (!broken.delete(n)) broken.add(n);
  build({ ...choice, waits: [...broken].sort((a, b) => a - b).join(".") || "kept" }, n);
}

/** Another layer, direction, number of ranks or size of tiles has other tiles: waits of single ones are given back. */
function choose(name, value) {
  stop();
  const sameTiles = ["programs", "order", "waits"].includes(name);
  const waits = sameTiles || Number.isNaN(parseInt(choice.waits)) ? choice.waits : DEFAULTS.waits;
  build({ ...choice, waits, [name]: value, at: 0 });
}

function onKey(event) {
  if (event.target.matches("select, input") || event.altKey || event.ctrlKey || event.metaKey) return;
  const moves = { ArrowRight: choice.at + 1, ArrowLeft: choice.at - 1, Home: 0, End: view.events.length };
  const along = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key in moves) {
    stop();
    goTo(moves[event.key]);
  } else if (along && event.target.matches(".tile")) {
    const { order, places } = view;
    const place = places.get(Number(event.target.dataset.tile)) + along;
    looked = order[Math.min(Math.max(place, 0), order.length - 1)];
    show();
    document.querySelector(`#stepper .tile[data-tile="${looked}"]`).focus();
  } else return;
  event.preventDefault();
}

function begin() {
  const stepper = document.getElementById("stepper");
  for (const [step, colour] of Object.entries(SCHEDULES.colours)) stepper.style.setProperty(`--${step}`, colour);
  for (const name of ["layer", "direction", "ranks", "tile", "programs", "order", "waits"]) {
    $(name).addEventListener("change", (event) => {
      choose(name, typeof DEFAULTS[name] === "number" ? Number(event.target.value) : event.target.value);
    });
  }
  const moves = { first: () => 0, back: () => choice.at - 1, on: () => choice.at + 1, last: () => view.events.length };
  for (const [name, to] of Object.entries(moves)) {
    $(name).addEventListener("click", () => {
      stop();
      goTo(to());
    });
  }
  $("play").addEventListener("click", play);
  $("slider").addEventListener("input", (event) => {
    stop();
    goTo(Number(event.target.value));
  });
  $("toggle").addEventListener("click", () => toggleWait(view.focus));
  stepper.addEventListener("keydown", onKey);
  stepper.addEventListener("click", (event) => {
    const shown = event.target.closest(".tile, .bar, .piece");
    if (!shown) return;
    looked = Number(shown.dataset.tile);
    show();
  });
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      stop();
      build(choiceFrom(button.dataset.show));
      stepper.scrollIntoView({ block: "start" });
    });
  }
  addEventListener("hashchange", () => {
    stop();
    build(choiceFrom(location.hash.slice(1)));
  });
  build(choiceFrom(location.hash.slice(1)));
  stepper.classList.add("ready");
}

begin();
