//! Reference implementation of the delta rule with decay, one position after another, with all states in memory.
//!
//! For position `t` of a state head, with `S_0` the initial state `[dim, v_dim]`:
//!
//! ```text
//! D_t   = exp(g_t) S_{t-1}                the decay is one number, or one for each row of the state
//! x_t   = v_t - D_t^T k_t                 what the state predicts wrongly; v_t without beta
//! u_t   = beta_t x_t                      x_t without beta
//! S_t   = D_t + k_t u_t^T
//! out_t = scale S_t^T q_t
//! ```

use super::{DeltaInputs, DeltaRule, L2_EPSILON, Sizes};
use regard::{Element, Number, View};

/// What [`forward`] returns, dense.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome<N> {
    /// `[batch, heads, len, v_dim]`
    pub out: Vec<N>,
    /// `[batch, heads.v, dim, v_dim]`
    pub state: Vec<N>,
}

/// What [`backward`] returns, dense, each in the shape of its tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grads<N> {
    /// By q.
    pub q: Vec<N>,
    /// By k.
    pub k: Vec<N>,
    /// By v.
    pub v: Vec<N>,
    /// By g; 0 without one, in the shape `[batch, heads.v, len, 1]`.
    pub g: Vec<N>,
    /// By beta; 0 without one.
    pub beta: Vec<N>,
    /// By the initial state, given or not.
    pub state: Vec<N>,
}

/// A state `[dim][v_dim]`.
type State<N> = Vec<Vec<N>>;

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

/// `S^T x`
fn read<N: Number>(state: &State<N>, x: &[N]) -> Vec<N> {
    let mut sums = vec![N::zero(); state.first().map_or(0, Vec::len)];
    for (row, x) in state.iter().zip(x) {
        sums.iter_mut().zip(row).for_each(|(sum, s)| *sum = *sum + *x * *s);
    }
    sums
}

/// `S += x y^T`
fn write<N: Number>(state: &mut State<N>, x: &[N], y: &[N]) {
    for (row, x) in state.iter_mut().zip(x) {
        row.iter_mut().zip(y).for_each(|(s, y)| *s = *s + *x * *y);
    }
}

fn add<N: Number>(to: &mut [N], x: impl IntoIterator<Item = N>) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to = *to + x);
}

/// A row of an input, L2-normalized if the rule says so.
struct Row<N> {
    x: Vec<N>,
    /// `1 / |x|`
    inverse: Option<N>,
}

impl<N: Number> Row<N> {
    fn new<E: Element>(view: &View<'_, E>, at: [usize; 3], normalized: bool) -> Self {
        let mut x = widened(view, at);
        let square: N = dot(&x, &x) + N::from_f64(L2_EPSILON);
        let inverse = normalized.then(|| square.sqrt().recip());
        inverse.iter().for_each(|by| x.iter_mut().for_each(|x| *x = *x * *by));
        Self { x, inverse }
    }

    /// The gradient by the input, from that by the row.
    fn back(&self, d: &[N]) -> Vec<N> {
        let along = dot(&self.x, d);
        let back = |(x, d): (&N, &N)| self.inverse.map_or(*d, |by| by * (*d - *x * along));
        self.x.iter().zip(d).map(back).collect()
    }
}

fn widened<N: Number, E: Element>(view: &View<'_, E>, [b, h, i]: [usize; 3]) -> Vec<N> {
    view.row(b, h, i).iter().map(|x| N::from_f64(Number::to_f64(x.widen()))).collect()
}

/// The inputs of one state head.
struct Head<'a, 'b, E: Element> {
    inputs: &'b DeltaInputs<'a, E>,
    sizes: Sizes,
    normalized: bool,
    scale: f64,
    /// Item and state head.
    at: [usize; 2],
}

/// One step of the recurrence.
struct Step<N> {
    q: Vec<Row<N>>,
    k: Row<N>,
    decay: Vec<N>,
    beta: Option<N>,
    /// The state after its decay.
    decayed: State<N>,
    error: Vec<N>,
    u: Vec<N>,
    state: State<N>,
}

impl<E: Element> Head<'_, '_, E> {
    fn step<N: Number>(&self, i: usize, before: &State<N>) -> Step<N> {
        let (DeltaInputs { q, k, v, g, beta, .. }, [b, h]) = (self.inputs, self.at);
        let heads = self.sizes.queries(h);
        let q = heads.map(|head| Row::new(q, [b, head, i], self.normalized)).collect();
        let k = Row::new(k, [b, self.sizes.key(h), i], self.normalized);
        let decay: Vec<N> = g.map_or(vec![N::zero()], |g| widened(&g, [b, h, i]));
        let decay: Vec<N> = decay.into_iter().map(N::exp).cycle().take(before.len()).collect();
        let beta = beta.map(|beta| widened(&beta, [b, h, i])[0]);
        let scaled = |(row, by): (&Vec<N>, &N)| row.iter().map(|s| *s * *by).collect();
        let decayed: State<N> = before.iter().zip(&decay).map(scaled).collect();
        let mut error: Vec<N> = widened(v, [b, h, i]);
        if beta.is_some() {
            add(&mut error, read(&decayed, &k.x).into_iter().map(|x| -x));
        }
        let u: Vec<N> = error.iter().map(|x| beta.unwrap_or_else(N::one) * *x).collect();
        let mut state = decayed.clone();
        write(&mut state, &k.x, &u);
        Step { q, k, decay, beta, decayed, error, u, state }
    }

