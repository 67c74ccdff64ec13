//! Chat templates: how a model that was taught to answer wants to be asked.
//!
//! A template is a program in Jinja that comes with the model, from anywhere: the steps that it may take and the text that it may write are
//! limited.

use super::gguf::Metadata;
use crate::error::Error;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, context};
use serde_json::Value;
use std::fmt;

/// A part of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who says it: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A template, and the names of the tokens that it may write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The Jinja.
    pub template: String,
    /// The token that a text begins with.
    pub bos: String,
    /// The token that it ends with.
    pub eos: String,
}

/// Steps of a template, at most; those of known models take some thousands.
const STEPS: u64 = 1_000_000;

impl ChatTemplate {
    /// That of a GGUF file, if it has one.
    pub(crate) fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, Error> {
        let Some(template) = metadata.text("tokenizer.chat_template")? else { return Ok(None) };
        let tokens = metadata.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let token = |name: &str| -> Result<String, Error> {
            let id = metadata.whole(name)?.and_then(|id| usize::try_from(id).ok());
            Ok(id.and_then(|id| tokens.get(id)).map_or_else(String::new, |t| (*t).to_owned()))
        };
        Ok(Some(Self {
            template: template.to_owned(),
            bos: token("tokenizer.ggml.bos_token_id")?,
            eos: token("tokenizer.ggml.eos_token_id")?,
        }))
    }

    /// That of a `tokenizer_config.json`, if it has one; of several, the one that is called `default`.
    pub(crate) fn from_json(json: &str) -> Result<Option<Self>, Error> {
        let config: Value = serde_json::from_str(json).map_err(wrong)?;
        let named = |all: &Vec<Value>| {
            let own = all.iter().find(|one| one["name"] == "default");
            own.and_then(|one| one["template"].as_str()).map(str::to_owned)
        };
        let template = match &config["chat_template"] {
            Value::String(template) => Some(template.clone()),
            Value::Array(all) => named(all),
            _ => None,
        };
        let token = |name: &str| {
            let token = &config[name];
            token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default().to_owned()
        };
        let (bos, eos) = (token("bos_token"), token("eos_token"));
        Ok(template.map(|template| Self { template, bos, eos }))
    }

    /// The prompt of a conversation, up to where the answer begins.
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let mut jinja = Environment::new();
        // As Transformers renders them.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        jinja.set_syntax(syntax.map_err(wrong)?);
        jinja.set_fuel(Some(STEPS));
        // Templates call methods of Python's strings: Qwen3's asks `content.startswith(..)`.
        jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        jinja.add_function("raise_exception", |why: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        let said =
            |one: &Message| context! { role => one.role.as_str(), content => one.content.as_str() };
        let messages: Vec<_> = messages.iter().map(said).collect();
        let values = context! {
            messages, add_generation_prompt => true,
            bos_token => self.bos.as_str(), eos_token => self.eos.as_str(),
        };
        jinja.render_str(&self.template, values).map_err(wrong)
    }
}

fn wrong(why: impl fmt::Display) -> Error {
    Error::format("chat template", why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    /// As SmolLM2 has it.
    const TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}\
        {{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    #[test]
    fn methods_of_python_are_known() {
        let template = "{% for m in messages %}{% if m.content.startswith('<t>') %}{{ m.content.split('>')[1].strip() }}{% endif %}{% endfor %}";
        let chat = ChatTemplate { template: template.into(), ..ChatTemplate::default() };
        assert_eq!(chat.render(&[said("user", "<t> Hi "), said("user", "no")]).unwrap(), "Hi");
    }

    #[test]
    fn messages_become_a_prompt() {
        let chat = ChatTemplate { template: TEMPLATE.into(), ..ChatTemplate::default() };
        assert_eq!(
            chat.render(&[said("user", "Hi <b>")]).unwrap(),
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
        );
        let both = chat.render(&[said("system", "Be short."), said("user", "Hi")]).unwrap();
        assert!(both.starts_with("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"));
    }

    #[test]
    fn templates_are_found_where_transformers_writes_them() {
        let of = |json: &str| ChatTemplate::from_json(json).unwrap();
        let one =
            of(r#"{"chat_template": "x", "bos_token": "<s>", "eos_token": {"content": "</s>"}}"#);
        let (template, bos, eos) = ("x".into(), "<s>".into(), "</s>".into());
        assert_eq!(one, Some(ChatTemplate { template, bos, eos }));
        let named = of(r#"{"chat_template": [{"name": "default", "template": "y"}]}"#).unwrap();
        assert_eq!(named.template, "y");
        assert_eq!(of("{}"), None);
        assert!(
            ChatTemplate::from_json("[").unwrap_err().to_string().starts_with("chat template: ")
        );
    }

    #[test]
    fn a_template_that_is_wrong_or_endless_is_refused() {
        let render = |template: &str| {
            let chat = ChatTemplate { template: template.into(), ..ChatTemplate::default() };
            chat.render(&[said("user", "Hi")]).unwrap_err().to_string()
        };
        assert!(render("{{ raise_exception('roles must alternate') }}").contains("must alternate"));
        assert!(render("{% for %}").starts_with("chat template: syntax error"));
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        assert!(render(endless).contains("fuel"), "{}", render(endless));
    }
}
