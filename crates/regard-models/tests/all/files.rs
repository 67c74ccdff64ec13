//! Files of real models: every tensor is used once, and tokens are those of the programs that they come from.

use crate::real::{fetched, fixture, json, kept};
use regard_models::files::{
    Activation, Architecture, Config, Dtype, Gguf, Heads, KnownModel, Message, ModelFiles,
    PairLayout, Positions, RopeConfig, Tokens, TransformerFiles, Weights,
};
use serde_json::Value;

type Shapes = Vec<(String, Vec<usize>)>;

fn norm(shapes: &mut Shapes, name: &str, d: usize, bias: bool) {
    shapes.push((format!("{name}.weight"), vec![d]));
    if bias {
        shapes.push((format!("{name}.bias"), vec![d]));
    }
}

fn linear(shapes: &mut Shapes, name: &str, [out, inner]: [usize; 2], bias: bool) {
    shapes.push((format!("{name}.weight"), vec![out, inner]));
    if bias {
        shapes.push((format!("{name}.bias"), vec![out]));
    }
}

fn attention(shapes: &mut Shapes, name: &str, config: &Config) {
    let (q, kv) = (config.heads.q * config.head_dim, config.heads.kv * config.head_dim);
    let (d, bias) = (config.d_model, config.attention_bias);
    for (part, shape) in [("q", [q, d]), ("k", [kv, d]), ("v", [kv, d]), ("out", [d, q])] {
        linear(shapes, &format!("{name}.{part}"), shape, bias);
    }
}

fn block(shapes: &mut Shapes, name: &str, config: &Config, cross: bool) {
    let (d, d_ff) = (config.d_model, config.d_ff.expect("d_ff"));
    let llama = config.architecture == Architecture::Llama;
    attention(shapes, &format!("{name}.attention"), config);
    norm(shapes, &format!("{name}.attention_norm"), d, !llama);
    if cross {
        attention(shapes, &format!("{name}.cross"), config);
        norm(shapes, &format!("{name}.cross_norm"), d, true);
    }
    let bias = config.feed_forward_bias;
    if llama {
        linear(shapes, &format!("{name}.feed_forward.gate"), [d_ff, d], bias);
    }
    linear(shapes, &format!("{name}.feed_forward.up"), [d_ff, d], bias);
    linear(shapes, &format!("{name}.feed_forward.down"), [d, d_ff], bias);
    norm(shapes, &format!("{name}.feed_forward_norm"), d, !llama);
}

/// All tensors that a model has, under our names.
fn shapes(config: &Config) -> Shapes {
    let (d, vocab) = (config.d_model, config.vocab);
    let target = config.target_vocab.unwrap_or(vocab);
    let mut shapes = Shapes::new();
    match config.architecture {
        Architecture::Llama | Architecture::Bert => {
            shapes.push(("embedding.weight".into(), vec![vocab, d]));
            let bert = config.architecture == Architecture::Bert;
            norm(&mut shapes, "norm", d, bert);
            for layer in 0..config.n_layers {
                block(&mut shapes, &format!("blocks.{layer}"), config, false);
            }
            if bert {
                shapes.push(("positions.weight".into(), vec![config.context.expect("context"), d]));
                shapes.push((
                    "token_types.weight".into(),
                    vec![config.token_types.expect("token_types"), d],
                ));
                linear(&mut shapes, "pooler", [d, d], true);
            }
            assert!(config.tie_embeddings);
        }
        Architecture::Transformer => {
            for layer in 0..config.n_layers {
                block(&mut shapes, &format!("encoder.{layer}"), config, false);
            }
            for layer in 0..config.decoder_layers.expect("a decoder") {
                block(&mut shapes, &format!("decoder.{layer}"), config, true);
            }
            norm(&mut shapes, "encoder_norm", d, true);
            norm(&mut shapes, "decoder_norm", d, true);
            shapes.push(("source.weight".into(), vec![vocab, d]));
            shapes.push(("target.weight".into(), vec![target, d]));
            linear(&mut shapes, "head", [target, d], true);
        }
        Architecture::E2k => {
            shapes.push(("source.weight".into(), vec![vocab, d]));
            shapes.push(("target.weight".into(), vec![target, d]));
            let cells = [("encoder.forward", d), ("encoder.backward", d), ("before", d)];
            for (cell, input) in cells.into_iter().chain([("after", 2 * d)]) {
                linear(&mut shapes, &format!("{cell}.input"), [3 * d, input], true);
                linear(&mut shapes, &format!("{cell}.hidden"), [3 * d, d], true);
            }
            linear(&mut shapes, "bridge", [d, 2 * d], true);
            attention(&mut shapes, "attention", config);
            linear(&mut shapes, "head", [target, d], true);
        }
        other => panic!("{other:?}"),
    }
    shapes
}

