// The page of a saved trace: all heads as thumbnails, one head as a map or as lines, heads in numbers.
// Everything is in the page; nothing is fetched. The address (#...) holds what is shown, so a reload,
// a bookmark or a link sent to a friend opens the same picture.

const MIN_CELL = 10; // px: a label below this cannot be read, so the map scrolls rather than shrinks
const LINE_PITCH = 17; // px per token in the flow; the style sheet says the same
const MAX_LINES = 2000; // more lines than this are a grey cloud
const CHANGED = 8; // heads in the list of those that changed most

// What a reader may not know; other statistics are shown by name alone.
const MEANING = {
  entropy: 'How widely a query spreads its weight, in nats: 0 is all on one key.',
  keys: 'Over about how many keys a query spreads its weight: e to the power of the entropy.',
  distance: 'How far away the keys are that a query looks at, in positions, averaged by weight.',
  first: 'How much weight goes to the first key.',
  largest: 'The weight of the key that a query looks at most.',
  change: 'How far apart the weights are before and after: the mean Jensen-Shannon divergence of a query, in nats, at most 0.693.',
};

const stats = [
  ...(data.against ? ['change'] : []),
  ...new Set(sites.flatMap((s) => Object.keys(s.stats || {}))),
  ...new Set(sites.flatMap((s) => spansOf(s, 'cols').map((span) => ON_SPAN + span.name))),
];
Object.assign(state, { view: 'heads', run: 'before', site: 0, scale: 'linear', stat: stats[0], lines: null });
const at = { row: null, col: null }; // the pair under the pointer or the keyboard
let token = null; // the token of the flow whose lines are shown alone: { side, index }

// ---- Small helpers ----

/** The step an arrow key asks for: [down, right]; null for other keys. */
function step(key) {
  const steps = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    PageUp: [-10, 0],
    PageDown: [10, 0],
    Home: [0, -1e9],
    End: [0, 1e9],
  };
  return steps[key] || null;
}

// ---- Tables of layers and heads ----

/** One table per kind; `fill(button, index)` puts the content into the button of a site. */
function headTable(kind, className, fill) {
  const own = sites.map((site, index) => ({ ...site, index })).filter((s) => s.kind === kind);
  const heads = [...new Set(own.map((s) => s.head))].sort((a, b) => a - b);
  const layers = [...new Set(own.map((s) => s.layer))].sort((a, b) => a - b);
  const table = el('table', { class: `heads ${className}` });
  table.style.setProperty('--heads', heads.length);
  table.append(el('caption', kinds.length > 1 ? {} : { class: 'hidden-text' }, kind));
  const top = el('tr', {}, el('th', { scope: 'col' }, el('span', { class: 'quiet' }, 'layer')));
  for (const head of heads)
    top.append(el('th', { scope: 'col' }, el('span', { class: 'hidden-text' }, 'head '), String(head)));
  table.append(el('thead', {}, top));
  const body = table.appendChild(el('tbody'));
  for (const layer of layers) {
    const line = body.appendChild(el('tr', {}, el('th', { scope: 'row' }, String(layer))));
    for (const head of heads) {
      const cell = line.appendChild(el('td'));
      const found = own.find((s) => s.layer === layer && s.head === head);
      if (!found) continue;
      const button = cell.appendChild(el('button', { type: 'button', 'data-site': found.index }));
      fill(button, found.index);
    }
  }
  return el('div', { class: 'scroll' }, table);
}

/** One tab stop for a whole table; arrow keys walk inside it, as in a grid. */
function walkTable(box, event) {
  const move = step(event.key);
  const cell = event.target.closest('td');
  if (!move || !cell) return;
  event.preventDefault();
  const line = cell.parentElement;
  const lines = [...box.querySelectorAll('tbody tr')];
  const to = lines[clamp(lines.indexOf(line) + move[0], 0, lines.length - 1)];
  const column = clamp(cell.cellIndex + move[1], 1, to.cells.length - 1);
  const button = to.cells[column].querySelector('button');
  if (button) focusOne(box, button);
}

