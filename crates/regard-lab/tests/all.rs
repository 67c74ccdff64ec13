//! Every claim holds, and with any of its faults in place it does not: an experiment that cannot fail proves nothing.

#![expect(clippy::unwrap_used, reason = "tests")]

use regard_lab::{EXPERIMENTS, Error, Setup, find, page};
use regard_scope::render::{Depth, svg, term};
use regard_scope::{Metrics, Style};
use std::collections::BTreeMap;

/// Runs an experiment as it is and with each of its faults, quickly.
fn tried(name: &str) {
    let experiment = find(name).unwrap();
    let report = experiment.run(&Setup::quick()).unwrap();
    assert!(report.holds(), "{name}: {:#?}", report.results);
    assert!(!experiment.faults.is_empty(), "{name} knows no fault");
    for fault in experiment.faults {
        let setup = Setup { fault: Some(fault.name.into()), ..Setup::quick() };
        let report = experiment.run(&setup).unwrap();
        assert!(!report.holds(), "{name}: {} goes unnoticed: {:#?}", fault.name, report.results);
    }
    let drawn = svg(&report.picture.scene(&Style::new(Metrics::pixels(800.0))));
    assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{name}: {drawn}");
    let words =
        term(&report.picture.scene(&Style::new(Metrics::terminal(80, false))), Depth::Ascii);
    assert!(words.lines().all(|line| line.chars().count() <= 80), "{name}: {words}");
    let page = page(experiment, &Setup::quick(), &report);
    assert!(page.contains("It holds.") && page.contains("<svg"), "{name}: {page}");
}

#[test]
fn scaling() {
    tried("scaling");
}

#[test]
fn order() {
    tried("order");
}

#[test]
fn cost() {
    tried("cost");
}

#[test]
fn geometry() {
    tried("geometry");
}

#[test]
fn additive() {
    tried("additive");
}

#[test]
fn symmetry() {
    tried("symmetry");
}

#[test]
fn heads() {
    tried("heads");
}

#[test]
fn distance() {
    tried("distance");
}

#[test]
fn tiled() {
    tried("tiled");
}

#[test]
fn sparse() {
    tried("sparse");
}

#[test]
fn learning() {
    tried("learning");
}

#[test]
fn there_is_one_experiment_for_each_claim_and_a_test_for_each() {
    let own = include_str!("all.rs");
    for (i, experiment) in EXPERIMENTS.iter().enumerate() {
        assert_eq!(experiment.id, format!("E{}", i + 1));
        assert!(own.contains(&format!("tried(\"{}\")", experiment.name)), "{}", experiment.name);
        assert!(!experiment.claim.ends_with('.') && experiment.claim.len() > 20);
        assert!(!experiment.next.is_empty(), "{}", experiment.name);
        for parameter in experiment.parameters {
            let (least, most) = parameter.range;
            let known = ["dim", "heads", "length", "samples", "steps"];
            assert!(known.contains(&parameter.name), "{} has no flag", parameter.name);
            assert!(
                (least..=most).contains(&parameter.full)
                    && (least..=most).contains(&parameter.quick)
            );
        }
    }
}

#[test]
fn the_same_seed_finds_the_same_and_another_does_not() {
    let scaling = find("E1").unwrap();
    let seeded = |seed| scaling.run(&Setup { seed, ..Setup::quick() }).unwrap();
    assert_eq!(seeded(3), seeded(3));
    assert_ne!(seeded(3), seeded(4));
}

#[test]
fn what_does_not_fit_is_refused_with_what_there_is() {
    let scaling = find("scaling").unwrap();
    let parameter = |name: &str, value| {
        let parameters = BTreeMap::from([(name.to_string(), value)]);
        scaling.run(&Setup { parameters, ..Setup::quick() }).unwrap_err()
    };
    assert!(matches!(parameter("heads", 2), Error::Unknown { what: "parameter", .. }));
    assert_eq!(parameter("dim", 1).to_string(), "dim: 1 is outside 256 to 4096");
    let broken = Setup { fault: Some("leg".into()), ..Setup::quick() };
    let told = scaling.run(&broken).unwrap_err().to_string();
    assert_eq!(told, "fault: no \"leg\" here; there are wrong-scale");
    assert!(find("nothing").unwrap_err().to_string().contains("scaling, order"));
}
