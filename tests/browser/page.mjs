// Uses the gateway's page in a real browser, as somebody at a keyboard does.
//
//   node page.mjs URL FOLDER
//
// Whoever starts it kills a worker of stage 1 when this says `shown`, and brings another one when
// it says `gone`; each is told by a line of JSON on standard input, `{"at": milliseconds}`.
// Screenshots go to FOLDER. CHROMIUM names another browser than the one of package.json.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { createInterface } from "node:readline";

import packed from "@sparticuz/chromium";
import { chromium } from "playwright-core";

const QUESTION = "What is the capital of Japan?";
const MARKUP = "<b>bold</b><img src=x onerror=\"document.title='hurt'\">";

/** The rules of WCAG 2.1 A and AA, and what is good practice beside them. */
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"];

/** Without them the browser asks for servers of its maker. */
const ALONE = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];

const [url, folder] = process.argv.slice(2);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Tells whoever started this what was seen. */
function say(what) {
  process.stdout.write(`${JSON.stringify(what)}\n`);
}

/** Waits for the answer to that. */
async function told() {
  const { value, done } = await lines.next();
  assert(!done, "standard input has ended");
  return JSON.parse(value);
}

/** Checks the page as it is by the rules, and that it needs no scrolling to the side. */
async function check(page, name) {
  const broken = await page.evaluate(async (rules) => {
    const { violations } = await globalThis.axe.run(document, { runOnly: rules });
    return violations.map(({ id, nodes }) => ({ id, where: nodes.map(({ target, any }) =>
      [String(target), ...any.map(({ message }) => message)].join(": ")) }));
  }, RULES);
  assert.deepEqual(broken, [], `${name}: ${JSON.stringify(broken, null, 2)}`);
  const [needs, has] = await page.evaluate(() =>
    [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
  assert(needs <= has, `${name}: ${needs} pixels on a screen of ${has}`);
  await page.screenshot({ path: path.join(folder, `${name}.png`), fullPage: true });
}

async function fleetIsShown(page) {
  await page.locator("#connection[data-state=live]").waitFor();
  await page.locator(".badge[data-looks=good]").waitFor();
  assert.equal(await page.locator(".stages li").count(), 2);
  const workers = page.getByRole("table", { name: "Workers" });
  await workers.locator("tbody tr").nth(1).waitFor();
  for (const stage of [0, 1]) {
    const row = workers.locator("tbody tr").nth(stage);
    assert.equal(await row.locator("td[data-label=Stage]").innerText(), String(stage));
    assert.equal(await row.locator("td[data-label=State]").innerText(), "ready");
  }
  await page.getByRole("table", { name: "Coordinators" }).locator("tbody tr").waitFor();
}

/** Sends a message by the keyboard alone and returns the turn of the answer. */
async function ask(page, text) {
  const n_turns = await page.locator(".turn.theirs").count();
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
  const turn = page.locator(".turn.theirs").nth(n_turns);
  await turn.and(page.locator(":not([aria-busy])")).waitFor();
  return turn;
}

async function chatAnswers(page) {
  // From the top of the page, the first key leads to a way past the fleet.
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "chat-text");
  await page.evaluate(() => {
    globalThis.lengths = new Set();
    const note = () => globalThis.lengths.add(
      document.querySelector(".turn.theirs .words")?.textContent.length ?? 0);
    new MutationObserver(note).observe(document.getElementById("turns"),
      { subtree: true, childList: true, characterData: true });
  });
  const turn = await ask(page, QUESTION);
  const words = await turn.locator(".words").textContent();
  assert.match(words, /Tokyo/);
  const n_lengths = await page.evaluate(() => globalThis.lengths.size);
  assert(n_lengths > 2, `the answer came in ${n_lengths} pieces`);
  const said = await page.locator("#said").textContent();
  assert(said.endsWith(words), `${said} is told to those who do not see`);

  // On demand: a step is a row, and the rows have all tokens.
  const summary = turn.locator("details.times > summary");
  await summary.focus();
  await page.keyboard.press("Enter");
  const rows = turn.locator("details.times tbody tr");
  await rows.first().waitFor();
  const steps = await rows.evaluateAll((all) => all.map((row) =>
    [...row.children].slice(1).map((cell) => Number(cell.textContent))));
  const used = Number((await turn.locator("p.quiet").innerText()).match(/^(\d+) tokens/)[1]);
  assert.equal(steps.reduce((sum, [tokens]) => sum + tokens, 0), used);
  for (const [, all, first, second, queues, hops] of steps) {
    assert(first > 0 && second > 0 && hops > 0, `${steps}`);
    assert(first + second + queues + hops <= all + 0.05, `${steps}`);
  }
}

async function markupIsText(page) {
  await page.locator("#chat-form summary").click();
  await page.locator("#max-tokens").fill("8");
  await page.locator("#chat-text").focus();
  await ask(page, MARKUP);
  assert.equal(await page.locator(".turn.mine .words").last().textContent(), MARKUP);
  assert.equal(await page.locator(".turns :is(b, img)").count(), 0);
  assert.equal(await page.title(), "Stagebus");
}

async function looksWellEverywhere(page) {
  await check(page, "light");
  await page.locator("#theme").selectOption("dark");
  await check(page, "dark");
  await page.locator("#theme").selectOption("system");
  await page.emulateMedia({ colorScheme: "dark" });
  const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.equal(ground, "rgb(14, 19, 26)", "without a choice the system's colours hold");
  await page.setViewportSize({ width: 360, height: 740 });
  await check(page, "phone-dark");
  await page.emulateMedia({ colorScheme: "light" });
  await check(page, "phone");
  await page.setViewportSize({ width: 1440, height: 900 });
}

/** As a gateway with keys does it; this one has none, so the stream's answer is made here. */
async function keyIsAskedFor(context) {
  const page = await context.newPage();
  const shown = [];
  await page.route("**/fleet/events", (route) => {
    const { authorization } = route.request().headers();
    shown.push(authorization);
    return authorization === "Bearer sk-right"
      ? route.continue()
      : route.fulfill({ status: 401, json: {} });
  });
  await page.goto(url);
  await page.locator("#key").fill("sk-wrong");
  await page.keyboard.press("Enter");
  await page.getByText("does not know this key").waitFor();
  await check(page, "key");
  // The field is ready for another one.
  await page.keyboard.type("sk-right");
  await page.keyboard.press("Enter");
  await page.locator("#connection[data-state=live]").waitFor();
  assert.deepEqual(shown, [undefined, "Bearer sk-wrong", "Bearer sk-right"]);
  await page.close();
}

async function deathAndReturnAreShown(page) {
  const rows = page.getByRole("table", { name: "Workers" }).locator("tbody tr");
  say({ seen: "shown" });
  const death = await told();
  await rows.filter({ hasText: "gone" }).waitFor();
  await page.locator(".problems").getByText("Stage 1 has nobody").waitFor();
  const gone_ms = Date.now() - death.at;
  await check(page, "gone");
  say({ seen: "gone" });
  const birth = await told();
  await rows.filter({ hasText: "ready" }).nth(1).waitFor();
  await page.locator(".badge[data-looks=good]").waitFor();
  const back_ms = Date.now() - birth.at;
  assert.match(await page.locator("#news").innerText(), /is served again[^]*is gone/);
  say({ seen: "back" });
  console.error(`a death is shown after ${gone_ms} ms, a return after ${back_ms} ms`);
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? await packed.executablePath(),
  args: ALONE,
});
try {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  // In this way the page's own policy does not keep it out.
  await context.addInitScript({ path: createRequire(import.meta.url).resolve("axe-core/axe.min.js") });
  const page = await context.newPage();
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) {
      complaints.push(message.text());
    }
  });
  await page.goto(url);
  await fleetIsShown(page);
  await chatAnswers(page);
  await markupIsText(page);
  await looksWellEverywhere(page);
  await keyIsAskedFor(context);
  await deathAndReturnAreShown(page);
  assert.deepEqual(complaints, [], "the console stays silent");
} finally {
  await browser.close();
}
process.exit();