function focusOne(box, button) {
  for (const other of box.querySelectorAll('button')) other.tabIndex = other === button ? 0 : -1;
  button.focus();
}

function markChosen(box) {
  for (const button of box.querySelectorAll('button')) {
    const chosen = Number(button.dataset.site) === state.site;
    button.setAttribute('aria-pressed', chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
}

const thumbs = new Map(); // the canvas of each site
let drawnThumbs = ''; // what they show

function drawThumbs() {
  const now = `${theme()} ${state.scale} ${state.run}`;
  if (drawnThumbs === now) return;
  drawnThumbs = now;
  for (const [index, canvas] of thumbs) {
    paint(canvas, index, 96);
    canvas.classList.toggle('coarse', canvas.width <= 48); // magnified: pairs stay squares
    const button = canvas.parentElement;
    const tags = tagsOf(sites[index]);
    const told = [nameOf(sites[index]), ...tags.map(([name, score]) => `${name} ${score}`)].join(', ');
    button.setAttribute('aria-label', told);
    button.title = [nameOf(sites[index]), ...tags.map(([name, score, why]) => `${name} ${score}: ${why}`)].join('\n');
    const shown = tags.slice(0, 1).map(([name, score]) => el('span', { class: 'tag' }, `${name} `, el('b', {}, score)));
    button.replaceChildren(canvas, ...shown);
  }
}

/** What stands under the picture of a head: how much it changed, or what it does; [name, number, definition]. */
function tagsOf(site) {
  if (isDifference()) return [['change', number(site.change), MEANING.change]];
  return shownRun(site).labels.map(({ name, score, definition }) => [name, score.toFixed(2), definition]);
}

function makeHeads() {
  for (const kind of kinds) {
    byId('heads-tables').append(
      headTable(kind, 'pictures', (button, index) => {
        thumbs.set(index, button.appendChild(el('canvas', { 'aria-hidden': 'true' })));
      }),
    );
  }
}

/** Heads by how much they changed, as buttons that open them. */
function makeChanged() {
  const order = sites.map((site, index) => ({ site, index })).filter(({ site }) => site.change > 0);
  order.sort((a, b) => b.site.change - a.site.change);
  const items = order.slice(0, CHANGED).map(({ site, index }) => {
    const button = el('button', { type: 'button' }, nameOf(site), ' ', el('b', {}, number(site.change)));
    button.title = MEANING.change;
    button.addEventListener('click', () => go({ site: index, view: 'map', run: 'difference' }));
    return el('li', {}, button);
  });
  byId('changed').querySelector('ol').replaceChildren(...items);
  byId('changed').hidden = items.length === 0;
}

// ---- Heads in numbers ----

function makeNumbers() {
  for (const name of stats) {
    const radio = el('input', { type: 'radio', name: 'stat', value: name });
    byId('stat').append(el('label', {}, radio, name));
  }
  for (const kind of kinds) byId('numbers-tables').append(headTable(kind, 'numbers', () => {}));
  byId('stat').addEventListener('change', (event) => go({ stat: event.target.value }));
  byId('stat').hidden = stats.length === 0;
}

/** Black or white, whichever stands out more: one of them always reaches a contrast of 4.5. */
function inkOn([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.179 ? '#000' : '#fff';
}

const meaning = (name) =>
  name.startsWith(ON_SPAN) ? 'How much weight a query puts on the keys of the span, averaged over the queries.' : MEANING[name] || '';

function drawNumbers() {
  const name = state.stat;
  const values = sites.map((s) => statOf(s, name));
  const known = values.filter((x) => Number.isFinite(x));
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const far = Math.max(...known.map(Math.abs)) || 1;
  // Differences have the palette with zero in the middle.
  const place = (x) => (isDifference() ? 128 + (127 * x) / far : (255 * (x - low)) / (high - low || 1));
  const told = (x) => signed(x, isDifference() && name !== 'change');
  byId('stat-says').textContent =
    known.length === 0
      ? 'This trace holds no statistics.'
      : `${meaning(name)} From ${told(low)} to ${told(high)} over all heads; colors span that range.`;
  for (const button of byId('numbers-tables').querySelectorAll('button')) {
    const value = values[button.dataset.site];
    const finite = Number.isFinite(value);
    const color = finite ? rgb(Math.round(place(value))) : null;
    button.textContent = told(value);
    button.setAttribute('aria-label', `${nameOf(sites[button.dataset.site])}: ${name} ${told(value)}`);
    button.style.background = color ? `rgb(${color})` : 'none';
    button.style.color = color ? inkOn(color) : 'inherit';
  }
  markChosen(byId('numbers-tables'));
  const open = el('button', { type: 'button' }, 'See its map');
  open.addEventListener('click', () => go({ view: 'map' }));
  byId('numbers-says').replaceChildren(
    `${nameOf(sites[state.site])}: ${name || ''} ${told(values[state.site])} `,
    open,
  );
}

// ---- One head: what map and flow share ----

function makePicker() {
  const select = byId('site');
  for (const kind of kinds) {
    const group = kinds.length > 1 ? select.appendChild(el('optgroup', { label: kind })) : select;
    sites.forEach((site, index) => {
      if (site.kind === kind) group.append(el('option', { value: index }, nameOf(site)));
    });
  }
  select.addEventListener('change', () => go({ site: Number(select.value) }));
  const shift = (by) => go({ site: (state.site + by + sites.length) % sites.length });
  byId('before').addEventListener('click', () => shift(-1));
  byId('after').addEventListener('click', () => shift(1));
  byId('mini').addEventListener('click', (event) => {
    const box = event.target.getBoundingClientRect();
    const [column, line] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const { heads, layers, own } = miniGrid();
    const head = heads[Math.floor(column * heads.length)];
    const layer = layers[Math.floor(line * layers.length)];
    const found = own.find((s) => s.head === head && s.layer === layer);
    if (found) go({ site: found.index });
  });
}

/** Sites of the chosen kind, as the small picker lays them out. */
function miniGrid() {
  const kind = sites[state.site].kind;
  const own = sites
    .map((s, index) => ({ layer: s.layer, head: s.head, kind: s.kind, index }))
    .filter((s) => s.kind === kind);
  const order = (list) => [...new Set(list)].sort((a, b) => a - b);
  return { own, heads: order(own.map((s) => s.head)), layers: order(own.map((s) => s.layer)) };
}

function drawMini() {
  const { own, heads, layers } = miniGrid();
  const cell = clamp(Math.floor(264 / heads.length), 6, 30);
  const ratio = devicePixelRatio || 1;
  const canvas = byId('mini');
  const scratch = el('canvas');
  [canvas.width, canvas.height] = [heads.length * cell * ratio, layers.length * cell * ratio];
  [canvas.style.width, canvas.style.height] = [`${heads.length * cell}px`, `${layers.length * cell}px`];
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  const style = getComputedStyle(canvas); // its text color marks the chosen head, its border the others
  for (const site of own) {
    const [x, y] = [heads.indexOf(site.head) * cell, layers.indexOf(site.layer) * cell];
    const chosen = site.index === state.site;
    paint(scratch, site.index, (cell - 2) * ratio); // pooled, not shrunk: thin lines must not fade
    context.drawImage(scratch, x + 1, y + 1, cell - 2, cell - 2);
    context.strokeStyle = chosen ? style.color : style.borderTopColor;
    context.lineWidth = chosen ? 2 : 1;
    context.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
  }
}

function drawBeside() {
  const site = sites[state.site];
  byId('one-title').textContent = nameOf(site).replace(/^./, (c) => c.toUpperCase());
  byId('site').value = state.site;
  const names = [...(data.against ? ['change'] : []), ...Object.keys(site.stats || {})];
  const facts = names.flatMap((name) => [
    el('dt', { title: MEANING[name] || name }, name),
    el('dd', {}, signed(statOf(site, name), isDifference() && name !== 'change')),
  ]);
  const told = (run, title) => run.labels.map((label) => ({ ...label, name: `${title}${label.name}` }));
  drawLabels(isDifference() ? [...told(site, 'before: '), ...told(site.after, 'after: ')] : shownRun(site).labels);
  byId('facts').replaceChildren(...facts);
  byId('facts').parentElement.hidden = facts.length === 0;
  byId('mini-box').hidden = sites.length < 2;
  drawMini();
}

/** The keys a query looks at most, or that changed most, strongest first: [col, weight]. */
function topKeys(row, count) {
  const site = sites[state.site];
  const cols = labelsOf(site, 'cols').length;
  const value = reader(site, 'weights');
  return Array.from({ length: cols }, (_, col) => [col, value(row * cols + col)])
    .filter(([, x]) => Math.abs(x) > 0)
    .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))
    .slice(0, count);
}

/** The spans of the keys, and the mass on them: of all queries, of the last one, and of a row of the map. */
function drawSpans(row) {
  const site = sites[state.site];
  const spans = spansOf(site, 'cols');
  const mass = (which) => spans.map((_, i) => signed(numberOf(site, (run) => (run.spans[i] || [])[which])));
  const of = row === null ? () => NaN : reader(site, 'masses');
  const own = spans.map((_, i) => signed(of(row * spans.length + i)));
  drawSpanTable(spans, [
    ['mean', 'Of all queries', mass(0)],
    ['last', 'Of the last query', mass(1)],
    ['row', row === null ? 'Point at a row of the map' : `Query ${row}`, own],
  ]);
}

function drawLooks(row) {
  drawSpans(row);
  byId('looks').hidden = row === null;
  if (row === null) return;
  const site = sites[state.site];
  const keys = labelsOf(site, 'cols');
  byId('looks')
    .querySelector('h3')
    .replaceChildren('Query ', word(labelsOf(site, 'rows')[row]), isDifference() ? ' changed most at' : ' looks at');
  byId('looks')
    .querySelector('ol')
    .replaceChildren(
      ...topKeys(row, 8).map(([col, weight]) => {
        const bar = el('i');
        bar.style.width = `${100 * Math.abs(weight)}%`;
        return el('li', {}, word(keys[col]), el('span', { class: 'number' }, signed(weight)), bar);
      }),
    );
}

// ---- Map ----

let cell = MIN_CELL;

function drawMap() {
  const site = sites[state.site];
  const [rows, cols] = [labelsOf(site, 'rows'), labelsOf(site, 'cols')];
  const lanes = (side) => lanesOf(spansOf(site, side).map((span) => span.cells));
  const [rowLanes, colLanes] = [lanes('rows'), lanes('cols')];
  byId('map-grid').style.setProperty('--row-bands', `${marginOf(rowLanes)}px`);
  byId('map-grid').style.setProperty('--col-bands', `${marginOf(colLanes)}px`);
  const space = byId('map').clientWidth - 84 - marginOf(rowLanes) - 46; // less the labels' widths in the style sheet
  const most = clamp(Math.floor(420 / rows.length), 26, 48); // a map of few pairs need not be tiny
  cell = clamp(Math.floor(space / cols.length), MIN_CELL, most);
  const size = `${clamp(cell - 2, 10, cell > 26 ? 17 : 13)}px`;
  const body = byId('body');
  body.style.width = `${cell * cols.length}px`;
  body.style.height = `${cell * rows.length}px`;
  // A map much taller than the screen scrolls in a frame of its own, where its labels stay in sight.
  body.closest('.scroll').classList.toggle('framed', cell * rows.length > 1.5 * innerHeight);
  paint(byId('heat'), state.site, Infinity);
  const labels = (list, side) =>
    list.map((label, i) => {
      const span = el('span', { dir: 'auto', title: label }, seen(label));
      span.style[side] = `${(i + 0.5) * cell}px`;
      span.style.fontSize = size;
      return span;
    });
  byId('cols').replaceChildren(...labels(cols, 'left'), ...bands(site, 'cols', colLanes));
  byId('cols').classList.toggle('upright', fitUpright(cols, size));
  byId('rows').replaceChildren(...labels(rows, 'top'), ...bands(site, 'rows', rowLanes));
  const fits = at.row !== null && at.row < rows.length && at.col < cols.length;
  look(fits ? at.row : null, at.col);
}

/** The bands of the spans, between the labels and the map. */
function bands(site, side, lanes) {
  return spansOf(site, side).map(({ name, cells: [start, end] }, i) => {
    const band = el('i', { class: `band span-${i % SPAN_COLORS}`, title: name });
    const [from, extent, edge] = side === 'cols' ? ['left', 'width', 'bottom'] : ['top', 'height', 'right'];
    band.style[from] = `${start * cell}px`;
    band.style[extent] = `${Math.max(end - start, 0) * cell}px`;
    band.style[edge] = `${2 + lanes[i] * BAND}px`;
    return band;
  });
}

/** Whether the labels of all columns fit over their cells: letters need not be turned to be read. */
function fitUpright(labels, size) {
  const context = el('canvas').getContext('2d');
  context.font = `600 ${size} ${getComputedStyle(document.body).fontFamily}`;
  return labels.every((label) => context.measureText(seen(label)).width <= cell);
}

/** Tells of one pair, and lets its row stand out; null for none. */
function look(row, col) {
  [at.row, at.col] = row === null ? [null, null] : [row, col];
  const [above, below] = byId('body').querySelectorAll('.shade');
  const mark = byId('body').querySelector('.mark');
  for (const part of [above, below, mark]) part.hidden = row === null;
  for (const [side, index] of [
    ['rows', at.row],
    ['cols', at.col],
  ]) {
    const old = byId(side).querySelector('.on');
    if (old) old.classList.remove('on');
    if (index !== null) byId(side).children[index].classList.add('on');
  }
  drawLooks(row);
  if (row === null) {
    byId('map-says').replaceChildren(
      el('span', { class: 'quiet' }, 'Point at a pair, or press Tab to reach the map and walk with the arrow keys.'),
    );
    return '';
  }
  above.style.cssText = `top: 0; height: ${row * cell}px`;
  below.style.cssText = `top: ${(row + 1) * cell}px; bottom: 0`;
  mark.style.cssText = `left: ${col * cell - 1}px; top: ${row * cell - 1}px; width: ${cell + 2}px; height: ${cell + 2}px`;
  const site = sites[state.site];
  const [query, key] = [labelsOf(site, 'rows')[row], labelsOf(site, 'cols')[col]];
  const x = reader(site, 'weights')(row * labelsOf(site, 'cols').length + col);
  const told = Number.isNaN(x) ? 'hidden' : `${isDifference() ? 'difference' : 'weight'} ${signed(x)}`;
  byId('map-says').replaceChildren(
    el('span', { class: 'quiet' }, `query ${row} `),
    el('b', {}, word(query)),
    ' → ',
    el('span', { class: 'quiet' }, `key ${col} `),
    el('b', {}, word(key)),
    ': ',
    el('b', { class: 'number' }, told),
  );
  return `query ${seen(query)}, key ${seen(key)}: ${told}`;
}

function listenMap() {
  const body = byId('body');
  const size = () => [labelsOf(sites[state.site], 'rows').length, labelsOf(sites[state.site], 'cols').length];
  body.addEventListener('pointermove', (event) => {
    const box = body.getBoundingClientRect();
    const [rows, cols] = size();
    look(
      clamp(Math.floor((event.clientY - box.top) / cell), 0, rows - 1),
      clamp(Math.floor((event.clientX - box.left) / cell), 0, cols - 1),
    );
  });
  body.addEventListener('pointerleave', (event) => {
    if (event.pointerType === 'mouse' && document.activeElement !== body) look(null);
  });
  body.addEventListener('focus', () => {
    if (at.row === null) say(look(0, 0));
  });
  body.addEventListener('keydown', (event) => {
    const move = step(event.key);
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [rows, cols] = size();
    say(look(clamp((at.row || 0) + move[0], 0, rows - 1), clamp((at.col || 0) + move[1], 0, cols - 1)));
    body.querySelector('.mark').scrollIntoView({ block: 'nearest', inline: 'nearest' });
  });
}

// ---- Flow ----

let sorted = { of: '', pairs: [] };

/** All pairs of the chosen site that carry weight, or that changed, strongest first: [row, col, weight]. */
function strongest() {
  const of = `${state.site} ${state.run}`;
  if (sorted.of !== of) {
    const site = sites[state.site];
    const cols = labelsOf(site, 'cols').length;
    const value = reader(site, 'weights');
    const pairs = [];
    for (let i = 0; i < pairsOf(site); i++) {
      const x = value(i);
      if (Math.abs(x) > 0) pairs.push([Math.floor(i / cols), i % cols, x]);
    }
    sorted = { of, pairs: pairs.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2])) };
  }
  return sorted.pairs;
}

