// Spans, head labels and differences on a page of a trace, against what the command says of the same traces.
import { readFileSync } from 'node:fs';
import { settled } from './check-zoom.mjs';

const text = (page, selector) => page.locator(selector).innerText();
const lines = (file) => readFileSync(file, 'utf8').trim().split('\n').map((line) => JSON.parse(line));
const VIEWS = ['heads', 'map', 'flow', 'numbers'];

/** A number as the page writes it: `−0.123`, `1.2×10⁻⁴`. */
function parsed(said) {
  const [, sign, digits, power] = /([+−-]?)([\d.,]+)(?:×10(\S+))?/.exec(said);
  const exponent = [...(power ?? '')].map((c) => (c === '⁻' ? '-' : '⁰¹²³⁴⁵⁶⁷⁸⁹'.indexOf(c))).join('');
  return Number(`${/[−-]/.test(sign) ? '-' : ''}${digits.replace(/,/g, '')}e${exponent || 0}`);
}

/** Whether a number of the page is `x`, with the digits that are shown. */
const isNear = (said, x) => Math.abs(parsed(said) - x) <= 0.0006;

const headOf = (page) =>
  page.evaluate(() => {
    const hash = new URLSearchParams(location.hash.slice(1));
    return { layer: Number(hash.get('layer')), kind: hash.get('kind'), head: Number(hash.get('head')) };
  });

/** The line of the command about a head. */
const ofHead = (all, { layer, kind, head }) =>
  all.find((one) => one.layer === layer && (kind === null || one.kind === kind) && one.head === head);

async function noScript(desk, page, where) {
  desk.expect(!(await page.evaluate(() => window.hacked)), `${where}: a name ran as a script`);
  desk.expect((await page.locator('main img').count()) === 0, `${where}: a name became a picture`);
}

async function lookEverywhere(desk, url, name) {
  for (const theme of ['dark', 'light']) {
    const page = await desk.open(url, { theme });
    for (const view of VIEWS) {
      await page.click(`#views [data-view=${view}]`);
      if (view === 'map') {
        const box = await page.locator('#body').boundingBox();
        await page.mouse.move(box.x + 45, box.y + Math.min(box.height - 5, 225));
      }
      await desk.png(page, `${name}-${view}-${theme}`);
      await desk.axe(page, `${name} ${view} ${theme}`);
    }
    await noScript(desk, page, `${name} ${theme}`);
    await page.context().close();
  }
  const page = await desk.open(url, { width: 400, height: 700 });
  for (const view of VIEWS) {
    await page.click(`#views [data-view=${view}]`);
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    desk.expect(over <= 0, `${name} ${view} is ${over} px too wide for 400 px`);
    await desk.png(page, `${name}-${view}-400`);
  }
  await page.context().close();
}

/** Bands lie over their positions, in the colors of the legend. */
async function compareBands(desk, page) {
  const wrong = await page.evaluate(() => {
    const { axes } = JSON.parse(document.getElementById('data').textContent);
    const { spans, labels } = Object.values(axes)[0];
    const wrong = [];
    const body = document.getElementById('body').getBoundingClientRect();
    const legend = [...document.querySelectorAll('#spans tbody tr')];
    if (legend.length !== spans.length) wrong.push(`${legend.length} lines of the legend for ${spans.length} spans`);
    for (const [side, from, extent] of [
      ['cols', 'left', 'width'],
      ['rows', 'top', 'height'],
    ]) {
      const bands = [...document.querySelectorAll(`#${side} .band`)];
      if (bands.length !== spans.length) wrong.push(`${bands.length} bands of ${side} for ${spans.length} spans`);
      const cell = body[extent] / labels.length;
      const boxes = bands.map((band) => band.getBoundingClientRect());
      spans.forEach(({ name, positions: [start, end] }, i) => {
        const [at, size] = [boxes[i][from] - body[from], boxes[i][extent]];
        if (Math.abs(at - start * cell) > 1 || Math.abs(size - (end - start) * cell) > 1)
          wrong.push(`the band of ${name} along ${side} is at ${at}, ${size} px long`);
        const color = (node) => getComputedStyle(node).backgroundColor;
        if (color(bands[i]) !== color(legend[i].querySelector('.swatch'))) wrong.push(`${name} has two colors`);
        if (!legend[i].innerText.includes(name)) wrong.push(`the legend lacks ${name}`);
        boxes.slice(0, i).forEach((other, j) => {
          const overlap = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]) > 0.5;
          if (overlap(other, boxes[i], 'left', 'right') && overlap(other, boxes[i], 'top', 'bottom'))
            wrong.push(`bands ${j} and ${i} of ${side} cover each other`);
        });
      });
    }
    return wrong;
  });
  wrong.forEach((what) => desk.fail(what));
}

/** The lines of the legend of spans: name, and the numbers beside it. */
const legendOf = (page) =>
  page.locator('#spans tbody tr').evaluateAll((all) =>
    all.map((tr) => ({
      name: tr.querySelector('bdi').innerText,
      numbers: [...tr.querySelectorAll('td')].map((cell) => cell.innerText),
    })),
  );

