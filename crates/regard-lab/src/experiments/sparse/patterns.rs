//! The patterns, each told twice: by a mask of the engine, and as its paper has it.

use regard::Mask;

/// Pairs that may meet: as a mask, as its paper has them, and how many there are.
pub(super) struct Pattern {
    pub(super) name: &'static str,
    pub(super) mask: Mask,
    pub(super) sees: Box<dyn Fn(usize, usize) -> bool>,
    pub(super) pairs: usize,
}

/// For s s positions, and windows and blocks of t s.
pub(super) fn patterns(s: usize, t: usize) -> [Pattern; 5] {
    let (n, w, g) = (s * s, t * s, t * s / 4);
    let globals: Vec<usize> = (0..g).collect();
    // The first and the last w - 1 rows see fewer than 2 w - 1 keys.
    let window = n * (2 * w - 1) - w * (w - 1);
    let jumps: usize = (1..n / w).map(|i| 2 * (n - i * w)).sum();
    let near = move |i: usize, j: usize| i.abs_diff(j) < w;
    let new = |name, mask, pairs, sees| Pattern { name, mask, sees, pairs };
    [
        new("window", Mask::full().window(w), window, Box::new(near)),
        new("blocks", Mask::blocks(w), n * w, Box::new(move |i, j| i / w == j / w)),
        new(
            "strided",
            Mask::strided(w),
            window + jumps,
            Box::new(move |i, j| near(i, j) || i.abs_diff(j) % w == 0),
        ),
        new(
            "fixed",
            Mask::fixed(w, t),
            n * (w + t * (n / w - 1)), // The own block, and the last t keys of each other one.
            Box::new(move |i, j| i / w == j / w || j % w >= w - t),
        ),
        new(
            "longformer",
            Mask::longformer(w, &globals),
            window + 2 * g * n - g * g - (2 * g * w - g), // What is global and near is counted once.
            Box::new(move |i, j| near(i, j) || i < g || j < g),
        ),
    ]
}
