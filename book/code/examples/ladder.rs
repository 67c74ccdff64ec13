//! How much does each rung of the book's ladder save?
//!
//! `cargo run --release -p regard-book --example ladder [QUERIES [KEYS]] [causal] [RUNG ..]`
//!
//! One head of 64 features. All rungs run in turns, so that a busy moment of the machine hits them alike; look at the medians and what
//! they are relative to. The times of one run differ from those of another, by half on a shared machine, and ratios by less.
//!
//! Try next: `256 65536`, where keys and values do not fit in the second-level cache; `causal`, where half of the pairs is skipped;
//! `RUSTFLAGS="-C target-cpu=x86-64-v3"` in front, which lets the compiler use wider vectors for the rungs (the engine chooses by itself).

#![expect(clippy::print_stdout, reason = "a program")]

use rayon::{ThreadPool, ThreadPoolBuilder};
use regard::reference::{self, Outcome};
use regard::{Machine, Mask, Problem, View};
use regard_book::{Head, backward, definition, engine, lanes, online, threads, tiles};
use regard_testkit::Noise;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

const DIM: usize = 64;
/// Turns, at most and at least; between them `PATIENCE` decides.
const TURNS: usize = 11;
const LEAST: usize = 3;
const PATIENCE: Duration = Duration::from_secs(30);
/// Rows that are held against the definition in `f64`.
const JUDGED: usize = 64;

const NAMES: [&str; 8] =
    ["definition", "online", "tiles", "lanes", "threads", "engine", "plain", "recompute"];

type Run<'a> = Box<dyn Fn() -> Result<Vec<f32>, Box<dyn Error>> + 'a>;

/// What is timed.
struct Rung<'a> {
    name: &'static str,
    threads: usize,
    /// Which rung it is held against: its name and threads.
    before: Option<(&'static str, usize)>,
    /// Bytes beside inputs and outputs, by formula, where there is one.
    memory: Option<usize>,
    /// Gives a number or more for each query.
    run: Run<'a>,
    times: Vec<Duration>,
    /// The largest difference from the definition in `f64`.
    error: f64,
}

impl<'a> Rung<'a> {
    fn new(name: &'static str, run: impl Fn() -> Vec<f32> + 'a) -> Self {
        Self::fallible(name, 1, move || Ok(run()))
    }

    fn fallible(
        name: &'static str,
        threads: usize,
        run: impl Fn() -> Result<Vec<f32>, Box<dyn Error>> + 'a,
    ) -> Self {
        let (run, times) = (Box::new(run), Vec::new());
        Self { name, threads, before: None, memory: None, run, times, error: 0.0 }
    }

    fn after(self, name: &'static str, threads: usize) -> Self {
        Self { before: Some((name, threads)), ..self }
    }

    fn memory(self, bytes: usize) -> Self {
        Self { memory: Some(bytes), ..self }
    }

    fn median(&self) -> Duration {
        self.times[self.times.len() / 2]
    }
}

/// The rungs of forward.
fn forward<'a>(head: &'a Head<'a>, pools: &'a [ThreadPool]) -> Vec<Rung<'a>> {
    let (f32s, row) = (4, head.v_dim + 2);
    let of_lanes = f32s * lanes::LANES * (lanes::GROUPS * (head.dim + row) + lanes::KEYS);
    let of_tiles = f32s * (tiles::ROWS * row + tiles::KEYS);
    // As `Scratch` in crates/regard/src/kernel/forward/mod.rs has it: two groups of 64 rows, a tile, and room for another part.
    let of_engine = f32s * 64 * (2 * (head.dim + head.v_dim + 4) + head.v_dim + 64);
    let matrix = f32s * head.q_len() * head.k_len();
    let mut rungs = vec![
        Rung::new("definition", || definition::attend(head).out).memory(matrix),
        Rung::new("online", || online::attend(head).out).memory(f32s * row).after("definition", 1),
        Rung::new("tiles", || tiles::attend(head).out).memory(of_tiles).after("online", 1),
        Rung::new("lanes", || lanes::attend(head).out).memory(of_lanes).after("tiles", 1),
    ];
    for pool in pools {
        let (n, machine) = (pool.current_num_threads(), machine(pool));
        let run = || Ok(pool.install(|| threads::attend(head)).out);
        let before = if n == 1 { "lanes" } else { "threads" };
        rungs.push(Rung::fallible("threads", n, run).memory(n * of_lanes).after(before, 1));
        let run = move || Ok(engine::attend(head, machine)?.out);
        rungs.push(Rung::fallible("engine", n, run).memory(n * of_engine).after("threads", n));
    }
    rungs
}

/// The rungs of the way back, from the output of forward.
fn back<'a>(
    head: &'a Head<'a>,
    attended: &'a regard_book::AttentionOutput,
    d_out: &'a [f32],
    pools: &'a [ThreadPool],
) -> Vec<Rung<'a>> {
    let matrix = 4 * (head.q_len() + 1) * head.k_len();
    let plain = Rung::new("plain", || backward::plain(head, d_out).q);
    let recompute = Rung::new("recompute", || backward::recompute(head, attended, d_out).q);
    let mut rungs = vec![plain.memory(matrix), recompute.memory(0).after("plain", 1)];
    for pool in pools {
        let machine = machine(pool);
        let run = move || Ok(engine::backward(head, attended, d_out, machine)?.q);
        rungs.push(Rung::fallible("engine", machine.threads, run).after("recompute", 1));
    }
    rungs
}

