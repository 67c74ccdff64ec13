use super::super::{Activation, DenseActivation, PairLayout, QkNorm};
use super::*;
use serde_json::json;

/// A small Llama with these settings more; null takes one out.
fn llama(more: &Value) -> Result<(TransformerConfig, Vec<String>), Error> {
    with(
        json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
            "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 4,
            "vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5
        }),
        more,
    )
}

fn with(mut config: Value, more: &Value) -> Result<(TransformerConfig, Vec<String>), Error> {
    for (field, value) in more.as_object().unwrap() {
        config[field] = value.clone();
    }
    TransformerConfig::from_json(&config.to_string())
}

fn decoder(more: &Value) -> StackConfig {
    llama(more).unwrap().0.decoder.unwrap()
}

/// Computed by `ROPE_INIT_FUNCTIONS` of Transformers 5.22 with 4 heads of 16 features.
#[test]
fn frequencies_are_those_of_transformers() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "rope_theta": 1e6});
    let mut other = yarn.clone();
    for (field, value) in [("mscale", 0.7), ("mscale_all_dim", 1.0), ("beta_fast", 16.0)] {
        other[field] = value.into();
    }
    other["beta_slow"] = 2.into();
    other["truncate"] = false.into();
    let plain = [1.0, 0.3162277639, 0.1, 0.03162277862, 0.01, 3.162277862e-3, 1e-3, 3.162277862e-4];
    for (parameters, expected, magnitude) in [
        (json!({"rope_type": "default"}), plain, 1.0),
        (json!({"rope_type": "linear", "factor": 4.0}), plain.map(|f| f / 4.0), 1.0),
        (json!({"type": "dynamic", "factor": 4.0}), plain, 1.0),
        (
            json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 5e5}),
            [
                1.0,
                0.1939227581,
                0.02624464408,
                2.278957836e-4,
                4.419417019e-5,
                8.570255886e-6,
                1.661967417e-6,
                3.222932889e-7,
            ],
            1.0,
        ),
        (
            yarn,
            [
                1.0,
                0.1333709508,
                0.01581138931,
                1.405853312e-3,
                2.5e-4,
                4.445698505e-5,
                7.905693565e-6,
                1.405853368e-6,
            ],
            1.138629436111989,
        ),
        (
            other,
            [
                1.0,
                0.1714731604,
                0.01079611108,
                1.405853312e-3,
                2.5e-4,
                4.445698505e-5,
                7.905693565e-6,
                1.405853368e-6,
            ],
            0.9634746568860826,
        ),
    ] {
        let old = llama(&json!({"rope_scaling": parameters, "rope_theta": 1e4})).unwrap();
        let new = decoder(&json!({"rope_parameters": parameters}));
        assert_eq!(old.0.decoder.as_ref(), Some(&new), "{parameters}");
        let rope = new.layers[4].rope.clone().unwrap();
        close(&rope.frequencies, &expected);
        assert!((rope.magnitude - magnitude).abs() < 1e-12, "{parameters}");
        assert_eq!(old.1.len(), usize::from(parameters["type"] == "dynamic"), "{:?}", old.1);
    }
}

/// Transformers computes in `f32`.
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-6 * expected, "{found} {expected}");
    }
}

#[test]
fn longrope_is_followed_up_to_the_context_of_its_training() {
    let short = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
    let (config, notes) = llama(&json!({
        "model_type": "phi3", "max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": "su", "short_factor": short, "long_factor": [1, 2, 3, 4, 5, 6]}
    }))
    .unwrap();
    let stack = config.decoder.unwrap();
    let rope = stack.layers[0].rope.as_ref().unwrap();
    let expected =
        [1.0, 0.1958576888, 0.03867990151, 0.007692307699, 0.001538881566, 3.094393178e-4];
    close(&rope.frequencies, &expected);
    assert!((rope.magnitude - 1.1547005383792515).abs() < 1e-12);
    assert_eq!((rope.dim, stack.context, notes.len()), (12, Some(512), 1));
}