function drawFlow() {
  const site = sites[state.site];
  const pairs = strongest();
  for (const [id, side] of [
    ['flow-rows', 'rows'],
    ['flow-cols', 'cols'],
  ]) {
    const items = labelsOf(site, side).map((label, i) =>
      el('li', { title: label, tabindex: i === 0 ? 0 : -1 }, word(label)),
    );
    byId(id).replaceChildren(...items);
  }
  byId('flow-q').textContent = `Queries (${data.axes[site.rows].title})`;
  byId('flow-k').textContent = `Keys (${data.axes[site.cols].title})`;
  byId('lines').max = Math.max(1, Math.min(MAX_LINES, pairs.length));
  byId('lines').value = state.lines || 2 * labelsOf(site, 'rows').length;
  token = null;
  drawLines();
}

/** The lines to draw now: all the strongest, or those of one token. */
function linesNow() {
  if (!token) return strongest().slice(0, Number(byId('lines').value));
  const side = token.side === 'rows' ? 0 : 1;
  return strongest()
    .filter((pair) => pair[side] === token.index)
    .slice(0, 60);
}

function drawLines() {
  const canvas = byId('flow-lines');
  const lines = linesNow();
  const site = sites[state.site];
  const most = Math.max(labelsOf(site, 'rows').length, labelsOf(site, 'cols').length);
  const [width, height] = [canvas.parentElement.querySelector('span').clientWidth, most * LINE_PITCH];
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  for (const [row, col, x] of [...lines].reverse()) {
    const t = strength(x);
    const [y, z] = [(row + 0.5) * LINE_PITCH, (col + 0.5) * LINE_PITCH];
    // The faint end of a palette is close to the paper; a line must still be seen on it.
    const color = isDifference() ? 128 + Math.sign(x) * Math.round(50 + 77 * t) : Math.round(90 + 165 * t);
    context.strokeStyle = `rgb(${rgb(color)} / ${0.35 + 0.65 * t})`.replace(/,/g, ' ');
    context.lineWidth = 0.6 + 3.4 * t;
    context.beginPath();
    context.moveTo(0, y);
    context.bezierCurveTo(width * 0.45, y, width * 0.55, z, width, z);
    context.stroke();
  }
  const weakest = lines.length ? Math.abs(lines[lines.length - 1][2]) : 0;
  const count = Number(byId('lines').value);
  const what = isDifference() ? 'a change of' : 'weight';
  if (!token) byId('lines-says').textContent = `${count} of ${strongest().length}, ${what} ${number(weakest)} or more`;
  markTokens(lines);
}

