//! What context-parallel attention costs: formulas, not measurements. `docs/scale.md` has them with their derivation.

use regard::{Element, Shape};

/// One attention call that is to be spread over ranks, forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Floating-point operations in all: [`Work::flops`](regard::plan::Work).
    pub flops: f64,
    /// Bytes of q and of the output.
    pub rows: f64,
    /// Bytes of k and v.
    pub keys: f64,
}

/// The machines: one rank on each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// How many.
    pub ranks: usize,
    /// Attention FLOP/s of a rank.
    pub flops: f64,
    /// Bytes a second of its network, in one direction.
    pub network: f64,
}

/// What a rank does and needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Seconds of arithmetic.
    pub compute: f64,
    /// Bytes that it receives; it sends as many.
    pub received: f64,
    /// Seconds that it waits for the network.
    pub exposed: f64,
    /// Bytes of its tensors, without what the transport needs.
    pub memory: f64,
}

impl Call {
    /// Of q, k and v of these shapes.
    #[must_use]
    pub fn of_shapes<E: Element>([q, k, v]: [Shape; 3], flops: f64) -> Self {
        let bytes = |Shape { batch, heads, len, dim }: Shape| {
            [batch, heads, len, dim].iter().fold(size_of::<E>() as f64, |all, n| all * *n as f64)
        };
        let out = Shape { dim: v.dim, ..q };
        Self { flops, rows: bytes(q) + bytes(out), keys: bytes(k) + bytes(v) }
    }

    /// All keys and values are gathered before anything is computed.
    #[must_use]
    pub fn gathered(&self, cluster: Cluster) -> Cost {
        let p = cluster.ranks as f64;
        let received = self.keys * (p - 1.0) / p;
        Cost {
            compute: self.flops / (p * cluster.flops),
            received,
            exposed: received / cluster.network,
            // Those of the rank stay beside those of all, which take half as much again while they are put in order; the output is
            // made in two parts that are joined.
            memory: (1.5 * self.rows + self.keys) / p + if p > 1.0 { 1.5 * self.keys } else { 0.0 },
        }
    }

    /// Keys and values go round in a ring, each block while the one before it is computed with.
    #[must_use]
    pub fn ring(&self, cluster: Cluster) -> Cost {
        let p = cluster.ranks as f64;
        let compute = self.flops / (p * cluster.flops);
        let block = self.keys / p;
        let wait = (block / cluster.network - compute / p).max(0.0);
        Cost {
            compute,
            received: block * (p - 1.0),
            exposed: wait * (p - 1.0),
            // The block that is computed with and the one that comes; q by chunks, and outputs of blocks to merge.
            memory: (2.0 * self.rows + self.keys) / p + if p > 1.0 { 2.0 * block } else { block },
        }
    }

    /// The number of ranks up to which a ring hides its communication. With more of them the time of a call stays what the network takes for
    /// all keys and values.
    #[must_use]
    pub fn most_ranks(&self, cluster: Cluster) -> f64 {
        (self.flops / cluster.flops) / (self.keys / cluster.network)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000,000 causal tokens, 8 heads of 64, f32.
    const CALL: Call = Call { flops: 2.0 * 1e12 * 512.0, rows: 4.096e9, keys: 4.096e9 };

    fn cluster(ranks: usize) -> Cluster {
        Cluster { ranks, flops: 185e9, network: 1.25e9 }
    }

    #[test]
    fn one_rank_communicates_nothing() {
        for cost in [CALL.gathered(cluster(1)), CALL.ring(cluster(1))] {
            assert_eq!((cost.received, cost.exposed), (0.0, 0.0));
            assert_eq!(cost.compute, CALL.flops / 185e9);
        }
    }

    #[test]
    fn a_ring_hides_its_communication_up_to_the_rule_and_not_beyond() {
        let most = CALL.most_ranks(cluster(1));
        assert!((1600.0..1800.0).contains(&most), "{most}");
        for ranks in [2, 64, 1024] {
            let (ring, gathered) = (CALL.ring(cluster(ranks)), CALL.gathered(cluster(ranks)));
            assert_eq!(ring.exposed, 0.0, "{ranks}");
            assert!((ring.received / gathered.received - 1.0).abs() < 1e-12);
            // With two ranks, two blocks are all keys and values.
            assert!(ranks == 2 || ring.memory < gathered.memory);
        }
        let beyond = CALL.ring(cluster(4096));
        let total = beyond.compute + beyond.exposed;
        assert!((total / (CALL.keys / 1.25e9) - 1.0).abs() < 1e-3, "{total}");
    }
}