#[test]
fn settings_that_change_numbers_are_followed_or_refused() {
    let plain = llama(&json!({})).unwrap().0;
    let stack = plain.decoder.clone().unwrap();
    assert_eq!((stack.heads.kv, stack.head_dim, stack.layers.len()), (4, 16, 5));
    assert!(!plain.head.unwrap().tied && stack.gated && !stack.qkv_bias);
    for (field, value) in [
        ("rope_scaling", json!({"rope_type": "proportional"})),
        ("rope_scaling", json!({"rope_type": "default", "factor": 2.0})),
        ("hidden_act", json!("mish")),
        ("attention_multiplier", json!(0.1)),
        ("quantization_config", json!({"bits": 4})),
        ("model_type", json!("mamba")),
        ("sliding_window", json!(8)),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("architectures", json!(["LlamaForTokenClassification"])),
    ] {
        let error = llama(&json!({ (field): value })).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{field}: {error}");
    }
    for (field, value) in [
        ("hidden_size", json!("64")),
        ("hidden_size", json!(63)),
        ("hidden_size", json!(0)),
        ("num_attention_heads", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("num_hidden_layers", json!(1_000_000)),
        ("head_dim", json!(1_000_000)),
        ("head_dim", json!(15)),
        ("vocab_size", json!(u64::MAX)),
        ("rms_norm_eps", json!(0.0)),
        ("rope_theta", json!(-1.0)),
    ] {
        assert!(llama(&json!({ (field): value })).is_err(), "{field}");
    }
    let (odd, notes) = llama(&json!({"_mine": 3, "eos_token_id": [2, 900]})).unwrap();
    assert_eq!((odd.eos, notes.len()), (vec![2], 2));
    for json in ["", "[]", "{}", "null", r#"{"model_type": 1}"#] {
        assert!(TransformerConfig::from_json(json).is_err(), "{json}");
    }
}

#[test]
fn windows_are_those_of_the_family() {
    let windows = |more: Value| -> Vec<Option<usize>> {
        decoder(&more).layers.iter().map(|layer| layer.window).collect()
    };
    let (no, six) = (None, Some(6));
    let family = |name: &str| json!({"model_type": name, "sliding_window": 6});
    assert_eq!(windows(family("mistral")), [six; 5]);
    assert_eq!(windows(family("gemma2")), [six, no, six, no, six]);
    assert_eq!(windows(family("gemma3_text")), [six; 5]);
    assert_eq!(windows(family("qwen2")), [no; 5]);
    let mut later = family("qwen3");
    later["use_sliding_window"] = true.into();
    later["max_window_layers"] = 3.into();
    assert_eq!(windows(later), [no, no, no, six, six]);
    let mut pattern = family("gemma3_text");
    pattern["sliding_window_pattern"] = 2.into();
    assert_eq!(windows(pattern.clone()), [six, no, six, no, six]);
    let ropes = decoder(&pattern).layers;
    let slowest = |i: usize| *ropes[i].rope.as_ref().unwrap().frequencies.last().unwrap();
    // Bases of 10000 with a window and a million without, of 256 features.
    assert!(slowest(0) > 50.0 * slowest(1));
    let rotated = decoder(&json!({"model_type": "smollm3"})).layers;
    let rotated: Vec<_> = rotated.iter().map(|layer| layer.rope.is_some()).collect();
    assert_eq!(rotated, [true, true, true, false, true]);
}

/// As `google/gemma-3-4b-it` has it, less sizes of images.
#[test]
fn the_text_of_a_model_of_images_is_read() {
    let (config, notes) = TransformerConfig::from_json(
        r#"{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eos_token_id": [1, 106], "model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, "vision_config": {}}"#,
    )
    .unwrap();
    let stack = config.decoder.unwrap();
    assert_eq!((stack.vocab, stack.heads, stack.head_dim), (262_208, Heads { q: 8, kv: 4 }, 256));
    assert_eq!((stack.qk_norm, stack.norm.plus_one), (Some(QkNorm::Head), true));
    assert_eq!(config.eos, [1, 106]);
    assert_eq!(notes.len(), 1);
    let first = |i: usize| stack.layers[i].rope.as_ref().unwrap().frequencies[0];
    assert_eq!((first(0), first(5), stack.layers[5].window), (1.0, 0.125, None));
}

/// As `answerdotai/ModernBERT-base` has it.
#[test]
fn modernbert_is_read_as_it_was_published() {
    let json = r#"{
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": false,
        "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": true,
        "deterministic_flash_attn": false, "embedding_dropout": 0.0, "eos_token_id": 50282,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": false,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
        "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
        "mlp_bias": false, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": false,
        "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
        "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": true,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "vocab_size": 50368
    }"#;
    let (config, notes) = TransformerConfig::from_json(json).unwrap();
    let (stack, head) = (config.encoder.unwrap(), config.head.unwrap());
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!((stack.layers[0].window, stack.layers[1].window), (None, Some(64)));
    assert!(stack.layers[0].no_attention_norm && !stack.layers[1].no_attention_norm);
    let dense = head.dense.unwrap();
    assert_eq!(dense.activation, DenseActivation::Of(Activation::Gelu));
    assert!(head.tied && head.bias && dense.norm && !dense.bias);
}