/** Compares a legend with what `regard stats --spans` says of the head. */
function compareLegend(desk, legend, spans) {
  for (const { name, numbers } of legend) {
    const { mean, last } = spans[name];
    desk.expect(isNear(numbers[0], mean), `mass of all queries on ${name}: ${numbers[0]}, regard stats says ${mean}`);
    desk.expect(isNear(numbers[1], last), `mass of the last query on ${name}: ${numbers[1]}, regard stats says ${last}`);
  }
}

/** The masses of every head are those of `regard stats --spans`, those of a row the sums of its weights. */
async function compareMasses(desk, page, masses) {
  for (let i = 0; i < masses.length; i++) {
    compareLegend(desk, await legendOf(page), ofHead(masses, await headOf(page)).spans);
    await page.click('#after');
  }
  const box = await page.locator('#body').boundingBox();
  await page.mouse.move(box.x + 5, Math.max(box.y + 5, 400)); // whatever row is there
  const sums = await page.evaluate(() => {
    const data = JSON.parse(document.getElementById('data').textContent);
    const hash = new URLSearchParams(location.hash.slice(1));
    const site = data.sites.find((s) => String(s.layer) === hash.get('layer') && String(s.head) === hash.get('head'));
    const n = data.axes[site.cols].labels.length;
    const row = Number(/query (\d+)/.exec(document.getElementById('map-says').innerText)[1]);
    const bytes = atob(site.weights);
    const weight = (key) => {
      const u = bytes.charCodeAt(2 * (row * n + key)) + 256 * bytes.charCodeAt(2 * (row * n + key) + 1);
      return u === 65535 ? 0 : (u / 65534) ** 2;
    };
    return data.axes[site.cols].spans.map(({ positions: [start, end] }) =>
      Array.from({ length: end - start }, (_, i) => weight(start + i)).reduce((a, b) => a + b, 0),
    );
  });
  const said = await page.locator('#spans tbody td:last-child').allInnerTexts();
  sums.forEach((sum, i) => desk.expect(Math.abs(parsed(said[i]) - sum) < 0.002, `mass of a row: ${said[i]}, its weights sum to ${sum}`));
}

const SCORES = { 'previous token': 'previous', 'duplicate token': 'duplicate', 'first token': 'sink' };

/** Labels are the scores of `regard heads` that are 0.5 or more. */
async function compareLabels(desk, page, heads) {
  await page.click('#views [data-view=heads]');
  const tags = await page.locator('#heads-tables .tag').allInnerTexts();
  desk.expect(tags.length > 0, 'no head has a label');
  await page.click('#views [data-view=map]');
  let count = 0;
  for (let i = 0; i < heads.length; i++) {
    const scores = ofHead(heads, await headOf(page));
    const [names, numbers] = [await page.locator('#labels dt').allInnerTexts(), await page.locator('#labels dd:not(.why)').allInnerTexts()];
    names.forEach((name, j) => {
      const score = scores[SCORES[name] ?? (/distance|same/.test(name) ? 'positional' : name)];
      desk.expect(score >= 0.5 && Number(numbers[j]) === Number(score.toFixed(2)), `${name} ${numbers[j]}: regard heads says ${score}`);
    });
    for (const name of ['previous', 'sink'])
      desk.expect(
        scores[name] < 0.5 || names.some((own) => SCORES[own] === name),
        `layer ${scores.layer} head ${scores.head} has ${name} ${scores[name]} and no such label`,
      );
    if (names.length > 0) {
      const why = await page.locator('#labels .why').first().innerText();
      desk.expect(/mean|part/.test(why), `a label is explained by "${why}"`);
      count++;
    }
    await page.click('#after');
  }
  desk.expect(count === tags.length, `${tags.length} labels in the overview, ${count} heads that have some`);
}

/** `files`: what `regard stats --spans` and `regard heads` say of the trace, as JSON. */
export async function checkSpans(desk, url, [masses, heads]) {
  const page = await desk.open(`${url}#view=map&layer=1&head=3`);
  await compareBands(desk, page);
  await compareMasses(desk, page, lines(masses));
  await compareLabels(desk, page, lines(heads));
  await page.click('#views [data-view=numbers]');
  await page.locator('#stat label', { hasText: 'mass on' }).first().click();
  desk.expect(/weight .* span/.test(await text(page, '#stat-says')), 'the mass is no statistic of the numbers');
  await page.context().close();
  await lookEverywhere(desk, url, 'spans');
}

/** What the canvas of the map shows, as one number. */
const picture = (page) =>
  page.evaluate(() => {
    const canvas = document.getElementById('heat');
    const bytes = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return bytes.reduce((hash, byte) => (hash * 31 + byte) % 4294967291, 7);
  });

const choose = (page, run) => page.locator('#run label', { hasText: run }).click();

