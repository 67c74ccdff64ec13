// Opens a page of the microscope in a real browser and tries what a reader would try.
//
//   npm install
//   node check.mjs trace  FILE.html [--png DIR]
//   node check.mjs spans  FILE.html [--png DIR] MASSES.json HEADS.json   of regard stats --spans, regard heads
//   node check.mjs difference FILE.html [--png DIR] DIFF.json            of regard diff
//   node check.mjs static FILE.html [--png DIR]
//   node check.mjs zoom   URL       [--png DIR]
//   node check.mjs zoom-spans URL-or-FILE [--png DIR] [MASSES.json]      of regard stats --spans, of the head of a file
//
// Prints one JSON object; exits with 1 if a finding is a failure. Times are told, never judged:
// they belong to the machine. The browser is $CHROMIUM, else `chromium` on the path.
import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync, statSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';
import { checkDifference, checkSpans, checkZoomSpans } from './check-runs.mjs';
import { checkTrace } from './check-trace.mjs';
import { checkStatic, checkZoom } from './check-zoom.mjs';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

/** What a check works with: pages that may only talk to `home`, and a place for its findings. */
class Desk {
  constructor(browser, home, pngs) {
    Object.assign(this, { browser, home, pngs, failures: [], told: {} });
  }

  fail(what) {
    this.failures.push(what);
  }

  expect(truth, what) {
    if (!truth) this.fail(what);
  }

  /** A fresh page; `theme` is what the reader's system prefers. */
  async open(url, { theme = 'dark', width = 1000, height = 700 } = {}) {
    const context = await this.browser.newContext({ viewport: { width, height }, colorScheme: theme });
    await context.route('**/*', (route) => {
      const asked = route.request().url();
      if (asked.startsWith(this.home) || asked.startsWith('data:') || asked.startsWith('blob:'))
        return route.continue();
      this.fail(`request to ${asked}`);
      return route.abort();
    });
    const page = await context.newPage();
    page.on('console', (message) => {
      if (message.type() === 'error') this.fail(`console: ${message.text()}`);
    });
    page.on('pageerror', (error) => this.fail(`error: ${error.message}`));
    await page.goto(url);
    return page;
  }

  /** Serious and critical findings of axe-core are failures; `where` says which view was looked at. */
  async axe(page, where) {
    await page.evaluate(AXE); // evaluated, not inserted: the page's content policy stays in force
    const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
    for (const { id, impact, nodes } of violations) {
      const text = `axe ${where}: ${impact} ${id}: ${nodes
        .map((n) => n.target.join(' '))
        .slice(0, 3)
        .join(', ')}`;
      if (impact === 'serious' || impact === 'critical') this.fail(text);
      else (this.told.axe_minor ||= []).push(text);
    }
  }

  async png(page, name) {
    if (this.pngs) await page.screenshot({ path: join(this.pngs, `${name}.png`) });
  }
}

function browserPath() {
  return process.env.CHROMIUM || execFileSync('which', ['chromium'], { encoding: 'utf8' }).trim();
}

async function main([what, target, ...rest]) {
  const checks = {
    trace: checkTrace,
    spans: checkSpans,
    difference: checkDifference,
    static: checkStatic,
    zoom: checkZoom,
    'zoom-spans': checkZoomSpans,
  };
  if (!checks[what] || !target)
    throw new Error('usage: node check.mjs trace|spans|difference|static|zoom|zoom-spans FILE-or-URL [--png DIR] [FILE..]');
  const pngs = rest[0] === '--png' ? resolve(rest[1]) : null;
  const files = pngs ? rest.slice(2) : rest;
  if (pngs) mkdirSync(pngs, { recursive: true });
  const file = !target.startsWith('http:');
  const url = file ? pathToFileURL(resolve(target)).href : target;
  // Chromium's own sandbox needs rights that containers and CI seldom have; the page is ours.
  const browser = await chromium.launch({ executablePath: browserPath(), args: ['--no-sandbox'] });
  const desk = new Desk(browser, file ? 'file:' : `${new URL(url).origin}/`, pngs);
  if (file) desk.told.bytes = statSync(resolve(target)).size;
  try {
    await checks[what](desk, url, files);
  } catch (error) {
    desk.fail(`check stopped: ${error.message}`);
  } finally {
    await browser.close();
  }
  console.log(JSON.stringify({ what, ok: desk.failures.length === 0, failures: desk.failures, ...desk.told }, null, 2));
  process.exitCode = desk.failures.length === 0 ? 0 : 1;
}

await main(process.argv.slice(2));
