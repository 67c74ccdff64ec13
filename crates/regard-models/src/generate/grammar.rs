//! JSON schemas, regular expressions and grammars as constraints, by llguidance.

use super::{Constraint, GenerateError};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use std::fmt;
use std::sync::Arc;

/// Makes grammars for one vocabulary. Its tree of tokens takes a while, so it is made once for a model.
pub struct GrammarCompiler {
    factory: ParserFactory,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vocab = self.factory.tok_env().tok_trie().vocab_size();
        f.debug_struct("GrammarCompiler").field("vocab", &vocab).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// `vocabulary` has the bytes of each token by its id; a token without bytes, or with 0xFF before its name, is special and never
    /// part of a text. A sentence ends by any of `end`.
    pub fn new(mut vocabulary: Vec<Vec<u8>>, end: &[u32]) -> Result<Self, GenerateError> {
        let wrong = |why: String| GenerateError::Grammar { why };
        let Some(first) = end.first() else {
            return Err(wrong("the model has no end token, by which a sentence could end".into()));
        };
        for token in end {
            let Some(word) = vocabulary.get_mut(*token as usize) else {
                return Err(wrong(format!("end token {token} is not in the vocabulary")));
            };
            if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        let vocab = u32::try_from(vocabulary.len()).map_err(|e| wrong(e.to_string()))?;
        let trie = TokTrie::from(&TokRxInfo::new(vocab, *first), &vocabulary).with_eos_tokens(end);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| wrong(format!("{e:#}")))?;
        factory.quiet();
        Ok(Self { factory })
    }

    /// The vocabulary of a `tokenizer.json` whose tokens are made of bytes: byte-level or with byte fallback.
    pub fn from_tokenizer_json(json: &str, end: &[u32]) -> Result<Self, GenerateError> {
        let wrong = |why: &dyn fmt::Display| GenerateError::Grammar {
            why: format!("tokenizer.json: {why:#}"),
        };
        let json = serde_json::from_str(json).map_err(|e| wrong(&e))?;
        // It asserts where a vocabulary is odd.
        let words = std::panic::catch_unwind(|| token_bytes_from_tokenizer_json(&json))
            .map_err(|_| wrong(&"the vocabulary is odd"))?
            .map_err(|e| wrong(&e))?;
        Self::new(words, end)
    }

    /// Values of a JSON schema.
    pub fn json_schema(&self, schema: &str) -> Result<Grammar, GenerateError> {
        let schema = serde_json::from_str(schema)
            .map_err(|e| GenerateError::Grammar { why: format!("JSON schema: {e}") })?;
        self.grammar(TopLevelGrammar::from_json_schema(schema))
    }

    /// Texts that match a regular expression as a whole.
    pub fn regex(&self, regex: &str) -> Result<Grammar, GenerateError> {
        self.grammar(TopLevelGrammar::from_regex(regex))
    }

    /// Texts of a grammar in the language of Lark, as llguidance has it, from its rule `start`.
    pub fn lark(&self, grammar: &str) -> Result<Grammar, GenerateError> {
        self.grammar(TopLevelGrammar::from_lark(grammar.into()))
    }

    fn grammar(&self, grammar: TopLevelGrammar) -> Result<Grammar, GenerateError> {
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(why) => Err(GenerateError::Grammar { why }),
            None => Ok(Grammar { matcher }),
        }
    }
}