/// As `Helsinki-NLP/opus-mt-en-de`, `google/flan-t5-small` and `facebook/nllb-200-distilled-600M` have it.
#[test]
fn translators_are_read_as_they_were_published() {
    let marian = r#"{
        "_num_labels": 3, "activation_dropout": 0.0, "activation_function": "swish", "add_bias_logits": false,
        "add_final_layer_norm": false, "architectures": ["MarianMTModel"], "attention_dropout": 0.0,
        "bad_words_ids": [[58100]], "bos_token_id": 0, "classif_dropout": 0.0, "classifier_dropout": 0.0,
        "d_model": 512, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0,
        "decoder_layers": 6, "decoder_start_token_id": 58100, "decoder_vocab_size": 58101, "dropout": 0.1,
        "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layerdrop": 0.0, "encoder_layers": 6,
        "eos_token_id": 0, "extra_pos_embeddings": 58101, "forced_eos_token_id": 0,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02,
        "is_encoder_decoder": true, "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "max_length": 512,
        "max_position_embeddings": 512, "model_type": "marian", "normalize_before": false,
        "normalize_embedding": false, "num_beams": 6, "num_hidden_layers": 6, "pad_token_id": 58100,
        "scale_embedding": true, "share_encoder_decoder_embeddings": true,
        "static_position_embeddings": true, "transformers_version": "4.22.0.dev0", "use_cache": true,
        "vocab_size": 58101
    }"#;
    let (config, notes) = TransformerConfig::from_json(marian).unwrap();
    assert_eq!((config.bos, config.eos, config.suppressed), (Some(58100), vec![0], vec![58100]));
    assert_eq!(notes, ["_num_labels = 3: ignored"]);
    let stack = config.decoder.unwrap();
    let sines = |first, inclusive| {
        let pairs = PairLayout::HalfSplit;
        AddedPositions::Sinusoidal { pairs, first, inclusive }
    };
    assert_eq!((stack.positions, stack.order), (sines(0, false), NormOrder::Post));

    let flan = r#"{
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "model_type": "t5",
        "n_positions": 512, "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "output_past": true,
        "pad_token_id": 0, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
        "tie_word_embeddings": false, "transformers_version": "4.23.1", "use_cache": true, "vocab_size": 32128
    }"#;
    let (config, _) = TransformerConfig::from_json(flan).unwrap();
    let (stack, head) = (config.encoder.unwrap(), config.head.unwrap());
    assert_eq!(
        (stack.activation, stack.gated, stack.scale),
        (Activation::GeluTanh, true, Some(1.0))
    );
    assert_eq!((head.tied, head.scale, config.bos), (false, None, Some(0)));

    let nllb = r#"{
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["M2M100ForConditionalGeneration"],
        "attention_dropout": 0.1, "bos_token_id": 0, "d_model": 1024, "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096, "decoder_layerdrop": 0, "decoder_layers": 12, "decoder_start_token_id": 2,
        "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layerdrop": 0,
        "encoder_layers": 12, "eos_token_id": 2, "init_std": 0.02, "is_encoder_decoder": true, "max_length": 200,
        "max_position_embeddings": 1024, "model_type": "m2m_100", "num_hidden_layers": 12, "pad_token_id": 1,
        "scale_embedding": true, "tokenizer_class": "NllbTokenizer", "torch_dtype": "float32",
        "transformers_version": "4.21.0.dev0", "use_cache": true, "vocab_size": 256206
    }"#;
    let (config, notes) = TransformerConfig::from_json(nllb).unwrap();
    let stack = config.decoder.unwrap();
    assert!(notes.is_empty() && stack.final_norm && config.shared_embedding);
    assert_eq!(stack.positions, sines(2, true));
    assert_eq!(stack.embedding_scale, Some(32.0));
}

