//! Runs the whole table and prints its report.
#![expect(clippy::print_stdout, reason = "the report is what it is for")]
fn main() {
    let cases = regard_testkit::cases();
    let report = regard_testkit::check(&cases, |_, _| {});
    println!("{report}");
}
