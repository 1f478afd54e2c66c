//! Which files of a model are fetched: those that the router reads, and no weights.

use super::download_error::DownloadError;
use super::hub::Listing;

/// A file of a model, by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WantedFile {
    pub(super) name: &'static str,
    /// Maximum size in bytes.
    pub(super) max_bytes: usize,
}

const TOKENIZER: &str = "tokenizer.json";
/// The largest that are known have some 35 MB.
const TOKENIZER_MAX_BYTES: usize = 128 << 20;
/// Each of them is a few kilobytes; vocabularies in `tokenizer_config.json` make some megabytes.
const OTHER_MAX_BYTES: usize = 16 << 20;

/// The files that models may have beside `tokenizer.json`.
const OTHERS: [&str; 8] = [
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "additional_chat_templates/tool_use.jinja",
];

/// The files to fetch, the tokenizer last.
///
/// # Errors
/// The model has no `tokenizer.json`.
pub(super) fn wanted(listing: &Listing) -> Result<Vec<WantedFile>, DownloadError> {
    if !listing.has(TOKENIZER) {
        let hint = "`tokenizer: engine` asks the engines for tokens, which needs no files";
        return Err(DownloadError::config("the model has no tokenizer.json on the hub", hint));
    }
    let others = OTHERS.into_iter().filter(|name| listing.has(name));
    let others = others.map(|name| WantedFile { name, max_bytes: OTHER_MAX_BYTES });
    let tokenizer = WantedFile { name: TOKENIZER, max_bytes: TOKENIZER_MAX_BYTES };
    Ok(others.chain([tokenizer]).collect())
}

/// Whether engines may read a tokenizer in Mistral's own format instead: they do so if the weights are
/// in that format, too.
pub(super) fn may_be_mistral(listing: &Listing) -> bool {
    let has = |is: fn(&str) -> bool| listing.files.iter().any(|name| is(name));
    has(|name| name.starts_with("consolidated") && name.ends_with(".safetensors"))
        && has(|name| name == "tekken.json" || name.starts_with("tokenizer.model.v"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn listing(files: &[&str]) -> Listing {
        let files = files.iter().map(|name| (*name).to_owned()).collect();
        Listing { commit: "c0ffee".to_owned(), files }
    }

    #[test]
    fn no_weights_are_fetched_and_the_tokenizer_comes_last() {
        let listing = listing(&["README.md", TOKENIZER, "model.safetensors", "config.json"]);
        let names: Vec<_> = wanted(&listing).ok().unwrap().iter().map(|file| file.name).collect();
        assert_eq!(names, ["config.json", TOKENIZER]);
        assert!(!may_be_mistral(&listing));
    }

    #[test]
    fn a_model_without_a_tokenizer_is_refused() {
        let error = wanted(&listing(&["tekken.json", "config.json"])).err().unwrap();
        assert!(error.why.contains("no tokenizer.json"), "{}", error.why);
    }

    #[test]
    fn files_of_mistral_are_noticed() {
        assert!(may_be_mistral(&listing(&["consolidated.safetensors", "tekken.json"])));
        assert!(!may_be_mistral(&listing(&["model.safetensors", "tekken.json"])));
    }
}
