//! Small models: two of the workspace, and an encoder of random weights.

use regard_models::Model;
use regard_models::files::{ChatTemplate, Config, ModelFiles, Tokens, Weights};
use regard_serve::NamedModel;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn named(name: &str, model: Model) -> NamedModel {
    NamedModel { name: name.into(), model }
}

/// A language model of 260,000 weights with a context of 512 tokens: llama2.c's stories260K.
pub(crate) fn story() -> NamedModel {
    named("story", Model::open(&workspace("fixtures/stories260K")).expect("a model"))
}

/// The same with a chat template.
pub(crate) fn chat_model() -> NamedModel {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    let chat = ChatTemplate { template: template.into(), ..ChatTemplate::default() };
    let mut files = ModelFiles::open(&workspace("fixtures/stories260K")).expect("a model");
    files.tokens = files.tokens.map(|tokens| tokens.with_chat(Some(chat)));
    named("chat", Model::new(files).expect("a model"))
}

/// The translator that is part of the command.
pub(crate) fn translator() -> NamedModel {
    let file = |name: &str| {
        std::fs::read(workspace("crates/regard-cli/zh-en").join(name)).expect("a file")
    };
    let config = String::from_utf8(file("config.json")).expect("text");
    let files = ModelFiles {
        config: Config::from_json(&config).expect("a configuration"),
        weights: Weights::safetensors(file("model.safetensors")).expect("weights"),
        tokens: Some(Tokens::from_json(&file("source_tokenizer.json")).expect("tokens")),
        target_tokens: Some(Tokens::from_json(&file("target_tokenizer.json")).expect("tokens")),
        title: "zh-en".into(),
    };
    named("zh-en", Model::new(files).expect("a model"))
}

/// Numbers between -0.5 and 0.5 that are the same each time.
fn noise(count: usize, seed: &mut u64) -> Vec<u8> {
    let mut next = || {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*seed >> 40) as f32 / (1 << 24) as f32) - 0.5
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

/// BERT with two layers of 16 features.
pub(crate) fn encoder() -> NamedModel {
    let words = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "sky", "is", "blue", "a", "man", "eats", "##s",
        ".",
    ];
    let (d, ff, vocab, context) = (16, 32, words.len(), 32);
    let mut shapes = vec![
        ("embeddings.word_embeddings.weight".to_owned(), vec![vocab, d]),
        ("embeddings.position_embeddings.weight".to_owned(), vec![context, d]),
        ("embeddings.token_type_embeddings.weight".to_owned(), vec![2, d]),
        ("embeddings.LayerNorm.weight".to_owned(), vec![d]),
        ("embeddings.LayerNorm.bias".to_owned(), vec![d]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("attention.self.query", vec![d, d]),
            ("attention.self.key", vec![d, d]),
            ("attention.self.value", vec![d, d]),
            ("attention.output.dense", vec![d, d]),
            ("attention.output.LayerNorm", vec![d]),
            ("intermediate.dense", vec![ff, d]),
            ("output.dense", vec![d, ff]),
            ("output.LayerNorm", vec![d]),
        ] {
            let bias = vec![shape[0]];
            shapes.push((format!("encoder.layer.{layer}.{name}.weight"), shape));
            shapes.push((format!("encoder.layer.{layer}.{name}.bias"), bias));
        }
    }
    let config = json!({
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": d, "intermediate_size": ff,
        "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": vocab,
        "max_position_embeddings": context, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "hidden_act": "gelu", "pad_token_id": 0,
    });
    let special = |id: usize| json!({"id": id, "content": words[id], "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let ids: Map<String, _> =
        words.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": (0..4).map(special).collect::<Vec<_>>(),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": ids},
    });
    named("sentences", random(&shapes, &config, &tokenizer))
}

/// A model of random weights, opened from a folder as a model of the Hub is.
fn random(shapes: &[(String, Vec<usize>)], config: &Value, tokenizer: &Value) -> Model {
    let (mut header, mut data, mut seed) = (Map::new(), Vec::new(), 7);
    for (name, shape) in shapes {
        let start = data.len();
        data.extend(noise(shape.iter().product(), &mut seed));
        let offsets = [start, data.len()];
        header
            .insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
    }
    let header = serde_json::to_vec(&header).expect("JSON");
    let length = (header.len() as u64).to_le_bytes();
    // Tests run at the same time.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("regard-serve-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let weights = [&length[..], &header, &data].concat();
    for (name, bytes) in [
        ("config.json", config.to_string().into_bytes()),
        ("tokenizer.json", tokenizer.to_string().into_bytes()),
        ("model.safetensors", weights),
    ] {
        std::fs::write(folder.join(name), bytes).expect("a file");
    }
    let model = Model::open(&folder).expect("a model");
    std::fs::remove_dir_all(&folder).expect("it was there");
    model
}

/// Llama with one layer, whose tokens are bytes: it writes noise.
pub(crate) fn noise_model() -> NamedModel {
    let (d, ff, vocab) = (16, 32, 258);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, d]),
        ("model.norm.weight".to_owned(), vec![d]),
        ("lm_head.weight".to_owned(), vec![vocab, d]),
    ];
    for (name, shape) in [
        ("input_layernorm", vec![d]),
        ("post_attention_layernorm", vec![d]),
        ("self_attn.q_proj", vec![d, d]),
        ("self_attn.k_proj", vec![d / 2, d]),
        ("self_attn.v_proj", vec![d / 2, d]),
        ("self_attn.o_proj", vec![d, d]),
        ("mlp.gate_proj", vec![ff, d]),
        ("mlp.up_proj", vec![ff, d]),
        ("mlp.down_proj", vec![d, ff]),
    ] {
        shapes.push((format!("model.layers.0.{name}.weight"), shape));
    }
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d, "intermediate_size": ff,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": false,
    });
    // Bytes as GPT-2 writes them: those that print stand for themselves, the others for what comes after 255.
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let ids: Map<String, Value> = (0..256_u32)
        .map(|byte| {
            let code = if printable(byte) { byte } else { next };
            next += u32::from(!printable(byte));
            (char::from_u32(code).expect("a character").to_string(), json!(byte))
        })
        .collect();
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(256, "<s>"), special(257, "</s>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": ids, "merges": [], "fuse_unk": false, "byte_fallback": false},
    });
    named("noise", random(&shapes, &config, &tokenizer))
}