/** The number that the map tells of the pair that is marked. */
const pairNumber = async (page) => parsed(/(?:weight|difference) (.*)/.exec(await text(page, '#map-says'))[1]);

/** `files`: what `regard diff` says of the two traces, as JSON. */
export async function checkDifference(desk, url, [diff]) {
  const changes = lines(diff);
  const page = await desk.open(url);
  desk.expect(await page.locator('#run [value=difference]').isChecked(), 'the page does not open with the difference');
  desk.expect((await page.locator('#rules li').count()) > 0, 'the rules of the intervention are not listed');
  const told = await page.locator('#heads-tables button').evaluateAll((all) => all.map((b) => b.getAttribute('aria-label')));
  for (const label of told) {
    const [, layer, head, change] = /layer (\d+), head (\d+), change (\S+)/.exec(label);
    const own = changes.find((one) => one.layer === Number(layer) && one.head === Number(head));
    desk.expect(isNear(change, own.js_mean), `${label}: regard diff says ${own.js_mean}`);
  }
  const order = await page.locator('#changed b').allInnerTexts();
  const best = Math.max(...changes.map((one) => one.js_mean));
  desk.expect(isNear(order[0], best), `the head that changed most has ${order[0]}, regard diff says ${best}`);
  desk.expect([...order].every((x, i) => i === 0 || parsed(x) <= parsed(order[i - 1])), `the order is ${order}`);
  await page.locator('#changed button').first().click();
  const pictures = [];
  const numbers = [];
  await page.focus('#body');
  for (let i = 0; i < 5; i++) await page.keyboard.press('ArrowDown');
  await page.keyboard.press('ArrowRight');
  for (const run of ['before', 'after', 'difference']) {
    await choose(page, run);
    desk.expect(page.url().includes(`run=${run}`), `${run} is not in the address`);
    pictures.push(await picture(page));
    numbers.push(await pairNumber(page));
  }
  desk.expect(new Set(pictures).size === 3, 'before, after and difference are not three pictures');
  desk.expect(Math.abs(numbers[1] - numbers[0] - numbers[2]) < 0.0021, `${numbers[1]} less ${numbers[0]} is not ${numbers[2]}`);
  await choose(page, 'after');
  await page.reload();
  desk.expect(await page.locator('#run [value=after]').isChecked(), 'reload forgets the run');
  await page.focus('#run [value=after]');
  await page.keyboard.press('ArrowRight');
  desk.expect(page.url().includes('run=difference'), 'the run cannot be chosen by keyboard');
  await page.context().close();
  await lookEverywhere(desk, url, 'difference');
}

/** How many pixels of the margins have the color of each span of the legend. */
const bandPixels = (page) =>
  page.evaluate(() => {
    const canvas = document.getElementById('marks');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return [...document.querySelectorAll('#spans .swatch')].map((swatch) => {
      const color = getComputedStyle(swatch).backgroundColor.match(/\d+/g).map(Number);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) if (color.every((c, j) => data[i + j] === c) && data[i + 3] === 255) count++;
      return count;
    });
  });

/** The mass of the pinned row is the sum of the weights that the server tells. */
async function pinnedMasses(desk, page, url) {
  const info = await (await fetch(new URL('info.json?site=0', url))).json();
  const row = Math.floor(info.q_len / 2);
  await page.fill('#go-row', String(row));
  await page.fill('#go-key', '0');
  await page.click('#go button');
  await page.waitForFunction(() => /\d/.test(document.querySelector('#spans tbody td').innerText));
  const said = await page.locator('#spans tbody td').allInnerTexts();
  for (const [i, { name, positions }] of info.k_spans.entries()) {
    let sum = 0;
    for (let key = positions[0]; key < positions[1]; key++)
      sum += (await (await fetch(new URL(`weight/0/${row}/${key}`, url))).json()).weight;
    desk.expect(isNear(said[i], sum), `mass of row ${row} on ${name}: ${said[i]}, the weights sum to ${sum}`);
  }
}

/** `url` is of a server, or of a saved page; of the latter `files` is what `regard stats --spans` says of its head. */
export async function checkZoomSpans(desk, url, [masses]) {
  for (const theme of ['dark', 'light']) {
    const page = await desk.open(url, { theme });
    await settled(page);
    await page.waitForTimeout(300);
    const pixels = await bandPixels(page);
    desk.expect(pixels.length > 1 && pixels.every((count) => count >= 20), `bands have ${pixels} pixels`);
    if (!masses) await pinnedMasses(desk, page, url);
    else {
      compareLegend(desk, await legendOf(page), lines(masses)[0].spans);
      desk.expect(await page.locator('#labels dt').first().isVisible(), 'the head has no label');
    }
    await noScript(desk, page, `zoom ${theme}`);
    await desk.png(page, `${masses ? 'static' : 'zoom'}-spans-${theme}`);
    await desk.axe(page, `zoom with spans ${theme}`);
    await page.context().close();
  }
}
