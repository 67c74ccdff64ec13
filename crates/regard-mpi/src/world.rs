//! The ranks of an MPI job.

use crate::launcher::{binding, processors_of_node};
use crate::request::{Memory, PIECE, cut, int, meaning, test};
use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, processor_name};
use mpi::ffi;
use regard::Machine;
use regard_ranks::{Ranks, RanksError, agree, gather_varied};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::raw::c_int;
use std::thread;
use std::time::{Duration, Instant};

/// The ranks of an MPI job. One for each process, and neither `Send` nor `Sync`: MPI is called by the thread that joined alone.
///
/// A call that fails, or does not end within the deadline, is the last one: ranks may be in different calls then, so every later call
/// fails at once. The process should end, by [`abort`](Self::abort) or with a code that is not 0; the launcher then ends the others.
///
/// Bytes are copied to memory of the communicator and back, since a call that is given up may still use its memory: up to 128 MiB,
/// which are used again, and are leaked by a call that is given up.
pub struct World {
    /// Until it is finalized.
    universe: Option<Universe>,
    comm: ffi::MPI_Comm,
    rank: usize,
    count: usize,
    /// Ranks of this machine.
    on_node: usize,
    deadline: Duration,
    here: PhantomData<*const ()>,
    failed: Cell<bool>,
    shifts: Cell<usize>,
    memory: Cell<Memory>,
    waited: Cell<Duration>,
}