/** Gives the chosen token and its partners their marks, and the strongest partners their numbers. */
function markTokens(lines) {
  const [rows, cols] = [byId('flow-rows').children, byId('flow-cols').children];
  for (const item of [...rows, ...cols]) {
    item.className = '';
    const old = item.querySelector('small');
    if (old) old.remove();
  }
  drawLooks(token && token.side === 'rows' ? token.index : null);
  if (!token) {
    byId('flow-says').replaceChildren(
      el('span', { class: 'quiet' }, 'Point at a word, or walk with the arrow keys, to see its lines alone.'),
    );
    return '';
  }
  const own = token.side === 'rows' ? rows : cols;
  const others = token.side === 'rows' ? cols : rows;
  own[token.index].classList.add('on');
  const partner = token.side === 'rows' ? 1 : 0;
  const top = lines.slice(0, 8).filter((pair) => Math.abs(pair[2]) >= 0.01);
  for (const pair of top) others[pair[partner]].append(el('small', { class: 'quiet' }, signed(pair[2])));
  const labels = labelsOf(sites[state.site], token.side);
  const said = token.side === 'rows' ? ['query ', ' looks at'] : ['key ', ' is looked at by'];
  byId('flow-says').replaceChildren(
    el('span', { class: 'quiet' }, said[0]),
    el('b', {}, word(labels[token.index])),
    `${said[1]} ${lines.length ? 'the words with numbers' : 'nothing'}`,
  );
  const names = labelsOf(sites[state.site], token.side === 'rows' ? 'cols' : 'rows');
  return (
    `${said[0]}${seen(labels[token.index])}${said[1]} ` +
    top
      .slice(0, 3)
      .map((pair) => `${seen(names[pair[partner]])} ${signed(pair[2])}`)
      .join(', ')
  );
}

