// What a reader does with a page of a large map, served (zoom) or saved (static).

const TIMEOUT = 60_000; // ms: a tile of a million tokens takes a while on a small machine

export const rounded = (x) => Math.round(x * 10) / 10;

export function summary(times) {
  const sorted = [...times].sort((a, b) => a - b);
  if (sorted.length === 0) return { count: 0 };
  return {
    count: sorted.length,
    median_ms: rounded(sorted[sorted.length >> 1]),
    max_ms: rounded(sorted[sorted.length - 1]),
  };
}

/** Waits until the viewer stands still and has drawn all tiles of its view; tells how long that took. */
export async function settled(page) {
  const start = performance.now();
  // Two frames first: the viewer learns of a move when it next draws.
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const still = () => {
    const { viewer, pending, ready } = window.regard;
    const items = Array.from({ length: viewer?.world.getItemCount() ?? 0 }, (_, i) => viewer.world.getItemAt(i));
    const zooms = viewer ? [true, false].map((now) => viewer.viewport.getZoom(now)) : [];
    const now = { ready, pending, loaded: items.map((item) => item.getFullyLoaded()), zooms };
    window.unsettled = JSON.stringify(now); // for the message, should it never be still
    const rest = Math.abs(zooms[0] - zooms[1]) < 1e-9 * Math.max(1, zooms[1]) && !viewer.isAnimating?.();
    return ready && pending === 0 && rest && now.loaded.every(Boolean);
  };
  await page.waitForFunction(still, null, { timeout: TIMEOUT, polling: 'raf' }).catch(async (error) => {
    throw new Error(`${error.message.split('\n')[0]} Not settled: ${await page.evaluate('window.unsettled')}`);
  });
  return performance.now() - start;
}

/** Share of the viewer's own pixels that differ from its first one: an empty map has none. */
const drawn = (page) =>
  page.evaluate(() => {
    const canvas = window.regard.viewer.drawer.canvas;
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let other = 0;
    for (let i = 4; i < data.length; i += 4)
      if (data[i] !== data[0] || data[i + 1] !== data[1] || data[i + 2] !== data[2]) other++;
    return other / (data.length / 4);
  });

const centreOf = (page) =>
  page.evaluate(() => {
    const { viewport } = window.regard.viewer;
    const { x, y } = viewport.getCenter(false);
    return [x, y, viewport.getZoom(false)];
  });

/** Pans and zooms as a curious reader would: in, about, far away, out again. */
const MOVES = [
  ['zoom', 2],
  ['zoom', 2],
  ['pan', 0.3, 0.3],
  ['zoom', 4],
  ['pan', 0.4, 0],
  ['pan', 0, 0.4],
  ['zoom', 4],
  ['pan', -0.5, 0],
  ['zoom', 8],
  ['pan', 0.5, 0.5],
  ['zoom', 8],
  ['pan', 0.3, -0.3],
  ['zoom', 0.5],
  ['zoom', 0.25],
  ['pan', 0.8, 0.8],
  ['pan', -0.8, 0],
  ['zoom', 0.125],
  ['pan', 0.2, 0.2],
  ['zoom', 0.125],
  ['home'],
];

/** Whether all of the map is exact by now, or still made from samples. */
const isExact = async (url) => (await (await fetch(new URL('info.json', url))).json()).exact;

async function wander(page) {
  const tiles = [];
  const note = (request) => {
    if (request.url().includes('/tile/')) tiles.push(request.timing().responseEnd);
  };
  page.on('requestfinished', note);
  const views = [];
  for (const move of MOVES) {
    await page.evaluate(([kind, a, b]) => {
      const { viewport } = window.regard.viewer;
      const bounds = viewport.getBounds(false);
      if (kind === 'zoom') viewport.zoomBy(a);
      else if (kind === 'home') viewport.goHome();
      else viewport.panBy(new window.OpenSeadragon.Point(a * bounds.width, b * bounds.height));
      viewport.applyConstraints();
    }, move);
    views.push(await settled(page));
  }
  page.off('requestfinished', note);
  return { tile_requests: summary(tiles), view_settled: summary(views) };
}

