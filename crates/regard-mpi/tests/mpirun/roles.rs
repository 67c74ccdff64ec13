//! What each rank of a job does.

use regard_mpi::{World, ranks_of_launcher};
use regard_ranks::{Ranks, agree, any, broadcast, gather, gather_varied};
use std::process::{Command, exit};
use std::time::Duration;

/// For ranks that all come.
const LONG: Duration = Duration::from_secs(60);
/// For those that wait for one that does not.
const SHORT: Duration = Duration::from_secs(2);

pub(crate) fn play(role: &str) {
    match role {
        "calls" => calls(&join(LONG)),
        "long" => long(&join(LONG)),
        "misuse" => misuse(&join(LONG)),
        "unequal" => unequal(&join(LONG)),
        "bound" => bound(&join(LONG)),
        "stopped" => stopped(&join(SHORT)),
        "sleeping" => sleeping(&join(SHORT)),
        "no-neighbor" => no_neighbor(&join(SHORT)),
        "early" => early(&join(SHORT)),
        "panics" => panics(&join(LONG)),
        other => panic!("no role {other}"),
    }
}

fn join(deadline: Duration) -> World {
    World::join(deadline).expect("equal ranks")
}

/// Bytes that tell which rank they are of, for whom, and where they belong.
fn bytes(from: usize, to: usize, count: usize) -> Vec<u8> {
    let byte = |i: usize| {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ (from * 64 + to).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x.to_le_bytes()[7] ^ x.to_le_bytes()[0]
    };
    (0..count).map(byte).collect()
}

/// `count(from, to)` bytes go from each to each.
fn exchange(world: &World, count: impl Fn(usize, usize) -> usize) {
    let (rank, all) = (world.rank(), 0..world.count());
    let to: Vec<usize> = all.clone().map(|to| count(rank, to)).collect();
    let from: Vec<usize> = all.clone().map(|from| count(from, rank)).collect();
    let send: Vec<_> = all.clone().map(|to| bytes(rank, to, count(rank, to))).collect();
    let mut receive = vec![0; from.iter().sum()];
    world.exchange(&send.concat(), &to, &mut receive, &from).expect("an exchange");
    let expected: Vec<_> = all.map(|from| bytes(from, rank, count(from, rank))).collect();
    assert!(receive == expected.concat(), "other bytes came");
}

/// Each rank has `count(rank)` bytes.
fn collect(world: &World, count: impl Fn(usize) -> usize) {
    let (rank, all) = (world.rank(), 0..world.count());
    let counts: Vec<usize> = all.clone().map(&count).collect();
    let mut received = vec![0; counts.iter().sum()];
    world.gather(&bytes(rank, 0, count(rank)), &counts, &mut received).expect("a gather");
    let expected: Vec<_> = all.map(|rank| bytes(rank, 0, count(rank))).collect();
    assert!(received == expected.concat(), "other bytes came");
}

/// Each rank sends `count(rank)` bytes to the next.
fn shift(world: &World, count: impl Fn(usize) -> usize) {
    let (rank, ranks) = (world.rank(), world.count());
    let before = (rank + ranks - 1) % ranks;
    let (mut receive, mut computed) = (vec![0; count(before)], None);
    let send = bytes(rank, (rank + 1) % ranks, count(rank));
    let mut meanwhile = || computed = Some(std::thread::current().id());
    world.shift(&send, &mut receive, &mut meanwhile).expect("a shift");
    assert!(receive == bytes(before, rank, count(before)), "other bytes came");
    assert!(computed.is_some_and(|id| id != std::thread::current().id()), "on another thread");
}

fn calls(world: &World) {
    let (rank, ranks) = (world.rank(), world.count());
    assert_eq!(ranks_of_launcher(), Some(ranks));
    let joined = world.waited();
    exchange(world, |_, _| 1);
    exchange(world, |from, to| 3 * from + 5 * to);
    exchange(world, |from, to| usize::from(from == 0 && to + 1 == ranks) * 100_000);
    exchange(world, |_, _| 0);
    collect(world, |_| 7);
    collect(world, |rank| rank * 1000);
    collect(world, |rank| usize::from(rank == 0) * 70_001);
    collect(world, |_| 0);
    assert!(world.waited() > joined);
    shift(world, |_| 1);
    shift(world, |_| 300_000);
    shift(world, |rank| rank * 100);
    shift(world, |_| 0);
    let own = vec![rank; rank];
    let counts: Vec<usize> = (0..ranks).collect();
    let expected: Vec<usize> = (0..ranks).flat_map(|rank| vec![rank; rank]).collect();
    assert_eq!(gather(world, &own, &counts), Ok(expected));
    let texts = gather_varied(world, "x".repeat(rank).as_bytes()).expect("texts");
    assert!(texts.iter().enumerate().all(|(rank, text)| text.len() == rank));
    assert_eq!(broadcast(world, vec![b'0' + u8::from(rank > 0); 3]), Ok(b"000".to_vec()));
    assert_eq!(any(world, rank + 1 == ranks), Ok(true));
    assert_eq!(any(world, false), Ok(false));
}

