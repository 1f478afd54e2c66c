//! The table of fields: one line for each name that an engine or an API knows.
//!
//! To follow a new version of an engine, list the fields of its request classes in
//! `tests/fixtures/engine_fields.json`; the test
//! `every_field_of_the_engines_schemas_passes_or_steers` then names those without a rule.

use super::Rule::{Passes, PassesOpen, PassesWith, Read, RouterOnly, Steers};
use super::{Field, Places, Rule};

/// The engine versions whose request classes the table follows.
pub const VERSIONS: &str = "vLLM 0.32.0 and SGLang 0.5.23";

/// In the body of `/v1/chat/completions`.
pub const CHAT: Places = Places(1);
/// In the body of `/v1/completions`.
pub const COMPLETIONS: Places = Places(1 << 1);
/// In the body of `/inference/v1/generate`.
pub const GENERATE: Places = Places(1 << 2);
/// In the body of `/v1/responses`.
pub const RESPONSES: Places = Places(1 << 3);
/// In the body of `/v1/messages`.
pub const MESSAGES: Places = Places(1 << 4);
/// In the body of `/v1/messages/count_tokens`.
pub const COUNT_TOKENS: Places = Places(1 << 5);
/// In the body of `/v1/embeddings`.
pub const EMBEDDINGS: Places = Places(1 << 6);
/// In the body of `/tokenize`.
pub const TOKENIZE: Places = Places(1 << 7);
/// In the body of `/detokenize`.
pub const DETOKENIZE: Places = Places(1 << 8);
/// In `sampling_params` of `/inference/v1/generate`.
const SAMPLING: Places = Places(1 << 9);
/// In `stream_options`.
const STREAM_OPTIONS: Places = Places(1 << 10);
/// In the body of `/score` and `/v1/score`.
pub const SCORE: Places = Places(1 << 11);
/// In the body of `/rerank`, `/v1/rerank` and `/v2/rerank`.
pub const RERANK: Places = Places(1 << 12);
/// In the body of `/classify`.
pub const CLASSIFY: Places = Places(1 << 13);
/// In the body of `/pooling`.
pub const POOLING: Places = Places(1 << 14);
/// In the form of `/v1/audio/transcriptions` and `/v1/audio/translations`.
pub const AUDIO: Places = Places(1 << 15);

/// The places with their titles in the documentation.
pub(super) const PLACES: [(Places, &str); 16] = [
    (CHAT, "`/v1/chat/completions`"),
    (COMPLETIONS, "`/v1/completions`"),
    (GENERATE, "`/inference/v1/generate`"),
    (SAMPLING, "its `sampling_params`"),
    (RESPONSES, "`/v1/responses`"),
    (MESSAGES, "`/v1/messages`"),
    (COUNT_TOKENS, "`/v1/messages/count_tokens`"),
    (EMBEDDINGS, "`/v1/embeddings`"),
    (SCORE, "`/score`, `/v1/score`"),
    (RERANK, "`/rerank`, `/v1/rerank`, `/v2/rerank`"),
    (CLASSIFY, "`/classify`"),
    (POOLING, "`/pooling`"),
    (TOKENIZE, "`/tokenize`"),
    (DETOKENIZE, "`/detokenize`"),
    (AUDIO, "`/v1/audio/transcriptions`, `/v1/audio/translations`"),
    (STREAM_OPTIONS, "`stream_options`"),
];

const ALL: Places = Places(0xf9ff);
const TEXT: Places = CHAT.or(COMPLETIONS);
/// Everything that samples tokens with vLLM's parameters.
const SAMPLED: Places = TEXT.or(SAMPLING);
const OPENAI: Places = TEXT.or(RESPONSES);
const ANTHROPIC: Places = MESSAGES.or(COUNT_TOKENS);
const GENERATES: Places = OPENAI.or(MESSAGES).or(GENERATE);
/// Where texts are compared with each other.
const COMPARES: Places = SCORE.or(RERANK);
/// Everything that returns what a model's pooler makes of a prompt.
const POOLED: Places = EMBEDDINGS.or(COMPARES).or(CLASSIFY).or(POOLING);
const VECTORS: Places = EMBEDDINGS.or(POOLING);
/// Where a chat is turned into a prompt.
const TEMPLATED: Places = CHAT.or(VECTORS).or(CLASSIFY).or(TOKENIZE);

