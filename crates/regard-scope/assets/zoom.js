// The page of a map too large to be sent at once: tiles are fetched as they come into view, words and
// exact weights as they are pointed at. x is the key, y the query. In this file "pair coordinates" are
// rows and keys, with fractions; the viewer's own coordinates are those divided by k_len.
// The address (#...) holds the view, so that a reload opens it again.

const MAX_PX = 64; // px per pair at the closest: a pair then is large enough to point at on glass
const LABEL_BLOCK = 256; // words are fetched in blocks, so that a pan asks rarely
const REST_MS = 70; // a pointer that rests this long asks for the weight
const POLL_MS = 500;
const TILES_AT_ONCE = 3; // a server has few cores, and a browser few connections: words and weights need some too
const PATIENCE_MS = 15000; // an answer that takes longer is lost
const KEPT_TILES = 300; // PNGs kept in memory, so that a change and its undoing need no server

const kept = JSON.parse(byId('data').textContent); // null: a server answers; else all is in here
Object.assign(state, { site: 0, how: 'max', row: null });
const regard = (window.regard = { viewer: null, hover: null, ready: false, pending: 0 });
let info = null; // of the site that is shown
let viewer = null;
let shown = null; // the tiled image on top

// ---- Asking ----

/** Fetches; asks once more if no answer comes. */
async function patient(path, { signal, ...options } = {}, again = true) {
  const late = AbortSignal.timeout(PATIENCE_MS);
  try {
    const answer = await fetch(path, { ...options, signal: signal ? AbortSignal.any([signal, late]) : late });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer;
  } catch (error) {
    if (!again || error.name !== 'TimeoutError') throw error;
    return patient(path, { signal, ...options }, false);
  }
}

const ask = async (path, signal) => (await patient(path, { signal })).json();

/** What is known of a site: each may have a size and axes of its own. */
const askInfo = (site) => (kept ? kept.info : ask(`info.json?site=${site}`));

const weightText = (x) => number(x, 4);

/** A word and its place; where positions have no words the place alone. */
function named(text, index) {
  const place = whole(index);
  if (text === String(index)) return [el('b', {}, place)];
  return [el('b', {}, text === null ? '…' : word(text)), el('span', { class: 'quiet' }, ` ${place}`)];
}

// ---- Tiles ----

const pngs = new Map(); // recently used tiles: key -> Blob
const sampled = new Map(); // tiles made from a sample of rows: path -> "8/195"
const version = new Map(); // how often a path was asked anew, because it was sampled

/** The path of a tile of the present choice; a saved choice can be given instead. */
const pathOf = (level, x, y, of = choice()) => `${of.site}/${of.how}/${of.theme}/${level}/${x}/${y}`;
const choice = () => ({ site: state.site, how: state.how, theme: tileTheme() });
const keyOf = (path) => `${path}#${version.get(path) || 0}`;

/** A saved page may hold the tiles of one theme only; better those than none. */
function tileTheme() {
  if (!kept) return theme();
  const start = `${state.site}/${state.how}/`;
  const has = (name) => Object.keys(kept.tiles).some((path) => path.startsWith(start + name));
  return has(theme()) ? theme() : otherTheme();
}

function keep(key, blob) {
  pngs.delete(key);
  pngs.set(key, blob);
  if (pngs.size > KEPT_TILES) pngs.delete(pngs.keys().next().value);
}

const flying = new Map(); // tiles on their way: the map and the small map often want the same one

async function fetchTile(path, signal) {
  const key = keyOf(path);
  if (pngs.has(key)) {
    keep(key, pngs.get(key));
    return pngs.get(key);
  }
  let flight = flying.get(key);
  if (!flight) {
    const stop = new AbortController();
    flight = { users: 0, stop, png: downloadTile(path, key, stop.signal).finally(() => flying.delete(key)) };
    flying.set(key, flight);
  }
  flight.users++;
  signal.addEventListener('abort', () => {
    flight.users--;
    if (flight.users === 0) flight.stop.abort(); // nobody looks there any more
  });
  return flight.png;
}

