//! `regard check --serve`: what a server answers does not depend on its load, on the replica, or on how fast a client reads.

use crate::args::{CheckArgs, Format};
use crate::say;
use crate::status::Negative;
use anyhow::{Context, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use ureq::Agent;

/// Requests that are sent alone, and then at once.
const REQUESTS: usize = 64;
/// How long a server may refuse, or be silent.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long it may take to open its models.
const READY: Duration = Duration::from_secs(60);

pub(super) fn run(args: &CheckArgs, format: Format) -> Result<()> {
    let key = args.key_file.as_deref().map(first_key).transpose()?;
    let client = Client { key, agent: agent() };
    args.serve.iter().try_for_each(|url| client.wait_until_ready(url))?;
    let requests: Vec<Value> = (0..REQUESTS).map(|i| request(i, args.model.as_deref())).collect();
    let [first, ..] = args.serve.as_slice() else { bail!("--serve needs the address of a server") };
    let progress = say::bar(ProgressBar::new((REQUESTS * (1 + args.serve.len())) as u64));
    progress.set_style(ProgressStyle::with_template(
        "{wide_bar} {pos}/{len} answers [{elapsed}, {eta} left]",
    )?);
    let ask = |url: &str, number: usize| -> Result<Vec<Value>> {
        let found = client.ask(url, &requests[number], reading(number));
        progress.inc(1);
        found.with_context(|| format!("{url}, request {number}"))
    };
    let alone: Vec<Vec<Value>> = (0..REQUESTS).map(|i| ask(first, i)).collect::<Result<_>>()?;
    let mut differ = Vec::new();
    for url in &args.serve {
        let together: Vec<Result<Vec<Value>>> = thread::scope(|scope| {
            let ask = &ask;
            let start = |i| scope.spawn(move || ask(url, i));
            let asked: Vec<_> = (0..REQUESTS).map(start).collect();
            let panicked = |_| Err(anyhow!("{url}: a request panicked"));
            asked.into_iter().map(|one| one.join().unwrap_or_else(panicked)).collect()
        });
        for (i, (found, right)) in together.into_iter().zip(&alone).enumerate() {
            if found? != *right {
                differ.push((url.as_str(), i));
            }
        }
    }
    progress.finish_and_clear();
    let tokens: usize = alone.iter().map(|answer| tokens(answer)).sum();
    let mut out = std::io::stdout().lock();
    match format {
        Format::Text => {
            for (url, i) in &differ {
                writeln!(out, "{url}: request {i} is answered otherwise under load")?;
            }
            let servers = args.serve.len();
            let equal = REQUESTS * servers - differ.len();
            writeln!(
                out,
                "{REQUESTS} requests, {tokens} tokens: alone, and at once from {servers} servers; {equal} of {} \
                 answers have the same tokens and log-probabilities to the last bit",
                REQUESTS * servers
            )?;
        }
        Format::Json => {
            let differ: Vec<_> = differ.iter().map(|(url, i)| json!([url, i])).collect();
            let line = json!({
                "requests": REQUESTS, "tokens": tokens, "servers": args.serve, "differ": differ,
            });
            writeln!(out, "{line}")?;
        }
    }
    if differ.is_empty() {
        return Ok(());
    }
    let why = "answers depend on the load or the replica; do all servers have the same model, version and \
               processor (`regard --version`)?";
    Err(Negative(why.into()).into())
}

/// The first line of a file of keys.
fn first_key(path: &Path) -> Result<String> {
    let shown = || format!("--key-file {}", path.display());
    let text = std::fs::read_to_string(path).with_context(shown)?;
    let key = text.lines().map(str::trim).find(|line| !line.is_empty());
    Ok(key.with_context(|| format!("{}: no key in it", shown()))?.to_owned())
}

fn agent() -> Agent {
    let config = Agent::config_builder().http_status_as_error(false);
    config.timeout_global(Some(PATIENCE)).build().into()
}

/// Requests of every kind: short and long prompts with common beginnings, greedy and sampled, whole and streamed.
fn request(number: usize, model: Option<&str>) -> Value {
    const WORDS: [&str; 12] = [
        "time", "river", "stone", "light", "winter", "garden", "letter", "music", "bread",
        "window", "forest", "engine",
    ];
    let count = [2, 20, 60, 100, 5, 80, 1, 120][number % 8];
    let word = |at: usize| WORDS[(at * (1 + number % 3) + number / 32 * (at / 100)) % WORDS.len()];
    let prompt: Vec<&str> = (0..count).map(word).collect();
    let temperature = [0.0, 1.0, 0.7][number % 3];
    let mut request = json!({
        "prompt": prompt.join(" "), "max_tokens": 4 + number % 24, "seed": number, "logprobs": 2,
        "temperature": temperature, "stream": reading(number) != Reading::Whole,
        "frequency_penalty": if number.is_multiple_of(5) { 0.5 } else { 0.0 },
    });
    if let Some(model) = model {
        request["model"] = model.into();
    }
    request
}

/// How a client reads its answer.
#[derive(Clone, Copy, PartialEq)]
enum Reading {
    Whole,
    Stream,
    /// With pauses.
    Slowly,
}

fn reading(number: usize) -> Reading {
    [Reading::Whole, Reading::Stream, Reading::Whole, Reading::Slowly][number % 4]
}

/// Tokens of an answer.
fn tokens(answer: &[Value]) -> usize {
    let of_choice = |choice: &Value| choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
    answer.iter().flat_map(|choices| choices.as_array().into_iter().flatten()).map(of_choice).sum()
}

struct Client {
    key: Option<String>,
    agent: Agent,
}

impl Client {
    /// A server that has just been started opens its models first.
    fn wait_until_ready(&self, url: &str) -> Result<()> {
        let start = Instant::now();
        loop {
            let answer = self.agent.get(format!("{}/readyz", url.trim_end_matches('/'))).call();
            let status = answer.with_context(|| url.to_owned())?.status().as_u16();
            match status {
                200 => return Ok(()),
                503 if start.elapsed() < READY => thread::sleep(Duration::from_millis(100)),
                _ => {
                    bail!("{url}: it is not ready, /readyz answers {status}; is it `regard serve`?")
                }
            }
        }
    }

    /// The choices of an answer; of a stream, those of each piece. Asks again while the server is full.
    fn ask(&self, url: &str, request: &Value, reading: Reading) -> Result<Vec<Value>> {
        let (url, body) =
            (format!("{}/v1/completions", url.trim_end_matches('/')), request.to_string());
        let start = Instant::now();
        loop {
            let mut post = self.agent.post(&url).header("content-type", "application/json");
            if let Some(key) = &self.key {
                post = post.header("authorization", format!("Bearer {key}"));
            }
            let mut answer = post.send(&body)?;
            let status = answer.status().as_u16();
            if status == 200 {
                let lines = BufReader::new(answer.into_body().into_reader()).lines();
                return pieces(lines, reading);
            }
            let retry = answer.headers().get("retry-after").and_then(|text| text.to_str().ok());
            let retry = retry.and_then(|text| text.parse().ok()).unwrap_or(1);
            if status != 429 || start.elapsed() > PATIENCE {
                let why = answer.body_mut().read_to_string().unwrap_or_default();
                bail!("it answers {status}: {}", why.trim());
            }
            thread::sleep(Duration::from_secs(retry));
        }
    }
}

fn pieces(
    lines: impl Iterator<Item = std::io::Result<String>>,
    reading: Reading,
) -> Result<Vec<Value>> {
    let choices = |text: &str| -> Result<Value> {
        let mut answer: Value = serde_json::from_str(text).context("an answer that is not JSON")?;
        if answer["choices"].is_null() {
            bail!("an answer without choices: {text}");
        }
        Ok(answer["choices"].take())
    };
    if reading == Reading::Whole {
        return Ok(vec![choices(&lines.collect::<std::io::Result<String>>()?)?]);
    }
    let (mut found, mut ended) = (Vec::new(), false);
    for line in lines {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            ended = true;
            break;
        }
        found.push(choices(data)?);
        if reading == Reading::Slowly {
            thread::sleep(Duration::from_millis(20));
        }
    }
    if !ended {
        bail!("the answer ends before its end");
    }
    Ok(found)
}