function listenFlow() {
  byId('lines').addEventListener('input', () => go({ lines: Number(byId('lines').value) }));
  for (const side of ['rows', 'cols']) {
    const list = byId(`flow-${side}`);
    const choose = (item) => {
      const next = item ? { side, index: [...list.children].indexOf(item) } : null;
      if (next && token && next.side === token.side && next.index === token.index) return;
      token = next;
      drawLines();
    };
    list.addEventListener('pointerover', (event) => choose(event.target.closest('li')));
    list.addEventListener('pointerleave', () => choose(null));
    list.addEventListener('focusin', (event) => {
      choose(event.target);
      say(markTokens(linesNow()));
    });
    list.addEventListener('focusout', () => choose(null));
    list.addEventListener('keydown', (event) => {
      const move = step(event.key);
      if (!move || !event.target.matches('li')) return;
      event.preventDefault();
      const items = [...list.children];
      const to = items[clamp(items.indexOf(event.target) + (move[0] || move[1]), 0, items.length - 1)];
      event.target.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    });
  }
}

// ---- The address, and drawing what it says ----

function readAddress() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const among = (name, allowed, otherwise) => (allowed.includes(hash.get(name)) ? hash.get(name) : otherwise);
  state.view = among('view', ['heads', 'map', 'flow', 'numbers'], 'heads');
  state.run = data.against ? among('run', ['before', 'after', 'difference'], 'difference') : 'before';
  state.scale = among('scale', ['linear', 'log'], 'linear');
  state.theme = among('theme', ['dark', 'light'], null);
  state.stat = among('stat', stats, stats[0]);
  state.lines = Number(hash.get('lines')) || null;
  const found = sites.findIndex(
    (s) =>
      String(s.layer) === hash.get('layer') &&
      String(s.head) === hash.get('head') &&
      (s.kind === hash.get('kind') || kinds.length === 1),
  );
  state.site = Math.max(0, found);
}