/// Takes every tensor that the model has by its configuration, after which none may be left.
fn takes_everything(files: &mut ModelFiles, parameters: usize) {
    assert_eq!(files.weights.parameters(), parameters);
    for (name, shape) in shapes(&files.config) {
        let numbers = files.weights.take(&name, &shape).expect(&name);
        assert_eq!(numbers.len(), shape.iter().product::<usize>(), "{name}");
        assert!(numbers.iter().all(|x| x.is_finite()), "{name}");
    }
    assert_eq!(files.weights.left(), Vec::<&str>::new());
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of numbers")
}

/// The text of tokens as it comes.
fn streamed(tokens: &Tokens, ids: &[u32]) -> String {
    let mut stream = tokens.stream();
    let mut text: String = ids.iter().filter_map(|id| stream.push(*id)).collect();
    text.extend(stream.finish());
    text
}

#[test]
fn stories_are_read_whole() {
    let mut files = kept("stories260K");
    takes_everything(&mut files, 260_032);
    let config = &files.config;
    assert_eq!(config.heads, Heads { q: 8, kv: 4 });
    assert_eq!(config.positions, Positions::Rotary { theta: 1e4, pairs: PairLayout::Interleaved });
    assert_eq!((config.bos, config.eos.as_slice()), (Some(1), &[2][..]));
    assert_eq!(files.title, "stories260K");
}

#[test]
fn stories_have_the_text_that_llama2c_prints() {
    let golden = json("stories260K/golden.json");
    let tokens = kept("stories260K").tokens.unwrap();
    let (ids, text) = (ids(&golden["greedy_ids"]), &golden["greedy_text_200_steps"]);
    assert_eq!(tokens.decode(&ids), *text);
    assert_eq!(streamed(&tokens, &ids), *text);
    // What the model wrote is what would be read.
    assert_eq!(tokens.encode("Once upon a time").unwrap(), ids[..5]);
    assert_eq!(tokens.encode(text.as_str().unwrap()).unwrap(), ids);
    assert_eq!((tokens.token(265), tokens.token(13)), (Some(" the".into()), Some("\\n".into())));
    assert_eq!(tokens.len(), 512);

    let bin = std::fs::read(fixture("stories260K/tok512.bin")).unwrap();
    let bin = Tokens::from_llama2c(&bin, 512).unwrap();
    for text in ["", " ", "Lily's mom said, “Ñandú…”", "日本\n\t<0x41> </s>"] {
        let ids = tokens.encode(text).unwrap();
        assert_eq!(bin.encode(text).unwrap(), ids);
        assert_eq!(tokens.decode(&ids), text);
        assert_eq!(streamed(&tokens, &ids), text);
    }
}

#[test]
fn aren_is_read_whole_and_its_parts_are_rows() {
    let mut files = kept("aren-transliteration");
    let path = fixture("aren-transliteration/model.safetensors");
    let mut raw = Weights::safetensors(std::fs::read(path).unwrap()).unwrap();
    let fused = raw.take("decoder.layer_3.attention.linear_1.weight", &[64, 32]).unwrap();
    let mut ours = files.weights.clone();
    assert_eq!(ours.take("decoder.3.cross.k.weight", &[32, 32]).unwrap(), fused[..1024]);
    assert_eq!(ours.take("decoder.3.cross.v.weight", &[32, 32]).unwrap(), fused[1024..]);
    let fused = raw.take("encoder.layer_5.self_attention.linear_0.bias", &[96]).unwrap();
    assert_eq!(ours.take("encoder.5.attention.v.bias", &[32]).unwrap(), fused[64..]);

    takes_everything(&mut files, 182_731);
    let config = &files.config;
    assert_eq!((config.vocab, config.target_vocab), (51, Some(43)));
    assert_eq!(config.activation, Some(Activation::Relu));
    assert_eq!(config.embedding_scale, Some(32f64.sqrt()));
    assert_eq!((config.bos, config.eos.as_slice(), config.pad), (Some(1), &[2][..], Some(0)));
    let positions =
        Positions::Sinusoidal { pairs: PairLayout::HalfSplit, first: 1, inclusive: true };
    assert_eq!(config.positions, positions);
}

