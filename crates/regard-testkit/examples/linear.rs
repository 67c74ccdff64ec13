//! Runs the rows of linear attention.

fn main() {
    let report = regard_testkit::check(&regard_testkit::linear::cases(), |_, _| {});
    print!("{report}");
}
