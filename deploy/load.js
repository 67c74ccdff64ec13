// Requests to a running `regard serve`, for deploy/load. Answers are streamed: a status comes with the first token, so the time to the
// first byte is the time to the first token.
import http from "k6/http";
import { Counter, Trend } from "k6/metrics";

const { URL, KEY, MODEL, SECONDS, RATE, CLIENTS, TOKENS } = __ENV;
const firstToken = new Trend("first_token", true);
const perToken = new Trend("per_token", true);
const refusal = new Trend("refusal", true);
const done = new Counter("done");
const refused = new Counter("refused");
const failed = new Counter("failed");

const open = { executor: "constant-arrival-rate", rate: Math.round(RATE * 10), timeUnit: "10s", preAllocatedVUs: 50, maxVUs: 2000 };
const closed = { executor: "constant-vus", vus: Number(CLIENTS) };
export const options = {
  scenarios: { load: { ...(RATE ? open : closed), duration: `${SECONDS}s`, gracefulStop: "60s" } },
  summaryTrendStats: ["p(50)", "p(99)", "max"],
};

const words = "time river stone light winter garden letter music bread window forest engine".split(" ");

export default function () {
  const picked = Array.from({ length: 24 }, () => words[Math.floor(Math.random() * words.length)]);
  const body = { model: MODEL, prompt: `Tell a story about ${picked.join(", ")}:`, max_tokens: Number(TOKENS), stream: true };
  const headers = { "content-type": "application/json", ...(KEY ? { authorization: `Bearer ${KEY}` } : {}) };
  const answer = http.post(`${URL}/v1/completions`, JSON.stringify(body), { headers, timeout: "120s" });
  if (answer.status === 200) {
    const tokens = Math.max(1, answer.body.split("data: {").length - 2);
    done.add(1);
    firstToken.add(answer.timings.waiting);
    perToken.add(answer.timings.receiving / tokens);
  } else if (answer.status === 429) {
    refused.add(1);
    refusal.add(answer.timings.duration);
  } else {
    failed.add(1);
  }
}