async function downloadTile(path, key, signal) {
  const cache = version.has(path) ? 'reload' : 'default'; // the browser's copy would be the sample again
  const answer = await patient(`tile/${path}.png`, { signal, cache });
  const blob = await answer.blob();
  const rows = answer.headers.get('x-regard-rows');
  if (rows) {
    sampled.set(path, rows);
    // It was under way when the exact pass ended: ask again, or the sample would stay for ever.
    // Not more than twice, though: a server that always samples must not be asked without end.
    if (info.exact && (version.get(path) || 0) < 2) setTimeout(reloadSampled, 0);
  } else sampled.delete(path);
  keep(key, blob);
  return blob;
}

function keptTile(path) {
  const bytes = atob(kept.tiles[path].split(',')[1]);
  return new Blob([Uint8Array.from(bytes, (c) => c.charCodeAt(0))], { type: 'image/png' });
}

async function startTile(job, path) {
  const stop = (job.userData.stop = new AbortController());
  regard.pending++;
  try {
    const blob = kept ? keptTile(path) : await fetchTile(path, stop.signal);
    job.finish(blob, null, 'rasterBlob');
  } catch (error) {
    job.fail(error.message, null);
  } finally {
    regard.pending--;
  }
}

/** Where a tile lies. The last pixel of a level may stand for fewer pairs than the others, yet a pixel
    must lie over the pairs it was made from: the viewer's own rule would squeeze the last tile. */
function tileBounds({ max_level, tile, k_len, q_len }, [level, x, y], isSource) {
  const pairs = 2 ** (max_level - level); // per pixel, each way
  const width = Math.min(tile, Math.ceil(k_len / pairs) - x * tile);
  const height = Math.min(tile, Math.ceil(q_len / pairs) - y * tile);
  if (isSource) return new OpenSeadragon.Rect(0, 0, width, height);
  const unit = pairs / k_len;
  return new OpenSeadragon.Rect(x * tile * unit, y * tile * unit, width * unit, height * unit);
}

function tileSource() {
  const [of, own] = [choice(), info]; // a later choice gets a source of its own
  const path = (level, x, y) => pathOf(level, x, y, of);
  const tiles = Math.ceil(Math.log2(info.tile)); // levels below this one are a single tile too
  const source = new OpenSeadragon.TileSource({
    width: info.k_len, height: info.q_len, tileSize: info.tile, tileOverlap: 0,
    minLevel: kept ? 0 : Math.min(tiles, info.max_level), maxLevel: info.max_level,
  });
  return Object.assign(source, {
    getTileUrl: path,
    getTileHashKey: (level, x, y) => keyOf(path(level, x, y)),
    getTileBounds: (level, x, y, isSource) => tileBounds(own, [level, x, y], isSource),
    tileExists: (level, x, y) => {
      const count = source.getNumTiles(level);
      const inside =
        level >= source.minLevel && level <= source.maxLevel && x >= 0 && y >= 0 && x < count.x && y < count.y;
      return inside && (!kept || path(level, x, y) in kept.tiles);
    },
    hasTransparency: () => false,
    downloadTileStart: (job) => startTile(job, job.src),
    downloadTileAbort: (job) => job.userData.stop && job.userData.stop.abort(),
  });
}

/** Lays the tiles of the present choice over the old ones, which leave when the new are complete:
    no flash of empty paper between them. */
function lay(then = () => {}) {
  viewer.addTiledImage({
    tileSource: tileSource(),
    success: ({ item }) => {
      show(item);
      then();
    },
  });
}

function show(item) {
  shown = item;
  item.whenFullyLoaded(() => {
    while (viewer.world.getIndexOfItem(item) > 0) viewer.world.removeItem(viewer.world.getItemAt(0));
    regard.ready = true;
    mark();
  });
}

/** Lets tiles made from a sample be asked for anew. */
function forgetSampled() {
  const own = [...sampled.keys()].filter((path) => path.startsWith(`${state.site}/`));
  for (const path of own) {
    version.set(path, (version.get(path) || 0) + 1);
    sampled.delete(path);
  }
  return own.length > 0;
}

function reloadSampled() {
  if (forgetSampled()) lay();
}

/** Asks how far the exact pass of the present site has come, until it is done. */
async function poll() {
  const site = state.site;
  try {
    const news = await askInfo(site);
    if (site === state.site) {
      info.progress = news.progress;
      info.exact = news.exact;
      if (info.exact) reloadSampled();
      mark();
    }
  } catch (error) {
    tellSilence();
  }
}