    fn initial<N: Number>(&self) -> State<N> {
        let [b, h] = self.at;
        let row = |i| match self.inputs.state {
            Some(state) => widened(&state, [b, h, i]),
            None => vec![N::zero(); self.sizes.v_dim],
        };
        (0..self.sizes.dim).map(row).collect()
    }

    fn scale<N: Number>(&self) -> N {
        N::from_f64(self.scale)
    }
}

fn heads<'a, 'b, E: Element>(
    rule: &DeltaRule,
    inputs: &'b DeltaInputs<'a, E>,
) -> impl Iterator<Item = Head<'a, 'b, E>> {
    let sizes = Sizes::new(inputs);
    let (normalized, scale) = (rule.is_normalized(), rule.scale_of(sizes.dim));
    let all = (0..sizes.batch).flat_map(move |b| (0..sizes.states).map(move |h| [b, h]));
    all.map(move |at| Head { inputs, sizes, normalized, scale, at })
}

/// Reference forward pass of inputs that are not packed. `round` is applied to outputs, as a narrower dtype rounds them.
pub fn forward<N: Number, E: Element>(
    rule: &DeltaRule,
    inputs: &DeltaInputs<'_, E>,
    round: fn(N) -> N,
) -> Outcome<N> {
    let mut outcome = Outcome { out: Vec::new(), state: Vec::new() };
    for head in heads(rule, inputs) {
        let (mut state, scale) = (head.initial::<N>(), head.scale::<N>());
        let mut out = vec![Vec::new(); head.sizes.readers()];
        for i in 0..head.sizes.len {
            let step = head.step(i, &state);
            for (q, out) in step.q.iter().zip(&mut out) {
                out.extend(read(&step.state, &q.x).into_iter().map(|x| round(scale * x)));
            }
            state = step.state;
        }
        outcome.out.extend(out.into_iter().flatten());
        outcome.state.extend(state.into_iter().flatten());
    }
    outcome
}

/// Gradients of `sum(out * d_out) + sum(state * d_state)`, by the derivative of every step from the last one to the first.
pub fn backward<N: Number, E: Element>(
    rule: &DeltaRule,
    inputs: &DeltaInputs<'_, E>,
    (d_out, d_state): (&[N], &[N]),
    round: fn(N) -> N,
) -> Grads<N> {
    let sizes = Sizes::new(inputs);
    let Sizes { batch, q_heads, k_heads, states, len, dim, v_dim, g_dim, .. } = sizes;
    let zeros = |heads: usize, dim: usize| vec![N::zero(); batch * heads * len * dim];
    let (mut d_q, mut d_k) = (zeros(q_heads, dim), zeros(k_heads, dim));
    let (mut d_v, mut d_g, mut d_beta) =
        (zeros(states, v_dim), zeros(states, g_dim), zeros(states, 1));
    let mut d_initial = Vec::new();
    for head in heads(rule, inputs) {
        let ([b, h], scale) = (head.at, head.scale::<N>());
        let mut steps: Vec<Step<N>> = Vec::new();
        for i in 0..len {
            let first = head.initial();
            steps.push(head.step(i, steps.last().map_or(&first, |step| &step.state)));
        }
        let own = &d_state[(b * states + h) * dim * v_dim..][..dim * v_dim];
        let row = |i: usize| own[i * v_dim..][..v_dim].to_vec();
        let mut d_s: State<N> = (0..dim).map(row).collect();
        for (i, step) in steps.iter().enumerate().rev() {
            for (r, (q, row)) in step.q.iter().zip(sizes.queries(h)).enumerate() {
                let out = (b * states + h) * sizes.readers() + r;
                let d_out = &d_out[(out * len + i) * v_dim..][..v_dim];
                let d: Vec<N> = step.state.iter().map(|s| scale * dot(s, d_out)).collect();
                add(&mut d_q[((b * q_heads + row) * len + i) * dim..][..dim], q.back(&d));
                let x: Vec<N> = q.x.iter().map(|x| scale * *x).collect();
                write(&mut d_s, &x, d_out);
            }
            let mut d_key: Vec<N> = d_s.iter().map(|d| dot(d, &step.u)).collect();
            let mut d = read(&d_s, &step.k.x);
            let at = (b * states + h) * len + i;
            if let Some(beta) = step.beta {
                d_beta[at] = dot(&d, &step.error);
                d.iter_mut().for_each(|d| *d = -beta * *d);
                add(&mut d_key, step.decayed.iter().map(|s| dot(s, &d)));
                write(&mut d_s, &step.k.x, &d);
                d.iter_mut().for_each(|d| *d = -*d);
            }
            add(&mut d_v[at * v_dim..][..v_dim], d);
            let key = (b * k_heads + sizes.key(h)) * len + i;
            add(&mut d_k[key * dim..][..dim], step.k.back(&d_key));
            let by_row = d_s.iter().zip(&step.decayed).map(|(d, s)| dot(d, s));
            for (c, d) in by_row.enumerate() {
                let d_g = &mut d_g[at * g_dim + c % g_dim];
                *d_g = *d_g + d;
            }
            let rows = d_s.iter_mut().zip(&step.decay);
            rows.for_each(|(row, by)| row.iter_mut().for_each(|d| *d = *d * *by));
        }
        d_initial.extend(d_s.into_iter().flatten());
    }
    for grad in [&mut d_q, &mut d_k, &mut d_v] {
        grad.iter_mut().for_each(|x| *x = round(*x));
    }
    Grads { q: d_q, k: d_k, v: d_v, g: d_g, beta: d_beta, state: d_initial }
}