function writeAddress() {
  const site = sites[state.site];
  const hash = new URLSearchParams({
    view: state.view,
    kind: site.kind,
    layer: site.layer,
    head: site.head,
    scale: state.scale,
  });
  if (data.against) hash.set('run', state.run);
  if (state.stat !== stats[0]) hash.set('stat', state.stat);
  if (state.lines) hash.set('lines', state.lines);
  if (state.theme) hash.set('theme', state.theme);
  history.replaceState(null, '', `#${hash}`);
}

function go(change) {
  Object.assign(state, change);
  writeAddress();
  draw();
}

function draw() {
  palettes = isDifference() ? data.against.palettes : data.palettes;
  drawTheme();
  for (const button of byId('views').children) {
    if (button.dataset.view === state.view) button.setAttribute('aria-current', 'page');
    else button.removeAttribute('aria-current');
  }
  const one = state.view === 'map' || state.view === 'flow';
  byId('heads').hidden = state.view !== 'heads';
  byId('one').hidden = !one;
  byId('map').hidden = state.view !== 'map';
  byId('flow').hidden = state.view !== 'flow';
  byId('numbers').hidden = state.view !== 'numbers';
  byId('scale').hidden = byId('legend').hidden = state.view === 'numbers';
  byId('scale').querySelector(`[value=${state.scale}]`).checked = true;
  byId('run').querySelector(`[value=${state.run}]`).checked = true;
  byId('legend').setAttribute('aria-label', isDifference() ? 'Colors of differences' : 'Colors of weights');
  const stat = [...byId('stat').querySelectorAll('input')].find((radio) => radio.value === state.stat);
  if (stat) stat.checked = true;
  drawLegend(isDifference() ? 1 : 0, scaleTicks()); // color 0 of differences is the page
  if (state.view === 'heads') {
    drawThumbs();
    markChosen(byId('heads-tables'));
  }
  if (one) drawBeside();
  if (state.view === 'map') drawMap();
  if (state.view === 'flow') drawFlow();
  if (state.view === 'numbers') drawNumbers();
}

