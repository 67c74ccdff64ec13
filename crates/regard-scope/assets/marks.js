// Margins and marks of the map, drawn over it: words or numbers along its edges, the pinned row, the pair that is
// pointed at, the badge. The zoom page's own script follows in the same module.

const LABEL_PX = 9; // a word needs this much room; below it, round numbers are shown

let marking = 0;

function mark() {
  if (marking) return;
  marking = requestAnimationFrame(() => {
    marking = 0;
    drawMarks();
  });
}

function drawMarks() {
  if (!viewer || !viewer.viewport) return;
  const canvas = byId('marks');
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  const pens = {
    quiet: getComputedStyle(byId('size')).color,
    accent: getComputedStyle(canvas).color,
    paper: getComputedStyle(canvas).borderTopColor,
    font: getComputedStyle(document.body).fontFamily,
  };
  const v = view(true);
  // Labels stand at the edge of the map while that is in sight, else at the edge of the viewer.
  const edge = { x: v.x + Math.max(0, -v.left * v.px), y: v.y + Math.max(0, -v.top * v.px) };
  if (edge.x < width && edge.y < height) {
    for (const axis of ['k', 'q']) drawBands(context, v, edge, axis);
    const [rows, cols] = ['q', 'k'].map((axis) => marginOf(bandsOf(axis).map((band) => band.lane)));
    const labels = { x: edge.x - rows, y: edge.y - cols };
    for (const axis of ['k', 'q']) drawAxis(context, v, labels, pens, axis);
    drawTitles(context, labels, pens);
  }
  drawPointed(context, v, pens);
  drawBadge();
  // The small map says where we are; when all is in sight it would only cover something.
  const all = Math.min(v.width / info.k_len, v.height / info.q_len) * 1.02 >= v.px;
  viewer.navigator.element.style.visibility = all ? 'hidden' : 'visible';
}

/** The spans of an axis with their lanes and colors; the legend has the colors as the theme has them. */
function bandsOf(axis) {
  const spans = info[`${axis}_spans`];
  const lanes = lanesOf(spans.map((span) => span.positions));
  return spans.map(({ positions }, i) => ({ positions, lane: lanes[i], color: i % SPAN_COLORS }));
}

/** The bands of the spans, between the labels and the map. */
function drawBands(context, v, edge, axis) {
  const down = axis === 'q';
  const [first, extent, begin] = down ? [v.top, v.height, v.y] : [v.left, v.width, v.x];
  for (const { positions, lane, color } of bandsOf(axis)) {
    const [start, end] = positions.map((at) => begin + clamp((at - first) * v.px, 0, extent));
    context.fillStyle = getComputedStyle(byId('spans').querySelector(`.span-${color}`)).backgroundColor;
    const from = (down ? edge.x : edge.y) - (lane + 1) * BAND;
    if (down) context.fillRect(from, start, BAND - 2, end - start);
    else context.fillRect(start, from, end - start, BAND - 2);
  }
}

/** 1, 2 or 5 times a power of ten: the smallest such step that leaves `room` px between ticks. */
function roundStep(px, room) {
  const least = room / px;
  const ten = 10 ** Math.floor(Math.log10(least));
  const by = [1, 2, 5, 10].find((n) => n * ten >= least);
  return Math.max(1, by * ten);
}

/** What stands along an axis: of each label in sight, where it is in px from the viewer's corner. All words where
    there is room for them; round numbers where there is none, or where positions have no words. */
function labelsInSight(v, axis) {
  const down = axis === 'q';
  const close = v.px >= LABEL_PX; // pairs are squares: a label stands at the middle of one
  const [from, extent, length] = down ? [v.top, v.height, info.q_len] : [v.left, v.width, info.k_len];
  const last = Math.min(length - 1, Math.ceil(from + extent / v.px));
  const every = (by, text) => {
    const found = [];
    for (let i = Math.max(0, Math.floor(from / by) * by); i <= last; i += by) {
      const at = (i - from + (close ? 0.5 : 0)) * v.px;
      if (at >= 0 && at <= extent) found.push({ i, at, text: text(i) });
    }
    return found;
  };
  const labels = close ? every(1, (i) => label(axis, i) ?? '…') : [];
  if (labels.some(({ i, text }) => text !== String(i)))
    return { words: true, labels: labels.map((one) => ({ ...one, text: seen(one.text) })) };
  const room = down ? (close ? 15 : 36) : close ? 52 : 76;
  return { words: false, labels: every(roundStep(v.px, room), whole) };
}