function tellSilence() {
  byId('badge').textContent = 'The server does not answer.';
  byId('badge').hidden = false;
}

/** One question at a time, whichever site is chosen meanwhile. */
async function keepPolling() {
  if (!info.exact) await poll();
  setTimeout(keepPolling, POLL_MS);
}

// ---- Where things are ----

/** The visible part in pair coordinates, and px per pair. */
function view(current) {
  const bounds = viewer.viewport.getBounds(current);
  const box = byId('viewer');
  return {
    left: bounds.x * info.k_len,
    top: bounds.y * info.k_len,
    px: box.clientWidth / (bounds.width * info.k_len),
    x: box.offsetLeft,
    y: box.offsetTop,
    width: box.clientWidth,
    height: box.clientHeight,
  };
}

function pairAt(x, y) {
  const v = view(true);
  const [key, row] = [Math.floor(v.left + x / v.px), Math.floor(v.top + y / v.px)];
  return key < 0 || row < 0 || key >= info.k_len || row >= info.q_len ? null : { row, key };
}

function center() {
  const v = view(false);
  return { q: v.top + v.height / v.px / 2, k: v.left + v.width / v.px / 2, px: v.px };
}

function moveTo(q, k, px, atOnce) {
  const zoom = (px * info.k_len) / byId('viewer').clientWidth;
  viewer.viewport.zoomTo(zoom, null, atOnce);
  viewer.viewport.panTo(new OpenSeadragon.Point(k / info.k_len, q / info.k_len), atOnce);
}

function jump(row, key) {
  moveTo(row + 0.5, key + 0.5, Math.max(center().px, 20), false);
  look({ row, key });
}

// ---- Words ----

let blocks = { q: new Map(), k: new Map() }; // of the present site; a new site gets new ones

/** The word of a token, or null while it is on its way. */
function label(axis, index) {
  if (kept) return ((kept.labels || {})[axis] || [])[index] ?? String(index);
  const start = index - (index % LABEL_BLOCK);
  const own = blocks[axis]; // an answer that comes after a change of site must not end up with the new words
  const block = own.get(start);
  if (block) return block[index - start] ?? String(index);
  if (block === undefined) {
    own.set(start, null);
    const end = Math.min(start + LABEL_BLOCK, axis === 'q' ? info.q_len : info.k_len);
    ask(`labels/${state.site}/${axis}/${start}/${end}`)
      .then((answer) => {
        own.set(start, answer.labels);
        mark();
      })
      .catch(() => setTimeout(() => own.delete(start), 2000)); // and then try again
  }
  return null;
}

// ---- The pair under the pointer ----

let asking = null; // the request under way, to be given up when the pointer moves on
let resting = 0;
let pointer = null; // where it is in the viewer: a zoom moves the pairs below a pointer at rest

/** Tells of a pair: its words at once if known, its weight when the server has answered. */
function look(pair) {
  clearTimeout(resting);
  if (asking) asking.abort();
  regard.hover = pair ? { ...pair, weight: null } : null;
  tell({});
  mark();
  if (!pair) return;
  resting = setTimeout(() => (kept ? lookKept(pair) : lookServed(pair)), REST_MS);
}

const isLatest = (pair) => regard.hover && regard.hover.row === pair.row && regard.hover.key === pair.key;

async function lookServed(pair) {
  asking = new AbortController();
  try {
    const answer = await ask(`weight/${state.site}/${pair.row}/${pair.key}`, asking.signal);
    if (!isLatest(pair)) return;
    regard.hover.weight = answer.weight ?? 0;
    tell({ query: answer.query, key: answer.word, weight: answer.hidden ? 'hidden' : weightText(answer.weight) });
  } catch (error) {
    if (error.name !== 'AbortError' && isLatest(pair)) tell({ weight: 'not known' });
  }
}

async function lookKept(pair) {
  const found = await keptWeight(pair);
  if (!isLatest(pair)) return;
  regard.hover.weight = found.weight;
  const rare = { null: 'not in this page', 0: 'none, or hidden' };
  tell({ weight: rare[found.weight] ?? `about ${number(found.weight)}`, pairs: found.pairs });
}

