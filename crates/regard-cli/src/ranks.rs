//! The ranks that a command runs on: one process, or those of an MPI job.

use crate::args::MpiArgs;
use crate::status::Refused;
use anyhow::Result;
use regard_ranks::{Alone, Ranks};
use std::rc::Rc;

/// What is done on the ranks of the job that this process was started in, where `--mpi` asks for it, or else alone.
pub(crate) fn on_ranks(
    args: MpiArgs,
    work: impl FnOnce(Rc<dyn Ranks>) -> Result<()>,
) -> Result<()> {
    match regard_mpi::ranks_of_launcher() {
        _ if args.mpi => on_world(args.mpi_timeout, work),
        Some(count) if count > 1 => Err(Refused(format!(
            "this process is one of {count} that a launcher has started, and each would do the same work; add --mpi, or start one process"
        ))
        .into()),
        _ => work(Rc::new(Alone)),
    }
}

#[cfg(feature = "mpi")]
fn on_world(timeout: f64, work: impl FnOnce(Rc<dyn Ranks>) -> Result<()>) -> Result<()> {
    let timeout = std::time::Duration::try_from_secs_f64(timeout)
        .map_err(|e| Refused(format!("--mpi-timeout {timeout}: {e}")))?;
    let world = regard_mpi::World::join(timeout).map_err(|error| match error.is_refusal() {
        true => Refused(error.to_string()).into(),
        false => anyhow::Error::from(error),
    })?;
    if let Some(warning) = world.binding_warning() {
        crate::say::say(format_args!("warning: {warning}"));
    }
    let world = Rc::new(world);
    work(world.clone()).inspect_err(|error| {
        // The others would wait for this rank.
        let (rank, count) = (world.rank(), world.count());
        crate::say::error(format_args!("error (rank {rank} of {count}): {}", crate::chain(error)));
        world.abort(crate::status::of(error).into())
    })
}

#[cfg(not(feature = "mpi"))]
fn on_world(_: f64, _: impl FnOnce(Rc<dyn Ranks>) -> Result<()>) -> Result<()> {
    let remedy = crate::args::remedy("mpi");
    Err(Refused(format!("--mpi: this program was built without it; {remedy}")).into())
}
