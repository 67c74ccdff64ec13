//! The card of a model: what it is, what it was made of, how good it is, how to use it.

use crate::settings::{ModelKind, Settings, Task};
use crate::train::Size;
use crate::validation::ValidationMetrics;
use std::fmt::Write;

/// The card as Markdown.
#[must_use]
pub(crate) fn card(settings: &Settings, size: &Size, report: &ValidationMetrics) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_card(&mut text, settings, size, report);
    text
}

fn write_card(
    text: &mut String,
    settings: &Settings,
    size: &Size,
    report: &ValidationMetrics,
) -> std::fmt::Result {
    let (model, t) = (&settings.model, &settings.training);
    let part = settings.data.parts.first();
    let kind = match model.kind {
        ModelKind::Transformer => "a transformer with an encoder and a decoder",
        ModelKind::Seq2Seq if model.attention > 0 => "two GRUs with additive attention",
        ModelKind::Seq2Seq => "two GRUs without attention",
        ModelKind::Gpt => "a transformer decoder",
        ModelKind::Han => "a hierarchical attention network",
    };
    let (title, verb) = match (settings.task, part) {
        (Task::Translate, Some(part)) => {
            (format!("{} to {}", part.source, part.target), "regard translate MODEL TEXT")
        }
        (Task::Generate, _) => ("A text goes on".into(), "regard generate MODEL --prompt TEXT"),
        (Task::Classify, _) => ("Classes of documents".into(), "regard classify MODEL TEXT"),
        (Task::Translate, None) => ("Translation".into(), "regard translate MODEL TEXT"),
    };
    writeln!(text, "# {title}\n")?;
    writeln!(text, "Made by `regard train`: {kind}, {} parameters.\n", size.parameters)?;
    writeln!(text, "| | |\n|---|---|")?;
    for part in &settings.data.parts {
        writeln!(text, "| training data | {} |", part.train)?;
    }
    if !settings.data.license.is_empty() {
        writeln!(text, "| license of the data | {} |", settings.data.license)?;
    }
    writeln!(
        text,
        "| examples | {} for training, {} for validation |",
        size.examples, size.validation
    )?;
    let vocabularies: Vec<String> = size.vocabulary.iter().map(ToString::to_string).collect();
    writeln!(text, "| vocabulary | {} |", vocabularies.join(" + "))?;
    writeln!(
        text,
        "| training | {} of {} steps, batches of {} tokens, learning rate {:e}, dropout {}, seed {} |",
        report.step, size.steps, t.batch_tokens, t.lr, t.dropout, settings.seed
    )?;
    writeln!(
        text,
        "| validation | loss {:.3}, perplexity {:.2} |",
        report.validation_loss, report.validation_perplexity
    )?;
    if let Some(score) = report.score {
        let name = if settings.task == Task::Classify { "right" } else { "BLEU" };
        writeln!(text, "| validation, {name} | {score:.2} |")?;
    }
    writeln!(text, "\nUse it by `{verb}`, and look inside by `regard look MODEL TEXT`.")?;
    if !report.samples.is_empty() {
        writeln!(text, "\n| source | reference | output |\n|---|---|---|")?;
        for sample in &report.samples {
            let cell = |text: &str| text.replace('|', "\\|");
            let [source, target, output] =
                [&sample.source, &sample.target, &sample.output].map(|text| cell(text));
            writeln!(text, "| {source} | {target} | {output} |")?;
        }
    }
    writeln!(
        text,
        "\nIt has seen what the table says and nothing else: of other matters, and of longer texts, expect little."
    )
}
