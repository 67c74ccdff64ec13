//! For how many threads plans have work. Schedules depend on sizes alone, so the table is the same on every machine.

use regard::{Error, Machine, Mask, Plan, Problem, Shape};
use std::fmt::Write;
use std::{fs, path::Path};

const THREADS: [usize; 5] = [8, 16, 32, 64, 128];

/// Batch, query and key heads, queries, keys, features.
const CASES: [([usize; 6], &str); 17] = [
    ([1, 8, 8, 512, 512, 64], "full"),
    ([1, 8, 8, 512, 512, 64], "causal"),
    ([1, 8, 8, 2048, 2048, 64], "full"),
    ([1, 8, 8, 2048, 2048, 64], "causal"),
    ([1, 8, 8, 8192, 8192, 64], "causal"),
    ([1, 8, 8, 8192, 8192, 64], "window 512"),
    ([1, 32, 8, 2048, 2048, 128], "causal"),
    ([1, 1, 1, 16384, 16384, 64], "causal"),
    ([64, 12, 12, 128, 128, 64], "full"),
    ([1, 32, 8, 1, 1024, 128], "causal"),
    ([1, 32, 8, 1, 8192, 128], "causal"),
    ([1, 32, 8, 1, 32768, 128], "causal"),
    ([8, 32, 8, 1, 8192, 128], "causal"),
    ([64, 32, 8, 1, 8192, 128], "causal"),
    ([1, 32, 8, 16, 8192, 128], "causal"),
    ([1, 9, 3, 1, 8192, 64], "causal"),
    ([1, 128, 1, 1, 8192, 576], "causal"),
];

fn plan(
    [batch, heads, kv, q_len, k_len, dim]: [usize; 6],
    mask: &str,
) -> Result<Plan<'static, f32>, Error> {
    let mask = match mask {
        "full" => Mask::full(),
        "causal" => Mask::causal(),
        _ => Mask::causal().window(512),
    };
    let shape = |heads, len| Shape { batch, heads, len, dim };
    let (q, k) = (shape(heads, q_len), shape(kv, k_len));
    Plan::new(Problem::of_shapes(q, k, k).mask(mask), Machine::detect())
}

#[test]
fn there_is_work_for_at_most_all_threads_and_more_threads_take_no_longer() {
    for (sizes, mask) in CASES {
        let plan = plan(sizes, mask).unwrap();
        assert_eq!(plan.parallelism(0), 1.0);
        assert_eq!(plan.parallelism(1), 1.0);
        let mut last = 1.0;
        for threads in THREADS {
            let found = plan.parallelism(threads);
            assert!(found <= threads as f64, "{plan}: {found} of {threads}");
            // Tasks that are claimed in order may fall a little worse on more threads.
            assert!(found >= 0.9 * last, "{plan}: {found} of {threads}, {last} of fewer");
            last = found;
        }
    }
}

/// Eight tasks of the same size: of nine threads, one has none.
#[test]
fn parallelism_counts_tasks() {
    let eight = plan([1, 8, 8, 1, 1024, 64], "full").unwrap();
    for (threads, expected) in [(2, 2.0), (3, 8.0 / 3.0), (8, 8.0), (9, 8.0), (1000, 8.0)] {
        assert_eq!(eight.parallelism(threads), expected, "{threads} threads");
    }
    let small = plan([1, 8, 8, 1, 16, 64], "full").unwrap();
    assert_eq!(small.parallelism(64), 1.0, "too small for a second thread");
    let large = plan([1 << 20, 8, 8, 1 << 20, 1 << 20, 64], "causal").unwrap();
    assert_eq!(large.parallelism(64), 64.0, "not simulated");
    for sizes in [[0, 1, 1, 1, 1, usize::MAX], [1, 1, 1, 0, 0, usize::MAX]] {
        let empty = plan(sizes, "full").unwrap();
        assert_eq!(empty.parallelism(64), 1.0);
        assert!(format!("{empty:#}").contains("0 visible of 0"));
    }
}

/// `REGARD_UPDATE_LINES=1` writes the table.
#[test]
fn the_page_has_the_parallelism_of_plans() {
    let mut table = String::from("\n\n| queries | keys | batch x heads | d | mask |");
    THREADS.iter().for_each(|threads| write!(table, " {threads} |").unwrap());
    table += "\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for (sizes, mask) in CASES {
        let [batch, heads, kv, q_len, k_len, dim] = sizes;
        write!(table, "| {q_len} | {k_len} | {batch} x {heads}/{kv} | {dim} | {mask} |").unwrap();
        let plan = plan(sizes, mask).unwrap();
        THREADS.iter().for_each(|n| write!(table, " {:.1} |", plan.parallelism(*n)).unwrap());
        table += "\n";
    }
    table += "\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/speed.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once("<!-- parallelism -->").unwrap();
    let (found, after) = rest.split_once("<!-- end -->").unwrap();
    if std::env::var_os("REGARD_UPDATE_LINES").is_some() {
        let page = [before, "<!-- parallelism -->", &table, "<!-- end -->", after].concat();
        fs::write(&path, page).unwrap();
    } else {
        assert_eq!(found, table, "REGARD_UPDATE_LINES=1 writes the table of docs/speed.md");
    }
}