impl World {
    /// Initializes MPI (`MPI_THREAD_FUNNELED`) and duplicates the communicator of all ranks. All must have the same version of Regard and
    /// the same instruction set, since results differ between those.
    ///
    /// `deadline` is how long a rank waits for the others in one transfer of at most 64 MiB. It does not hold for `MPI_Init` itself, in
    /// which ranks wait for each other as the launcher has it.
    pub fn join(deadline: Duration) -> Result<Self, RanksError> {
        let early =
            |why: &str| RanksError { rank: 0, call: "MPI_Init_thread".into(), why: why.into() };
        let (universe, threading) = initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| early("MPI is initialized already; a process joins once"))?;
        let mut world = Self {
            universe: Some(universe),
            // SAFETY: a constant of the library.
            comm: unsafe { ffi::RSMPI_COMM_WORLD },
            rank: 0,
            count: 1,
            on_node: 1,
            deadline,
            here: PhantomData,
            failed: Cell::default(),
            shifts: Cell::default(),
            memory: Cell::default(),
            waited: Cell::default(),
        };
        if threading < Threading::Funneled {
            return Err(early("this library cannot be used by a process with several threads"));
        }
        world.duplicate()?;
        agree(&world, "the version of Regard", env!("CARGO_PKG_VERSION"))?;
        agree(&world, "the instruction set", Machine::detect().isa.name())?;
        let name = processor_name().unwrap_or_default();
        let names = gather_varied(&world, name.as_bytes())?;
        world.on_node = names.iter().filter(|other| **other == name.as_bytes()).count();
        Ok(world)
    }

    /// A communicator of our own, whose errors are returned, and our place in it.
    fn duplicate(&mut self) -> Result<(), RanksError> {
        let (mut rank, mut count): (c_int, c_int) = (0, 0);
        // SAFETY: MPI was initialized by this thread (`join`), and the communicators are constants of the library. Errors that belong to
        // no communicator are those of the first (MPI 3) or the second (MPI 4).
        unsafe {
            for comm in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
                let code = ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN);
                self.check("MPI_Comm_set_errhandler", code)?;
            }
            self.check("MPI_Comm_rank", ffi::MPI_Comm_rank(self.comm, &raw mut rank))?;
            self.check("MPI_Comm_size", ffi::MPI_Comm_size(self.comm, &raw mut count))?;
        }
        self.rank = usize::try_from(rank).expect("ranks are from 0");
        self.count = usize::try_from(count).expect("there are ranks");
        let comm = self.comm;
        // In a `Vec`, for `complete` to leak.
        let memory = vec![comm];
        let (memory, _) = self.complete("MPI_Comm_idup", memory, |memory, [request]| {
            // SAFETY: `complete` has the memory of the new communicator until the request ends.
            unsafe { ffi::MPI_Comm_idup(comm, memory.as_mut_ptr(), request) }
        })?;
        self.comm = memory[0];
        // SAFETY: the communicator was made above, by all ranks.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(self.comm, ffi::RSMPI_ERRORS_RETURN) };
        self.check("MPI_Comm_set_errhandler", code)
    }

    /// For a rank that may use fewer processors than its share of the machine: what to do. `mpirun` of Open MPI binds each of one or two
    /// ranks to one core, and threads follow.
    #[must_use]
    pub fn binding_warning(&self) -> Option<String> {
        let own = thread::available_parallelism().ok()?.get();
        binding(self.rank, own, processors_of_node()?, self.on_node)
    }

    /// Ends all ranks, with this exit code where the launcher keeps it. What a rank does that cannot go on: the others end at once,
    /// not at their deadline.
    pub fn abort(&self, code: i32) -> ! {
        // SAFETY: MPI is initialized while there is a `World`, and this thread has joined.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        std::process::exit(code)
    }

    fn error(&self, call: &str, why: String) -> RanksError {
        RanksError { rank: self.rank, call: call.into(), why }
    }

    /// Whether MPI may be called.
    fn enter(&self, call: &str) -> Result<(), RanksError> {
        if self.failed.get() {
            let why =
                "an earlier call has failed, and ranks may be in different calls; end this process";
            return Err(self.error(call, why.into()));
        }
        Ok(())
    }

    /// Errors are told in the words of the library.
    fn check(&self, call: &str, code: c_int) -> Result<(), RanksError> {
        if code == 0 {
            return Ok(());
        }
        self.failed.set(true);
        // SAFETY: MPI is initialized while there is a `World`, and this thread has joined.
        Err(self.error(call, unsafe { meaning(code) }))
    }

    /// Starts requests that use `memory`, waits for them, and returns the memory and the status of the last. If they fail or do not end
    /// within the deadline, the memory is leaked, since MPI may still use it.
    fn complete<M, const N: usize>(
        &self,
        call: &str,
        mut memory: M,
        start: impl FnOnce(&mut M, &mut [ffi::MPI_Request; N]) -> c_int,
    ) -> Result<(M, ffi::MPI_Status), RanksError> {
        // SAFETY: a constant of the library.
        let mut requests = [unsafe { ffi::RSMPI_REQUEST_NULL }; N];
        let code = start(&mut memory, &mut requests);
        match self.check(call, code).and_then(|()| self.wait(call, &mut requests)) {
            Ok(status) => Ok((memory, status)),
            Err(error) => {
                std::mem::forget(memory);
                Err(error)
            }
        }
    }

    /// Polls, since Open MPI progresses only inside calls, and sleeps in between, so that ranks can share processors.
    fn wait(
        &self,
        call: &str,
        requests: &mut [ffi::MPI_Request],
    ) -> Result<ffi::MPI_Status, RanksError> {
        let (start, mut pause) = (Instant::now(), Duration::from_micros(50));
        let mut ended = 0;
        loop {
            // SAFETY: this thread has passed `enter` or joins, and `complete` has the memory of the request.
            match unsafe { test(&mut requests[ended]) } {
                Ok(Some(status)) if ended + 1 == requests.len() => return Ok(status),
                Ok(Some(_)) => {
                    ended += 1;
                    continue;
                }
                Ok(None) => {}
                Err(code) => self.check(call, code)?,
            }
            if start.elapsed() > self.deadline {
                self.failed.set(true);
                let why = format!(
                    "the other ranks have not come in {:.1} s, the deadline: one has ended, is stopped, cannot be reached or computes for \
                     longer; look at what the others say, or give them a longer deadline",
                    start.elapsed().as_secs_f64()
                );
                return Err(self.error(call, why));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_micros(200));
        }
    }

    /// Of each part, how many bytes one call transfers.
    fn step(&self) -> usize {
        (PIECE / self.count).max(1)
    }

    /// What a buffer and the counts of its parts must be.
    fn fit(
        &self,
        call: &str,
        name: &str,
        length: usize,
        counts: &[usize],
    ) -> Result<(), RanksError> {
        let sum: usize = counts.iter().sum();
        if counts.len() == self.count && sum == length {
            return Ok(());
        }
        let why = format!(
            "`{name}` has {length} bytes, its {} parts {sum}; there are {} ranks, and a part for each",
            counts.len(),
            self.count
        );
        Err(self.error(call, why))
    }

    /// One transfer: sends these parts of some bytes, and fills these of others.
    fn transfer<const N: usize>(
        &self,
        call: &str,
        (send, outgoing): (&[u8], &[Range<usize>]),
        (receive, incoming): (&mut [u8], &[Range<usize>]),
        start: impl FnOnce(&mut Memory, &mut [ffi::MPI_Request; N]) -> c_int,
    ) -> Result<ffi::MPI_Status, RanksError> {
        let mut memory = self.memory.take();
        memory.pack(send, outgoing);
        memory.expect(incoming);
        let (memory, status) = self.complete(call, memory, start)?;
        memory.unpack(receive, incoming);
        self.memory.set(memory);
        Ok(status)
    }

    /// [`Ranks::gather`], with counts that fit.
    fn collect(&self, mine: &[u8], counts: &[usize], all: &mut [u8]) -> Result<(), RanksError> {
        let (most, step) = (counts.iter().copied().max().unwrap_or(0), self.step());
        for at in (0..most).step_by(step) {
            let (own, ranges) = (cut(&[mine.len()], at, step), cut(counts, at, step));
            let (out, into) = ((mine, own.as_slice()), (&mut *all, ranges.as_slice()));
            self.transfer("MPI_Iallgatherv", out, into, |memory, [request]| {
                let Memory { send, receive, from, .. } = memory;
                // SAFETY: `complete` has the memory until the request ends; `pack` and `expect` made it as long as the counts say.
                unsafe {
                    ffi::MPI_Iallgatherv(
                        send.as_ptr().cast(),
                        int(send.len()),
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        from.counts.as_ptr(),
                        from.starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        self.comm,
                        request,
                    )
                }
            })?;
        }
        Ok(())
    }

    /// How many bytes the longest part has that any rank sends to another. All must know it, to make the same number of calls; and each
    /// rank compares what the others send with what it expects.
    fn longest(&self, to: &[usize], from: &[usize]) -> Result<usize, RanksError> {
        let row: Vec<u8> = to.iter().flat_map(|count| (*count as u64).to_ne_bytes()).collect();
        let mut table = vec![0; row.len() * self.count];
        self.collect(&row, &vec![row.len(); self.count], &mut table)?;
        let number = |bytes: &[u8]| {
            let bytes = bytes.try_into().expect("chunks of 8");
            usize::try_from(u64::from_ne_bytes(bytes)).expect("it was a usize")
        };
        let table: Vec<usize> = table.chunks_exact(8).map(number).collect();
        let sent = table.chunks_exact(self.count).map(|row| row[self.rank]);
        if let Some((other, (sent, expected))) =
            sent.zip(from).enumerate().find(|(_, (sent, expected))| sent != *expected)
        {
            self.failed.set(true);
            let why =
                format!("rank {other} sends {sent} bytes, and {expected} are expected from it");
            return Err(self.error("exchange", why));
        }
        let others = table.iter().enumerate().filter(|(i, _)| i / self.count != i % self.count);
        Ok(others.map(|(_, count)| *count).max().unwrap_or(0))
    }

    /// [`Ranks::exchange`], with counts that fit.
    fn all_to_all(
        &self,
        send: &[u8],
        to: &[usize],
        receive: &mut [u8],
        from: &[usize],
    ) -> Result<(), RanksError> {
        let (longest, step) = (self.longest(to, from)?, self.step());
        // What a rank has for itself does not go through MPI.
        let own = |counts: &[usize]| cut(counts, 0, usize::MAX)[self.rank].clone();
        receive[own(from)].copy_from_slice(&send[own(to)]);
        let parts = |counts: &[usize], at: usize| -> Vec<Range<usize>> {
            let mut ranges = cut(counts, at, step);
            ranges[self.rank] = 0..0;
            ranges
        };
        for at in (0..longest).step_by(step) {
            let (outgoing, incoming) = (parts(to, at), parts(from, at));
            let (out, into) = ((send, outgoing.as_slice()), (&mut *receive, incoming.as_slice()));
            self.transfer("MPI_Ialltoallv", out, into, |memory, [request]| {
                let Memory { send, receive, to, from } = memory;
                // SAFETY: `complete` has the memory until the request ends; `pack` and `expect` made it as long as the counts say.
                unsafe {
                    ffi::MPI_Ialltoallv(
                        send.as_ptr().cast(),
                        to.counts.as_ptr(),
                        to.starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        from.counts.as_ptr(),
                        from.starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        self.comm,
                        request,
                    )
                }
            })?;
        }
        Ok(())
    }

    /// Sends to the next rank and receives from the one before.
    fn ring(&self, send: &[u8], receive: &mut [u8]) -> Result<(), RanksError> {
        let next = (self.rank + 1) % self.count;
        let before = (self.rank + self.count - 1) % self.count;
        // A tag of its own, so that unexpected bytes are not taken for those of another shift. Tags go to at least 32767.
        let tag = int(self.shifts.replace(self.shifts.get() + 1) % 32768);
        // One message at least: where one rank sends and the other expects nothing, both must notice.
        for at in (0..send.len().max(receive.len()).max(1)).step_by(PIECE) {
            let outgoing = cut(&[send.len()], at, PIECE);
            let incoming = cut(&[receive.len()], at, PIECE);
            let start = |memory: &mut Memory, [sent, received]: &mut [ffi::MPI_Request; 2]| {
                let Memory { send, receive, to, from } = memory;
                let mut code = 0;
                // SAFETY: `complete` has the memory until both requests end; `pack` and `expect` made it as long as the counts say.
                unsafe {
                    if at == 0 || from.counts[0] > 0 {
                        let into = receive.as_mut_ptr().cast();
                        let kind = ffi::RSMPI_UINT8_T;
                        let count = from.counts[0];
                        code = ffi::MPI_Irecv(
                            into,
                            count,
                            kind,
                            int(before),
                            tag,
                            self.comm,
                            received,
                        );
                    }
                    if code == 0 && (at == 0 || to.counts[0] > 0) {
                        let bytes = send.as_ptr().cast();
                        let kind = ffi::RSMPI_UINT8_T;
                        code = ffi::MPI_Isend(
                            bytes,
                            to.counts[0],
                            kind,
                            int(next),
                            tag,
                            self.comm,
                            sent,
                        );
                    }
                }
                code
            };
            let call = format!("MPI_Isend to rank {next}, MPI_Irecv from rank {before}");
            let (out, into) = ((send, outgoing.as_slice()), (&mut *receive, incoming.as_slice()));
            let status = self.transfer(&call, out, into, start)?;
            let mut came = 0;
            // SAFETY: this thread has passed `enter`, and `complete` has filled the status.
            let code =
                unsafe { ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut came) };
            self.check("MPI_Get_count", code)?;
            let expected = int(incoming[0].len());
            if came != expected {
                self.failed.set(true);
                let why = format!("{came} bytes from rank {before}, not {expected}");
                return Err(self.error("shift", why));
            }
        }
        Ok(())
    }
}