/** Opens the page, times its first picture, wanders about. */
async function firstVisit(desk, url) {
  const start = performance.now();
  const page = await desk.open(url);
  await page.waitForFunction(() => window.regard?.viewer?.world.getItemAt(0)?.getTilesToDraw().length > 0, null, {
    timeout: TIMEOUT,
    polling: 'raf',
  });
  const first_picture_ms = rounded(performance.now() - start);
  const first_settled_ms = rounded(first_picture_ms + (await settled(page)));
  const exact_at_first = await isExact(url);
  await desk.png(page, exact_at_first ? 'zoom-first-exact' : 'zoom-first-preview');
  const times = { first_picture_ms, first_settled_ms, ...(await wander(page)) };
  return { page, times: { ...times, exact: [exact_at_first, await isExact(url)] } };
}

/** While the map is still made from samples, and when it is exact: a reader meets both. */
async function visitTwice(desk, url) {
  const early = await firstVisit(desk, url);
  if (early.times.exact[0]) {
    desk.told.when_exact = early.times;
    return early.page;
  }
  desk.told.while_sampled = early.times;
  await early.page.context().close();
  const end = performance.now() + 2 * TIMEOUT;
  while (!(await isExact(url)) && performance.now() < end) await new Promise((done) => setTimeout(done, 500));
  const late = await firstVisit(desk, url);
  desk.told.when_exact = late.times;
  return late.page;
}

/** Points at a part of the map, told in shares of what is visible of it; what the page then knows. */
async function pointAt(page, x, y) {
  const box = await page.locator('#viewer').boundingBox();
  const point = await page.evaluate(
    ([shareX, shareY]) => {
      const { viewport, world } = window.regard.viewer;
      const inside = viewport.getBounds(true).intersection(world.getItemAt(0).getBounds(true));
      const at = new window.OpenSeadragon.Point(inside.x + shareX * inside.width, inside.y + shareY * inside.height);
      const pixel = viewport.pixelFromPoint(at, true);
      const pair = world.getItemAt(0).viewportToImageCoordinates(at, true);
      return { x: pixel.x, y: pixel.y, key: pair.x, row: pair.y };
    },
    [x, y],
  );
  await page.mouse.move(box.x + point.x, box.y + point.y, { steps: 3 });
  await page.waitForFunction(() => window.regard.hover && window.regard.hover.weight !== null, null, {
    timeout: TIMEOUT,
  });
  const hover = await page.evaluate(() => window.regard.hover);
  const perPixel = await page.evaluate(() => {
    const { viewport, world } = window.regard.viewer;
    return 1 / world.getItemAt(0).viewportToImageZoom(viewport.getZoom(true));
  });
  const near = (a, b) => Math.abs(a + 0.5 - b) <= 0.5 + perPixel;
  return { ...hover, right: near(hover.row, point.row) && near(hover.key, point.key) };
}

/** Points at pairs and compares the page's weight with the server's. */
async function pointAtPairs(desk, page, url) {
  let compared = 0;
  for (const [x, y] of [
    [0.3, 0.6],
    [0.45, 0.5],
    [0.5, 0.52],
    [0.2, 0.8],
    [0.7, 0.3],
  ]) {
    const found = await pointAt(page, x, y);
    desk.expect(found.right, `${x}, ${y} of the map is not pair ${found.row}, ${found.key}`);
    const site = await page.inputValue('#site');
    const answer = await (await fetch(new URL(`weight/${site}/${found.row}/${found.key}`, url))).json();
    desk.expect(
      Math.abs((answer.weight ?? 0) - found.weight) <= 1e-6,
      `pair ${found.row}, ${found.key}: page ${found.weight}, server ${answer.weight}`,
    );
    compared++;
  }
  desk.told.weights_compared = compared;
}