const IMAGES: &str = "how much work the engine spends on an image or a video";
const IMAGE_CACHE: &str = "which entries of the engine's cache of images are used";
const PROMPT: &str = "a prompt other than the one that the router placed";
const ADAPTER: &str = "which adapter runs, beside `model`";
const CODE: &str = "code that the engine runs";
const SESSION: &str = "a session in the engine, perhaps another client's";
const STATES: &str = "whether internal states of the model are returned";
const WATERMARK: &str = "whether and how a reply is marked";
const OWN_OUTPUT: &str = "how the engine's parts pass output to each other";

/// The fields.
pub const FIELDS: &[Field] = &[
    // The prompt.
    field("model", Passes(ALL)),
    field("messages", Passes(CHAT.or(ANTHROPIC).or(VECTORS).or(CLASSIFY).or(TOKENIZE))),
    field("prompt", Passes(COMPLETIONS.or(RESPONSES).or(TOKENIZE).or(AUDIO))),
    field("prompt_embeds", Passes(COMPLETIONS)),
    field("suffix", Passes(COMPLETIONS)),
    field("token_ids", Passes(GENERATE)),
    field("token_offsets", Passes(GENERATE)),
    field("content_parts", Passes(GENERATE)),
    field("tokens", Passes(DETOKENIZE)),
    field("input", Passes(RESPONSES.or(VECTORS).or(CLASSIFY))),
    field("instructions", Passes(RESPONSES)),
    field("previous_input_messages", Passes(RESPONSES)),
    field("system", Passes(ANTHROPIC)),
    field("query", Passes(COMPARES)),
    field("queries", Passes(SCORE)),
    field("items", Passes(SCORE)),
    field("text_1", Passes(SCORE)),
    field("text_2", Passes(SCORE)),
    field("data_1", Passes(SCORE)),
    field("data_2", Passes(SCORE)),
    field("data", Passes(POOLING)),
    field("documents", Passes(CHAT.or(COMPARES))),
    field("instruction", Passes(COMPARES)),
    field("instruct", Passes(RERANK)),
    field("cache_salt", Passes(GENERATES.or(POOLED))),
    field("cache_hit_threshold", Read),
    // A recording. `[]` marks a list.
    field("language", Passes(AUDIO)),
    field("to_language", Passes(AUDIO)),
    field("hotwords", Passes(AUDIO)),
    field("chunking_strategy", Passes(AUDIO)),
    field("timestamp_granularities[]", Passes(AUDIO)),
    field("include[]", Passes(AUDIO)),
    field("keywords[]", Passes(AUDIO)),
    field("languages[]", Passes(AUDIO)),
    field("known_speaker_names[]", Passes(AUDIO)),
    field("known_speaker_references[]", Passes(AUDIO)),
    field("stream_include_usage", Passes(AUDIO)),
    field("stream_continuous_usage_stats", Passes(AUDIO)),
    // Turning a chat into a prompt.
    field("add_generation_prompt", Passes(TEMPLATED)),
    field("continue_final_message", Passes(TEMPLATED)),
    field("add_special_tokens", Passes(TEMPLATED.or(COMPLETIONS))),
    field("chat_template", Passes(TEMPLATED)),
    field("chat_template_kwargs", Passes(TEMPLATED.or(COMPARES).or(RESPONSES).or(ANTHROPIC))),
    field("truncate_prompt_tokens", Passes(SAMPLED.or(POOLED))),
    field("truncation_side", Passes(TEXT.or(POOLED))),
    field("truncation", Passes(RESPONSES)),
    field("task", Passes(CHAT.or(POOLING))),
    field("use_audio_in_video", Passes(CHAT)),
    // Tools and reasoning.
    field("tools", Passes(CHAT.or(RESPONSES).or(ANTHROPIC).or(TOKENIZE))),
    field("tool_choice", Passes(CHAT.or(RESPONSES).or(ANTHROPIC).or(TOKENIZE))),
    field("parallel_tool_calls", Passes(CHAT.or(RESPONSES))),
    field("max_tool_calls", Passes(RESPONSES)),
    field("functions", Passes(CHAT)),
    field("function_call", Passes(CHAT)),
    field("web_search_options", Passes(CHAT)),
    field("reasoning", Passes(RESPONSES)),
    field("reasoning_effort", Passes(CHAT.or(TOKENIZE))),
    field("include_reasoning", Passes(CHAT.or(RESPONSES))),
    field("separate_reasoning", Passes(CHAT)),
    field("stream_reasoning", Passes(CHAT)),
    field("reasoning_ended", Passes(GENERATE)),
    field("reasoning_parser_kwargs", Passes(GENERATE)),
    field("thinking", Passes(CHAT.or(ANTHROPIC))),
    field("thinking_token_budget", Passes(SAMPLED)),
    // Sampling. Earlier versions of vLLM have `best_of` everywhere.
    field("sampling_params", PassesWith(GENERATE, SAMPLING)),
    field("n", Passes(SAMPLED.or(AUDIO))),
    field("best_of", Passes(SAMPLED)),
    field("temperature", Passes(SAMPLED.or(RESPONSES).or(MESSAGES).or(SCORE).or(AUDIO))),
    field("top_p", Passes(SAMPLED.or(RESPONSES).or(MESSAGES).or(AUDIO))),
    field("top_k", Passes(SAMPLED.or(RESPONSES).or(MESSAGES).or(AUDIO))),
    field("min_p", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("seed", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("frequency_penalty", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("presence_penalty", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("repetition_penalty", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("repetition_detection", Passes(SAMPLED)),
    field("length_penalty", Passes(TEXT.or(AUDIO))),
    field("use_beam_search", Passes(TEXT.or(AUDIO))),
    field("logit_bias", Passes(SAMPLED.or(RESPONSES))),
    field("allowed_token_ids", Passes(SAMPLED)),
    field("bad_words", Passes(SAMPLED)),
    field("skip_reading_prefix_cache", Passes(SAMPLING)),
    // The end of a reply.
    field("max_tokens", Passes(SAMPLED.or(MESSAGES))),
    field("max_completion_tokens", Passes(CHAT.or(AUDIO))),
    field("max_output_tokens", Passes(RESPONSES)),
    field("min_tokens", Passes(SAMPLED)),
    field("stop", Passes(SAMPLED.or(RESPONSES))),
    field("stop_sequences", Passes(MESSAGES)),
    field("stop_token_ids", Passes(SAMPLED.or(RESPONSES))),
    field("stop_regex", Passes(TEXT)),
    field("include_stop_str_in_output", Passes(SAMPLED.or(RESPONSES).or(AUDIO))),
    field("no_stop_trim", Passes(TEXT)),
    field("ignore_eos", Passes(SAMPLED.or(RESPONSES))),
    // The form of a reply. Earlier versions of vLLM have `guided_*`.
    field("response_format", Passes(TEXT.or(AUDIO))),
    field("structured_outputs", Passes(SAMPLED.or(RESPONSES))),
    field("text", Passes(RESPONSES)),
    field("output_config", Passes(ANTHROPIC)),
    field("json_schema", Passes(COMPLETIONS)),
    field("regex", Passes(TEXT)),
    field("ebnf", Passes(TEXT)),
    field("guided_json", Passes(OPENAI)),
    field("guided_regex", Passes(OPENAI)),
    field("guided_choice", Passes(OPENAI)),
    field("guided_grammar", Passes(OPENAI)),
    field("guided_decoding_backend", Passes(OPENAI)),
    field("guided_whitespace_pattern", Passes(OPENAI)),
    field("structural_tag", Passes(OPENAI)),
    field("verbosity", Passes(CHAT)),
    field("modalities", Passes(CHAT)),
    field("audio", Passes(CHAT)),
    field("prediction", Passes(CHAT)),
    field("detokenize", Passes(SAMPLING)),
    field("skip_special_tokens", Passes(SAMPLED.or(RESPONSES).or(DETOKENIZE))),
    field("spaces_between_special_tokens", Passes(SAMPLED)),
    field("output_mode", Passes(GENERATE)),
    field("encoding_format", Passes(VECTORS)),
    field("embed_dtype", Passes(VECTORS)),
    field("endianness", Passes(VECTORS)),
    field("dimensions", Passes(VECTORS)),
    field("use_activation", Passes(POOLED)),
    field("padding", Passes(POOLED)),
    field("max_tokens_per_query", Passes(COMPARES)),
    field("max_tokens_per_doc", Passes(COMPARES)),
    field("top_n", Passes(RERANK)),
    field("return_documents", Passes(RERANK)),
    field("label_token_ids", Passes(SCORE)),
    field("apply_softmax", Passes(SCORE)),
    field("item_first", Passes(SCORE)),
    field("score_extraction_token", Passes(SCORE)),
    field("return_token_logprobs", Passes(SCORE)),
    // How a reply is sent, and what comes with it.
    field("stream", Passes(GENERATES.or(AUDIO))),
    field("stream_options", PassesWith(OPENAI.or(GENERATE), STREAM_OPTIONS)),
    field("include_usage", Passes(STREAM_OPTIONS)),
    field("continuous_usage_stats", Passes(STREAM_OPTIONS)),
    field("include_obfuscation", Passes(STREAM_OPTIONS)),
    field("stream_interval", Passes(SAMPLED)),
    field("include", Passes(RESPONSES)),
    field("echo", Passes(TEXT)),
    field("logprobs", Passes(SAMPLED)),
    field("top_logprobs", Passes(CHAT.or(RESPONSES))),
    field("prompt_logprobs", Passes(SAMPLED)),
    field("prompt_logprob_start", Passes(SAMPLING)),
    field("prompt_logprob_token_ids", Passes(SAMPLING)),
    field("logprob_token_ids", Passes(SAMPLED)),
    field("flat_logprobs", Passes(SAMPLING)),
    field("sampling_logprobs_mode", Passes(CHAT)),
    field("return_flat_raw_output_top_logprobs", Passes(CHAT)),
    field("return_flat_raw_top_logprobs_b64", Passes(CHAT)),
    field("return_sampling_mask", Passes(CHAT)),
    field("return_token_ids", Passes(TEXT.or(GENERATE))),
    field("return_tokens_as_token_ids", Passes(TEXT)),
    field("return_token_offsets", Passes(TEXT)),
    field("return_token_strs", Passes(TOKENIZE)),
    field("return_prompt_text", Passes(CHAT)),
    field("return_prompt_token_ids", Passes(CHAT)),
    field("return_input_ids_in_sglext", Passes(CHAT)),
    field("return_output_ids_in_sglext", Passes(CHAT)),
    field("return_meta_info", Passes(CHAT)),
    field("return_cached_tokens_details", Passes(TEXT)),
    field("return_spec_tokens_details", Passes(TEXT)),
    field("mm_payload", Passes(OPENAI.or(MESSAGES))),
    field("return_mm_kwargs", Passes(OPENAI.or(MESSAGES))),
    field("enable_response_messages", Passes(RESPONSES)),
    // Fields in which clients describe themselves, and fields that the router refuses because they
    // need state that it does not keep.
    field("user", Passes(OPENAI.or(POOLED))),
    field("metadata", Passes(CHAT.or(RESPONSES).or(MESSAGES))),
    field("safety_identifier", Passes(CHAT.or(RESPONSES))),
    field("prompt_cache_key", Passes(CHAT.or(RESPONSES))),
    field("prompt_cache_retention", Passes(CHAT.or(RESPONSES))),
    field("service_tier", Passes(CHAT.or(RESPONSES).or(MESSAGES))),
    field("store", Passes(CHAT.or(RESPONSES))),
    field("background", Passes(RESPONSES)),
    field("conversation", Passes(RESPONSES)),
    field("previous_response_id", Passes(RESPONSES)),
    field("betas", Passes(ANTHROPIC)),
    field("context_management", Passes(ANTHROPIC)),
    field("cache_control", Passes(ANTHROPIC)),
    field("inference_geo", Passes(MESSAGES)),
    // Objects of the operator's own extensions.
    field("vllm_xargs", PassesOpen(OPENAI.or(MESSAGES).or(AUDIO))),
    field("extra_args", PassesOpen(SAMPLING)),
    field("custom_params", PassesOpen(TEXT)),
    // Fields that steer an engine.
    field("priority", Steers("whose requests the engine serves first")),
    field("lora_path", Steers(ADAPTER)),
    field("lora_id", Steers(ADAPTER)),
    field("lora_request", Steers(ADAPTER)),
    field("session_id", Steers(SESSION)),
    field("session_params", Steers(SESSION)),
    field("conversation_id", Steers(SESSION)),
    field("extra_key", Steers("a part of the engine's prefix cache that the index does not know")),
    field("custom_logit_processor", Steers(CODE)),
    field("logits_processors", Steers(CODE)),
    field("input_ids", Steers(PROMPT)),
    field("input_embeds", Steers(PROMPT)),
    field("embed_overrides", Steers(PROMPT)),
    field("embed_override_token_id", Steers(PROMPT)),
    field("positional_embed_overrides", Steers(PROMPT)),
    field("query_embed_overrides", Steers(PROMPT)),
    field("item_embed_overrides", Steers(PROMPT)),
    field("trace_decode_token_ids", Steers("the reply, in place of the model")),
    field("return_hidden_states", Steers(STATES)),
    field("return_pooled_hidden_states", Steers(STATES)),
    field("return_routed_experts", Steers(STATES)),
    field("routed_experts_prompt_start", Steers(STATES)),
    field("routed_experts_start_len", Steers(STATES)),
    field("return_indexer_topk", Steers(STATES)),
    field("mm_processor_kwargs", Steers(IMAGES)),
    field("media_io_kwargs", Steers(IMAGES)),
    field("max_dynamic_patch", Steers(IMAGES)),
    field("min_dynamic_patch", Steers(IMAGES)),
    field("images_config", Steers(IMAGES)),
    field("video_config", Steers(IMAGES)),
    field("features", Steers(IMAGE_CACHE)),
    field("mm_hashes", Steers(IMAGE_CACHE)),
    field("mm_content_hashes", Steers(IMAGE_CACHE)),
    field("allowed_media_domains", Steers("from where the engine fetches images")),
    field("watermark", Steers(WATERMARK)),
    field("watermarking", Steers(WATERMARK)),
    field("kv_cache_report_mode", Steers("how many KV events the engine publishes")),
    field("custom_labels", Steers("labels of the engine's metrics")),
    field("no_logs", Steers("whether the engine logs the request")),
    field("log_metrics", Steers("whether the engine counts the request")),
    field("output_kind", Steers(OWN_OUTPUT)),
    field("skip_clone", Steers(OWN_OUTPUT)),
    field("output_text_buffer_length", Steers(OWN_OUTPUT)),
    field("http_worker_ipc", Steers(OWN_OUTPUT)),
    // Hand-offs, ids and ranks.
    field("kv_transfer_params", RouterOnly),
    field("ec_transfer_params", RouterOnly),
    field("disaggregated_params", RouterOnly),
    field("conversation_params", RouterOnly),
    field("kv_hints", RouterOnly),
    field("kv_hint", RouterOnly),
    field("request_id", RouterOnly),
    field("rid", RouterOnly),
    field("data_parallel_rank", RouterOnly),
    field("data_parallel_rank_decode", RouterOnly),
    field("routed_dp_rank", RouterOnly),
    field("disagg_prefill_dp_rank", RouterOnly),
    field("decode_dp_rank", RouterOnly),
    field("dp_rank", RouterOnly),
    field("decode_tp_size", RouterOnly),
];

const fn field(name: &'static str, rule: Rule) -> Field {
    Field { name, rule }
}