#[test]
fn aren_has_the_vocabularies_of_its_configuration() {
    let files = kept("aren-transliteration");
    let config = json("aren-transliteration/config.json");
    let (source, target) = (files.tokens.unwrap(), files.target_tokens.unwrap());
    for (tokens, list) in [(&source, "source_vocab"), (&target, "target_vocab")] {
        let list: Vec<String> = serde_json::from_value(config[list].clone()).unwrap();
        assert_eq!(tokens.len(), list.len());
        for (id, token) in (0..).zip(&list) {
            assert_eq!(tokens.id(token), Some(id));
        }
    }
    let golden = json("aren-transliteration/golden_ctranslate2.json");
    for case in golden.as_array().unwrap() {
        let (text, name) = (case["src"].as_str().unwrap(), case["greedy"].as_str().unwrap());
        let ids = source.encode(text).unwrap();
        assert_eq!(ids.len(), text.chars().count());
        assert!(!ids.contains(&50));
        assert_eq!(source.decode(&ids), text);
        let ids = target.encode(name).unwrap();
        assert_eq!(target.decode(&[&[1], &ids[..], &[2]].concat()), name);
    }
    assert_eq!(source.encode("xي").unwrap(), [50, 3]);
}

#[test]
fn smollm2_is_read_whole() {
    let path = fetched("smollm2");
    let files = TransformerFiles::open(&path).unwrap();
    assert_eq!(files.weights.parameters(), 134_515_008);
    assert_eq!(files.notes, [""; 0]);
    let config = &files.config;
    let stack = config.decoder.as_ref().unwrap();
    assert_eq!((stack.d_model, stack.layers.len(), stack.head_dim), (576, 30, 64));
    assert_eq!(stack.heads, Heads { q: 9, kv: 3 });
    assert_eq!((stack.context, stack.norm.eps), (Some(8192), 1e-5));
    let rope = RopeConfig::plain(64, 1e5, PairLayout::Interleaved);
    assert_eq!(stack.layers[29].rope.as_ref(), Some(&rope));
    assert_eq!((config.bos, config.eos.as_slice(), config.pad), (Some(1), &[0, 2][..], Some(2)));
    // Every tensor has its place.
    regard_models::infer::Transformer::new(config.clone(), files.weights).unwrap();
}

#[test]
fn blocks_of_smollm2_are_opened_as_numpy_opens_them() {
    let path = fetched("smollm2");
    let mut weights = Gguf::read(std::fs::read(path).unwrap()).unwrap().weights;
    // The first four, the 21st (in the upper half of a block) and the last number, and the sum of all sizes, by a few lines of
    // numpy that share nothing with this crate.
    let golden = [
        (
            "token_embd.weight",
            Dtype::Q8_0,
            [49152, 576],
            [
                -0.106_544_495,
                0.032_978_06,
                0.048_198_7,
                -0.022_830_963,
                0.040_588_38,
                -0.041_702_27,
            ],
            2_802_153.619_805_813_f64,
        ),
        (
            "blk.0.attn_k.weight",
            Dtype::Q4_1,
            [192, 576],
            [-0.155_273_44, 0.340_209_96, -0.485_595_7, -0.320_434_57, 0.175_048_83, 0.363_647_46],
            29_794.781_265_258_79,
        ),
        (
            "blk.0.ffn_down.weight",
            Dtype::Q4_1,
            [576, 1536],
            [-0.330_810_55, 0.346_069_34, 0.075_317_38, -0.466_186_52, 0.075_317_38, -0.181_365_97],
            128_458.062_866_210_94,
        ),
    ];
    for (name, dtype, shape, few, sum) in golden {
        assert_eq!(weights.dtype(name), Some(&dtype));
        let numbers = weights.take(name, &shape).unwrap();
        let own = [0, 1, 2, 3, 20, numbers.len() - 1].map(|at| numbers[at]);
        for (own, golden) in own.into_iter().zip(few) {
            assert!((own - golden).abs() <= 1e-7, "{name}: {own} {golden}");
        }
        let own: f64 = numbers.iter().map(|x| f64::from(x.abs())).sum();
        assert!((own - sum).abs() <= 1e-9 * sum, "{name}: {own} {sum}");
    }
}

#[test]
fn smollm2_is_asked_by_its_own_template() {
    let path = fetched("smollm2");
    let tokens = TransformerFiles::open(&path).unwrap().tokens.unwrap();
    let chat = tokens.chat().unwrap();
    assert_eq!((chat.bos.as_str(), chat.eos.as_str()), ("<|im_start|>", "<|im_end|>"));
    let user = Message { role: "user".into(), content: "Hi!".into() };
    let prompt = chat.render(&[user]).unwrap();
    assert!(prompt.starts_with("<|im_start|>system\nYou are a helpful AI assistant"), "{prompt}");
    assert!(prompt.ends_with("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"));
    // Marks of the template are tokens, not letters.
    let marks = tokens.encode(&prompt).unwrap();
    assert_eq!(marks.iter().filter(|id| Some(**id) == tokens.id("<|im_start|>")).count(), 3);
}

