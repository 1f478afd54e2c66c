//! Requests whose prompt cannot be computed by the router; and no request can harm the router while
//! its prompt is computed.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use splitrail_engine::EngineKind;
use splitrail_prompt::template::{ChatInput, ChatTemplate, SpecialTokens, TemplateError};
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel, PromptOptions, Tokenizer};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer")
}

fn model(template: Option<&str>) -> PromptModel {
    let options =
        PromptOptions { chat_template: template.map(str::to_owned), ..PromptOptions::default() };
    PromptModel::load(&fixtures().join("model"), options).unwrap()
}

fn tokenize(model: &PromptModel, body: &Value) -> Result<Vec<u32>, PromptError> {
    let view = ChatRequestView::from_body(body.as_object().unwrap())?;
    Ok(model.tokenize_chat(view, 0)?.ids)
}

fn chat(message: Value) -> Value {
    json!({ "messages": [message] })
}

#[test]
fn prompts_that_cannot_be_computed_exactly_are_left_to_the_engine() {
    let model = model(None);
    let user = json!({"role": "user", "content": "hi"});
    let with = |key: &str, value: Value| {
        let mut body = chat(user.clone());
        body[key] = value;
        body
    };
    let parts = |part: Value| chat(json!({"role": "user", "content": [part]}));
    let call = |call: Value| chat(json!({"role": "assistant", "tool_calls": [call]}));
    assert!(tokenize(&model, &chat(user.clone())).is_ok());
    for body in [
        parts(json!({"type": "image_url", "image_url": {"url": "data:"}})),
        parts(json!({"type": "input_audio", "input_audio": {}})),
        parts(json!({"type": "file", "file": {}})),
        parts(json!({"type": "text", "text": "a", "uuid": "u"})),
        parts(json!({"type": "text"})),
        parts(json!("bare text")),
        parts(json!({"type": "unheard_of", "text": "a"})),
        parts(json!({"text": "a"})),
        chat(json!({"role": "user", "content": null})),
        chat(json!({"role": "user", "content": 5})),
        chat(json!({"role": "assistant", "content": null, "tool_calls": null})),
        chat(json!({"content": "no role"})),
        call(json!({"type": "function", "function": {"name": "f", "arguments": "{}"}})),
        call(json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}})),
        call(
            json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": NaN}"}}),
        ),
        call(
            json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 123456789012345678901234567890}"}}),
        ),
        with("chat_template", json!("{{ messages }}")),
        with("chat_template_kwargs", json!({"tokenize": true})),
        with("chat_template_kwargs", json!({"messages": []})),
        with("continue_final_message", json!(true)),
        with("truncate_prompt_tokens", json!(5)),
        with("reasoning_effort", json!("extreme")),
        with("documents", json!([{"title": 1}])),
        with("tools", json!([])),
        with("tools", json!([{"type": "custom", "custom": {}}])),
        with("add_generation_prompt", json!("yes")),
    ] {
        let got = tokenize(&model, &body);
        assert!(matches!(got, Err(PromptError::Unsupported(_))), "{body}: {got:?}");
    }
}

#[test]
fn a_client_gets_at_most_500_characters_of_a_templates_message() {
    let model = model(Some("{{ raise_exception(messages[0].role * 400) }}"));
    let error = tokenize(&model, &chat(json!({"role": "user", "content": "secret"}))).unwrap_err();
    let PromptError::Client(message) = error else { panic!("{error:?}") };
    assert_eq!(message.chars().count(), 500);
    assert!(message.starts_with("useruser"));
}

#[test]
fn errors_never_show_the_conversation() {
    for source in [
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.no_method() }}",
        "{% macro m(x) %}{{ x|tojson(separators=x) }}{% endmacro %}{{ m(messages[0].content) }}",
    ] {
        let body = chat(json!({"role": "user", "content": "secret words"}));
        let error = tokenize(&model(Some(source)), &body).unwrap_err();
        assert!(matches!(error, PromptError::Unsupported(_)), "{source}: {error:?}");
        let messages = json!([{"role": "user", "content": "secret words"}]);
        let error = render(source, &messages).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"), "{source}: {error:?}");
    }
}

fn render(source: &str, messages: &Value) -> Result<String, TemplateError> {
    let template = ChatTemplate::compile(source, SpecialTokens::new())?;
    let input = ChatInput {
        messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: None,
        now_unix_s: 0,
    };
    Ok(template.render(&input)?.text)
}

#[test]
fn a_render_that_would_not_end_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &json!([])), Err(TemplateError::TooMuch("steps"))));
    let deep = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    assert!(render(deep, &json!([])).is_err());
    let huge = "{% for a in range(99) %}{{ 'x' * 9000000 }}{% endfor %}";
    assert!(matches!(
        render(huge, &json!([])),
        Err(TemplateError::TooMuch("the size of a prompt"))
    ));
}

#[test]
fn long_conversations_stay_within_the_bounds() {
    let source = std::fs::read_to_string(fixtures().join("templates/thinking.jinja")).unwrap();
    let turns: Vec<Value> = (0..4000)
        .map(|turn| json!({"role": if turn % 2 == 0 { "user" } else { "assistant" }, "content": "word ".repeat(20)}))
        .collect();
    assert!(render(&source, &Value::Array(turns)).unwrap().len() > 400_000);
}