/// As `sentence-transformers/all-MiniLM-L6-v2`, `FacebookAI/roberta-base` and `distilbert/.._sst-2` have it.
#[test]
fn encoders_are_read_as_they_were_published() {
    let minilm = json!({
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": false, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1536,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522
    });
    let (config, notes) = TransformerConfig::from_json(&minilm.to_string()).unwrap();
    assert!(config.head.is_none() && config.decoder.is_none() && notes.is_empty());
    let roberta = with(
        minilm,
        &json!({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "type_vocab_size": 1,
            "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    );
    let config = roberta.unwrap().0;
    let stack = config.encoder.unwrap();
    assert_eq!(stack.positions, AddedPositions::Learned { entries: 514, offset: 2 });
    assert_eq!((stack.context, config.head.unwrap().tied), (Some(512), true));
    let (config, _) = TransformerConfig::from_json(
        r#"{"activation": "gelu", "architectures": ["DistilBertForSequenceClassification"],
        "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 3072,
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "initializer_range": 0.02,
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1}, "max_position_embeddings": 512, "model_type": "distilbert",
        "n_heads": 12, "n_layers": 6, "output_past": true, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": false, "tie_weights_": true, "vocab_size": 30522}"#,
    )
    .unwrap();
    assert_eq!(config.labels, ["NEGATIVE", "POSITIVE"]);
    assert_eq!(config.pooling, Pooling::First);
    let dense = config.head.unwrap().dense.unwrap();
    assert_eq!(dense.activation, DenseActivation::Of(Activation::Relu));
}

/// As `google/vit-base-patch16-224` has it, with fewer names.
fn vit(more: &Value) -> Result<(TransformerConfig, Vec<String>), Error> {
    with(
        json!({
            "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768,
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish"}, "image_size": 224,
            "initializer_range": 0.02, "intermediate_size": 3072, "label2id": {"tench, Tinca tinca": 0, "goldfish": 1},
            "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12, "num_channels": 3,
            "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": true, "transformers_version": "4.13.0.dev0"
        }),
        more,
    )
}

#[test]
fn models_of_images_are_read_as_they_were_published() {
    let (config, notes) = vit(&json!({})).unwrap();
    let patches = config.patches().unwrap();
    assert_eq!((patches.grid(), patches.inputs(), notes.len()), ([14, 14], 768, 0));
    assert_eq!(config.labels, ["tench, Tinca tinca", "goldfish"]);
    let stack = config.encoder.unwrap();
    assert_eq!(stack.positions, AddedPositions::Learned { entries: 197, offset: 0 });
    assert_eq!((stack.order, stack.final_norm, stack.vocab), (NormOrder::Pre, true, 1));
    let wide = json!({"image_size": [32, 64], "patch_size": [8, 16], "qkv_bias": false});
    let config = vit(&wide).unwrap().0;
    assert_eq!(config.patches().unwrap().grid(), [4, 4]);
    assert!(!config.encoder.unwrap().qkv_bias);
}

#[test]
fn images_that_patches_do_not_cover_are_refused() {
    for (field, value, named) in [
        ("patch_size", json!(0), "0; it must divide image_size, 224"),
        ("patch_size", json!([16, 0]), "0; it must divide image_size, 224"),
        ("patch_size", json!(15), "15; it must divide image_size, 224"),
        ("patch_size", json!(448), "448; it must divide image_size, 224"),
        ("patch_size", json!(1), "50176 patches"),
        ("patch_size", json!([1, 2, 3]), "height and width"),
        ("image_size", json!(0), "0; it must be from 1 to 2048"),
        ("image_size", json!(2064), "2064; it must be from 1 to 2048"),
        ("image_size", json!(u64::MAX), "it must be from 1 to 2048"),
        ("image_size", json!([224, -16]), "height and width"),
        ("num_channels", json!(1), "num_channels = 1"),
        ("architectures", json!(["ViTModel"]), "ViTForImageClassification"),
        ("hidden_size", json!(770), "770 features"),
        ("interpolate", json!(true), "interpolate"),
    ] {
        let error = vit(&json!({ (field): value })).unwrap_err().to_string();
        assert!(error.contains(named), "{field}: {error}");
    }
}
