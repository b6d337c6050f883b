(() => {
"use strict";

const AXIS = 22, EDGE = 4, ROW = 24, BETWEEN = 6, LABEL = 14, NARROW = 560, FONT = "12px system-ui, sans-serif";
const LEAST = 2e-6;  // seconds that are shown at least

const all = [];

function human(seconds) {
  const s = Math.abs(seconds);
  if (s >= 60) return `${Math.floor(s / 60)} min ${(s % 60).toFixed(1)} s`;
  if (s >= 1) return `${s.toPrecision(4)} s`;
  if (s >= 1e-3) return `${(s * 1e3).toPrecision(4)} ms`;
  return `${(s * 1e6).toPrecision(3)} µs`;
}

async function unpack(packed, unit, gap) {
  const bytes = Uint8Array.from(atob(packed.data), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const n = packed.n, key = new Uint8Array(n), begin = new Float64Array(n), end = new Float64Array(n);
  let count = 0, at = 0, last = gap;
  for (let i = 0; i < n; i++) {
    const k = raw[i];
    const units = raw[n + i] + raw[2 * n + i] * 256 + raw[3 * n + i] * 65536
      + raw[4 * n + i] * 16777216;
    if (k !== gap) {
      if (k !== last) {
        key[count] = k;
        begin[count] = packed.begin + at * unit;
        count++;
      }
      end[count - 1] = packed.begin + (at + units) * unit;
    }
    last = k;
    at += units;
  }
  return {
    host: packed.host, keys: packed.keys, kind: packed.kind,
    key: key.subarray(0, count), begin: begin.subarray(0, count), end: end.subarray(0, count),
  };
}

function readable(fill) {  // on this colour, which is #rrggbb
  const [r, g, b] = [1, 3, 5].map(i => (parseInt(fill.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#111111" : "#ffffff";
}

function firstAfter(ends, time) {  // the first event that ends after it
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

function roleOf(key) {
  const role = key.split("/")[0];
  return role === "driver" ? "run" : role;
}

// One canvas. Those of a section are the runs of a stack: with one axis, one table, one set of tools.
class Timeline {
  constructor(part, content, tracks) {
    this.part = part;
    this.section = part.closest(".tj-timeline");
    this.leader = all.find(t => t.section === this.section) || this;  // who has what they share
    this.order = content.roles;  // as data flow
    this.kinds = content.kinds;
    this.labels = content.labels;
    this.numbers = content.numbers;
    this.home = content.home;
    this.zero = this.section.classList.contains("tj-stack") ? this.home[0] : 0;
    this.axis = this.leader === this ? AXIS : EDGE;
    this.canvas = part.querySelector("canvas");
    this.tip = part.querySelector(".tj-tip");
    this.said = this.section.querySelector(".tj-said");
    this.offset = 0;  // seconds from home to what is shown
    this.span = this.home[1] - this.home[0];
    this.rows = [];
    this.tracks = tracks;
    this.room = this.canvas.clientWidth;  // asked for seldom: the page is laid out for it
    for (const track of tracks) this.addRows(track);
    this.low = Math.min(...tracks.map(t => t.begin[0]));
    this.high = Math.max(...tracks.map(t => t.end[t.end.length - 1]));
    this.row = 0;
    this.event = -1;
    this.fingers = new Map();
    this.makeTable();
    this.listen();
  }

  addRows(track) {
    const roles = [...new Set(track.keys.map(roleOf))];
    roles.sort((a, b) => this.order.indexOf(a) - this.order.indexOf(b));
    track.rowOf = track.keys.map(key => this.rows.length + roles.indexOf(roleOf(key)));
    track.first = this.rows.length;
    track.count = roles.length;
    for (const role of roles)
      this.rows.push({ track, label: roles.length > 1 ? `${track.host} · ${role}` : track.host });
  }

  get from() { return this.home[0] + this.offset; }
  get to() { return this.from + this.span; }
  get narrow() { return this.room < NARROW; }
  get pitch() { return ROW + BETWEEN + (this.narrow ? LABEL : 0); }

  top(row) { return this.axis + row * this.pitch + (this.narrow ? LABEL : 0); }

  get left() {
    if (this.narrow) return 0;
    return this.leader.gutterOfAll();
  }

  gutterOfAll() {
    if (this.gutter === undefined) {
      const pen = this.canvas.getContext("2d");
      pen.font = FONT;
      const rows = all.filter(t => t.leader === this).flatMap(t => t.rows);
      this.gutter = 10 + Math.max(...rows.map(r => pen.measureText(r.label).width));
    }
    return this.gutter;
  }

  x(time) { return this.left + (time - this.from) / this.span * this.width; }
  time(x) { return this.from + (x - this.left) / this.width * this.span; }
  get width() { return this.room - this.left; }

  // All timelines of a page show the same stretch of time, each from its own home on.
  show(from, span) {
    const low = Math.min(...all.map(t => t.low - t.home[0]));
    const high = Math.max(...all.map(t => t.high - t.home[0]));
    const most = (high - low) * 1.04;
    span = Math.min(Math.max(span, LEAST), most);
    let offset = from - this.home[0];
    offset = Math.max(low - 0.02 * (high - low), Math.min(offset, low + most - span));
    for (const timeline of all) {
      timeline.offset = offset;
      timeline.span = span;
      timeline.hide();
      timeline.ask();
    }
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, this.span * factor);
  }

  move(share) { this.show(this.from + share * this.span, this.span); }

  reset() { this.show(this.home[0], Math.max(...all.map(t => t.home[1] - t.home[0]))); }

  everything() {
    const low = Math.min(...all.map(t => t.low - t.home[0]));
    this.show(this.home[0] + low - 1e9, 1e9);
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    const canvas = this.canvas, style = getComputedStyle(this.section);
    const ratio = window.devicePixelRatio || 1;
    this.room = canvas.clientWidth;
    const height = this.axis + this.rows.length * this.pitch;
    const wide = Math.round(this.room * ratio), high = Math.round(height * ratio);
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    const colour = name => style.getPropertyValue(`--tj-${name}`).trim();
    this.colours = this.kinds.map(colour);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.fillStyle = colour("paper");
    pen.fillRect(0, 0, wide, high);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = FONT;
    pen.textBaseline = "middle";
    this.drawAxis(pen, colour);
    const spent = this.rows.map(() => new Float64Array(this.kinds.length));
    pen.setTransform(1, 0, 0, 1, 0, 0);
    for (const track of this.tracks) this.drawTrack(pen, track, ratio, spent);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawWords(pen, colour);
    this.drawMarks(pen, colour);
    this.fillTable(spent);
    this.part.dataset.from = this.from;
    this.part.dataset.to = this.to;
    if (this.leader === this)
      this.section.querySelector(".tj-range").textContent =
        `${(this.from - this.zero).toFixed(this.digits())} s, ${human(this.span)} long`;
  }

  // Every column of pixels is divided among the kinds of work by their shares of its time.
  drawTrack(pen, track, ratio, spent) {
    const kinds = this.kinds.length, from = this.from, to = this.to;
    const left = Math.round(this.left * ratio), columns = Math.round(this.width * ratio);
    const scale = columns / this.span, height = ROW * ratio;
    const shares = Array.from({ length: track.count }, () => new Float32Array(columns * kinds));
    for (let i = firstAfter(track.end, from); i < track.key.length && track.begin[i] < to; i++) {
      const key = track.key[i], kind = track.kind[key], row = track.rowOf[key];
      const begin = Math.max(track.begin[i], from), end = Math.min(track.end[i], to);
      spent[row][kind] += end - begin;
      const a = (begin - from) * scale, b = (end - from) * scale;
      const first = Math.floor(a), last = Math.min(Math.floor(b), columns - 1);
      const share = shares[row - track.first];
      if (first >= columns) continue;
      if (first === last) {
        share[first * kinds + kind] += b - a;
        continue;
      }
      share[first * kinds + kind] += first + 1 - a;
      share[last * kinds + kind] += b - last;
      if (last > first + 1) {
        pen.fillStyle = this.colours[kind];
        pen.fillRect(left + first + 1, Math.round(this.top(row) * ratio), last - first - 1, height);
      }
    }
    for (let r = 0; r < track.count; r++) {
      const share = shares[r], base = new Float32Array(columns);
      const bottom = Math.round(this.top(track.first + r) * ratio) + height;
      for (let kind = 0; kind < kinds; kind++) {
        pen.fillStyle = this.colours[kind];
        for (let column = 0; column < columns; column++) {
          const part = share[column * kinds + kind] * height;
          if (part > 0) {
            pen.fillRect(left + column, bottom - base[column] - part, 1, part);
            base[column] += part;
          }
        }
      }
    }
  }

  drawWords(pen, colour) {
    const left = this.left;
    for (let r = 0; r < this.rows.length; r++) {
      pen.fillStyle = colour(r === this.row && this.focused ? "ink" : "faint");
      pen.textAlign = this.narrow ? "left" : "right";
      const y = this.narrow ? this.top(r) - LABEL / 2 : this.top(r) + ROW / 2;
      pen.fillText(this.rows[r].label, this.narrow ? 0 : left - 8, y);
    }
    pen.textAlign = "center";
    const least = 12 / this.width * this.span;  // seconds that a number has room in
    for (const track of this.tracks) {
      for (let i = firstAfter(track.end, this.from); i < track.key.length; i++) {
        if (track.begin[i] >= this.to) break;
        if (track.end[i] - track.begin[i] < least) continue;
        const a = Math.max(this.x(track.begin[i]), left);
        const b = Math.min(this.x(track.end[i]), left + this.width);
        const key = track.key[i], kind = track.kind[key], text = this.wordsFor(track, key, b - a, pen);
        if (!text) continue;
        pen.fillStyle = this.kinds[kind] === "wait" ? colour("faint") : readable(this.colours[kind]);
        pen.fillText(text, (a + b) / 2, this.top(track.rowOf[key]) + ROW / 2 + 0.5);
      }
    }
  }

  wordsFor(track, key, room, pen) {
    const name = track.keys[key].split("/")[1], number = this.numbers[track.kind[key]];
    const long = name.startsWith("wait_") ? `waits for ${name.slice(5)}` : name;
    for (const text of [number ? `${number} ${long}` : long, number || ""])
      if (text && pen.measureText(text).width < room - 6) return text;
    return "";
  }

  step() {
    const rough = this.span * 90 / this.width, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  }

  digits() { return Math.max(0, Math.min(7, 1 - Math.floor(Math.log10(this.step())))); }

  drawAxis(pen, colour) {
    const step = this.step(), bottom = this.axis + this.rows.length * this.pitch;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const from = this.from - this.zero, to = this.to - this.zero;
    pen.textAlign = "center";
    for (let k = Math.ceil(from / step); k * step <= to; k++) {
      const x = Math.round(this.x(this.zero + k * step)) + 0.5;
      pen.fillStyle = colour("line");
      pen.fillRect(x - 0.5, this.axis - EDGE, 1, bottom);
      if (this.leader !== this) continue;
      pen.fillStyle = colour("faint");
      const text = `${(k * step).toFixed(digits)} s`, half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.max(half, Math.min(x, this.room - half)), AXIS / 2 - 2);
    }
  }

  drawMarks(pen, colour) {
    if (this.selected) {
      const [a, b] = this.selected;
      pen.fillStyle = colour("select");
      pen.fillRect(Math.min(a, b), this.axis - EDGE, Math.abs(b - a), this.canvas.clientHeight);
    }
    if (this.event < 0) return;
    const { track } = this.rows[this.row];
    const a = Math.max(this.x(track.begin[this.event]), this.left);
    const b = Math.max(a + 2, Math.min(this.x(track.end[this.event]), this.left + this.width));
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.strokeRect(a, this.top(this.row) - 1, b - a, ROW + 2);
  }

  makeTable() {
    const table = this.section.querySelector(".tj-shares");
    const heading = (line, scope, text) => {
      const cell = document.createElement("th");
      cell.scope = scope;
      cell.textContent = text;
      line.append(cell);
      return cell;
    };
    if (this.leader === this) {
      table.createCaption().textContent = "Of what is shown, each host's time in percent";
      const head = table.createTHead().insertRow();
      for (const text of ["", "", ...this.labels]) heading(head, "col", text);
    }
    const body = table.createTBody(), run = this.part.querySelector("h3");
    if (run) heading(body.insertRow(), "rowgroup", run.textContent).colSpan = 2 + this.kinds.length;
    for (const row of this.rows) {
      const line = body.insertRow();
      heading(line, "row", row.label);
      const bar = document.createElement("div");
      bar.className = "tj-bar";
      line.insertCell().append(bar);
      row.bars = this.kinds.map(kind => {
        const part = document.createElement("span");
        part.style.background = `var(--tj-${kind})`;
        bar.append(part);
        return part;
      });
      row.cells = this.kinds.map(() => line.insertCell());
    }
  }

  fillTable(spent) {
    for (const track of this.tracks) {
      const rows = Array.from({ length: track.count }, (_, i) => track.first + i);
      let whole = 0;
      for (const r of rows) for (const s of spent[r]) whole += s;
      for (const r of rows) {
        spent[r].forEach((seconds, kind) => {
          const share = whole > 0 ? 100 * seconds / whole : 0;
          this.rows[r].cells[kind].textContent = share > 0 ? share.toFixed(1) : "";
          this.rows[r].bars[kind].style.width = `${share}%`;
        });
      }
    }
  }

  rowAt(y) {
    const row = Math.floor((y - this.axis) / this.pitch);
    return row >= 0 && row < this.rows.length && y >= this.top(row) - BETWEEN / 2 ? row : -1;
  }

  // The event of a row at a time; of another role's, none.
  eventAt(row, time) {
    const { track } = this.rows[row], i = firstAfter(track.end, time);
    const there = i < track.key.length && track.begin[i] <= time;
    return there && track.rowOf[track.key[i]] === row ? i : -1;
  }

  describe(row, event) {
    const { track, label } = this.rows[row], name = track.keys[track.key[event]].split("/")[1];
    const kind = this.labels[track.kind[track.key[event]]];
    const what = name.startsWith("wait_") ? `waits for ${name.slice(5)}`
      : kind.endsWith(name) ? kind : `${kind}: ${name}`;
    const begin = track.begin[event], end = track.end[event];
    return `${label}\n${what}\nfrom ${(begin - this.zero).toFixed(6)} s\nfor ${human(end - begin)}`;
  }

  point(x, y) {
    const row = this.rowAt(y), event = row < 0 || x < this.left ? -1 : this.eventAt(row, this.time(x));
    if (event < 0) return this.hide();
    this.row = row;
    this.event = event;
    this.tell(x, this.top(row) + ROW + 8);
  }

  tell(x, y) {
    const tip = this.tip;
    tip.textContent = this.describe(this.row, this.event);
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(x + 12, this.room - tip.offsetWidth))}px`;
    tip.style.top = `${y}px`;
    this.ask();
  }

  hide() {
    if (this.event < 0 && this.tip.hidden) return;
    this.event = -1;
    this.tip.hidden = true;
    this.ask();
  }

  next(step) {
    const { track } = this.rows[this.row];
    let i = this.event;
    if (i < 0) i = firstAfter(track.end, this.from) - (step > 0 ? 1 : 0);
    do i += step; while (i >= 0 && i < track.key.length && track.rowOf[track.key[i]] !== this.row);
    if (i < 0 || i >= track.key.length) return;
    const begin = track.begin[i], end = track.end[i];
    if (begin < this.from || end > this.to) this.show((begin + end - this.span) / 2, this.span);
    this.event = i;
    this.tell(this.x(Math.max(begin, this.from)), this.top(this.row) + ROW + 8);
    this.said.textContent = this.tip.textContent;
  }

  listen() {
    const canvas = this.canvas;
    const doing = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.4),
      right: () => this.move(0.4), home: () => this.reset(), all: () => this.everything(),
    };
    if (this.leader === this)
      for (const button of this.section.querySelectorAll("[data-do]"))
        button.addEventListener("click", doing[button.dataset.do]);
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (sideways) return this.move((event.deltaX || event.deltaY) / 600);
      this.zoom(Math.exp(event.deltaY / 400), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("pointerdown", event => this.press(event));
    canvas.addEventListener("pointermove", event => this.drag(event));
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, event => this.release(event, name === "pointerup"));
    canvas.addEventListener("pointerleave", () => { if (!this.fingers.size) this.hide(); });
    canvas.addEventListener("keydown", event => this.key(event));
    for (const name of ["focus", "blur"])
      canvas.addEventListener(name, () => { this.focused = name === "focus"; this.ask(); });
    new ResizeObserver(() => this.ask()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.ask());
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, event.offsetX);
    const moves = event.pointerType === "touch" || event.shiftKey || event.button === 1;
    this.grabbed = moves ? { at: event.offsetX, from: this.from } : null;
    this.selected = moves || event.button !== 0 ? null : [event.offsetX, event.offsetX];
  }

  drag(event) {
    const x = event.offsetX, before = this.fingers.get(event.pointerId);
    if (before === undefined) return this.point(x, event.offsetY);
    if (this.fingers.size === 2) {
      const [other] = [...this.fingers].filter(([id]) => id !== event.pointerId);
      const apart = Math.abs(before - other[1]), now = Math.abs(x - other[1]);
      if (apart > 8 && now > 8) this.zoom(apart / now, this.time((x + other[1]) / 2));
      this.grabbed = null;
    } else if (this.grabbed) {
      const { at, from } = this.grabbed;
      this.show(from - (x - at) / this.width * this.span, this.span);
    } else if (this.selected) {
      this.selected[1] = x;
      this.hide();
      this.ask();
    }
    this.fingers.set(event.pointerId, x);
  }

  release(event, meant) {
    this.fingers.delete(event.pointerId);
    const selected = this.selected;
    this.selected = this.grabbed = null;
    if (!meant || !selected || Math.abs(selected[1] - selected[0]) < 5) return this.ask();
    const [a, b] = selected.map(x => this.time(Math.max(x, this.left))).sort((p, q) => p - q);
    this.show(a, b - a);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step) {
      if (event.shiftKey) this.next(step); else this.move(0.2 * step);
    } else if (turn) {
      this.hide();
      this.row = Math.max(0, Math.min(this.rows.length - 1, this.row + turn));
      this.said.textContent = this.rows[this.row].label;
      this.ask();
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-" || event.key === "_") this.zoom(2);
    else if (event.key === "0" || event.key === "Home") this.reset();
    else if (event.key === "a") this.everything();
    else if (event.key === "Escape") this.hide();
    else return;
    event.preventDefault();
  }
}

async function begin() {
  const parts = [...document.querySelectorAll(".tj-part")];
  const ready = await Promise.all(parts.map(async part => {
    const content = JSON.parse(part.querySelector(".tj-data").textContent);
    const tracks = content.tracks.map(track => unpack(track, content.unit, content.gap));
    return [part, content, await Promise.all(tracks)];
  }));
  for (const [part, content, tracks] of ready) {
    if (tracks.length) all.push(new Timeline(part, content, tracks));
    else part.querySelector(".tj-stage").textContent = "The trace is empty.";
  }
  if (all.length) all[0].reset();
  document.documentElement.dataset.timelines = all.length;
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
})();