function tell({ query, key, weight, pairs }) {
  const pair = regard.hover;
  const show = (id, index, text) => byId(id).replaceChildren(...(pair ? named(text, index) : ['–']));
  const words = pair ? [query ?? peek('q', pair.row), key ?? peek('k', pair.key)] : [];
  show('pair-q', pair && pair.row, words[0]);
  show('pair-k', pair && pair.key, words[1]);
  byId('pair-weight').replaceChildren(pair ? el('b', {}, weight ?? '…') : '–');
  byId('pair-note').textContent = pair ? pixelNote(pairs) : '';
  if (pair && weight)
    say(`${axisNames()[0]} ${pair.row} ${seen(words[0] ?? '')}, ${axisNames()[1]} ${pair.key} ${seen(words[1] ?? '')}: weight ${weight}`);
}

/** Says what is seen where a pixel stands for several pairs; `pairs` if the weight is that pixel's too. */
function pixelNote(pairs) {
  const each = pairs || 2 ** Math.ceil(Math.log2(1 / center().px)); // as the viewer chooses its level
  if (each <= 1) return '';
  const many = `the ${state.how} of ${whole(each)} × ${whole(each)} pairs`;
  return pairs ? `This is ${many}: the page holds no finer ones.` : `Of this pair alone. A pixel here is ${many}.`;
}

/** A word if it is here already; pointing far out must not fetch blocks of words. */
function peek(axis, index) {
  if (kept) return label(axis, index);
  const block = blocks[axis].get(index - (index % LABEL_BLOCK));
  return block ? block[index % LABEL_BLOCK] : null;
}

const pixels = new Map(); // decoded tiles of a saved page

/** The weight as the finest saved tile shows it: the color, looked up backwards in the palette. */
async function keptWeight({ row, key }) {
  for (let level = info.max_level; level >= 0; level--) {
    const pairs = 2 ** (info.max_level - level);
    const [x, y] = [Math.floor(key / pairs), Math.floor(row / pairs)];
    const path = pathOf(level, Math.floor(x / info.tile), Math.floor(y / info.tile));
    if (!(path in kept.tiles)) continue;
    if (!pixels.has(path)) pixels.set(path, await decode(path));
    const image = pixels.get(path);
    const at = 4 * ((y % info.tile) * image.width + (x % info.tile));
    const index = paletteIndex(image.data.subarray(at, at + 3));
    return { pairs, weight: index === 0 ? 0 : 10 ** (((index - 255) / 254) * info.decades) };
  }
  return { pairs: 1, weight: null };
}

async function decode(path) {
  const bitmap = await createImageBitmap(keptTile(path));
  const canvas = el('canvas', { width: bitmap.width, height: bitmap.height });
  const context = canvas.getContext('2d');
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}

function paletteIndex([r, g, b]) {
  let [best, least] = [0, Infinity];
  for (let i = 0; i < 256; i++) {
    const own = rgb(i, tileTheme());
    const far = Math.abs(own[0] - r) + Math.abs(own[1] - g) + Math.abs(own[2] - b);
    if (far < least) [best, least] = [i, far];
  }
  return best;
}

// ---- The pinned row ----

async function pin(row) {
  if (kept) return;
  state.row = row;
  writeAddress();
  mark();
  drawSpans(null);
  byId('row').hidden = row === null;
  if (row === null) return;
  byId('row-title').replaceChildren(`${axisNames()[0]} ${whole(row)} …`);
  try {
    const answer = await ask(`row/${state.site}/${row}`);
    if (state.row === row) drawRow(answer);
  } catch (error) {
    byId('row-title').replaceChildren(`${axisNames()[0]} ${whole(row)}: not known`);
  }
}

/** The spans of the keys; beside them the masses that a saved page holds, or those of the pinned row. */
function drawSpans(row) {
  const told = (numbers) => numbers.map((x) => number(x));
  const columns = kept
    ? [
        ['mean', 'Of all queries', told(kept.masses.map(([mean]) => mean))],
        ['last', 'Of the last query', told(kept.masses.map(([, last]) => last))],
      ]
    : [['row', row ? `Query ${row.row}` : 'Pin a row', row ? told(row.spans) : []]];
  drawSpanTable(info.k_spans, columns);
}