fn machine(pool: &ThreadPool) -> Machine {
    Machine::detect().threads(pool.current_num_threads())
}

/// Runs all of them in turns. `exact` is what the last rows should be.
fn race(rungs: &mut [Rung<'_>], exact: &[f64]) -> Result<usize, Box<dyn Error>> {
    let start = Instant::now();
    let mut turns = 0;
    while turns < LEAST || turns < TURNS && start.elapsed() < PATIENCE {
        for rung in &mut *rungs {
            let start = Instant::now();
            let made = black_box((rung.run)()?);
            rung.times.push(start.elapsed());
            let pairs = made.iter().rev().zip(exact.iter().rev());
            rung.error = pairs.fold(0.0, |most, (x, y)| most.max((f64::from(*x) - y).abs()));
        }
        turns += 1;
    }
    rungs.iter_mut().for_each(|rung| rung.times.sort());
    Ok(turns)
}

/// The outputs and the gradients by the queries of the last rows, by definition: those of a row depend on no other row.
fn exact(head: &Head<'_>, d_out: &[f32]) -> Result<[Vec<f64>; 2], regard::Error> {
    let rows = head.q_len().min(JUDGED);
    let q = View::matrix(&head.q[head.q.len() - rows * DIM..], [rows, DIM])?;
    let [k, v] = [head.k, head.v].map(|x| View::matrix(x, [x.len() / DIM, DIM]));
    let (k, v) = (k?, v?);
    let mask = if head.causal { Mask::causal() } else { Mask::full() };
    let problem = Problem::new(&q, &k, &v).mask(mask);
    let out = reference::forward(&problem, (q, k, v)).out;
    let d_out = d_out[d_out.len() - rows * DIM..].iter().map(|x| f64::from(*x)).collect();
    let [lse, entropy, max_score] = [(); 3].map(|()| vec![0.0; rows]);
    let upstream = Outcome { out: d_out, lse, entropy, max_score };
    Ok([out, reference::backward(&problem, (q, k, v), &upstream).q])
}

fn table(rungs: &[Rung<'_>]) {
    println!("{:>43}times as fast as", "");
    println!(
        "rung       threads     median    fastest   the one before        {:<12}engine    memory    error",
        rungs[0].name
    );
    for rung in rungs {
        let time = |x: Duration| format!("{:.2} ms", x.as_secs_f64() * 1e3);
        let over = |other: &Rung<'_>| other.median().as_secs_f64() / rung.median().as_secs_f64();
        let named = |(name, threads): (&str, usize)| {
            rungs.iter().find(|r| (r.name, r.threads) == (name, threads))
        };
        let before = rung.before.and_then(named);
        let before =
            before.map(|b| format!("{:<15}{:>5.2}", format!("{}, {}", b.name, b.threads), over(b)));
        let engine = named(("engine", rung.threads)).map(|engine| format!("{:.2}", over(engine)));
        println!(
            "{:<11}{:>7}{:>11}{:>11}   {:<20}{:>12.2}{:>8}{:>10}{:>9.0e}",
            rung.name,
            rung.threads,
            time(rung.median()),
            time(rung.times[0]),
            before.unwrap_or_default(),
            over(&rungs[0]),
            engine.unwrap_or_default(),
            rung.memory.map(bytes).unwrap_or_default(),
            rung.error
        );
    }
}

fn bytes(n: usize) -> String {
    match n {
        0..10_000 => format!("{n} B"),
        10_000..10_000_000 => format!("{} KiB", n >> 10),
        _ => format!("{} MiB", n >> 20),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let sizes: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let names = words.iter().filter(|word| word.parse::<usize>().is_err() && *word != "causal");
    let names: Vec<&str> = names.map(String::as_str).collect();
    if let Some(unknown) = names.iter().find(|name| !NAMES.contains(name)) {
        return Err(format!("{unknown} is no rung; there are {}", NAMES.join(", ")).into());
    }
    let q_len = sizes.first().copied().unwrap_or(2048);
    let k_len = sizes.get(1).copied().unwrap_or(q_len);

    let mut noise = Noise::new(1);
    let [q, d_out] = [(); 2].map(|()| noise.normals(q_len * DIM));
    let [k, v] = [(); 2].map(|()| noise.normals(k_len * DIM));
    let causal = words.iter().any(|word| word == "causal");
    let head = Head { q: &q, k: &k, v: &v, dim: DIM, v_dim: DIM, causal };
    let all = Machine::detect().threads;
    let pools = [1, all].map(|n| ThreadPoolBuilder::new().num_threads(n).build());
    let pools = pools.into_iter().collect::<Result<Vec<ThreadPool>, _>>()?;
    let pools = if all > 1 { &pools[..] } else { &pools[..1] };

    let (exact, attended) = (exact(&head, &d_out)?, tiles::attend(&head));
    let mask = if causal { "causal" } else { "full" };
    println!("one head of {q_len} queries x {k_len} keys x {DIM} features, f32, {mask}");
    let races = [forward(&head, pools), back(&head, &attended, &d_out, pools)];
    for ((what, exact), mut rungs) in ["output", "gradients"].into_iter().zip(exact).zip(races) {
        rungs.retain(|rung| names.is_empty() || names.contains(&rung.name));
        if !rungs.is_empty() {
            let turns = race(&mut rungs, &exact)?;
            println!("\n{what}, {turns} turns");
            table(&rungs);
        }
    }
    Ok(())
}
