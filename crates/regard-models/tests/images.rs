//! A vision transformer of random numbers, as a folder: classes, attention, and folders that nobody means well with.

use regard_models::files::save;
use regard_models::{Image, Model};
use regard_scope::LayerData;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn config() -> Value {
    json!({
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3,
        "image_size": [4, 6], "patch_size": 2, "id2label": {"0": "cat", "1": "dog", "2": "tree"}
    })
}

fn preprocessor() -> Value {
    json!({"size": {"height": 4, "width": 6}, "resample": 2})
}

/// Such a folder.
fn folder(test: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("regard-vit-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a folder");
    std::fs::write(path.join("config.json"), config().to_string()).expect("a file");
    std::fs::write(path.join("preprocessor_config.json"), preprocessor().to_string())
        .expect("a file");
    let mut tensors = vec![
        ("vit.embeddings.cls_token".to_owned(), vec![1, 1, 8]),
        ("vit.embeddings.position_embeddings".into(), vec![1, 7, 8]),
        ("vit.embeddings.patch_embeddings.projection.weight".into(), vec![8, 3, 2, 2]),
        ("vit.embeddings.patch_embeddings.projection.bias".into(), vec![8]),
        ("vit.layernorm.weight".into(), vec![8]),
        ("vit.layernorm.bias".into(), vec![8]),
        ("classifier.weight".into(), vec![3, 8]),
        ("classifier.bias".into(), vec![3]),
    ];
    for layer in 0..2 {
        let mut linear = |name: &str, shape: Vec<usize>| {
            let name = format!("vit.encoder.layer.{layer}.{name}");
            tensors.push((format!("{name}.bias"), shape[..1].to_vec()));
            tensors.push((format!("{name}.weight"), shape));
        };
        for name in ["attention.query", "attention.key", "attention.value", "output.dense"] {
            linear(&format!("attention.{name}"), vec![8, 8]);
        }
        linear("intermediate.dense", vec![12, 8]);
        linear("output.dense", vec![8, 12]);
        linear("layernorm_before", vec![8]);
        linear("layernorm_after", vec![8]);
    }
    let numbers: Vec<f32> = (0u16..128).map(|i| f32::from(i * 37 % 101) / 50.0 - 1.0).collect();
    let own = tensors
        .iter()
        .map(|(name, shape)| (name.clone(), shape.clone(), &numbers[..shape.iter().product()]));
    save(&path.join("model.safetensors"), own.collect::<Vec<_>>(), &BTreeMap::new())
        .expect("a file");
    path
}

fn open(path: &Path) -> Result<Model, String> {
    Model::open(path).map_err(|e| e.to_string())
}

/// Numbers without a pattern.
fn image(size: [usize; 2]) -> Image {
    let levels = (0..size[0] * size[1] * 3).map(|i| (i * 71).to_le_bytes()[0]);
    Image::new(size, levels.collect()).expect("pixels")
}

#[test]
fn images_have_classes_and_attention() {
    let path = folder("classes");
    let model = open(&path).expect("a model");
    std::fs::remove_dir_all(path).expect("it was there");
    assert!(model.tokens().is_none() && model.notes().is_empty());
    assert!(model.title().starts_with("regard-vit-classes"), "{}", model.title());
    let images = [image([4, 6]), image([13, 9]), image([1, 40])];
    let classifier = model.image_classifier().expect("it is");
    let found = classifier.classify(&images).expect("classes");
    for (one, image) in found.iter().zip(&images) {
        assert_eq!(one.label, ["cat", "dog", "tree"][one.class]);
        assert!((one.probabilities.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{one:?}");
        // Alone it has the same bits.
        assert_eq!(*one, classifier.classify(std::slice::from_ref(image)).expect("one")[0]);
    }
    assert_ne!(found[0].probabilities, found[1].probabilities);
    assert_eq!(classifier.classify(&[]).expect("none"), []);
    assert_eq!(classifier.transformer().classify_images(&[]).expect("none").len(), 0);

    let trace = model.look_at_image(&images[1]).expect("a trace");
    let labels = trace.labels("patch");
    let words: Vec<String> = (0..labels.len()).map(|i| labels.label(i)).collect();
    assert_eq!(words, ["cls", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]);
    assert_eq!(trace.layers.len(), 2);
    for layer in &trace.layers {
        assert_eq!((layer.rows.as_str(), layer.cols.as_str()), ("patch", "patch"));
        let LayerData::Inputs(seen) = &layer.data else { panic!("{}", layer.kind) };
        assert_eq!((seen.q_shape, seen.k_shape), ([2, 7, 4], [2, 7, 4]));
    }
}

#[test]
fn texts_and_images_are_told_apart() {
    let path = folder("texts");
    let model = open(&path).expect("a model");
    std::fs::remove_dir_all(path).expect("it was there");
    let classifier = model.image_classifier().expect("it is");
    for error in [
        model.look("a cat").map(drop).unwrap_err(),
        model.classifier().map(drop).unwrap_err(),
        model.encoder().map(drop).unwrap_err(),
    ] {
        assert!(error.to_string().contains("an image classifier"), "{error}");
    }
    let network = classifier.transformer();
    assert!(network.classify(&[vec![0]]).unwrap_err().to_string().contains("a model of images"));
    assert!(network.logits(None, &[0]).is_err());
    let error = network.classify_images(&[vec![0.0; 71]]).unwrap_err().to_string();
    assert!(error.contains("71") && error.contains("4 x 6"), "{error}");
}

#[test]
fn folders_that_do_not_fit_are_refused_with_both_numbers() {
    let path = folder("hostile");
    open(&path).expect("a model");
    let processor = path.join("preprocessor_config.json");
    std::fs::write(&processor, "{}").expect("a file");
    open(&path).expect("without a size of its own");
    let file = path.join("config.json");
    for (field, value, named) in [
        ("patch_size", json!(0), "patch_size: 0"),
        ("patch_size", json!(5), "image_size, 4"),
        ("patch_size", json!([2, 3]), "[8, 12]"),
        ("patch_size", json!(1), "[8, 3]"),
        ("image_size", json!([4, 8]), "[9, 8]"),
        ("image_size", json!(1u64 << 40), "2048"),
        ("hidden_size", json!(1u64 << 28), "134217728"),
        ("hidden_size", json!(16), "16"),
        ("num_attention_heads", json!(0), "heads"),
        ("num_hidden_layers", json!(1), "blocks.1"),
        ("num_hidden_layers", json!(1u64 << 28), "1024"),
        ("intermediate_size", json!(1u64 << 28), "268435456"),
        ("qkv_bias", json!(false), "attention"),
        ("num_channels", json!(4), "num_channels = 4"),
        ("id2label", json!({"0": "cat"}), "head"),
        ("id2label", json!({"1": "cat"}), "id2label"),
        ("layer_norm_eps", json!(0), "above 0"),
    ] {
        let mut changed = config();
        changed[field] = value.clone();
        std::fs::write(&file, changed.to_string()).expect("a file");
        let Err(error) = open(&path) else { panic!("{field} = {value} was believed") };
        assert!(error.contains(named), "{field} = {value}: {error}");
    }
    std::fs::write(&file, config().to_string()).expect("a file");
    std::fs::write(&processor, r#"{"size": 224}"#).expect("a file");
    let error = open(&path).unwrap_err();
    assert!(error.contains("preprocessor_config.json: size: [224, 224]"), "{error}");
    std::fs::remove_file(&processor).expect("it was there");
    let error = open(&path).unwrap_err();
    std::fs::remove_dir_all(path).expect("it was there");
    assert!(error.contains("no preprocessor_config.json"), "{error}");
}