function drawAxis(context, v, edge, pens, axis) {
  const down = axis === 'q';
  const { words, labels } = labelsInSight(v, axis);
  const pointed = regard.hover ? regard.hover[down ? 'row' : 'key'] : -1;
  context.save();
  context.beginPath();
  const half = 7; // px of a line of text: row 0 has its number half above the map
  if (down) context.rect(0, v.y - half, edge.x, v.height + half);
  else context.rect(edge.x - half, 0, v.x + v.width - edge.x + half, edge.y);
  context.clip();
  context.font = `${words ? clamp(v.px - 2, 9.5, v.px > 30 ? 15 : 13) : 11}px ${pens.font}`;
  // Letters need not be turned to be read.
  const upright = !words || labels.every(({ text }) => context.measureText(text).width <= v.px - 1);
  for (const { i, at, text } of labels) {
    context.fillStyle = i === pointed ? pens.accent : pens.quiet;
    if (down) drawRowLabel(context, edge.x, v.y + at, text, words);
    else if (upright) drawKeyLabel(context, v.x + at, edge.y, text, words);
    else drawTurned(context, v.x + at, edge.y, text);
  }
  context.restore();
}

function drawTitles(context, edge, pens) {
  context.fillStyle = pens.quiet;
  context.font = `11px ${pens.font}`;
  context.textAlign = 'right';
  context.textBaseline = 'alphabetic';
  const [query, key] = axisNames();
  context.fillText(`${key} →`, edge.x - 9, edge.y - 29);
  context.fillText(`${query} ↓`, edge.x - 9, edge.y - 14);
}

function drawRowLabel(context, x, y, text, words) {
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  context.fillText(fit(context, text, byId('viewer').offsetLeft - 14), x - (words ? 5 : 9), y);
  if (!words) context.fillRect(x - 6, Math.round(y), 5, 1);
}

function drawKeyLabel(context, x, y, text, words) {
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  context.fillText(text, x, y - (words ? 6 : 9));
  if (!words) context.fillRect(Math.round(x), y - 6, 1, 5);
}

function drawTurned(context, x, y, text) {
  context.save();
  context.translate(x + 2, y - 4);
  context.rotate((-62 * Math.PI) / 180);
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillText(fit(context, text, byId('viewer').offsetTop - 4), 0, 0);
  context.restore();
}

const cut = new Map();

/** A word made short enough for the margin, by whole characters. */
function fit(context, text, room) {
  const key = `${context.font} ${room} ${text}`;
  if (!cut.has(key)) {
    const letters = [...text];
    let short = text;
    while (letters.length > 1 && context.measureText(short).width > room) {
      letters.pop();
      short = `${letters.join('')}…`;
    }
    if (cut.size > 5000) cut.clear();
    cut.set(key, short);
  }
  return cut.get(key);
}

/** The pinned row, and the pair that is told of. */
function drawPointed(context, v, pens) {
  context.save();
  context.beginPath();
  context.rect(v.x, v.y, v.width, v.height);
  context.clip();
  // Twice: the wider stroke in the color of the paper sets the line off from any color below.
  const frame = (x, y, width, height) => {
    for (const [pen, line] of Object.entries({ paper: 3.5, accent: 1.5 })) {
      context.strokeStyle = pens[pen];
      context.lineWidth = line;
      context.strokeRect(x - 1, y - 1, width + 2, height + 2);
    }
  };
  if (state.row !== null) {
    const [left, right] = [-v.left, info.k_len - v.left].map((x) => v.x + clamp(x * v.px, -9, v.width + 9));
    frame(left, v.y + (state.row - v.top) * v.px, right - left, Math.max(v.px, 1));
  }
  if (regard.hover) {
    const size = Math.max(v.px, 3);
    frame(v.x + (regard.hover.key - v.left) * v.px, v.y + (regard.hover.row - v.top) * v.px, size, size);
  }
  context.restore();
}

/** Says of tiles made from a sample that they are. */
function drawBadge() {
  const tiles = shown ? shown.getTilesToDraw().map((drawn) => drawn.tile.getUrl()) : [];
  const rows = tiles.map((path) => sampled.get(path)).find(Boolean);
  byId('badge').hidden = !rows;
  if (!rows) return;
  const [some, all] = rows.split('/').map((n) => whole(Number(n)));
  byId('badge').textContent =
    `Preview: a pixel looks at ${some} of its ${all} rows. The exact map is ${Math.floor(100 * info.progress)} % done.`;
}
