//! The tokenizer library that engines run, loaded without a tree of its file.

use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BpeBuilder, Vocab};
use tokenizers::{AddedToken, Tokenizer};

use super::file::File;

/// The settings of a BPE model, without its vocabulary.
#[derive(Deserialize)]
struct BpeSettings {
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
}

#[derive(Deserialize)]
struct AddedTokenWithId {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// Builds the tokenizer of a file. For BPE, also returns its description without vocabulary, merges
/// and added tokens.
///
/// # Errors
/// As the library reports them for the whole text.
pub(super) fn build(text: &[u8]) -> tokenizers::Result<(Tokenizer, Option<Value>)> {
    match File::read(text).ok().and_then(|file| build_bpe(&file)) {
        Some((tokenizer, described)) => Ok((tokenizer, Some(described))),
        None => Ok((Tokenizer::from_bytes(text)?, None)),
    }
}

/// Builds a BPE tokenizer exactly as the library would; `None` if the library might read the file
/// differently.
fn build_bpe(file: &File<'_>) -> Option<(Tokenizer, Value)> {
    let model = &file.rest["model"];
    if !model.is_object() || model.get("type").is_some_and(|kind| kind != "BPE") {
        return None;
    }
    let added: Vec<AddedTokenWithId> = match file.rest.get("added_tokens") {
        Some(added) => serde_json::from_value(added.clone()).ok()?,
        None => Vec::new(),
    };
    let words: BpeSettings = serde_json::from_value(model.clone()).ok()?;
    // Both are read before either is used, because reading needs as much memory as building.
    let pairs = file.pairs()?;
    let pairs = pairs.into_iter().map(|(left, right)| (left.0.into(), right.0.into())).collect();
    let vocab: Vocab = serde_json::from_str(file.vocab?.get()).ok()?;
    let mut builder = BpeBuilder::new()
        .vocab_and_merges(vocab, pairs)
        .fuse_unk(words.fuse_unk.unwrap_or(false))
        .byte_fallback(words.byte_fallback.unwrap_or(false))
        .ignore_merges(words.ignore_merges.unwrap_or(false));
    if let Some(dropout) = words.dropout {
        builder = builder.dropout(dropout);
    }
    if let Some(unknown) = words.unk_token {
        builder = builder.unk_token(unknown);
    }
    if let Some(prefix) = words.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(suffix) = words.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    let bpe = builder.build().ok()?;
    let mut head = file.rest.clone();
    head["added_tokens"] = json!([]);
    head["model"] = json!({ "type": "BPE", "vocab": {}, "merges": [] });
    let mut tokenizer = Tokenizer::from_bytes(head.to_string()).ok()?;
    let mut described = serde_json::to_value(&tokenizer).ok()?;
    described["model"] = model.clone();
    described["model"]["type"] = json!("BPE");
    tokenizer.with_model(bpe);
    // Added tokens get the id of their vocabulary entry or the next free id, so they are added
    // after the vocabulary.
    let added: Vec<AddedToken> = added.into_iter().map(|added| added.token).collect();
    tokenizer.add_tokens(&added);
    Some((tokenizer, described))
}
