//! What the environment tells of a launcher, and the system of processors.

/// Variables that say how many ranks a launcher has started, beside one that only a process of that launcher has.
///
/// `SLURM_NTASKS` is not among them: a batch script has it, with `SLURM_PROCID` 0, and is one process. PMIx has no variable for it.
const SIZES: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"), // MPICH, Intel MPI, and srun --mpi=pmi2
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

/// How many ranks a launcher has started, this process among them: Open MPI, MVAPICH, MPICH, Intel MPI, Slurm. `None` for a process
/// that none of them has started.
///
/// For a program that would do the same work in every rank if it did not know of them: it can refuse instead.
#[must_use]
pub fn ranks_of_launcher() -> Option<usize> {
    ranks_of(|name| std::env::var(name).ok())
}

fn ranks_of(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    SIZES.into_iter().find_map(|(size, rank)| {
        variable(rank)?;
        variable(size)?.trim().parse().ok()
    })
}

/// Processors of a list as Linux writes it: `0-3,8,10-11`.
#[cfg(any(feature = "mpi", test))]
fn processors(list: &str) -> Option<usize> {
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.trim().split(',').map(run).sum()
}

/// Processors of this machine that are online.
#[cfg(feature = "mpi")]
pub(crate) fn processors_of_node() -> Option<usize> {
    processors(&std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?)
}

/// A rank that is bound to fewer processors than its share of the machine.
#[cfg(any(feature = "mpi", test))]
pub(crate) fn binding(rank: usize, own: usize, node: usize, ranks: usize) -> Option<String> {
    let share = node / ranks;
    (own < share).then(|| {
        format!(
            "rank {rank} may use {own} of the {node} processors of its machine, where {ranks} ranks could use {share} each; \
             start with `mpirun --bind-to none`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_is_known_by_its_variables() {
        let of = |set: &[(&str, &str)]| {
            ranks_of(|name| Some(set.iter().find(|(known, _)| *known == name)?.1.to_owned()))
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")]), Some(4));
        assert_eq!(of(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), Some(2));
        assert_eq!(of(&[("MV2_COMM_WORLD_SIZE", "2"), ("MV2_COMM_WORLD_RANK", "0")]), Some(2));
        let step = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "16")];
        assert_eq!(of(&step), Some(8));
        // A batch script, and a number that somebody has left in the environment.
        assert_eq!(of(&[("SLURM_NTASKS", "16"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(of(&[("OMPI_COMM_WORLD_SIZE", "4")]), None);
        assert_eq!(of(&[("PMI_SIZE", "many"), ("PMI_RANK", "0")]), None);
    }

    #[test]
    fn processors_are_counted_as_linux_lists_them() {
        let counts = ["0", "0-3\n", "0-3,8,10-11", "", "3-1"].map(processors);
        assert_eq!(counts, [Some(1), Some(4), Some(7), None, None]);
    }

    #[test]
    fn a_rank_with_less_than_its_share_is_warned_with_both_numbers() {
        assert_eq!(binding(0, 16, 64, 4), None);
        assert_eq!(binding(0, 1, 2, 4), None);
        let text = binding(3, 1, 64, 4).expect("a warning");
        for part in ["rank 3", "1 of the 64", "4 ranks", "16 each", "mpirun --bind-to none"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}
