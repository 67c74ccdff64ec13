//! Every target tests something: its own seeds are accepted, some of what is made of them is refused, and nothing panics.

use regard_hostile::hunt::{Until, hunt, seeds};
use regard_hostile::targets::TARGETS;

#[test]
fn seeds_are_accepted() {
    for target in TARGETS {
        let all = seeds(&target).expect("a folder of seeds");
        for (i, seed) in all.iter().enumerate() {
            assert!(seed.len() <= 8192, "{} {i}: {} bytes", target.name, seed.len());
            assert!((target.call)(seed), "{} {i}: refused", target.name);
        }
    }
}

#[test]
fn a_short_hunt_finds_nothing_and_the_same_again() {
    for target in TARGETS {
        let found = hunt(&target, Until::Inputs(300), 7).expect("seeds");
        assert_eq!(found.wrong(), None, "{}: {:?}", target.name, found.failures);
        let again = hunt(&target, Until::Inputs(300), 7).expect("seeds");
        assert_eq!(
            (found.accepted, found.refused),
            (again.accepted, again.refused),
            "{}",
            target.name
        );
    }
}
