//! Selects the tokenizer class that an engine uses for a model folder.
//!
//! transformers 5 does not always use `tokenizer.json` as it is: the model type and the class named
//! in the configuration decide (`models/auto/tokenization_auto.py`). vLLM has exceptions of its
//! own (`vllm/tokenizers/registry.py`, `vllm/config/model.py`); SGLang prefers the named class where
//! transformers would use the file as it is (`srt/utils/hf_transformers/tokenizer.py`). The facts
//! below are those of transformers 5.19, vLLM 0.32 and SGLang 0.5.23.

use std::path::Path;

use serde_json::{Map, Value};
use splitrail_engine::EngineKind;

use super::rebuild::Family;

/// Tokenizer classes with the model types that transformers registers for them. The first row is
/// `TokenizersBackend`, which uses `tokenizer.json` as it is: first its own types, then those of
/// `MistralCommonBackend`, which vLLM switches off. The last row has all types whose class is not
/// reproduced here.
const REGISTERED: [(&str, &str); 10] = [
    (
        "TokenizersBackend",
        "EvollaModel arctic aria bigbird_pegasus camembertv2-base canary chameleon chatlm cohere_asr \
         deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl \
         deepseek_vl_hybrid deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe \
         glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode granite granitemoe \
         granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 jamba janus \
         kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpmv minicpmv4_6 \
         minicpmv4_7 minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 nystromformer \
         olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe \
         pix2struct smolvlm stablelm step3_vl step3p5 umt5 vipllava xlm-roberta-xl",
    ),
    (
        "MistralCommonBackend",
        "ministral ministral3 mistral mistral3 mixtral pixtral voxtral voxtral_realtime",
    ),
    (
        "Qwen2Tokenizer",
        "audioflamingo3 colqwen2 cosmos3_omni fun_asr_nano hunyuan_vl internvl lighton_ocr ovis2 \
         qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr \
         qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    ),
    ("Qwen3_5Tokenizer", "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp"),
    ("LlamaTokenizer", "idefics idefics2"),
    (
        "GemmaTokenizer",
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma \
         shieldgemma2 t5gemma zaya",
    ),
    (
        "GPT2Tokenizer",
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip \
         instructblipvideo jais2 opt phi starcoder2",
    ),
    ("GPTNeoXTokenizer", "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm"),
    ("CohereTokenizer", "aya_vision cohere cohere2"),
    (
        "a class of its own",
        "aimv2 albert align bark bart barthez bartpho bert bert-generation bert-japanese bertweet \
         big_bird biogpt blenderbot blenderbot-small blip bridgetower bros byt5 camembert canine \
         chinese_clip clap clip clipseg clvp code_llama convbert cpm cpmant ctrl data2vec-audio \
         data2vec-text deberta deberta-v2 dia distilbert dpr electra ernie esm esmc esmfold2 \
         fastspeech2_conformer flaubert flava florence2 fnet fsmt funnel git gpt-sw3 gpt_neox_japanese \
         granite_speech5_ctc grounding-dino groupvit gte herbert hubert ibert jina_embeddings_v3 \
         lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm led lilt longformer luke lxmert \
         m2m_100 marian markuplm mbart mbart50 mega megatron-bert metaclip_2 mgp-str mluke \
         mm-grounding-dino mobilebert mpnet mra mt5 musicgen musicgen_melody mvp myt5 nemotron3_5_asr \
         nemotron_asr_streaming nezha nllb nllb-moe nomic_bert nougat omdet-turbo oneformer openai-gpt \
         owlv2 owlvit parakeet_ctc parakeet_rnnt parakeet_tdt pegasus perceiver phobert plbart \
         pp_formulanet prophetnet qdqbert rag realm reformer rembert retribert roberta \
         roberta-prelayernorm roc_bert roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip \
         siglip2 speech_to_text speecht5 splinter squeezebert switch_transformers t5 tapas tipsv2 trocr \
         tvp udop unispeech unispeech-sat videoprism vilt visual_bert vits wav2vec2 wav2vec2-bert \
         wav2vec2-conformer wav2vec2_phoneme whisper xclip xglm xlm xlm-roberta xlnet xmod yoso",
    ),
];

/// Model types whose registered class takes precedence over the class in their configuration. (Of
/// transformers' list, those registered for a class that rebuilds.)
const CLASS_OF_TYPE_WINS: [&str; 6] =
    ["hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"];

/// Model types that vLLM always loads as `TokenizersBackend`.
const VLLM_AS_IS: [&str; 5] =
    ["internlm2", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr"];

/// Architectures that vLLM loads in the same way: DeepSeek's tokenizer modes.
const VLLM_AS_IS_ARCHITECTURES: [&str; 4] = [
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
];

/// How the engine uses `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenizerUse {
    /// Used as it is.
    AsIs,
    /// Vocabulary and merges are used; the class defines the rest.
    Rebuilt(Family),
    /// The choice is not known; holds the name or the reason, for the operator.
    Unknown(String),
}

/// Selects as the engine does. `model` is `config.json`.
pub(super) fn select(
    folder: &Path,
    config: &Map<String, Value>,
    model: Option<&Map<String, Value>>,
    engine: EngineKind,
) -> TokenizerUse {
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    match (engine, by_transformers(folder, config, model, engine), class) {
        (EngineKind::Sglang, TokenizerUse::AsIs, Some(class)) => by_name(class),
        (_, selected, _) => selected,
    }
}

/// Selects as `AutoTokenizer` does within the engine.
fn by_transformers(
    folder: &Path,
    config: &Map<String, Value>,
    model: Option<&Map<String, Value>>,
    engine: EngineKind,
) -> TokenizerUse {
    let text =
        |key: &str| model.and_then(|model| model.get(key)?.as_str()).filter(|s| !s.is_empty());
    let architectures: Vec<&str> = model
        .and_then(|model| model.get("architectures")?.as_array())
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let model_type = text("model_type");
    let as_is = architectures.iter().any(|name| VLLM_AS_IS_ARCHITECTURES.contains(name))
        || model_type.is_some_and(|kind| VLLM_AS_IS.contains(&kind));
    if engine == EngineKind::Vllm && as_is {
        return TokenizerUse::AsIs;
    }
    if let Some(circumstance) = out_of_the_ordinary(folder, config, model, &architectures) {
        return TokenizerUse::Unknown(circumstance);
    }
    let named = config.get("tokenizer_class").and_then(Value::as_str).or(text("tokenizer_class"));
    let registered = model_type.and_then(registered_class);
    let Some(named) = named else {
        return registered.map_or(TokenizerUse::AsIs, |class| match class {
            "MistralCommonBackend" => TokenizerUse::AsIs,
            class => by_name(class),
        });
    };
    match (registered, model_type) {
        (Some("TokenizersBackend"), _) => TokenizerUse::AsIs,
        // transformers also looks up `model_name` in a separate list.
        (Some(class), _) if text("model_name").is_some() && by_name(class) != by_name(named) => {
            TokenizerUse::Unknown("a config.json with model_name".to_owned())
        }
        (Some("MistralCommonBackend"), _) if named != "MistralCommonBackend" => TokenizerUse::AsIs,
        (Some(class), Some(kind)) if CLASS_OF_TYPE_WINS.contains(&kind) => by_name(class),
        _ => by_name(named),
    }
}

fn registered_class(model_type: &str) -> Option<&'static str> {
    REGISTERED
        .iter()
        .find(|(_, types)| types.split_ascii_whitespace().any(|kind| kind == model_type))
        .map(|(class, _)| *class)
}