impl Ranks for World {
    fn rank(&self) -> usize {
        self.rank
    }

    fn count(&self) -> usize {
        self.count
    }

    fn waited(&self) -> f64 {
        self.waited.get().as_secs_f64()
    }

    fn exchange(
        &self,
        send: &[u8],
        to: &[usize],
        receive: &mut [u8],
        from: &[usize],
    ) -> Result<(), RanksError> {
        self.enter("exchange")?;
        self.fit("exchange", "send", send.len(), to)?;
        self.fit("exchange", "receive", receive.len(), from)?;
        let start = Instant::now();
        let done = self.all_to_all(send, to, receive, from);
        self.waited.set(self.waited.get() + start.elapsed());
        done
    }

    fn gather(&self, mine: &[u8], counts: &[usize], all: &mut [u8]) -> Result<(), RanksError> {
        self.enter("gather")?;
        self.fit("gather", "all", all.len(), counts)?;
        if mine.len() != counts[self.rank] {
            let why =
                format!("`mine` has {} bytes, and `counts` says {}", mine.len(), counts[self.rank]);
            return Err(self.error("gather", why));
        }
        let start = Instant::now();
        let done = self.collect(mine, counts, all);
        self.waited.set(self.waited.get() + start.elapsed());
        done
    }

    /// `meanwhile` runs on a thread of its own, outside of any thread pool of the caller, while this one polls.
    fn shift(
        &self,
        send: &[u8],
        receive: &mut [u8],
        meanwhile: &mut (dyn FnMut() + Send),
    ) -> Result<(), RanksError> {
        self.enter("shift")?;
        let work = || {
            meanwhile();
            Instant::now()
        };
        thread::scope(|scope| {
            let computing = thread::Builder::new().spawn_scoped(scope, work).map_err(|error| {
                self.error("shift", format!("no thread to compute on: {error}"))
            })?;
            let done = self.ring(send, receive);
            let now = Instant::now();
            let computed =
                computing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let waited = now.saturating_duration_since(computed);
            self.waited.set(self.waited.get() + waited);
            done
        })
    }
}

impl Drop for World {
    /// Finalizes MPI when all ranks have come here, within the deadline. Otherwise this process ends without that, and the launcher
    /// ends the others: `MPI_Finalize` would wait for them without end.
    fn drop(&mut self) {
        let universe = self.universe.take();
        let all_are_done = !thread::panicking() && self.enter("MPI_Ibarrier").is_ok() && {
            // Of the communicator of all ranks, which nothing else uses: ranks that are still in a call do not mistake it for theirs.
            let start = |(): &mut (), [request]: &mut [ffi::MPI_Request; 1]| {
                // SAFETY: MPI is initialized, and this thread may call it (`enter`).
                unsafe { ffi::MPI_Ibarrier(ffi::RSMPI_COMM_WORLD, request) }
            };
            self.complete("MPI_Ibarrier", (), start).is_ok()
        };
        if !all_are_done {
            std::mem::forget(universe);
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, count, on_node, deadline, .. } = self;
        f.debug_struct("World")
            .field("rank", rank)
            .field("count", count)
            .field("on_node", on_node)
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}