function summary() {
  const layers = new Set(sites.map((s) => `${s.kind} ${s.layer}`)).size;
  const many = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
  const tokens = Object.values(data.axes).map((a) => many(a.labels.length, `${a.title} token`));
  return (
    `${many(sites.length, 'head')} in ${many(layers, 'layer')} over ${tokens.join(' and ')}. ` +
    'A weight says how much a query takes from a key; the weights of a query sum to 1.'
  );
}

/** What the two runs of a page of differences are, and the rules of an intervention. */
function makeRuns() {
  byId('run').hidden = !data.against;
  const runs = [['before', data.title, data.interventions || []]];
  if (data.against) runs.push(['after', data.against.title, data.against.interventions]);
  const rules = runs.flatMap(([run, , texts]) => texts.map((text) => el('li', {}, data.against ? `${run}: ` : '', el('code', {}, text))));
  byId('runs').hidden = !data.against && rules.length === 0;
  byId('runs-says').replaceChildren(
    ...(data.against ? runs.flatMap(([run, title], i) => [i ? '; ' : 'Two runs. ', `${run}: `, word(title)]) : []),
    ...(rules.length ? [data.against ? '. Rules of interventions:' : 'Rules of interventions:'] : []),
  );
  byId('rules').replaceChildren(...rules);
}

