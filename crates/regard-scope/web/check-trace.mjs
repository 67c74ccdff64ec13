// What a reader does with a page of a trace.
import { summary } from './check-zoom.mjs';

const LIMIT = 3e6; // bytes: a page that still goes through a mail

const text = (page, selector) => page.locator(selector).innerText();
const field = async (page, name) => page.evaluate((n) => new URLSearchParams(location.hash.slice(1)).get(n), name);

async function lookAtViews(desk, url, theme) {
  const page = await desk.open(url, { theme });
  for (const view of ['heads', 'map', 'flow', 'numbers']) {
    await page.click(`#views [data-view=${view}]`);
    if (view === 'map') {
      const box = await page.locator('#body').boundingBox();
      await page.mouse.move(box.x + 25, box.y + Math.min(box.height - 5, 225));
    }
    if (view === 'flow') {
      const words = page.locator('#flow-rows li');
      await words.nth(Math.min(9, (await words.count()) - 1)).hover();
    }
    await desk.png(page, `trace-${view}-${theme}`);
    await desk.axe(page, `${view} ${theme}`);
    if (view === 'flow') {
      await page.mouse.move(2, 2);
      await desk.png(page, `trace-flow-all-${theme}`);
    }
  }
  await page.click('#views [data-view=heads]');
  await page.locator('#scale label', { hasText: 'log' }).click();
  await desk.png(page, `trace-heads-log-${theme}`);
  await page.context().close();
}

/** The whole page by keyboard alone: a head, its map, a pair of it. */
async function walkByKeyboard(desk, page) {
  const chosen = page.locator('#heads-tables [tabindex="0"]').first();
  await chosen.focus();
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('ArrowDown');
  const target = await page.evaluate(() => document.activeElement.getAttribute('aria-label'));
  await page.keyboard.press('Enter');
  desk.expect((await field(page, 'view')) === 'map', 'Enter on a head does not open its map');
  desk.expect((await text(page, '#one-title')).toLowerCase() === target, `Enter on "${target}" opens another head`);
  await page.focus('#body');
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('ArrowRight');
  const said = await text(page, '#map-says');
  desk.expect(/query 2 .*key 1 .*(weight|hidden)/s.test(said), `arrow keys on the map say "${said}"`);
  desk.expect((await text(page, '#live')) !== '', 'arrow keys on the map are not announced');
}

/** The page tells a weight; the data says what it should be. */
async function compareWeights(desk, page) {
  const wrong = await page.evaluate(() => {
    const data = JSON.parse(document.getElementById('data').textContent);
    const body = document.getElementById('body');
    const box = body.getBoundingClientRect();
    const shown = new URLSearchParams(location.hash.slice(1));
    const site = data.sites.find(
      (s) =>
        String(s.layer) === shown.get('layer') && String(s.head) === shown.get('head') && s.kind === shown.get('kind'),
    );
    const [rows, cols] = ['rows', 'cols'].map((side) => data.axes[site[side]].labels.length);
    const bytes = atob(site.weights);
    const wrong = [];
    for (let i = 0; i < 40; i++) {
      const [row, col] = [(i * 7) % rows, (i * 5) % cols];
      body.dispatchEvent(
        new PointerEvent('pointermove', {
          clientX: box.left + ((col + 0.5) * box.width) / cols,
          clientY: box.top + ((row + 0.5) * box.height) / rows,
        }),
      );
      const at = 2 * (row * cols + col);
      const u = bytes.charCodeAt(at) + 256 * bytes.charCodeAt(at + 1);
      const weight = (u / 65534) ** 2;
      const said = document.getElementById('map-says').textContent;
      const expected = u === 65535 ? 'hidden' : weight >= 0.001 ? weight.toFixed(3) : '';
      if (!said.includes(expected)) wrong.push(`pair ${row}, ${col}: "${said}" lacks "${expected}"`);
    }
    return wrong;
  });
  wrong.forEach((what) => desk.fail(what));
}

async function reload(desk, page) {
  await page.locator('#scale label', { hasText: 'log' }).click();
  await page.click('#views [data-view=flow]');
  const [address, title] = [page.url(), await text(page, '#one-title')];
  await page.reload();
  desk.expect(page.url() === address, `reload changes the address: ${address} to ${page.url()}`);
  desk.expect((await text(page, '#one-title')) === title, `reload shows another head than ${title}`);
  desk.expect(await page.locator('#flow-lines').isVisible(), 'reload shows another view');
  desk.expect(await page.locator('#scale [value=log]').isChecked(), 'reload forgets the scale');
}

/** How long the page takes to draw each view anew, head by head. */
async function timeViews(desk, page) {
  const times = await page.evaluate(async () => {
    const times = [];
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    for (const view of ['heads', 'map', 'flow', 'numbers', 'map', 'flow']) {
      document.getElementById('after').click();
      await frame();
      const start = performance.now();
      document.querySelector(`#views [data-view=${view}]`).click();
      document.body.getBoundingClientRect(); // lays the page out
      times.push(performance.now() - start);
    }
    return times;
  });
  desk.told.view_drawn = summary(times);
}

async function narrow(desk, url) {
  const page = await desk.open(url, { width: 400, height: 700 });
  for (const view of ['heads', 'map', 'flow', 'numbers']) {
    await page.click(`#views [data-view=${view}]`);
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    desk.expect(over <= 0, `${view} is ${over} px too wide for 400 px`);
    await desk.png(page, `trace-${view}-400`);
  }
  await page.context().close();
}

export async function checkTrace(desk, url) {
  desk.expect(desk.told.bytes < LIMIT, `${desk.told.bytes} bytes are more than ${LIMIT}`);
  for (const theme of ['dark', 'light']) await lookAtViews(desk, url, theme);
  const page = await desk.open(url);
  await walkByKeyboard(desk, page);
  await compareWeights(desk, page);
  await page.click('#theme');
  desk.expect(
    (await page.evaluate(() => document.documentElement.dataset.theme)) === 'light',
    'the theme button does nothing',
  );
  await timeViews(desk, page);
  await reload(desk, page);
  await narrow(desk, url);
}