#[test]
fn a_broken_template_affects_only_chats() {
    let model = model(Some("{% for x in %}"));
    assert!(model.notes.iter().any(|note| note.contains("line 1")), "{:?}", model.notes);
    assert!(matches!(
        tokenize(&model, &chat(json!({"role": "user", "content": "hi"}))),
        Err(PromptError::Unsupported(_))
    ));
    assert!(!model.tokenize_text("hi", true).unwrap().ids.is_empty());
}

#[test]
fn the_date_in_a_prompt_is_reported() {
    let body = chat(json!({"role": "user", "content": "hi"}));
    let view = ChatRequestView::from_body(body.as_object().unwrap()).unwrap();
    let dated = model(Some("{{ strftime_now('%Y') }}")).render_chat(view.clone(), 0).unwrap();
    assert_eq!((dated.text.as_str(), dated.uses_clock), ("1970", true));
    assert!(!model(None).tokenize_chat(view, 0).unwrap().uses_clock);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap_err();
    assert!(missing.path.ends_with("tokenizer.json"));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(
        Tokenizer::load(folder.path(), EngineKind::Vllm)
            .unwrap_err()
            .path
            .ends_with("tokenizer.json")
    );
    std::fs::copy(fixtures().join("model/tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    assert!(
        Tokenizer::load(folder.path(), EngineKind::Vllm)
            .unwrap_err()
            .path
            .ends_with("tokenizer_config.json")
    );
}

#[test]
fn a_template_file_replaces_the_configured_template_and_changes_the_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixtures().join("model").join(name), folder.path().join(name)).unwrap();
    }
    let before = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
    assert_eq!(
        before.fingerprint,
        Tokenizer::load(&folder.path().join("tokenizer.json"), EngineKind::Vllm)
            .unwrap()
            .fingerprint
    );
    std::fs::write(folder.path().join("chat_template.jinja"), "other").unwrap();
    let after = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
    assert_eq!(after.chat_template("default"), Some("other"));
    assert_ne!(before.fingerprint, after.fingerprint);
}

#[test]
fn models_whose_chats_the_engine_encodes_itself_are_recognised() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixtures().join("model").join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "gpt_oss"}"#).unwrap();
    let model = PromptModel::load(folder.path(), PromptOptions::default()).unwrap();
    assert!(matches!(
        tokenize(&model, &chat(json!({"role": "user", "content": "hi"}))),
        Err(PromptError::Unsupported(_))
    ));
}

#[test]
fn tools_get_their_own_template_where_the_model_has_one() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixtures().join("model/tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    let config = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let model = PromptModel::load(folder.path(), PromptOptions::default()).unwrap();
    let mut body = chat(json!({"role": "user", "content": "hi"}));
    let text = |body: &Value| {
        let view = ChatRequestView::from_body(body.as_object().unwrap()).unwrap();
        model.render_chat(view, 0).unwrap().text
    };
    assert_eq!(text(&body), "plain");
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(text(&body), "tools");
}

/// Arbitrary JSON, with keys and values of chats.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop_oneof![
            Just("user"),
            Just("assistant"),
            Just("tool"),
            Just("system"),
            Just("text"),
            Just("function"),
            Just("developer"),
            Just("{\"a\": 1}")
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 64, 6, |inner| {
        let key = prop_oneof![
            Just("role"),
            Just("content"),
            Just("type"),
            Just("text"),
            Just("tool_calls"),
            Just("id"),
            Just("function"),
            Just("name"),
            Just("arguments"),
            Just("parameters"),
            Just("reasoning"),
            Just("items"),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..6).prop_map(|pairs| {
                Value::Object(
                    pairs
                        .into_iter()
                        .map(|(key, value)| (key.to_owned(), value))
                        .collect::<Map<_, _>>(),
                )
            }),
        ]
    })
}

fn any_message() -> impl Strategy<Value = Value> {
    let role = prop_oneof![
        Just("user"),
        Just("assistant"),
        Just("tool"),
        Just("system"),
        Just("developer")
    ];
    let content = prop_oneof![
        "\\PC{0,20}".prop_map(Value::from),
        prop::collection::vec(".{0,9}", 0..4).prop_map(|texts| {
            texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect()
        }),
    ];
    (role, content, any_json()).prop_map(|(role, content, other)| {
        json!({"role": role, "content": content, "tool_calls": other, "name": "n"})
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_request_makes_a_render_panic(
        messages in prop_oneof![any_json(), prop::collection::vec(any_message(), 0..5).prop_map(Value::from)],
        tools in any_json(),
        kwargs in any_json(),
    ) {
        thread_local! {
            static MODELS: Vec<PromptModel> = ["chatml", "headers", "thinking", "alternating", "parts", "python"]
                .iter()
                .map(|name| model(Some(&std::fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap())))
                .collect();
        }
        for body in [
            json!({"messages": messages}),
            json!({"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}),
        ] {
            MODELS.with(|models| {
                for model in models {
                    let _ = tokenize(model, &body);
                }
            });
        }
        // Bypasses the checks of a request and renders directly.
        let _ = render("{% for m in messages %}{{ m.role ~ m.content }}{{ m|tojson }}{{ m }}{% endfor %}", &messages);
    }

    #[test]
    fn no_text_makes_an_encoder_panic_and_ids_are_in_the_vocabulary(text in ".{0,200}") {
        thread_local! {
            static TOKENIZER: Tokenizer = Tokenizer::load(&fixtures().join("model"), EngineKind::Vllm).unwrap();
        }
        TOKENIZER.with(|tokenizer| {
            let ids = tokenizer.encode(&text, true).unwrap();
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size));
            assert!(text.is_empty() || !ids.is_empty());
        });
    }
}
