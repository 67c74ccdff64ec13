//! A cache against plain lists of rows, for any calls; and a shape or budget of any size never panics.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::cache::{CacheShape, Quantization};
use regard::KvCache;
use regard_fuzz::size;
use regard_testkit::CacheModel;

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    if u.ratio(1, 16)? {
        let mut next = || size(u, true);
        let shape = CacheShape { heads: next()?, qk_dim: next()?, v_dim: next()?, page: next()? };
        let budget = next()?;
        let in_8_bits = Quantization::ALL.into_iter().flat_map(|x| {
            [KvCache::quantized(shape, x, budget), KvCache::latent_quantized(shape, x, budget)]
        });
        let others = [KvCache::<f32>::new(shape, budget), KvCache::latent(shape, budget)];
        for cache in in_8_bits.chain(others).flatten() {
            assert_eq!((cache.shape(), cache.budget(), cache.bytes()), (shape, budget, 0));
        }
        return Ok(());
    }
    let mut model = CacheModel::new(Arbitrary::arbitrary(u)?);
    while !u.is_empty() {
        model.step(Arbitrary::arbitrary(u)?);
        model.check_all();
    }
    model.free_all();
    Ok(())
}