function drawRow(found) {
  const { row, query, entropy, distance, top } = found;
  drawSpans(found);
  const digits = (x) => (Number.isFinite(x) ? whole(Number(x.toPrecision(3))) : '–');
  byId('row-title').replaceChildren(`${axisNames()[0]} `, ...named(query, row), ' looks at');
  const facts = Object.entries({ entropy, distance });
  byId('row-facts').replaceChildren(...facts.flatMap(([name, x]) => [el('dt', {}, name), el('dd', {}, digits(x))]));
  byId('row-keys').replaceChildren(
    ...top.map(({ key, word: text, weight }) => {
      const bar = el('i');
      bar.style.width = `${100 * clamp(weight, 0, 1)}%`;
      const name = el('span', {}, ...named(text, key));
      const button = el('button', { type: 'button' }, name, el('span', { class: 'number' }, weightText(weight)), bar);
      button.addEventListener('click', () => jump(row, key));
      return el('li', {}, button);
    }),
  );
  const first = top.slice(0, 3).map((t) => `${seen(t.word)} ${weightText(t.weight)}`);
  say(`${axisNames()[0]} ${row} ${seen(query)} looks at ${first.join(', ')}`);
}

// ---- The address ----

const short = (x) => String(Number(x.toFixed(6))); // a millionth of a pair is less than a pixel at any zoom

function readAddress() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const among = (name, allowed, otherwise) => (allowed.includes(hash.get(name)) ? hash.get(name) : otherwise);
  const natural = (name) => (/^\d+$/.test(hash.get(name) ?? '') ? Number(hash.get(name)) : null);
  const [q, k, px] = ['q', 'k', 'zoom'].map((name) => (hash.has(name) ? Number(hash.get(name)) : NaN));
  return {
    site: kept ? 0 : (natural('site') ?? 0),
    how: among('how', hows(), 'max'),
    theme: among('theme', ['dark', 'light'], null),
    row: natural('row'),
    view: Number.isFinite(q) && Number.isFinite(k) && px > 0 ? { q, k, px } : null,
  };
}

function writeAddress() {
  const { q, k, px } = center();
  const { site, how } = state;
  const hash = new URLSearchParams({ site, how, q: short(q), k: short(k), zoom: Number(px.toPrecision(9)) });
  if (state.row !== null) hash.set('row', state.row);
  if (state.theme) hash.set('theme', state.theme);
  history.replaceState(null, '', `#${hash}`);
}

// ---- Controls ----

/** What a pixel of many pairs can show: a saved page need not hold both. */
const hows = () =>
  ['max', 'mean'].filter((how) => !kept || Object.keys(kept.tiles).some((path) => path.split('/')[1] === how));

function drawControls() {
  drawTheme();
  byId('site').value = state.site;
  byId('how').querySelector(`[value=${state.how}]`).checked = true;
  byId('swatch').style.background = `#${hex(0)}`;
  const ticks = [];
  for (let n = 0; n >= -info.decades; n -= info.decades > 3 ? 2 : 1) ticks.push([1 + n / info.decades, power(n)]);
  drawLegend(1, ticks.reverse()); // color 0 is no weight at all: it has a swatch of its own
}

/** What belongs to the site: its size, and what its axes are called. */
function drawSite() {
  const size = `${whole(info.q_len)} × ${whole(info.k_len)} pairs`;
  byId('size').textContent = info.sites.length > 1 ? size : `${siteName(info.sites[0])}: ${size}`;
  const [query, key] = axisNames();
  for (const id of ['go-row-name', 'pair-q-name']) byId(id).textContent = query;
  for (const id of ['go-key-name', 'pair-k-name']) byId(id).textContent = key;
  drawSpans(null);
  drawLabels(kept ? kept.names : []);
  byId('go-row').max = info.q_len - 1;
  byId('go-key').max = info.k_len - 1;
}

/** Axes of the same name are told apart by what they do. */
const axisNames = () => (info.q_title === info.k_title ? ['query', 'key'] : [info.q_title, info.k_title]);

function siteName({ kind, layer, head }) {
  const kinds = new Set(info.sites.map((site) => site.kind)).size;
  const told = kinds > 1 || info.sites.length === 1; // else all are alike
  return `${told ? `${kind}, ` : ''}layer ${layer}, head ${head}`;
}

