// The data of the trace page: heads of one run, or of two with their difference; their numbers, and the colors of these.
// The page's own script follows in the same module.

const data = JSON.parse(byId('data').textContent);
const HIDDEN = 65535; // the stored number of a pair the mask hides
const DECADES = 6; // reach of the log scale: below 10^-6 a weight is drawn as none
const ON_SPAN = 'mass on '; // and its name: a statistic
const sites = data.sites;
const kinds = [...new Set(sites.map((s) => s.kind))];
palettes = data.palettes;

// ---- Numbers of a head ----

function labelsOf(site, side) {
  const axis = data.axes[site[side]];
  return axis ? axis.labels : [];
}

function spansOf(site, side) {
  const axis = data.axes[site[side]];
  return (axis && axis.spans) || [];
}

const isDifference = () => state.run === 'difference';
const shownRun = (site) => (state.run === 'after' ? site.after : site);

/** The number of a head that is shown: of one run, or how much it grew from the first to the second; `of` takes it from a run. */
function numberOf(site, of) {
  if (!isDifference()) return of(shownRun(site));
  const [before, after] = [of(site), of(site.after)];
  return Number.isFinite(before) && Number.isFinite(after) ? after - before : NaN;
}

/** A statistic by its name; the change is one of both runs. */
function statOf(site, name) {
  if (name === 'change') return site.change;
  const span = name.startsWith(ON_SPAN) ? spansOf(site, 'cols').findIndex((s) => ON_SPAN + s.name === name) : -1;
  if (span >= 0) return numberOf(site, (run) => (run.spans[span] || [])[0]);
  return numberOf(site, (run) => (run.stats || {})[name]);
}

/** A number with its sign where it is a difference. */
const signed = (x, difference = isDifference()) => (difference && x > 0 ? '+' : '') + number(x).replace('-', '−');

const nameOf = (site) => (kinds.length > 1 ? `${site.kind}, ` : '') + `layer ${site.layer}, head ${site.head}`;

// ---- Weights and colors ----

const decoded = new Map();

/** Stored numbers; decoded once, when first looked at. */
function stored(text) {
  if (!decoded.has(text)) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    decoded.set(
      text,
      Uint16Array.from({ length: bytes.length >> 1 }, (_, i) => view.getUint16(2 * i, true)),
    );
  }
  return decoded.get(text);
}

const weightOf = Float64Array.from({ length: 65536 }, (_, u) => (u === HIDDEN ? NaN : (u / 65534) ** 2));

/** What is shown of the numbers that each run has under a name: of number i its value, NaN where nothing is seen. */
function reader(site, name) {
  const of = (run) => {
    const from = stored(run[name]);
    return (i) => weightOf[from[i]] ?? NaN; // no weight: a pooled page has none of its pairs
  };
  if (!isDifference()) return of(shownRun(site));
  const [before, after] = [of(site), of(site.after)];
  // A pair that only one of the runs hides has no weight there.
  return (i) => {
    const [a, b] = [before(i), after(i)];
    return Number.isNaN(a) && Number.isNaN(b) ? NaN : (b || 0) - (a || 0);
  };
}

const pairsOf = (site) => labelsOf(site, 'rows').length * labelsOf(site, 'cols').length;

let largestChange = 0;

/** The end of the scale: 1 for weights, for differences the largest of any head. */
function most() {
  if (!isDifference()) return 1;
  if (largestChange === 0) {
    for (const site of sites) {
      const value = reader(site, 'weights');
      for (let i = 0; i < pairsOf(site); i++) largestChange = Math.max(largestChange, Math.abs(value(i)) || 0);
    }
    largestChange = largestChange || 1;
  }
  return largestChange;
}

/** The part of the palette from its faint end: 0 to 1. */
function strength(value) {
  const part = Math.abs(value) / most();
  return clamp(state.scale === 'log' ? 1 + Math.log10(part) / DECADES : part, 0, 1);
}

/** Of differences 128 is none, as the palette has it. */
function colorIndex(value) {
  if (!isDifference()) return Math.round(255 * strength(value));
  return 128 + Math.sign(value) * Math.round(127 * strength(value));
}

const inks = new Map();

/** The pixels of the palette. */
function ink() {
  const key = `${theme()} ${isDifference()}`;
  if (!inks.has(key)) {
    const pixels = Uint32Array.from({ length: 256 }, (_, i) => {
      const [r, g, b] = rgb(i);
      return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
    });
    inks.set(key, pixels);
  }
  return inks.get(key);
}

/** Draws a site with one pixel per pair, or the strongest of several where `limit` is smaller. Hidden pairs stay transparent: the paper
    shows through. */
function paint(canvas, index, limit) {
  const site = sites[index];
  const rows = labelsOf(site, 'rows').length;
  const cols = labelsOf(site, 'cols').length;
  const pool = Math.max(1, Math.ceil(Math.max(rows, cols) / limit));
  const height = (canvas.height = Math.ceil(rows / pool));
  const width = (canvas.width = Math.ceil(cols / pool));
  const value = reader(site, 'weights');
  const strongest = new Float64Array(width * height).fill(NaN); // NaN: hidden in all its pairs
  for (let r = 0; r < rows; r++) {
    const line = Math.floor(r / pool) * width;
    for (let c = 0; c < cols; c++) {
      const x = value(r * cols + c);
      const to = line + Math.floor(c / pool);
      if (!(Math.abs(x) <= Math.abs(strongest[to])) && !Number.isNaN(x)) strongest[to] = x;
    }
  }
  const palette = ink();
  const context = canvas.getContext('2d');
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < strongest.length; i++)
    pixels[i] = Number.isNaN(strongest[i]) ? 0 : palette[colorIndex(strongest[i])];
  context.putImageData(image, 0, 0);
}

function scaleTicks() {
  if (isDifference()) return [-1, 0, 1].map((part) => [(part + 1) / 2, signed(part * most())]);
  if (state.scale === 'log') return [-6, -4, -2, 0].map((n) => [1 + n / DECADES, power(n)]);
  return [0, 0.25, 0.5, 0.75, 1].map((w) => [w, String(w)]);
}