/// A grammar, and the place in it that a sequence has reached.
pub struct Grammar {
    matcher: Matcher,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Constraint for Grammar {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self { matcher: self.matcher.clone() })
    }

    fn mask(&mut self, scores: &mut [f32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| format!("{e:#}"))?;
        for (id, score) in scores.iter_mut().enumerate() {
            if id >= allowed.len() || !allowed.get(id) {
                *score = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.matcher.consume_token(token).map_err(|e| format!("{e:#}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::toy::{Toy, beam, run_with, sample};
    use super::super::{DecodingStrategy, FinishReason, GenerationOptions, StoppingCriteria};
    use super::*;
    use serde_json::Value;

    /// All bytes, some longer tokens, two end tokens; the model has one token more than the vocabulary.
    fn vocabulary() -> Vec<Vec<u8>> {
        let longer = ["\": ", "{\"", "true", "name", " 1", "\",", "ge\"", "é", "red"];
        let bytes = (0..=255).map(|byte| if byte == 255 { vec![] } else { vec![byte] });
        let ends = ["</s>", "<end>"].map(|end| end.as_bytes().to_vec());
        bytes.chain(longer.map(|word| word.as_bytes().to_vec())).chain(ends).collect()
    }

    const END: [u32; 2] = [265, 266];

    fn written(grammar: Grammar, strategy: DecodingStrategy, seed: u64) -> String {
        let words = vocabulary();
        let stop = StoppingCriteria { max_tokens: 4000, end: END.to_vec() };
        let mut options = GenerationOptions::new(strategy, stop);
        options.constraint = Some(Box::new(grammar));
        let mut toy = Toy::noise(words.len() + 1, seed);
        let said = run_with(&mut toy, &[vec![1]], &options).unwrap().0.remove(0);
        assert_eq!(said.finish_reason, FinishReason::EndToken);
        let text = &said.tokens[..said.tokens.len() - 1];
        String::from_utf8(text.iter().flat_map(|id| words[*id as usize].clone()).collect()).unwrap()
    }

    #[test]
    fn what_a_model_of_noise_writes_fits_the_schema() {
        let schema = r##"{
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/colour"}},
                "ok": {"type": "boolean"}
            },
            "required": ["name", "age", "tags", "ok"],
            "additionalProperties": false,
            "$defs": {"colour": {"enum": ["red", "blue"]}}
        }"##;
        let compiler = GrammarCompiler::new(vocabulary(), &END).unwrap();
        for seed in 0..12 {
            let strategy = if seed < 10 { sample(seed) } else { beam(2, 1.0) };
            let text = written(compiler.json_schema(schema).unwrap(), strategy, seed);
            let value: Value = serde_json::from_str(&text).unwrap();
            let fields = value.as_object().unwrap();
            assert_eq!(fields.len(), 4, "{text}");
            assert!(fields["name"].as_str().unwrap().chars().count() <= 5, "{text}");
            assert!(fields["age"].as_u64().unwrap() <= 120, "{text}");
            let tags = fields["tags"].as_array().unwrap();
            assert!(tags.len() <= 3 && tags.iter().all(|tag| tag == "red" || tag == "blue"));
            assert!(fields["ok"].is_boolean());
        }
    }

    #[test]
    fn regular_expressions_and_grammars_are_followed() {
        let compiler = GrammarCompiler::new(vocabulary(), &END).unwrap();
        for seed in 0..10 {
            let regex = compiler.regex("[0-9]{3}-(red|blue)").unwrap();
            let text = written(regex, DecodingStrategy::Greedy, seed);
            let (digits, colour) = text.split_once('-').unwrap();
            assert!(digits.len() == 3 && digits.bytes().all(|digit| digit.is_ascii_digit()));
            assert!(colour == "red" || colour == "blue", "{text}");
            let lark = compiler.lark("start: \"(\" start \")\" | \"x\"").unwrap();
            let text = written(lark, sample(seed), seed);
            let depth = text.find('x').unwrap();
            assert_eq!(text, format!("{}x{}", "(".repeat(depth), ")".repeat(depth)));
        }
    }

    #[test]
    fn what_is_no_grammar_says_why() {
        let compiler = GrammarCompiler::new(vocabulary(), &END).unwrap();
        let says = |result: Result<Grammar, GenerateError>, part: &str| {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        says(compiler.json_schema("{"), "JSON schema: EOF");
        says(compiler.json_schema(r#"{"type": "nonsense"}"#), "nonsense");
        says(compiler.regex("("), "regex");
        says(compiler.lark("start: missing"), "missing");
        for end in [&[][..], &[9999]] {
            let error = GrammarCompiler::new(vocabulary(), end).unwrap_err().to_string();
            assert!(error.contains("end token"), "{error}");
        }
        assert!(GrammarCompiler::from_tokenizer_json("{}", &END).is_err());
        let json = r#"{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0, "Ġb": 1}},
            "added_tokens": [{"id": 2, "content": "</s>", "special": true}]}"#;
        let compiler = GrammarCompiler::from_tokenizer_json(json, &[2]).unwrap();
        let mut scores = [0.0; 3];
        compiler.regex("a b").unwrap().mask(&mut scores).unwrap();
        assert_eq!(scores, [0.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    }
}
