// What both pages use. The page's own script follows in the same module.

const byId = (id) => document.getElementById(id);
const state = { theme: null }; // what is shown, as the address says it; each page adds its own
let palettes = null; // the 256 colors of each theme as one string of hex digits; the page sets it

// ---- Small helpers ----

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const whole = (n) => n.toLocaleString('en');
/** For ears: a screen reader reads it out. */
const say = (text) => byId('live').replaceChildren(text);

/** A label as the eye can see it: line ends and blanks get a sign of their own. */
function seen(label) {
  if (label === '') return '∅';
  const text = label.replace(/\r?\n/g, '⏎').replace(/\t/g, '⇥');
  return text.trim() === '' ? '␣'.repeat(text.length) : text;
}

const word = (label) => el('bdi', { dir: 'auto' }, seen(label));

const SUPER = '⁰¹²³⁴⁵⁶⁷⁸⁹';
const power = (n) =>
  n === 0 ? '1' : '10' + (n < 0 ? '⁻' : '') + [...String(Math.abs(n))].map((d) => SUPER[d]).join('');

/** So many decimals where they say something, powers of ten below. */
function number(x, decimals = 3) {
  if (typeof x !== 'number' || !Number.isFinite(x)) return '–';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1000) return whole(Math.round(x));
  if (size >= 100) return x.toFixed(0);
  if (size >= 10) return x.toFixed(1);
  if (size >= 0.001) return x.toFixed(decimals);
  const exponent = Math.floor(Math.log10(size));
  return `${(x / 10 ** exponent).toFixed(decimals - 2)}×${power(exponent)}`;
}

// ---- Theme and colors ----

const system = matchMedia('(prefers-color-scheme: dark)');
const theme = () => state.theme || (system.matches ? 'dark' : 'light');
const otherTheme = () => (theme() === 'dark' ? 'light' : 'dark');

const hex = (index, of = theme()) => palettes[of].substr(6 * index, 6);

function rgb(index, of) {
  const color = parseInt(hex(index, of), 16);
  return [color >> 16, (color >> 8) & 255, color & 255];
}

/** The reader's choice outranks the system's. */
function drawTheme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  const other = otherTheme() === 'dark' ? 'Dark' : 'Light';
  byId('theme').textContent = other;
  byId('theme').setAttribute('aria-label', `${other} colors`);
}

/** The palette from color `first` on, and under it ticks: [where from 0 to 1, text]. */
function drawLegend(first, ticks) {
  const strip = byId('legend').querySelector('canvas').getContext('2d');
  for (let i = first; i < 256; i++) {
    strip.fillStyle = `#${hex(i)}`;
    strip.fillRect(i - first, 0, 1, 1);
  }
  const marks = ticks.map(([share, text]) => {
    const tick = el('li', {}, text);
    tick.style.left = `${100 * share}%`;
    return tick;
  });
  byId('legend').querySelector('ol').replaceChildren(...marks);
}

// ---- Spans and labels of heads ----

const BAND = 6; // px of a band of a span and the gap beside it
const SPAN_COLORS = 8; // of the style sheet; more spans than these share colors, and are told apart by their names

/** A lane for each span [start, end], so that spans that overlap lie beside each other. */
function lanesOf(spans) {
  const ends = []; // of each lane
  return spans.map(([start, end]) => {
    const found = ends.findIndex((last) => last <= start);
    const lane = found < 0 ? ends.length : found;
    ends[lane] = end;
    return lane;
  });
}

/** Px that the bands of so many lanes take. */
const marginOf = (lanes) => BAND * Math.max(0, ...lanes.map((lane) => lane + 1));

/** The legend of spans, and numbers beside it: columns [head, what it is, text of each span]. */
function drawSpanTable(spans, columns) {
  byId('spans').hidden = spans.length === 0;
  const head = (text, title) => el('th', { scope: 'col', title }, text);
  const heads = [head('span', 'Name and positions'), ...columns.map(([text, title]) => head(text, title))];
  const lines = spans.map(({ name, positions: [start, end] }, i) => {
    const swatch = el('i', { class: `swatch span-${i % SPAN_COLORS}` });
    const places = el('small', {}, ` ${whole(start)}–${whole(Math.max(start, end - 1))}`);
    const label = el('th', { scope: 'row', title: `${name}: positions ${start} to ${end}, the last one left out` });
    label.append(swatch, word(name), places);
    return el('tr', {}, label, ...columns.map(([, , texts]) => el('td', {}, texts[i] ?? '–')));
  });
  byId('spans').querySelector('thead').replaceChildren(el('tr', {}, ...heads));
  byId('spans').querySelector('tbody').replaceChildren(...lines);
}

/** What the detectors found in a head, with definitions. */
function drawLabels(labels) {
  const items = labels.flatMap(({ name, score, definition }) => [
    el('dt', {}, name),
    el('dd', {}, score.toFixed(2)),
    el('dd', { class: 'why' }, definition),
  ]);
  byId('labels').querySelector('dl').replaceChildren(...items);
  byId('labels').hidden = items.length === 0;
}