/** After a change of what the tiles show. */
function change(what) {
  Object.assign(state, what);
  drawControls();
  writeAddress();
  lay();
  if (regard.hover) look({ row: regard.hover.row, key: regard.hover.key });
}

let wanted = 0; // the site that was asked for last

/** Shows another site: at `to` if that is given, else where the old one was if both are of one size, so that heads can
    be compared; else all of it. */
async function changeSite(site, to) {
  wanted = site;
  let next = null;
  try {
    next = await askInfo(site);
  } catch (error) {
    if (wanted === site) drawControls(); // back to the site that is shown
    return tellSilence();
  }
  if (wanted !== site) return;
  const same = next.q_len === info.q_len && next.k_len === info.k_len;
  info = next;
  state.site = site;
  blocks = { q: new Map(), k: new Map() };
  if (info.exact) forgetSampled();
  drawSite();
  if (same) {
    change({});
    if (to) moveTo(to.q, to.k, to.px, true);
    return pin(state.row);
  }
  look(null);
  pin(null);
  drawControls();
  regard.ready = false;
  viewer.world.removeAll(); // a map of another size has its pairs elsewhere: it cannot lie below the new one
  lay(() => {
    if (to) moveTo(to.q, to.k, to.px, true);
    else viewer.viewport.goHome(true);
    writeAddress();
  });
}

/** Opens what the address says, when a reader has changed it. */
async function follow({ site, how, theme, row, view: to }) {
  if (site !== state.site) await changeSite(site, to);
  else if (to) moveTo(to.q, to.k, to.px, true);
  if (how !== state.how || theme !== state.theme) change({ how, theme });
  pin(inside(row));
}

const inside = (row) => (row !== null && row < info.q_len ? row : null);

function makeControls() {
  info.sites.forEach((site, i) => byId('site').append(el('option', { value: i }, siteName(site))));
  byId('site').hidden = info.sites.length < 2;
  byId('how').hidden = hows().length < 2;
  if (!kept) byId('help').append(' Click, or press Enter, to pin a row.');
  byId('site').addEventListener('change', () => changeSite(Number(byId('site').value)));
  byId('how').addEventListener('change', (event) => change({ how: event.target.value }));
  byId('theme').addEventListener('click', () => change({ theme: otherTheme() }));
  byId('go').addEventListener('submit', (event) => {
    event.preventDefault();
    const row = Number(byId('go-row').value);
    jump(row, Number(byId('go-key').value));
    pin(row);
  });
  byId('in').addEventListener('click', () => zoomBy(2));
  byId('out').addEventListener('click', () => zoomBy(1 / 2));
  byId('fit').addEventListener('click', () => viewer.viewport.goHome());
  byId('unpin').addEventListener('click', () => pin(null));
  system.addEventListener('change', () => {
    if (!state.theme) change({});
  });
}

function zoomBy(factor) {
  viewer.viewport.zoomBy(factor);
  viewer.viewport.applyConstraints();
}

/** Keys on the map. The pair in the middle is then the one told of. */
function onKey(event) {
  const key = event.originalEvent;
  event.preventDefaultAction = true; // the viewer's own keys also turn and mirror the map
  if (key.ctrlKey || key.metaKey || key.altKey) return;
  const v = view(false);
  const far = key.shiftKey ? 1 / info.k_len : (0.2 * v.width) / v.px / info.k_len; // Shift: one pair
  const steps = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -far], ArrowDown: [0, far] };
  const middle = () => {
    const c = center();
    return { row: clamp(Math.floor(c.q), 0, info.q_len - 1), key: clamp(Math.floor(c.k), 0, info.k_len - 1) };
  };
  if (steps[key.key]) {
    viewer.viewport.panBy(new OpenSeadragon.Point(...steps[key.key]));
    viewer.viewport.applyConstraints();
  } else if (key.key === '+' || key.key === '=') zoomBy(1.5);
  else if (key.key === '-' || key.key === '_') zoomBy(1 / 1.5);
  else if (key.key === '0' || key.key === 'Home') viewer.viewport.goHome();
  else if (key.key === 'Enter') pin(middle().row);
  else return;
  key.preventDefault();
  pointer = null;
  look(middle());
}

// ---- The viewer ----