/// A call transfers 64 MiB: these take several.
fn long(world: &World) {
    exchange(world, |from, to| (usize::from(from < to) << 25) + 1001 * (1 + from + 2 * to));
    collect(world, |rank| usize::from(rank == 1) * (70 << 20) + 3 * rank);
    // The ranks of a ring make different numbers of calls.
    shift(world, |rank| if rank == 1 { (64 << 20) + 5 } else { 11 });
    // Nothing is computed meanwhile: unless that thread starts late, which it does not again and again, some rank waits.
    let waits = |_| {
        let before = world.waited();
        shift(world, |_| 64 << 20);
        any(world, world.waited() > before).expect("all ranks")
    };
    assert!((0..20).any(waits), "20 transfers, and none took time");
    shift(world, |_| 2);
}

fn misuse(world: &World) {
    let rank = world.rank();
    let isa = if rank == 2 { "avx2" } else { "amx" };
    let told = agree(world, "the instruction set", isa).expect_err("two sets").to_string();
    assert!(told.contains("the instruction set is amx on rank 0 and avx2 on rank 2"), "{told}");
    let told = World::join(LONG).expect_err("it has joined").to_string();
    assert!(told.contains("MPI is initialized already"), "{told}");
    let told = world.gather(&[1], &[1, 1], &mut [0; 2]).expect_err("a part is missing").to_string();
    assert!(told.contains("`all` has 2 bytes, its 2 parts 2; there are 3 ranks"), "{told}");
    let told = world.gather(&[1], &[2; 3], &mut [0; 6]).expect_err("too short").to_string();
    assert!(told.contains("`mine` has 1 bytes, and `counts` says 2"), "{told}");
    let told = world.exchange(&[1], &[1; 3], &mut [0; 3], &[1; 3]).expect_err("short").to_string();
    assert!(told.contains("`send` has 1 bytes, its 3 parts 3"), "{told}");
    assert_eq!(any(world, true), Ok(true));
}

/// Each sends 3 bytes to the other, and expects 4 from it.
fn unequal(world: &World) {
    let (to, from) = if world.rank() == 0 { ([1, 3], [1, 4]) } else { ([3, 1], [4, 1]) };
    let error = world.exchange(&[0; 4], &to, &mut [0; 5], &from).expect_err("3 are not 4");
    println!("{error}");
    // For the other to say it as well, before the launcher ends it.
    std::thread::sleep(Duration::from_secs(1));
    exit(5);
}

fn bound(world: &World) {
    println!("processors: {}", std::thread::available_parallelism().expect("a number"));
    println!("{}", world.binding_warning().unwrap_or_default());
}

fn stopped(world: &World) {
    if world.rank() == 1 {
        let id = std::process::id().to_string();
        Command::new("kill").args(["-STOP", &id]).status().expect("kill");
    }
    let mut all = [9; 3];
    let error = world.gather(&[1], &[1; 3], &mut all).expect_err("one is missing");
    assert_eq!(all, [9; 3], "memory of a caller is not used by a call that is given up");
    println!("{error}");
    println!("again: {}", any(world, true).expect_err("the last was the last"));
    exit(3);
}

fn sleeping(world: &World) {
    if world.rank() == 1 {
        std::thread::sleep(LONG);
    }
    println!("{}", world.exchange(&[0; 2], &[1; 2], &mut [0; 2], &[1; 2]).expect_err("no other"));
    world.abort(7);
}

fn no_neighbor(world: &World) {
    if world.rank() == 1 {
        std::thread::sleep(LONG);
    }
    let (mut receive, mut computed) = (vec![9; 1 << 20], false);
    let done = world.shift(&vec![1; 1 << 20], &mut receive, &mut || computed = true);
    println!("{}", done.expect_err("no neighbor"));
    assert!(computed && receive.iter().all(|byte| *byte == 9));
    exit(3);
}

/// Rank 1 drops its world while the other is in a call: neither must wait for the other without end.
fn early(world: &World) {
    if world.rank() == 0 {
        println!("{}", any(world, true).expect_err("the other has left"));
    }
}

fn panics(world: &World) {
    assert!(world.rank() != 1, "a panic of rank 1");
    any(world, true).expect("the launcher ends this rank before its deadline");
}