async function goToAndPin(desk, page, url) {
  const [row, key] = await page.evaluate(() =>
    ['go-row', 'go-key'].map((id) => Math.floor(Number(document.getElementById(id).max) / 2)),
  );
  await page.fill('#go-row', String(row));
  await page.fill('#go-key', String(key));
  await page.keyboard.press('Enter');
  await settled(page);
  const hash = new URLSearchParams(new URL(page.url()).hash.slice(1));
  desk.expect(Math.abs(Number(hash.get('q')) - row - 0.5) < 0.01, `"go to" ${row} leads to ${hash.get('q')}`);
  await page.waitForSelector('#row-keys button', { timeout: TIMEOUT });
  const site = hash.get('site');
  const { top } = await (await fetch(new URL(`row/${site}/${row}`, url))).json();
  const told_row = await page.locator('#row-keys button').allInnerTexts();
  desk.expect(told_row.length === top.length, `the row tells of ${told_row.length} keys, the server of ${top.length}`);
  for (const [i, { key: own, weight }] of top.entries()) {
    const pair = await (await fetch(new URL(`weight/${site}/${row}/${own}`, url))).json();
    desk.expect(Math.abs(pair.weight - weight) <= 1e-6, `row ${row}, key ${own}: ${weight}, alone ${pair.weight}`);
    const place = own.toLocaleString('en');
    desk.expect(told_row[i].includes(place), `the row's key ${i} should be ${place}: "${told_row[i]}"`);
    if (weight >= 0.001) desk.expect(told_row[i].includes(weight.toFixed(4)), `"${told_row[i]}" lacks ${weight}`);
  }
  const told = await page.locator('#live').innerText();
  desk.expect(told !== '', 'the pinned row is not announced');
}

/** Goes through heads of different kinds: each has a size and words of its own. */
async function changeSites(desk, page, url) {
  const count = await page.locator('#site option').count();
  for (const site of [...new Set([1, Math.floor(count / 2), count - 1, 0])].filter((site) => site < count && count > 1)) {
    await page.selectOption('#site', String(site));
    await page.waitForFunction((n) => new URLSearchParams(location.hash.slice(1)).get('site') === n, String(site));
    await settled(page);
    const { q_len, k_len } = await (await fetch(new URL(`info.json?site=${site}`, url))).json();
    const [said, size] = [await page.locator('#size').innerText(), [q_len, k_len].map((n) => n.toLocaleString('en'))];
    desk.expect(said.includes(size.join(' × ')), `site ${site} has ${size} pairs; the page says "${said}"`);
    await page.click('#fit');
    await settled(page);
    const found = await pointAt(page, 0.3, 0.6);
    desk.expect(found.right, `site ${site}: 0.3, 0.6 of the map is not pair ${found.row}, ${found.key}`);
    const own = await (await fetch(new URL(`weight/${site}/${found.row}/${found.key}`, url))).json();
    desk.expect(Math.abs(own.weight - found.weight) <= 1e-6, `site ${site}: ${found.weight}, not ${own.weight}`);
    const words = await page.locator('.pair-facts').innerText();
    const name = (text, at) => (text === String(at) ? at.toLocaleString('en') : text.trim());
    for (const word of [name(own.query, own.row), name(own.word, own.key)])
      desk.expect(words.includes(word), `site ${site}: "${words}" lacks "${word}"`);
  }
}

async function reload(desk, page) {
  await settled(page);
  const [address, before] = [page.url(), await centreOf(page)];
  await page.reload();
  await settled(page);
  const after = await centreOf(page);
  desk.expect(page.url() === address, `reload changes the address: ${address} to ${page.url()}`);
  // The center by a millionth of what is visible (a thousandth of a pixel), the zoom by a millionth.
  const zoom = before[2];
  const near = before.every((x, i) => Math.abs(x - after[i]) <= 1e-6 * (i < 2 ? 1 / zoom : zoom));
  desk.expect(near, `reload moves the view: ${before} to ${after}`);
}