#[test]
fn smollm2_has_the_tokens_of_its_goldens() {
    let path = fetched("smollm2");
    let golden = json("goldens/smollm2.json");
    let tokens = TransformerFiles::open(&path).unwrap().tokens.unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let prompt = case["prompt"].as_str().unwrap();
        assert_eq!(tokens.encode(prompt).unwrap(), ids(&case["prompt_ids"]));
        let next = ids(&case["next_ids"]);
        assert_eq!(tokens.decode(&next), case["text"]);
        assert_eq!(streamed(&tokens, &next), case["text"]);
    }
    let chat = tokens.encode("<|im_start|>user\n2018 你好👋<|im_end|>").unwrap();
    assert_eq!((chat[0], chat[chat.len() - 1]), (1, 2));
    assert_eq!(tokens.decode(&chat), "user\n2018 你好👋");
    assert_eq!(streamed(&tokens, &chat), "user\n2018 你好👋");
    // Each digit is a token: golden ids of `2018`.
    assert!(chat.windows(4).any(|four| four == [34, 32, 33, 40]), "{chat:?}");
    assert_eq!(tokens.token(7042).unwrap(), " Paris");
    assert_eq!(tokens.token(198).unwrap(), "\\n");
    assert_eq!(tokens.token(1).unwrap(), "<|im_start|>");
    assert_eq!(tokens.len(), 49152);
}

#[test]
fn minilm_is_read_whole_with_its_tokens() {
    let path = fetched("minilm");
    let mut files = ModelFiles::open(&path).unwrap();
    takes_everything(&mut files, 22_713_216);
    let config = &files.config;
    assert_eq!((config.d_model, config.n_layers, config.heads.q), (384, 6, 12));
    assert_eq!(
        (config.norm_eps, config.token_types, config.pre_norm),
        (Some(1e-12), Some(2), false)
    );
    assert_eq!(config.activation, Some(Activation::Gelu));
    let tokens = files.tokens.unwrap();
    assert_eq!(tokens.len(), 30522);
    let long = tokens.encode(&"word ".repeat(300)).unwrap();
    assert_eq!(long.len(), 302);

    let golden = json("goldens/minilm.json");
    let ids = tokens.encode(golden["sentences"][0].as_str().unwrap()).unwrap();
    let words: Vec<_> = ids.iter().map(|id| tokens.token(*id).unwrap()).collect();
    assert_eq!(serde_json::json!(words), golden["tokens0"]);
    assert_eq!(tokens.decode(&ids), "that is a happy person");
    assert_eq!(streamed(&tokens, &ids), "that is a happy person");
}

#[test]
fn e2k_is_read_whole_with_its_tokens() {
    let path = fetched("e2k");
    let mut files = ModelFiles::open(&path).unwrap();
    let mut ours = files.weights.clone();
    let mut raw = Weights::safetensors(std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(raw.dtype("attn.in_proj_weight"), Some(&Dtype::F16));
    let fused = raw.take("attn.in_proj_weight", &[768, 256]).unwrap();
    assert_eq!(ours.take("attention.k.weight", &[256, 256]).unwrap(), fused[65536..131_072]);
    let parameters = usize::try_from(KnownModel::named("e2k").unwrap().parameters).unwrap();
    takes_everything(&mut files, parameters);
    assert_eq!((files.config.vocab, files.config.target_vocab), (31, Some(88)));
    assert_eq!((files.config.bos, files.config.eos.as_slice()), (Some(1), &[2][..]));
    let (source, target) = (files.tokens.unwrap(), files.target_tokens.unwrap());
    assert_eq!(source.encode("He-l!o 'Z").unwrap(), [1, 10, 7, 14, 17, 29, 30, 28, 2]);
    assert_eq!(source.decode(&[1, 10, 7, 2]), "he");
    let golden = json("goldens/e2k_c2k.json");
    for (word, katakana) in golden["cases"].as_object().unwrap() {
        assert_eq!(source.encode(word).unwrap().len(), word.len() + 2);
        let ids = target.encode(katakana.as_str().unwrap()).unwrap();
        assert_eq!(target.decode(&[&ids[..], &[2]].concat()), *katakana);
    }
}
