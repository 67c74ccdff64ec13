//! The case table on every instruction set of this machine, in parts that run in parallel.
//!
//! With `REGARD_REQUIRE_ISAS=avx2,avx512`, a run fails unless it covers these.

use regard::Isa;
use regard_testkit::{AttentionKind, Case, Dtype, Report, check};

/// Parts of the table. Part `i` takes every `PARTS`-th row, so that each part covers all kinds of rows.
const PARTS: usize = 4;

/// The rows of the engine; those of linear attention are tested where it is, in `regard-approx`.
fn cases() -> Vec<Case> {
    let of_engine = |case: &Case| {
        !matches!(case.attention, AttentionKind::Linear(_) | AttentionKind::Delta { .. })
    };
    regard_testkit::cases().into_iter().filter(of_engine).collect()
}

fn run(rows: impl Iterator<Item = Case>) -> Report {
    let rows: Vec<Case> = rows.collect();
    let report = check(&rows, &mut |_, _| {});
    assert!(report.is_green(), "{report}");
    report
}

fn part(i: usize) -> Report {
    let usual = |c: &Case| c.dtype == Dtype::F32 && c.precision.is_none();
    run(cases().into_iter().filter(usual).skip(i).step_by(PARTS))
}

#[test]
fn the_first_part_of_the_table_agrees_with_the_definition() {
    println!("{}", part(0));
}

#[test]
fn the_second_part_of_the_table_agrees_with_the_definition() {
    println!("{}", part(1));
}

#[test]
fn the_third_part_of_the_table_agrees_with_the_definition() {
    println!("{}", part(2));
}

#[test]
fn the_fourth_part_of_the_table_agrees_with_the_definition() {
    println!("{}", part(3));
}

fn of(dtype: Dtype) -> Report {
    run(cases().into_iter().filter(|c| c.dtype == dtype))
}

#[test]
fn the_table_in_double_precision_agrees_with_the_definition() {
    println!("{}", of(Dtype::F64));
}

#[test]
fn the_table_in_f16_agrees_with_the_definition() {
    println!("{}", of(Dtype::F16));
}

#[test]
fn the_table_in_bf16_agrees_with_the_definition() {
    println!("{}", of(Dtype::Bf16));
}

#[test]
fn the_table_in_other_precisions_agrees_with_the_definition() {
    println!("{}", run(cases().into_iter().filter(|c| c.precision.is_some())));
}

#[test]
fn the_required_instruction_sets_are_covered() {
    let covered: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    println!("instruction sets covered: {}", covered.join(", "));
    let required = std::env::var("REGARD_REQUIRE_ISAS").unwrap_or_default();
    for isa in required.split(',').map(str::trim).filter(|isa| !isa.is_empty()) {
        assert!(covered.contains(&isa), "{isa} is required, but only {covered:?} were covered");
    }
}