async function keyboard(desk, page) {
  await page.focus('#viewer .openseadragon-canvas');
  const [x, , zoom] = await centreOf(page);
  await page.keyboard.press('+');
  await page.keyboard.press('ArrowRight');
  await settled(page);
  const [x2, , zoom2] = await centreOf(page);
  const max = await page.evaluate(() => window.regard.viewer.viewport.getMaxZoom());
  desk.expect(zoom2 > zoom || zoom >= 0.99 * max, 'the + key does not zoom in');
  desk.expect(x2 > x, 'the right arrow key does not pan');
}

async function lookAtThemes(desk, url, name) {
  for (const theme of ['dark', 'light']) {
    const page = await desk.open(url, { theme });
    await settled(page);
    desk.expect((await drawn(page)) > 0.001, `${theme}: the map is empty`);
    await desk.png(page, `${name}-${theme}`);
    await desk.axe(page, `${name} ${theme}`);
    await page.evaluate(() => {
      const { viewer } = window.regard;
      viewer.viewport.zoomTo(viewer.viewport.getMaxZoom() / 4, null, true);
      viewer.viewport.panTo(
        new window.OpenSeadragon.Point(0.5, 0.5 * viewer.world.getItemAt(0).getBounds().height),
        true,
      );
    });
    await settled(page);
    const box = await page.locator('#viewer').boundingBox();
    await page.mouse.click(box.x + box.width / 2, box.y + box.height / 2);
    await page.waitForFunction(() => window.regard.hover && window.regard.hover.weight !== null, null, {
      timeout: TIMEOUT,
    });
    await page.waitForTimeout(300); // words and the row come on their own
    await desk.png(page, `${name}-words-${theme}`);
    await desk.axe(page, `${name} words ${theme}`);
    await page.context().close();
  }
}

async function narrow(desk, url, name) {
  const page = await desk.open(url, { width: 400, height: 700 });
  await settled(page);
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  desk.expect(over <= 0, `the page is ${over} px too wide for 400 px`);
  await desk.png(page, `${name}-400`);
  await page.context().close();
}

export async function checkZoom(desk, url) {
  const page = await visitTwice(desk, url);
  await goToAndPin(desk, page, url);
  await pointAtPairs(desk, page, url);
  await changeSites(desk, page, url);
  await keyboard(desk, page);
  await page.mouse.move(2, 2);
  await reload(desk, page);
  await page.click('#fit');
  await settled(page);
  if (await isExact(url)) {
    await page.waitForTimeout(1500); // the page asks twice a second, then fetches
    desk.expect(!(await page.locator('#badge').isVisible()), 'the map is exact, yet the page calls it a preview');
  }
  await page.locator('#how label', { hasText: 'mean' }).click();
  await settled(page);
  desk.expect((await page.url()).includes('how=mean'), 'mean is not in the address');
  await page.context().close();
  await lookAtThemes(desk, url, 'zoom');
  await narrow(desk, url, 'zoom');
}

export async function checkStatic(desk, url) {
  const start = performance.now();
  const page = await desk.open(url);
  await settled(page);
  desk.told.first_settled_ms = rounded(performance.now() - start);
  desk.told.view_settled = (await wander(page)).view_settled;
  await page.click('#fit');
  await settled(page);
  desk.expect(!(await page.locator('#site').isVisible()), 'a saved page offers other heads');
  const found = await pointAt(page, 0.3, 0.6);
  desk.expect(found.right, `0.3, 0.6 of the map is not pair ${found.row}, ${found.key}`);
  const said = await page.locator('#pair-weight').innerText();
  desk.expect(/about|none/.test(said), `a saved page tells "${said}" of a weight`);
  await keyboard(desk, page);
  await page.mouse.move(2, 2);
  await reload(desk, page);
  await page.context().close();
  await lookAtThemes(desk, url, 'static');
  await narrow(desk, url, 'static');
}