/** Pairs, each way, of the finest pixel there is. */
function finest() {
  if (!kept) return 1;
  const levels = Object.keys(kept.tiles).map((path) => Number(path.split('/')[3]));
  return 2 ** (info.max_level - Math.max(...levels));
}

function makeViewer(start) {
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  viewer = regard.viewer = OpenSeadragon({
    element: byId('viewer'), tileSources: tileSource(), drawer: 'canvas', showNavigationControl: false,
    // Pairs are squares, never blurred; and never drawn smaller than they are, or some would be dropped.
    imageSmoothingEnabled: false, smoothTileEdgesMinZoom: Infinity, minPixelRatio: 1,
    animationTime: calm ? 0 : 0.45, springStiffness: 9, blendTime: 0, preserveViewport: true,
    maxZoomPixelRatio: MAX_PX / finest(), minZoomImageRatio: 0.7, visibilityRatio: 0.3, zoomPerScroll: 1.35,
    imageLoaderLimit: TILES_AT_ONCE, maxTilesPerFrame: 6, timeout: 120000, maxImageCacheCount: 400,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsTouch: { clickToZoom: false }, gestureSettingsPen: { clickToZoom: false },
    // Top right: under a causal mask nothing is there to be covered.
    showNavigator: true, navigatorPosition: 'TOP_RIGHT', navigatorSizeRatio: 0.17, navigatorAutoFade: false,
    navigatorOpacity: 1,
  });
  viewer.canvas.setAttribute('role', 'application');
  viewer.canvas.setAttribute(
    'aria-label',
    'Map of weights: arrow keys move, plus and minus zoom, Enter pins the row in the middle',
  );
  viewer.navigator.element.setAttribute('aria-hidden', 'true');
  viewer.navigator.drawer.setImageSmoothingEnabled(false);
  viewer.navigator.imageLoader.jobLimit = 1; // it can wait
  viewer.addHandler('open', () => {
    show(viewer.world.getItemAt(0));
    if (start) moveTo(start.q, start.k, start.px, true);
    writeAddress();
    if (state.row !== null) pin(state.row);
  });
  viewer.addHandler('canvas-key', onKey);
  for (const name of ['update-viewport', 'animation', 'resize', 'tile-loaded']) viewer.addHandler(name, mark);
  viewer.addHandler('animation-finish', writeAddress);
  viewer.addHandler('canvas-click', (event) => {
    if (!event.quick) return;
    const pair = pairAt(event.position.x, event.position.y);
    if (pair) pin(pair.row);
    if (pair) look(pair);
  });
  listenPointer();
}

function lookBelowPointer() {
  const pair = pairAt(pointer.x, pointer.y);
  if (!pair && !regard.hover) return;
  if (!pair || !isLatest(pair)) look(pair);
}

function listenPointer() {
  const box = byId('viewer');
  // The viewer takes the focus by script, which a browser holds for the keyboard's doing: no ring for a mouse.
  box.addEventListener('pointerdown', () => byId('stage').classList.add('by-pointer'), true);
  addEventListener('keydown', () => byId('stage').classList.remove('by-pointer'), true);
  box.addEventListener('pointermove', (event) => {
    if (event.buttons !== 0 || event.target.closest('.navigator')) return;
    const area = box.getBoundingClientRect();
    pointer = { x: event.clientX - area.left, y: event.clientY - area.top };
    lookBelowPointer();
  });
  box.addEventListener('pointerleave', (event) => {
    pointer = null;
    if (event.pointerType === 'mouse') look(null);
  });
  viewer.addHandler('animation-finish', () => {
    if (pointer) lookBelowPointer();
  });
}

async function main() {
  const { site, how, theme, row, view: to } = readAddress();
  // An address may name a site of another trace.
  info = await (site === 0 ? askInfo(0) : Promise.resolve(askInfo(site)).catch(() => askInfo(0)));
  palettes = info.palettes;
  if (info.title) byId('size').previousElementSibling.textContent = info.title;
  Object.assign(state, { site: site < info.sites.length ? site : 0, how, theme, row: inside(row) });
  wanted = state.site;
  makeControls();
  drawSite();
  drawControls();
  makeViewer(to);
  if (!kept) keepPolling();
  addEventListener('hashchange', () => follow(readAddress()));
}

main().catch((error) => {
  byId('size').textContent = `The map cannot be opened: ${error.message}`;
});