/** Says what the labels are, if there are any. */
function makeLabelsNote() {
  const some = sites.some((s) => s.labels.length > 0 || (s.after && s.after.labels.length > 0));
  byId('labels-says').hidden = !some;
  byId('labels-says').textContent =
    'A label names what a head does on this text: the highest score of a detector, if it is 0.5 or more, as a mean over at least 4 queries. ' +
    'Its definition is beside the map of the head.';
}

function listen() {
  byId('views').addEventListener('click', (event) => {
    if (event.target.dataset.view) go({ view: event.target.dataset.view });
  });
  byId('scale').addEventListener('change', (event) => go({ scale: event.target.value }));
  byId('run').addEventListener('change', (event) => go({ run: event.target.value }));
  byId('theme').addEventListener('click', () => go({ theme: otherTheme() }));
  for (const [id, view] of [
    ['heads-tables', 'map'],
    ['numbers-tables', 'numbers'],
  ]) {
    byId(id).addEventListener('click', (event) => {
      const button = event.target.closest('button');
      if (button) go({ site: Number(button.dataset.site), view });
    });
    byId(id).addEventListener('keydown', (event) => walkTable(byId(id), event));
  }
  listenMap();
  listenFlow();
  addEventListener('hashchange', () => {
    readAddress();
    draw();
  });
  system.addEventListener('change', draw);
  let waiting = 0;
  addEventListener('resize', () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
}

byId('summary').textContent = sites.length ? summary() : 'This trace is empty: nothing was recorded.';
document.querySelector('main').hidden = sites.length === 0;
if (sites.length > 0) {
  makeRuns();
  makeLabelsNote();
  makeHeads();
  makeChanged();
  makeNumbers();
  makePicker();
  readAddress();
  listen();
  draw();
}