fn by_name(class: &str) -> TokenizerUse {
    let name = class.strip_suffix("Fast").unwrap_or(class);
    match name {
        "TokenizersBackend"
        | "PreTrainedTokenizer"
        | "PreTrainedTokenizerBase"
        | "PythonBackend"
        | "BloomTokenizer" => TokenizerUse::AsIs,
        name => Family::of_class(name).map_or_else(
            || TokenizerUse::Unknown(format!("the tokenizer class {name}")),
            TokenizerUse::Rebuilt,
        ),
    }
}

/// A reason why the engine's choice differs from the rules or cannot be known from the folder.
fn out_of_the_ordinary(
    folder: &Path,
    config: &Map<String, Value>,
    model: Option<&Map<String, Value>>,
    architectures: &[&str],
) -> Option<String> {
    let model = model.filter(|model| !model.is_empty());
    if let Some(model) = model
        && model.get("model_type").and_then(Value::as_str).is_none()
    {
        return Some("a config.json without model_type".to_owned());
    }
    if architectures.contains(&"MoonshotKimiaForCausalLM") {
        return Some("vLLM's own tokenizer for Kimi-Audio".to_owned());
    }
    if uses_mistral_mode(folder) {
        return Some("a tokenizer in Mistral's own format".to_owned());
    }
    let code = match config.get("auto_map") {
        Some(Value::Object(map)) => map.get("AutoTokenizer").is_some_and(|entry| !entry.is_null()),
        Some(Value::Array(_)) => true,
        _ => false,
    };
    if code {
        return Some("tokenizer code that comes with the model (auto_map)".to_owned());
    }
    let other_files = config.get("fast_tokenizer_files").and_then(Value::as_array);
    if other_files.into_iter().flatten().any(|name| name != "tokenizer.json") {
        return Some("a choice between several tokenizer files".to_owned());
    }
    if config.get("fix_mistral_regex") == Some(&Value::Bool(true)) && !fixed_already(model) {
        return Some("a pattern replaced on loading (fix_mistral_regex)".to_owned());
    }
    None
}

/// transformers does not change files that version 5 or later has written.
fn fixed_already(model: Option<&Map<String, Value>>) -> bool {
    model
        .and_then(|model| model.get("transformers_version")?.as_str())
        .and_then(|version| version.split('.').next()?.parse::<u32>().ok())
        .is_some_and(|major| major >= 5)
}

/// vLLM prefers Mistral's own files if the weights are in that format, too.
fn uses_mistral_mode(folder: &Path) -> bool {
    let names: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    names.iter().any(|name| name.starts_with("consolidated") && name.ends_with(".safetensors"))
        && names.iter().any(|name| name == "tekken.json" || name.starts_with("tokenizer.model.v"))
}
